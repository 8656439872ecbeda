"""The cache of tokens: what reading into memory gives, made once, made again where it is damaged, with flat memory."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.data import sources as sources_module
from dilated_attention_pytorch.training.data import token_cache
from dilated_attention_pytorch.training.data.corpus import corpus_figures, read_corpus
from dilated_attention_pytorch.training.data.sources import Sources
from dilated_attention_pytorch.training.data.token_cache import cached_corpus, open_corpus
from dilated_attention_pytorch.training.data.tokenizer import BYTES, ByteTokenizer, bytes_of, train_tokenizer
from dilated_attention_pytorch.training.data.windows import TrainingWindows
from support.processes import environment
from training.data.test_records import write_jsonl


def texts_of(folder: Path, count: int, words: str = "öne line\n") -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(words * (number + 2))
    return folder


def cached(paths: list[Path], folder: Path, tokenizer: Any = BYTES, said: list[str] | None = None) -> Path:
    return cached_corpus(Sources(paths, "text", None), tokenizer, folder, None if said is None else said.append)


@pytest.mark.parametrize(
    "case", ["one file", "two files", "97 files", "a file and records", "one record", "one character"]
)
def test_bytes_in_the_cache_are_those_in_memory(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pieces that end within lines and between the bytes of a character.
    monkeypatch.setattr(sources_module, "CHUNK_BYTES", 13)
    monkeypatch.setattr(sources_module, "_LONGEST_CHUNK", 23)
    counts = {"one file": 1, "two files": 2, "97 files": 97, "a file and records": 1}
    paths = [texts_of(tmp_path / "texts", counts[case], "ä€𝄞" * 7)] if case in counts else []
    if "record" in case:
        texts = ["a text ä", "", "x" * 99] if case == "a file and records" else ["one ä€𝄞" * 31]
        paths.append(write_jsonl(tmp_path / "a.jsonl", texts))
    if case == "one character":
        paths.append(write_jsonl(tmp_path / "a.jsonl", ["ä"]))
    expected, found = read_corpus(paths), open_corpus(cached(paths, tmp_path / "cache"))
    assert corpus_figures(found) == corpus_figures(expected)
    assert found.skipped == expected.skipped
    for side in ("training", "held_out"):
        mapped, text = getattr(found, side), getattr(expected, side)
        assert torch.equal(mapped.data, text.data)
        assert torch.equal(mapped.file_starts, text.file_starts)
        assert torch.equal(pickle.loads(pickle.dumps(mapped)).data, text.data)


def test_tokens_in_the_cache_stand_for_the_bytes_in_memory(tmp_path: Path) -> None:
    folder = texts_of(tmp_path / "texts", 53)
    expected = read_corpus([folder])
    tokenizer = train_tokenizer([b"one line\n" * 9], 262)
    found = open_corpus(cached([folder], tmp_path / "cache", tokenizer))
    assert found.training.data.dtype == torch.uint16
    for mapped, text in ((found.training, expected.training), (found.held_out, expected.held_out)):
        assert bytes_of(tokenizer, mapped.data.to(torch.int64)) == text.data.numpy().tobytes()
        assert (mapped.data[mapped.file_starts] == tokenizer.separator).all()
    figures = corpus_figures(found)
    assert {name: figures[name] for name in ("training_bytes", "held_out_files")} == {
        name: corpus_figures(expected)[name] for name in ("training_bytes", "held_out_files")
    }
    assert figures["training_tokens"] == len(found.training) < len(expected.training)


def test_it_is_made_once_for_the_same_files_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = texts_of(tmp_path / "texts", 5)
    made = cached([folder], tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(Sources, "survey", lambda self: pytest.fail("it was made again"))
        assert cached([folder], tmp_path / "cache") == made
    assert cached([folder], tmp_path / "cache", train_tokenizer([b"one line\n"], 260)) != made
    (folder / "3.txt").write_text("another text")
    again = cached([folder], tmp_path / "cache")
    assert again != made
    assert torch.equal(open_corpus(again).training.data, read_corpus([folder]).training.data)


@pytest.mark.parametrize("damage", ["a flipped bit", "a cut file", "a missing file", "no manifest"])
def test_a_damaged_one_is_made_again_and_said(damage: str, tmp_path: Path) -> None:
    folder = texts_of(tmp_path / "texts", 31)
    cache = cached([folder], tmp_path / "cache")
    tokens = cache / "training.tokens"
    whole = tokens.read_bytes()
    if damage == "a flipped bit":
        tokens.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "a cut file":
        tokens.write_bytes(whole[:-7])
    else:
        (tokens if damage == "a missing file" else cache / "manifest.json").unlink()
    said: list[str] = []
    assert cached([folder], tmp_path / "cache", said=said) == cache
    assert tokens.read_bytes() == whole
    assert len(said) == 1
    assert said[0].startswith(f"the cache of tokens: {cache}")
    assert said[0].endswith("; it is made again")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.name]


def test_one_that_is_cut_while_it_is_read_is_said(tmp_path: Path) -> None:
    # Reading past the end of a mapped file would end the process by SIGBUS.
    folder = texts_of(tmp_path / "texts", 31)
    cache = cached([folder], tmp_path / "cache")
    text = open_corpus(cache).training
    kept = pickle.dumps(text)
    os.truncate(cache / "training.tokens", 100)
    for read in (
        lambda: text.tokens(0, 10),
        lambda: text.file(0),
        lambda: TrainingWindows(text, 16, 3, seed=0, file_start_fraction=0.5)[0],
        lambda: pickle.loads(kept),
    ):
        with pytest.raises(
            RunError, match=r"training.tokens or .starts was cut while it was read.*; start again: it is"
        ):
            read()


@pytest.mark.parametrize("is_damaged", [False, True], ids=["none there", "a damaged one there"])
def test_processes_that_make_one_cache_at_the_same_time_all_get_it_and_none_loses_what_it_has_mapped(
    is_damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has seen that it is not there, and has made its own, before the first gives it its name."""
    folder, count = texts_of(tmp_path / "texts", 31), 5
    if is_damaged:
        os.truncate(cached([folder], tmp_path / "cache") / "training.tokens", 3)
    make, all_have_made = token_cache._make, threading.Barrier(count)

    def make_and_wait(*given: Any) -> Any:
        about = make(*given)
        all_have_made.wait(60)
        return about

    monkeypatch.setattr(token_cache, "_make", make_and_wait)
    with ThreadPoolExecutor(count) as threads:
        opened = list(threads.map(lambda _: open_corpus(cached([folder], tmp_path / "cache")), range(count)))
    expected = read_corpus([folder])
    for corpus in opened:
        assert torch.equal(corpus.training.data, expected.training.data)
        assert torch.equal(corpus.held_out.file_starts, expected.held_out.file_starts)
        # A file that another one had replaced would be another file under the same name.
        assert pickle.loads(pickle.dumps(corpus.training)).data.tolist() == corpus.training.data.tolist()
    (left,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in left.iterdir()) == sorted([*token_cache._FILES, "manifest.json"])


