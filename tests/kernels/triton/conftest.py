"""The interpreter of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dilated_attention_pytorch.kernels.select import is_interpreted
from support.interpreter import patched_once_per_launch


@pytest.fixture(autouse=True, scope="package")
def _interpreter_without_needless_work() -> Iterator[None]:
    if not is_interpreted():
        yield
        return
    with patched_once_per_launch():
        yield
