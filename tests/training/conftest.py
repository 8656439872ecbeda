"""What runs are trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.runs import write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text files, one for all tests of a module."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")
