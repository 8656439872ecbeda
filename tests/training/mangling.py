"""Run folders mangled at random: a run goes on from what was written, or not at all, and nothing is executed.

    PYTHONPATH=tests python -m training.mangling --trials 5000 --seed 0 --commands 20

A run of 9 steps is stopped after step 7, with the checkpoints of steps 4 and 7. Every trial damages a copy of it, and
lets the program choose where to go on; some trials go on to the end with the real command, and compare the weights.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.training import RunError, resume, train
from dilated_attention_pytorch.training import run as training_run
from dilated_attention_pytorch.training.checkpoint import SETTINGS_NAME, checkpoint_step, file_names
from dilated_attention_pytorch.training.manifest import MANIFEST_NAME, read_sealed, sealed
from training.damage import (
    NothingLeft,
    Watched,
    cut,
    flip_bits,
    lengthen,
    link,
    payload,
    pipe,
    remove,
    whole,
    zero_a_page,
)
from training.runs import quiet, seal_again, stopped_run, tiny_settings, weights, write_texts

OLD, NEW = 4, 7
_BEFORE, _NEWEST = "the one before", "the newest"
_NAMES = [*file_names(1), MANIFEST_NAME]


@dataclasses.dataclass(frozen=True)
class World(Watched):
    """A run that was stopped, another one with the same settings, and the first one undisturbed."""

    stopped: Path
    other: Path
    whole: Path


def make_world(folder: Path) -> World:
    """The runs, of a few seconds."""
    settings = tiny_settings(write_texts(folder / "texts"), threads=1, device="cpu")
    world = World(folder, folder / "stopped", folder / "other", folder / "whole")
    train(settings, world.whole, quiet())
    for run in (world.stopped, world.other):
        with pytest.MonkeyPatch.context() as monkeypatch:
            stopped_run(monkeypatch, settings, run, NEW - 1)
        assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (OLD, NEW)}
    return world


Damage = Callable[[Path, World, random.Random], str]
"""Damages a run folder, and says how. What it is given besides: its runs, and the draws."""


def _drawn_file(run: Path, draw: random.Random) -> Path:
    steps = draw.choice([[NEW], [NEW], [NEW], [OLD], [OLD, NEW]])
    return whole(run / f"checkpoint-{draw.choice(steps)}" / draw.choice(_NAMES))


def _of_a_file(damage: Callable[[Path, random.Random], str], *, of_settings_too: bool = False) -> Damage:
    """The damage to a file of a checkpoint, or now and then to training.json."""

    def of_a_file(run: Path, world: World, draw: random.Random) -> str:
        is_checkpoint = not of_settings_too or draw.random() < 0.9
        return damage(_drawn_file(run, draw) if is_checkpoint else run / SETTINGS_NAME, draw)

    of_a_file.__name__ = damage.__name__
    return of_a_file


def _swap_within(run: Path, world: World, draw: random.Random) -> str:
    folder = _drawn_file(run, draw).parent
    one, two = draw.sample(_NAMES, 2)
    (folder / one).rename(folder / "third")
    (folder / two).rename(folder / one)
    (folder / "third").rename(folder / two)
    return f"{one} and {two} swapped"


def _swap_between(run: Path, world: World, draw: random.Random) -> str:
    names = draw.sample(_NAMES, draw.randrange(1, len(_NAMES)))
    for name in names:
        old, new = (whole(run / f"checkpoint-{step}" / name) for step in (OLD, NEW))
        one, two = old.read_bytes(), new.read_bytes()
        old.write_bytes(two)
        new.write_bytes(one)
    return f"{len(names)} files of two checkpoints swapped"


def _take_others(run: Path, world: World, draw: random.Random) -> str:
    names = draw.sample(_NAMES, draw.randrange(1, len(_NAMES) + 1))
    step = draw.choice([OLD, NEW, NEW])
    for name in names:
        path = whole(run / f"checkpoint-{step}" / name)
        shutil.copy(world.other / f"checkpoint-{draw.choice([OLD, step])}" / name, path)
    return f"{len(names)} files of another run"


def _take_whole_others(run: Path, world: World, draw: random.Random) -> str:
    if draw.random() < 0.2:
        shutil.copy(world.other / "training.json", run)
        return "training.json of another run"
    for step in draw.choice([[NEW], [NEW], [OLD, NEW]]):
        shutil.rmtree(run / f"checkpoint-{step}")
        shutil.copytree(world.other / f"checkpoint-{step}", run / f"checkpoint-{step}")
    return "whole checkpoints of another run"


def _rename(run: Path, world: World, draw: random.Random) -> str:
    path = run / f"checkpoint-{draw.choice([OLD, NEW])}"
    name = draw.choice(["checkpoint-9", "checkpoint-5", "checkpoint-012", "checkpoint-²", "checkpoint-" + "9" * 60])
    path.rename(run / name)
    return f"{path.name} renamed"


def _link(run: Path, world: World, draw: random.Random) -> str:
    path = _drawn_file(run, draw)
    return link(path, draw, world.other / path.parent.name / path.name, run / f"checkpoint-{OLD}" / path.name)


def _put_payload(run: Path, world: World, draw: random.Random) -> str:
    """In the place of a file; half of the time the manifest speaks for it, as a stranger's would."""
    checkpoint = run / f"checkpoint-{draw.choice([OLD, NEW, NEW])}"
    said = payload(checkpoint / draw.choice(["optimizer.pt", "scheduler.pt", "rng_state.pth"]), draw, world.canary)
    if draw.random() < 0.5:
        _seal(checkpoint)
        said += ", sealed"
    return said


