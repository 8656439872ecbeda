"""The corpus: what is read, what is refused, and a split that is the same on every run."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import memory, progress
from dilated_attention_pytorch.training import RunError
from dilated_attention_pytorch.training.data import sources
from dilated_attention_pytorch.training.data.corpus import SEPARATOR, Text, read_corpus
from dilated_attention_pytorch.training.data.sources import describe_skipped, standard_library


def _texts(folder: Path, count: int) -> Path:
    for number in range(count):
        path = folder / f"part{number % 3}" / f"file{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text number {number}\n" * (number + 2))
    return folder


def _files(text: Text) -> set[bytes]:
    return {text.file(index).numpy().tobytes()[1:] for index in range(len(text.file_starts))}


def test_training_and_held_out_files_are_the_files_and_share_none(tmp_path: Path) -> None:
    corpus = read_corpus([_texts(tmp_path, 101)])
    training, held_out = _files(corpus.training), _files(corpus.held_out)
    assert training | held_out == {path.read_bytes() for path in tmp_path.rglob("*.txt")}
    assert not training & held_out
    assert 1 <= len(held_out) <= 15


def test_the_split_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    first, second = read_corpus([_texts(tmp_path / "a", 53)]), read_corpus([_texts(tmp_path / "b" / "c", 53)])
    assert torch.equal(first.held_out.data, second.held_out.data)
    assert torch.equal(first.training.data, second.training.data)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_files_leave_some_on_both_sides(tmp_path: Path, count: int) -> None:
    corpus = read_corpus([_texts(tmp_path, count)])
    assert len(corpus.training.file_starts) >= 1
    assert len(corpus.held_out.file_starts) >= 1


def test_a_single_file_is_cut_between_two_characters(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("ä€𝄞" * 211)
    corpus = read_corpus([path])
    (training,), (held_out,) = _files(corpus.training), _files(corpus.held_out)
    assert training + held_out == path.read_bytes()
    held_out.decode()
    assert 0 < len(held_out) <= len(path.read_bytes()) // 20 + 4


def test_every_file_begins_with_the_separator(tmp_path: Path) -> None:
    text = read_corpus([_texts(tmp_path, 31)]).training
    assert (text.data == SEPARATOR).nonzero().flatten().tolist() == text.file_starts.tolist()


def test_what_is_no_text_in_a_folder_is_counted_and_left_out(tmp_path: Path) -> None:
    _texts(tmp_path, 5)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("hidden")
    corpus = read_corpus([tmp_path])
    assert corpus.skipped == {"empty": 1, "not UTF-8 text": 2}
    assert len(corpus.training.file_starts) + len(corpus.held_out.file_starts) == 5


def test_a_file_that_may_not_be_read_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _texts(tmp_path, 5)

    def refuse(path: Path, mode: str) -> None:
        # Permissions do not bind root, so the refusal of the system is played.
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RunError, match=r"may not be read by this user; change its permissions"):
        read_corpus([tmp_path])


def test_the_standard_library_is_real_text_without_installed_packages() -> None:
    corpus = read_corpus()
    assert len(corpus.training) > 5_000_000
    assert 0.01 < len(corpus.held_out) / (len(corpus.training) + len(corpus.held_out)) < 0.12
    assert standard_library().joinpath("os.py").read_bytes() in _files(corpus.training) | _files(corpus.held_out)


def test_pipes_empty_files_and_broken_links_are_left_out_and_said_and_nothing_waits(tmp_path: Path) -> None:
    _texts(tmp_path, 5)
    os.mkfifo(tmp_path / "a-pipe")  # opening it would wait for a writer
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "log.txt").touch()
    corpus = read_corpus([tmp_path])
    assert corpus.skipped == {"no regular files": 2, "empty": 1}
    assert describe_skipped(corpus.skipped, "; left out: ") == "; left out: 2 no regular files, 1 empty"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux has /proc")
def test_files_of_the_kernel_are_empty_whatever_reading_them_would_give() -> None:
    with pytest.raises(RunError, match=r"the folder /proc/self/net holds no text file \(\d+ files .* empty"):
        read_corpus([Path("/proc/self/net")])
    with pytest.raises(RunError, match=r"/proc/version is empty"):
        read_corpus([Path("/proc/version")])


def test_how_far_it_is_is_said_where_reading_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _texts(tmp_path, 7)
    clock = itertools.count(0.0, 6.0)  # six seconds pass between two looks at it
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    read_corpus([tmp_path], say=said.append)
    assert said
    assert all(line.startswith("reading --data: ") and str(tmp_path) in line for line in said)
    counts = [int(line.split()[2]) for line in said if "files of text" in line]
    assert counts == sorted(counts)
    assert counts[-1] > 1
    quiet: list[str] = []
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    read_corpus([tmp_path], say=quiet.append)
    assert not quiet


def test_more_text_than_memory_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b.txt").write_text("b" * 1000)
    (tmp_path / "c.bin").write_bytes(bytes(100_000))  # is not text and takes no memory
    monkeypatch.setattr(memory, "free_memory", lambda device: 2000)
    assert read_corpus([tmp_path]).skipped == {"not UTF-8 text": 1}
    monkeypatch.setattr(memory, "free_memory", lambda device: 1999)
    monkeypatch.setattr(sources.Sources, "chunks", lambda self: pytest.fail("it is read"))
    with pytest.raises(
        RunError, match=r"--data: the text needs at least .* are free; name fewer files, or keep .*--cache"
    ):
        read_corpus([tmp_path])


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = sources.Sources.survey

    def survey_and_change(self: sources.Sources) -> None:
        survey(self)
        (tmp_path / "part1" / "file1.txt").write_text("longer than before, by far")

    monkeypatch.setattr(sources.Sources, "survey", survey_and_change)
    with pytest.raises(RunError, match="a file changed while it was read"):
        read_corpus([_texts(tmp_path, 5)])


def test_a_character_may_lie_across_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 4)
    (tmp_path / "a.txt").write_text("aaaé" * 9)
    (tmp_path / "b.txt").write_bytes("aaaé".encode()[:4])
    corpus = read_corpus([tmp_path])
    assert corpus.skipped == {"not UTF-8 text": 1}
    assert len(corpus.training) + len(corpus.held_out) == 2 + 5 * 9
