"""Whatever a command reads, mangled at random: it ends as it should, or in a sentence, and nothing is executed or lost.

    PYTHONPATH=tests python -m training.mangled_inputs --trials 1000 --seed 0 [--kind "run folder"]

Every trial copies what a command reads, damages it, and runs the real command within this process, up to the training
itself. A run goes on from a checkpoint as it was written, or not at all.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.cli import main as run_command
from dilated_attention_pytorch.training import ExtensionSettings, RunError, extend, extension, lease, train
from dilated_attention_pytorch.training import run as training_run
from dilated_attention_pytorch.training.checkpoint import SETTINGS_NAME, choose_start, file_names
from dilated_attention_pytorch.training.data.run_data import RunData, read_data, read_tokenizer
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer
from dilated_attention_pytorch.training.faults import note_fault
from dilated_attention_pytorch.training.manifest import read_sealed, write_manifest
from dilated_attention_pytorch.training.stages import StageSettings
from training import mangling
from training.damage import DAMAGES, NothingLeft, Watched, payload, whole
from training.data.test_records import write_arrow, write_jsonl
from training.runs import quiet, stop_after, stopped_run, tiny_settings, write_texts

MOST_MEMORY = 6 << 30
"""Bytes of data that a trial may take: a file that asks for more is to be refused in words."""
LONGEST = 60
"""Seconds of a trial: more is a command that waits for what never comes."""
_WORDS = [f"record {number}: " + "x y z " * (number % 40) for number in range(300)]


@dataclasses.dataclass(frozen=True)
class World(Watched):
    """What the trials copy: texts in every format, a tokenizer, a cache, runs stopped and finished, a model."""

    data: RunData
    """What is read through the cache that lies in it."""


_LEASE = {
    "lease.json": '{"token": "x", "holder": {"host": "h", "pid": 1, "place": "p", "started": "s"}}',
    "lease.lock": "filelock/2\npid=1\nhost=h\nmode=lease\ntoken=x\nduration=0.2\n",
}


def make_world(folder: Path) -> World:
    """Runs of a few seconds."""
    texts = write_texts(folder / "texts")
    (folder / "tokenizer").mkdir(parents=True)
    train_tokenizer([path.read_bytes() for path in sorted(texts.iterdir())], 300).save(folder / "tokenizer")
    records = folder / "records"
    records.mkdir()
    write_jsonl(records / "a.jsonl", _WORDS)
    pq.write_table(pa.table({"text": _WORDS, "id": range(len(_WORDS))}), records / "a.parquet", row_group_size=50)
    write_arrow(records / "saved", _WORDS)

    plain = tiny_settings(texts, threads=1, device="cpu", stages=StageSettings(lengths=(64, 256)))
    model = dataclasses.replace(plain.model, vocab_size=300)
    settings = dataclasses.replace(plain, tokenizer=folder / "tokenizer", model=model, cache=folder / "cache")
    train(dataclasses.replace(settings, steps=4), folder / "finished", quiet())
    for name in ("stopped", "other"):
        with pytest.MonkeyPatch.context() as patch:
            stopped_run(patch, settings, folder / name, mangling.NEW - 1)
    note_fault(folder / "stopped", "skipped", step=3, reason="of a test", batches=[3, 3])
    _as_of_two_processes(folder / "stopped", folder / "two")

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)).save_pretrained(folder / "short")
    LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=32, **sizes)).save_pretrained(folder / "words")
    train_tokenizer([path.read_bytes() for path in sorted(texts.iterdir())], 300).save(folder / "words")
    longer = ExtensionSettings(
        model=str(folder / "short"),
        data=(texts,),
        context_length=64,
        steps=8,
        save_steps=3,
        log_steps=1,
        eval_steps=50,
        final_eval_windows=1,
        device="cpu",
        threads=1,
        precision="float32",
    )
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 5, signal.SIGINT)
        extend(longer, folder / "extension", quiet())
    return World(folder, read_data(settings, read_tokenizer(settings), None))


def _as_of_two_processes(run: Path, target: Path) -> None:
    """A copy of a run, as if two processes had written its checkpoints: each its own random numbers."""
    shutil.copytree(run, target)
    for checkpoint in target.glob("checkpoint-*"):
        about = read_sealed(checkpoint / "manifest.json", what="test", remedy="")
        names = [name for name in about.pop("files") if name != "rng_state.pth"]
        for rank in range(2):
            shutil.copy(checkpoint / "rng_state.pth", checkpoint / f"rng_state_{rank}.pth")
            names.append(f"rng_state_{rank}.pth")
        (checkpoint / "rng_state.pth").unlink()
        del about["format"]
        write_manifest(checkpoint, names, **about | {"processes": 2})


@dataclasses.dataclass(frozen=True)
class Kind:
    """Something that commands read."""

    name: str
    copied: str
    """What of the world is copied."""
    files: str
    """What of the copy is damaged, as patterns."""
    lines: str
    """Command lines that read it, one a line: ``{w}`` stands for the world, ``{c}`` for the copy, ``{n}`` for a new
    folder."""
    may_write: str = ""
    """What of the copy a command may change, as a pattern."""


_TRAIN = "train --preset tiny --device cpu --output {n}/new"
_TOKENS = f"{_TRAIN} --data {{w}}/texts --tokenizer {{w}}/tokenizer --model.vocab-size 300"
_GENERATE = "generate {c} --prompt def --max-new-tokens 3 --device cpu"
_EVAL = "eval {c} --output-file {n}/e.json --context-lengths 16 32 --windows 1 --recall-texts 1 --device cpu"
_REPORT = "report {c} --output {n}/r.html"

KINDS = [
    Kind("cache of tokens", "cache", "*/*", f"{_TOKENS} --cache {{c}}", may_write="*"),
    Kind("tokenizer", "tokenizer", "*", f"{_TRAIN} --data {{w}}/texts --tokenizer {{c}} --model.vocab-size 300"
         " --cache {n}/cache"),
    Kind("text files", "texts", "module1.py module7.py", f"{_TRAIN} --data {{c}}\n{_TRAIN} --data {{c}} --cache "
         "{n}/cache\ntokenizer {c}/module1.py {c}/module7.py --vocab-size 258 --output {n}/t.json"),
    Kind("JSONL", "records", "a.jsonl", f"{_TRAIN} --data {{c}}/a.jsonl\n{_TRAIN} --data {{c}}/a.jsonl --cache "
         "{n}/cache\ntokenizer {c}/a.jsonl --vocab-size 258 --output {n}/t.json"),
    Kind("Parquet", "records", "a.parquet", f"{_TRAIN} --data {{c}}/a.parquet\n{_TRAIN} --data {{c}}/a.parquet --cache "
         "{n}/cache"),
    Kind("Arrow", "records", "saved/*", f"{_TRAIN} --data {{c}}/saved\n{_TRAIN} --data {{c}}/saved --cache "
         "{n}/cache"),
    Kind("run.toml", "stopped", "run.toml", "train --config {c}/run.toml --output {n}/new"),
    Kind("training.json", "stopped", "training.json", f"train --resume {{c}}\n{_GENERATE}\n{_EVAL}\n{_REPORT}"),
    Kind("logs", "stopped", "faults.jsonl metrics.jsonl lease.json lease.lock", f"train --resume {{c}}\n{_REPORT}"),
    Kind("checkpoint", "stopped", "checkpoint-*/*", f"train --resume {{c}}\n{_GENERATE}\n{_EVAL}"),
    Kind("run folder", "stopped", "", "train --resume {c}"),
    Kind("checkpoint of two processes", "two", "checkpoint-*/*", "ranks {c}"),
    Kind("finished run", "finished", "model.safetensors config.json manifest.json training.json tokenizer*.json "
         "generation_config.json", f"{_GENERATE}\n{_EVAL}\n{_REPORT}\ntrain --resume {{c}}"),
    Kind("extension", "extension", "training.json checkpoint-*/*", f"extend --resume {{c}}\n{_EVAL}\n{_REPORT}"),
    Kind("pretrained model", "short", "*", f"extend --model {{c}} --context-length 64 --data {{w}}/texts --device cpu "
         f"--output {{n}}/new\n{_EVAL} --data {{w}}/texts"),
    Kind("pretrained model's tokenizer", "words", "tokenizer*.json", "extend --model {c} --context-length 64 "
         f"--data {{w}}/texts --device cpu --output {{n}}/new\n{_EVAL} --data {{w}}/texts"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was done to what a command reads, and what came of it."""

    kind: str
    said: str
    outcome: str
    """"refused", or "done": the command went on, up to the training if it trains; or the step that it goes on from."""
    sentence: str