def _seal(checkpoint: Path, *others: str) -> None:
    for name in _NAMES:
        whole(checkpoint / name)
    seal_again(checkpoint, *others)


def _add_payload(run: Path, world: World, draw: random.Random) -> str:
    """Under a name that transformers may look for."""
    checkpoint = run / f"checkpoint-{draw.choice([OLD, NEW, NEW])}"
    path = checkpoint / draw.choice(
        [
            "pytorch_model.bin",
            "scaler.pt",
            "optimizer.bin",
            "training_args.bin",
            "rng_state_0.pth",
            "adapter_model.bin",
        ]
    )
    said = payload(path, draw, world.canary)
    if path.name == "pytorch_model.bin" and draw.random() < 0.5:
        (checkpoint / "model.safetensors").unlink()
    elif draw.random() < 0.5:
        _seal(checkpoint, path.name)
        said += ", sealed"
    return f"added {said}"


def _add(run: Path, world: World, draw: random.Random) -> str:
    checkpoint = run / f"checkpoint-{draw.choice([OLD, NEW, NEW])}"
    name = draw.choice(["model.safetensors.index.json", "adapter_config.json", "notes.txt", "pytorch_model_fsdp", ".x"])
    if "." in name:
        (checkpoint / name).write_text('{"weight_map": {"a": "b"}}')
    else:
        (checkpoint / name).mkdir()
    return f"added {name}"


def _forge_manifest(run: Path, world: World, draw: random.Random) -> str:
    """With a checksum that fits, or as somebody writes it by hand."""
    path = run / f"checkpoint-{draw.choice([NEW, NEW, OLD])}" / MANIFEST_NAME
    manifest = read_sealed(whole(path), what="test", remedy="")
    name = draw.choice(list(manifest["files"]))
    change = draw.choice(
        [
            {"run": "00"},
            {"step": 9},
            {"format": 2},
            {"files": {}},
            {"files": []},
            {"files": {**manifest["files"], name: 3}},
            {"files": {**manifest["files"], "../../texts/module1.py": manifest["files"][name]}},
            {"files": {name: None}},
            {"files": {**manifest["files"], name: {"bytes": 3, "sha256": "00"}}},
            {"step": True},
            {"step": None},
        ]
    )
    forged = {**manifest, **change}
    text = sealed(forged)
    if draw.random() < 0.3:
        text = json.dumps(forged)
    elif draw.random() < 0.2:
        text = draw.choice(
            ["[" * 100_000, '{"sha256": ' + "9" * 5000 + "}", "null", "[]", '{"sha256": NaN}', "\ud800x"]
        )
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    return f"manifest with {next(iter(change))} forged"


