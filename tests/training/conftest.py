"""What runs are trained on, and what they do without: a chart, and a measurement of this machine for every run."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from training.runs import write_texts


@pytest.fixture(autouse=True, scope="module")
def draw_losses() -> Iterator[Callable[..., Any]]:
    """The function that draws the chart of a run, which runs of these tests leave out.

    To draw, to measure and to compress takes as long as the steps of a run; so does the collection of garbage at its
    end, which goes through all that earlier modules have imported on the way.
    """
    from dilated_attention_pytorch.training import evaluation, lifecycle

    draws = evaluation.draw_losses
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "draw_losses", lambda *args, **options: None)
        for module, name in ((lifecycle, "matrix_product_rate"), (evaluation, "xz_bits_per_byte")):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield draws


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text files, one for all tests of a module."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")
