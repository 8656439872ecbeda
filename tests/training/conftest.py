"""What runs are trained on, and what they do without: a chart, and a measurement of this machine for every run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from training.runs import write_texts


@pytest.fixture(autouse=True, scope="module")
def draw_losses() -> Iterator[Callable[..., Any]]:
    """The function that draws the chart of a run, which runs of these tests leave out.

    To draw and to measure takes as long as the steps of a run.
    """
    from dilated_attention_pytorch.training import evaluation, lifecycle

    draws = evaluation.draw_losses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "draw_losses", lambda *args, **options: None)
        patch.setattr(lifecycle, "matrix_product_rate", functools.cache(lifecycle.matrix_product_rate))
        yield draws


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text files, one for all tests of a module."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")