def test_a_cache_that_is_whole_by_now_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = texts_of(tmp_path / "texts", 31)
    make, seen = token_cache._make, []

    def make_after_another(*given: Any) -> Any:
        monkeypatch.setattr(token_cache, "_make", make)
        cache = cached([folder], tmp_path / "cache")  # another process begins later and is done before
        seen.append([(cache / name).stat().st_ino for name in token_cache._FILES])
        return make(*given)

    monkeypatch.setattr(token_cache, "_make", make_after_another)
    cache = cached([folder], tmp_path / "cache")
    assert [[(cache / name).stat().st_ino for name in token_cache._FILES]] == seen
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.name]


def test_folders_that_killed_processes_left_are_removed_and_those_that_are_written_to_are_not(tmp_path: Path) -> None:
    cache, two_days_ago = tmp_path / "cache", time.time() - 2 * 86400.0
    for name in ("old", "new", "written-to"):
        (cache / f".unfinished-{name}").mkdir(parents=True)
        (cache / f".unfinished-{name}" / "training.tokens").write_bytes(b"abc")
    for name in ("old", "written-to"):
        os.utime(cache / f".unfinished-{name}" / "training.tokens", (two_days_ago, two_days_ago))
        os.utime(cache / f".unfinished-{name}", (two_days_ago, two_days_ago))
    os.utime(cache / ".unfinished-written-to" / "training.tokens")
    cached([texts_of(tmp_path / "texts", 3)], cache)
    left = {path.name.removeprefix(".unfinished-") for path in cache.glob(".unfinished-*")}
    assert left == {"new", "written-to"}


def test_what_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "a.jsonl"
    broken.write_text(json.dumps({"text": "x" * 99}) + "\n{\n")
    with pytest.raises(RunError, match=r"a\.jsonl, line 2 is not valid JSON"):
        cached([broken], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()

    def fill(self: ByteTokenizer, texts: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ByteTokenizer, "encode", fill)
    with pytest.raises(RunError, match=r"cannot be written to .*cache \(No space left on device\); make room"):
        cached([texts_of(tmp_path / "texts", 3)], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


LIMITED = """
import re, resource, sys
from pathlib import Path
import torch
from dilated_attention_pytorch.training.data.sources import Sources
from dilated_attention_pytorch.training.data.token_cache import cached_corpus, open_corpus
from dilated_attention_pytorch.training.data.tokenizer import BYTES
text, folder, megabytes = sys.argv[1:]
cached_corpus(Sources([Path(text).with_name("small.jsonl")], "text", None), BYTES, Path(folder), None)
taken = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (taken + (int(megabytes) << 20),) * 2)
corpus = open_corpus(cached_corpus(Sources([Path(text)], "text", None), BYTES, Path(folder), None))
print(len(corpus.training) + len(corpus.held_out))
try:
    bytearray(50 << 20)
except MemoryError:
    print("limited")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of private memory is Linux's")
def test_fifty_megabytes_of_text_are_made_and_mapped_where_they_would_not_fit(tmp_path: Path) -> None:
    """24 MB more than the program itself has, of which 16 MB are the largest manifest that is read."""
    record = json.dumps({"text": "a line of a text that is long\n" * 1700}) + "\n"
    (tmp_path / "a.jsonl").write_text(record * 1000)
    (tmp_path / "small.jsonl").write_text(record * 20)
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "a.jsonl"), str(tmp_path / "cache"), "24"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(1000 * (1 + 30 * 1700)), "limited"]