DAMAGES: list[Damage] = [
    *3 * [_of_a_file(flip_bits, of_settings_too=True)], *2 * [_of_a_file(cut, of_settings_too=True)],
    _of_a_file(lengthen), *2 * [_of_a_file(zero_a_page)], _swap_within, _swap_between, *2 * [_take_others],
    _take_whole_others,
    _of_a_file(remove), _rename, _link, _of_a_file(pipe), _put_payload, _put_payload, _add_payload, _add,
    _forge_manifest,
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was done to a run, and where it went on."""

    kind: str
    said: str
    outcome: str
    """"refused", "the one before", "the newest" (what was damaged is not read), or "the other run": both its settings
    and its checkpoints were put there, so that the folder is that run."""


def _start_of(run: Path) -> Path | None:
    """The checkpoint that the run would go on from; None if it is refused."""
    taken: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "_train_and_report", taken.append)
        try:
            resume(run, quiet())
        except RunError:
            return None
    found: Path | None = taken[0].opened.start.checkpoint
    assert found is not None
    return found


def attempt(world: World, draw: random.Random, place: Path, *, with_command: bool = False) -> Trial:
    """Damage a copy of the run, once or twice, and see where it goes on.

    Raises:
        AssertionError: it goes on from what was not written, or something was executed.
    """
    run = Path(shutil.copytree(world.stopped, place))
    damages = draw.choices(DAMAGES, k=draw.choice([1, 1, 1, 2]))
    said = []
    for damage in damages:
        try:
            said.append(damage(run, world, draw))
        except (NothingLeft, OSError, RunError):
            continue
    words = ", ".join(said)
    checkpoint = _start_of(run)
    assert not world.canary.exists(), words
    if checkpoint is None:
        outcome = "refused"
    else:
        is_other = _identity(run) == _identity(world.other)
        outcome = "the other run" if is_other else {OLD: _BEFORE, NEW: _NEWEST}[checkpoint_step(checkpoint)]
        for name in file_names(1):
            written = ((world.other if is_other else world.stopped) / checkpoint.name / name).read_bytes()
            assert (checkpoint / name).read_bytes() == written, f"{words}: {outcome} has another {name}"
    if with_command:
        _go_to_the_end(world, run, outcome, words)
    assert not world.canary.exists(), words
    shutil.rmtree(run)
    return Trial(damages[0].__name__.strip("_"), words, outcome)


def _identity(run: Path) -> str:
    return str(read_sealed(run / SETTINGS_NAME, what="test", remedy="")["run"])


def _go_to_the_end(world: World, run: Path, outcome: str, words: str) -> None:
    command = [sys.executable, "-m", "dilated_attention_pytorch", "train", "--resume", str(run)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "Traceback" not in ended.stderr, f"{words}: {ended.stderr}"
    if outcome == "refused":
        assert ended.returncode == 2, f"{words}: {ended.stderr}"
        assert ended.stderr.startswith("dilated-attention: "), f"{words}: {ended.stderr}"
        return
    assert ended.returncode == 0, f"{words}: {ended.stderr}"
    if outcome not in (_BEFORE, _NEWEST):
        return
    expected, found = weights(world.whole), weights(run)
    assert all(torch.equal(expected[name], found[name]) for name in expected | found), words


def main() -> None:
    """Do the trials, and print how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5000, help="run folders to mangle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=int, default=20, help="of the trials, how many go on to the end")
    arguments = parser.parse_args()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        draw = random.Random(arguments.seed)
        every = max(1, arguments.trials // max(1, arguments.commands))
        for number in range(arguments.trials):
            with_command = arguments.commands > 0 and number % every == every - 1
            trial = attempt(world, draw, Path(folder) / "run", with_command=with_command)
            counts[trial.kind, trial.outcome] += 1
            if number % 500 == 499:
                print(f"{number + 1} of {arguments.trials}", file=sys.stderr, flush=True)
    outcomes = sorted({outcome for _, outcome in counts})
    for kind in sorted({kind for kind, _ in counts}):
        print(f"{kind:20}", *(f"{outcome}: {counts[kind, outcome]:5}" for outcome in outcomes), sep="  ")
    totals = {outcome: sum(count for (_, found), count in counts.items() if found == outcome) for outcome in outcomes}
    print(f"{arguments.trials} run folders mangled, seed {arguments.seed}: {totals}; resumed wrongly: 0; executed: 0")


if __name__ == "__main__":
    main()