class _Began(Exception):
    """The run would train now."""


def attempt(world: World, draw: random.Random, folder: Path, kind: Kind) -> Trial:
    """Damage a copy of something, and give it to a command that reads it.

    Raises:
        AssertionError: the command ended in neither way, or something was executed or lost.
    """
    copy, new = folder / "copy", folder / "new"
    shutil.copytree(world.folder / kind.copied, copy)
    new.mkdir(parents=True)
    said = ", ".join(_damaged(kind, copy, world, draw)) or "nothing"
    line = draw.choice(kind.lines.split("\n")).format(w=world.folder, c=copy, n=new)
    what = f"{kind.name}: {said}: {line}"
    before = _state(copy, kind.may_write)
    outcome, sentence = _outcome(line, what, world, copy, world.folder / kind.copied)
    assert not world.canary.exists(), f"{what}: it was executed"
    if outcome == "refused":
        assert _state(copy, kind.may_write) == before, f"{what}: something was changed"
        made = [path.name for path in new.iterdir() if path.name != "cache"]
        assert not made, f"{what}: refused, and yet made {made}: {sentence}"
    for checkpoint in copy.glob("checkpoint-*"):
        for path in checkpoint.rglob("*"):
            assert _digest(path) == before[str(path)], f"{what}: {path} was changed"
    shutil.rmtree(folder)
    return Trial(kind.name, said, outcome, sentence)


