"""``dilated-attention show``: figures, sketch and picture are those of the pattern; what is wrong is said."""

from __future__ import annotations

import errno
from pathlib import Path

import matplotlib.figure
import pytest

from dilated_attention_pytorch import DilatedPattern, global_tokens, local_window, per_head, random_blocks
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.patterns import SegmentedPattern, pattern_from_expression

PLAIN = "arguments must be literal numbers, lists and strings (only per_head takes a list of patterns)"


def test_an_expression_is_the_pattern_that_python_makes() -> None:
    text = " local_window(3, after=1) + DilatedPattern([4, 8], [1, 2], tail='ragged')+random_blocks(0.5, seed=7)"
    python = local_window(3, 1) + DilatedPattern([4, 8], [1, 2]) + random_blocks(0.5, seed=7)
    assert pattern_from_expression(text) == python


def test_a_sum_may_have_a_thousand_terms() -> None:
    pattern = pattern_from_expression(" + ".join(["local_window(1)"] * 1010))
    assert pattern.num_pairs(10, is_causal=True) == 1010 * 19


def test_segments_and_patterns_by_head_are_written_as_in_python() -> None:
    text = "SegmentedPattern([[0, 5]], [1]) + per_head([local_window(3), global_tokens(2) + local_window(1)])"
    by_head = per_head([local_window(3), global_tokens(2) + local_window(1)])
    assert pattern_from_expression(text) == SegmentedPattern([[0, 5]], [1]) + by_head
    assert pattern_from_expression("per_head(patterns=(local_window(3),))") == per_head([local_window(3)])


def test_show_prints_density_and_sketch_and_writes_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "pattern.png"
    main(["show", "strided_blocks(4, block_size=2)", "--sequence-length", "16", "--causal", "--output-file", str(file)])
    printed = capsys.readouterr().out
    assert "25.0000%" in printed
    lines = printed.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("@@"))
    assert [line.rstrip() for line in lines[first : first + 10]] == [
        "@@",
        "@@@@",
        "    @@",
        "    @@@@",
        "        @@",
        "        @@@@",
        "            @@",
        "            @@@@",
        "@@@@            @@",
        "@@@@            @@@@",
    ]
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["local_window(-1)"], "local_window(-1): before must be at least 0"),
        (["print(1)"], "expected a sum of calls of DilatedPattern, SegmentedPattern, global_tokens"),
        (["local_window(1) * 2"], "got 'local_window(1) * 2'"),
        (["local_window(x)"], f"local_window(x): {PLAIN}, got 'x'"),
        (["local_window(10**3)"], f"local_window(10**3): {PLAIN}, got '10**3'"),
        (["local_window(after=10**3)"], f"local_window(after=10**3): {PLAIN}, got '10**3'"),
        (["local_window(**{})"], f"local_window(**{{}}): {PLAIN}, got '**{{}}'"),
        (["local_window(*[1])"], f"local_window(*[1]): {PLAIN}, got '*[1]'"),
        (["local_window([local_window(1)])"], f"{PLAIN}, got '[local_window(1)]'"),
        (["per_head([3])"], "expected a sum of calls of DilatedPattern, SegmentedPattern"),
        (["per_head(3)"], "per_head(3): "),
        ([f"DilatedPattern([{10**30}], [1])"], "segment_lengths must hold integers of at most 2^62, got 1000"),
        ([f"DilatedPattern([8], [{10**30}])"], "dilation_rates must hold integers of at most 2^62, got 1000"),
        ([f"SegmentedPattern([[0, {10**30}]], [1])"], "boundaries must hold integers of at most 2^62, got 1000"),
        (["local_window(1"], "is not a sum of patterns"),
        (["local_window(1)", "--sequence-length", "0"], "sequence_length must be at least 1, got 0"),
        (
            ["local_window(1)", "--sequence-length", "9", "--output-file", "nowhere/p.png"],
            "there is no folder nowhere; make it first",
        ),
        (
            ["local_window(1)", "--sequence-length", "9", "--output-file", "p.xyz"],
            "--output-file p.xyz: pictures end in .",
        ),
    ],
)
def test_wrong_patterns_are_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["show", *words])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EROFS, "Read-only file system", "p.png"), "p.png: the disk is read-only; name a place on one"),
        (OSError(errno.ENOSPC, "No space left", "p.png"), "the disk is full (p.png); make room, or name a folder"),
        (
            OSError(errno.EFBIG, "File too large", "p.png"),
            "a file would be larger than the limit of this shell (ulimit -f) (p.png); raise it",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the memory is used up ([Errno 12] Cannot allocate memory)"),
        (MemoryError(), "the memory is used up; take smaller numbers"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "the memory is used up (DefaultCPU"),
    ],
)
def test_what_fails_while_the_picture_is_written_is_said_and_nothing_of_going_on(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*words: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    with pytest.raises(SystemExit) as left:
        main(["show", "local_window(1)", "--sequence-length", "9", "--output-file", str(tmp_path / "p.png")])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dilated-attention: {message}")
    assert "--resume" not in said


def test_every_head_is_sketched_as_the_first_however_many_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "DilatedPattern([8], [4])", "--sequence-length", "8", "--heads", "4"])
    four = capsys.readouterr().out.splitlines()[-8:]
    main(["show", "DilatedPattern([8], [4])", "--sequence-length", "8", "--heads", "4096"])
    assert capsys.readouterr().out.splitlines()[-8:] == four


def test_a_long_sketch_shows_the_mean_of_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    # Every cell of 512 positions would be drawn full, or empty, by the rows that it begins with.
    main(["show", "DilatedPattern([8192], [4])", "--sequence-length", "8192", "--heads", "4"])
    printed = capsys.readouterr().out
    assert "6.2500%" in printed
    assert set("".join(printed.splitlines()[-20:])) == {"."}
