"""What runs are trained on, and what they do without: a chart, and a measurement of this machine for every run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from training.runs import leave_out_figures, write_texts


@pytest.fixture(autouse=True, scope="module")
def draw_losses() -> Iterator[Callable[..., Any]]:
    """The function that draws the chart of a run, which runs of these tests leave out."""
    from dilated_attention_pytorch.training import evaluation

    draws = evaluation.draw_losses
    gc.freeze()  # a run collects garbage, and would go through all that runs before it have imported
    with pytest.MonkeyPatch.context() as patch:
        leave_out_figures(patch)
        yield draws


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text files, one for all tests of a module."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")