def _damaged(kind: Kind, copy: Path, world: World, draw: random.Random) -> Iterator[str]:
    if kind.name == "run folder":
        for damage in draw.choices(mangling.DAMAGES, k=draw.choice([1, 1, 1, 2])):
            with contextlib.suppress(NothingLeft, OSError, RunError):
                yield damage(copy, world, draw)
        return
    files = sorted(path for pattern in kind.files.split() for path in copy.glob(pattern))
    for _ in range(draw.choice([1, 1, 1, 2])):
        path = draw.choice(files) if files else copy / kind.files.split()[-1]
        with contextlib.suppress(NothingLeft, OSError):
            if kind.name == "finished run" and draw.random() < 0.3:
                (copy / "manifest.json").unlink(missing_ok=True)  # as one changes such a folder on purpose
            if draw.random() < 0.15:
                name = draw.choice([path.name, "pytorch_model.bin", "optimizer.pt", "training_args.bin"])
                if name == "pytorch_model.bin" and (path.parent / "model.safetensors").exists():
                    (path.parent / "model.safetensors").unlink()
                yield payload(path.with_name(name), draw, world.canary)
            else:
                if path.name in _LEASE and not path.exists():
                    path.write_text(_LEASE[path.name])
                yield draw.choice(DAMAGES)(whole(path), draw)


def _outcome(line: str, what: str, world: World, copy: Path, original: Path) -> tuple[str, str]:
    """How a command ended: "done", or "refused" with its sentence."""
    if line.startswith("ranks "):
        return _as_two_processes(copy, what)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _up_to_training() as began:
        try:
            run_command(line.split())
        except _Began:
            pass
        except SystemExit as left:
            return "refused", _sentence(left, err.getvalue(), what)
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:500]}") from error
    if "--cache" in line and "cache of tokens" in what:
        _check_data(began, world, what)
    if line.startswith("train --resume") and began:
        return _start_of(began[0], world.other, copy, original, what), ""
    return "done", ""


def _start_of(run: Any, other: Path, copy: Path, original: Path, what: str) -> str:
    """The checkpoint that the run goes on from, which is as it was written."""
    start = run.opened.start.checkpoint
    ids = [read_sealed(path / SETTINGS_NAME, what="test", remedy="")["run"] for path in (copy, other)]
    written = (other if ids[0] == ids[1] else original) / start.name
    for name in file_names(1):
        assert (start / name).read_bytes() == (written / name).read_bytes(), f"{what}: {start.name} has another {name}"
    return str(start.name)


