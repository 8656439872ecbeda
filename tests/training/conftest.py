"""What runs are trained on, and what they do without: a chart, and a measurement of this machine for every run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.runs import write_texts


@pytest.fixture(autouse=True, scope="module")
def _without_charts() -> Iterator[None]:
    """To draw and to measure takes as long as the steps of a run; a run of the command does both."""
    from dilated_attention_pytorch.training import evaluation, lifecycle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "draw_losses", lambda *args, **options: None)
        patch.setattr(lifecycle, "matrix_product_rate", functools.cache(lifecycle.matrix_product_rate))
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text files, one for all tests of a module."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")
