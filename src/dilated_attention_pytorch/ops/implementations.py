"""The implementations by name."""

from .call import Implementation
from .dense import Dense
from .device import Triton
from .host import Host

IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Triton(),
    "native": Host("native", is_in_place=True),
    "aten": Host("aten", is_in_place=False),
    "reference": Dense(),
}