def _sentence(left: SystemExit, err: str, what: str) -> str:
    """What a command that ended with exit code 2 said."""
    words = " ".join(err.split())
    assert left.code == 2, f"{what}: exit code {left.code}: {words}"
    assert "dilated-attention: " in words, f"{what}: no sentence: {words}"
    assert "Traceback" not in words, f"{what}: {words}"
    return words.partition("dilated-attention: ")[2]


def _check_data(began: list[Any], world: World, what: str) -> None:
    """What is read through a cache is what the texts are, whatever was done to it."""
    (run,) = began
    for found, expected in zip(run.data.corpora, world.data.corpora, strict=True):
        for side in ("training", "held_out"):
            for name in ("data", "file_starts"):
                tensors = [getattr(getattr(corpus, side), name) for corpus in (found, expected)]
                assert torch.equal(*tensors), f"{what}: {side} {name} is another"


def _as_two_processes(run: Path, what: str) -> tuple[str, str]:
    """Where a run of two processes would go on, and what each of them verifies."""
    run_id = read_sealed(run / "training.json", what="test", remedy="")["run"]
    try:
        start = choose_start(run, run_id, 2, lambda checkpoint: None)
        start.verify_here(run_id, 2, 1)
    except RunError as error:
        return "refused", str(error)
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return "done", ""


@contextlib.contextmanager
def _up_to_training() -> Iterator[list[Any]]:
    """Runs are checked and begun, and then end; within the memory and the time of a trial."""
    began: list[Any] = []

    def begin(run: Any, *rest: Any) -> None:
        began.append(run)
        raise _Began

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {LONGEST} s")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(training_run, "_train_and_report", begin)
        patch.setattr(extension, "_train_and_report", begin)
        patch.setattr(extension, "_measure", begin)
        patch.setattr(lease, "LEASE_SECONDS", 0.2)
        before = signal.signal(signal.SIGALRM, ring)
        signal.alarm(LONGEST)
        try:
            yield began
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def _state(folder: Path, but: str) -> dict[str, str]:
    """A digest of everything in a folder."""
    left_out = set(folder.glob(but)) if but else set()
    return {str(path): _digest(path) for path in folder.rglob("*") if not left_out & {path, *path.parents}}


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """No more than :data:`MOST_MEMORY`: a machine that others use too is not to be filled."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def trials(
    count: int, seed: int, folder: Path, failed: Callable[[AssertionError], None], kinds: list[Kind]
) -> list[Trial]:
    """Make the world, and do so many trials; ``failed`` is told of one that ended as none may."""
    world, draw, found = make_world(folder / "world"), random.Random(seed), []
    originals = _state(world.folder, "")
    with limited():
        for number in range(count):
            try:
                found.append(attempt(world, draw, folder / "trial", draw.choice(kinds)))
            except AssertionError as error:
                print(f"FAILED: {error}", file=sys.stderr, flush=True)
                failed(error)
                shutil.rmtree(folder / "trial", ignore_errors=True)
                world.canary.unlink(missing_ok=True)
            if number % 100 == 99:
                print(f"{number + 1} of {count}", file=sys.stderr, flush=True)
    assert _state(world.folder, "") == originals, "something of the originals was changed"
    return found


def main() -> int:
    """Do the trials, and print how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="of what is mangled; without it, any")
    parser.add_argument("--sentences", action="store_true", help="print every sentence")
    arguments = parser.parse_args()
    failures: list[AssertionError] = []
    kinds = [kind for kind in KINDS if arguments.kind in (None, kind.name)]
    with tempfile.TemporaryDirectory() as folder:
        found = trials(arguments.trials, arguments.seed, Path(folder), failures.append, kinds)
    for trial in found if arguments.sentences else ():
        print(f"{trial.kind} | {trial.said} | {trial.outcome} | {trial.sentence[:300]}")
    counts = collections.Counter((trial.kind, trial.outcome) for trial in found)
    outcomes = sorted({trial.outcome for trial in found})
    for kind in kinds:
        each = {outcome: counts[kind.name, outcome] for outcome in outcomes if counts[kind.name, outcome]}
        print(f"{kind.name:30} {each}")
    refused = sum(trial.outcome == "refused" for trial in found)
    print(
        f"{arguments.trials} inputs mangled, seed {arguments.seed}: {refused} refused in a sentence, "
        f"{len(found) - refused} done; ended otherwise: {len(failures)}; executed: 0"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
