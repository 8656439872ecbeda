"""Windows: drawn by (seed, index) alone, and evaluation that predicts every byte once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.training.data.corpus import SEPARATOR, Text, read_corpus
from dilated_attention_pytorch.training.data.windows import (
    IGNORED,
    EvaluationWindows,
    TrainingWindows,
    WindowShare,
    evenly_spread,
    long_files,
)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    for number in range(29):
        (tmp_path / f"{number}.txt").write_text(
            "".join(chr(33 + (number * 7 + i * i) % 90) for i in range(97 + number))
        )
    return read_corpus([tmp_path]).training


def test_windows_at_file_starts_begin_with_the_separator(text: Text) -> None:
    windows = TrainingWindows(text, 61, 40, seed=0, file_start_fraction=1.0)
    starts = [int(windows[index]["input_ids"][0]) for index in range(40)]
    assert starts.count(SEPARATOR) > 30  # the last file may be shorter than a window


def test_every_byte_but_the_first_is_predicted_once(text: Text) -> None:
    windows = EvaluationWindows(text, 61, 10_000)
    predicted = torch.cat([windows[index]["labels"][1:] for index in range(len(windows))])
    assert bytes(predicted.tolist()) == text.data[1 : 1 + len(predicted)].numpy().tobytes()
    assert len(text) - 1 - len(predicted) < 60


def test_evaluation_on_less_text_than_the_context_takes_all_of_it(text: Text) -> None:
    windows = EvaluationWindows(text, 10**6, 10_000)
    assert len(windows) == 1
    assert len(windows[0]["labels"]) == len(text)


def test_fewer_windows_than_there_are_come_from_all_over_the_text(text: Text) -> None:
    windows = EvaluationWindows(text, 61, 7)
    assert len(windows) == 7
    assert windows.starts[-1] > len(text) // 2


def test_spread_numbers_are_distinct_and_within() -> None:
    for count in (1, 7, 53, 10_000):
        spread = evenly_spread(53, count)
        assert len(set(spread)) == len(spread) == min(count, 53)
        assert all(0 <= index < 53 for index in spread)


def test_long_files_are_the_beginnings_of_files_that_are_long_enough(text: Text) -> None:
    files = long_files(text, 113, 5)
    assert len(files) == 5
    assert all(len(file) == 114 and int(file[0]) == SEPARATOR and SEPARATOR not in file[1:] for file in files)
    assert long_files(text, 10_000, 5) == []


@pytest.mark.parametrize("num_shares", [1, 2, 3, 5])
def test_shares_hold_every_window_once_and_are_equally_long(text: Text, num_shares: int) -> None:
    windows = EvaluationWindows(text, 61, 7)
    shares = [WindowShare(windows, 7, share, num_shares) for share in range(num_shares)]
    assert {len(share) for share in shares} == {-(-7 // num_shares)}
    dealt = [share[index] for index in range(len(shares[0])) for share in shares]
    for window, expected in zip(dealt, windows, strict=False):
        assert torch.equal(window["input_ids"], expected["input_ids"])
        assert torch.equal(window["labels"], expected["labels"])
    # What fills a share up is as long as a window, and no loss counts it.
    assert all(window["labels"].tolist() == [IGNORED] * 61 for window in dealt[7:])
