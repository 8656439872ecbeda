"""Ways in which a run folder is damaged: files, as of :mod:`training.damage`, and checkpoints swapped or forged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from dilated_attention_pytorch.training.checkpoint import SETTINGS_NAME, file_names
from dilated_attention_pytorch.training.manifest import MANIFEST_NAME, read_sealed, sealed
from training.damage import (
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
from training.runs import seal_again

OLD, NEW = 4, 7
"""Steps of the two checkpoints of the run that is damaged."""
_NAMES = [*file_names(1), MANIFEST_NAME]

Damage = Callable[[Path, Watched, random.Random], str]
"""Damages a run folder, and says how. It is given another run with the same settings, and the draws."""


def _drawn_file(run: Path, draw: random.Random) -> Path:
    steps = draw.choice([[NEW], [NEW], [NEW], [OLD], [OLD, NEW]])
    return whole(run / f"checkpoint-{draw.choice(steps)}" / draw.choice(_NAMES))


def _of_a_file(damage: Callable[[Path, random.Random], str], *, of_settings_too: bool = False) -> Damage:
    """The damage to a file of a checkpoint, or now and then to training.json."""

    def of_a_file(run: Path, world: Watched, draw: random.Random) -> str:
        is_checkpoint = not of_settings_too or draw.random() < 0.9
        return damage(_drawn_file(run, draw) if is_checkpoint else run / SETTINGS_NAME, draw)

    of_a_file.__name__ = damage.__name__
    return of_a_file


def _swap_within(run: Path, world: Watched, draw: random.Random) -> str:
    folder = _drawn_file(run, draw).parent
    one, two = draw.sample(_NAMES, 2)
    (folder / one).rename(folder / "third")
    (folder / two).rename(folder / one)
    (folder / "third").rename(folder / two)
    return f"{one} and {two} swapped"


def _swap_between(run: Path, world: Watched, draw: random.Random) -> str:
    names = draw.sample(_NAMES, draw.randrange(1, len(_NAMES)))
    for name in names:
        old, new = (whole(run / f"checkpoint-{step}" / name) for step in (OLD, NEW))
        one, two = old.read_bytes(), new.read_bytes()
        old.write_bytes(two)
        new.write_bytes(one)
    return f"{len(names)} files of two checkpoints swapped"


def _take_others(run: Path, world: Watched, draw: random.Random) -> str:
    names = draw.sample(_NAMES, draw.randrange(1, len(_NAMES) + 1))
    step = draw.choice([OLD, NEW, NEW])
    for name in names:
        path = whole(run / f"checkpoint-{step}" / name)
        shutil.copy(world.other / f"checkpoint-{draw.choice([OLD, step])}" / name, path)
    return f"{len(names)} files of another run"


def _take_whole_others(run: Path, world: Watched, draw: random.Random) -> str:
    if draw.random() < 0.2:
        shutil.copy(world.other / "training.json", run)
        return "training.json of another run"
    for step in draw.choice([[NEW], [NEW], [OLD, NEW]]):
        shutil.rmtree(run / f"checkpoint-{step}")
        shutil.copytree(world.other / f"checkpoint-{step}", run / f"checkpoint-{step}")
    return "whole checkpoints of another run"


def _rename(run: Path, world: Watched, draw: random.Random) -> str:
    path = run / f"checkpoint-{draw.choice([OLD, NEW])}"
    name = draw.choice(["checkpoint-9", "checkpoint-5", "checkpoint-012", "checkpoint-²", "checkpoint-" + "9" * 60])
    path.rename(run / name)
    return f"{path.name} renamed"


def _link(run: Path, world: Watched, draw: random.Random) -> str:
    path = _drawn_file(run, draw)
    return link(path, draw, world.other / path.parent.name / path.name, run / f"checkpoint-{OLD}" / path.name)


def _put_payload(run: Path, world: Watched, draw: random.Random) -> str:
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


def _add_payload(run: Path, world: Watched, draw: random.Random) -> str:
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


def _add(run: Path, world: Watched, draw: random.Random) -> str:
    checkpoint = run / f"checkpoint-{draw.choice([OLD, NEW, NEW])}"
    name = draw.choice(["model.safetensors.index.json", "adapter_config.json", "notes.txt", "pytorch_model_fsdp", ".x"])
    if "." in name:
        (checkpoint / name).write_text('{"weight_map": {"a": "b"}}')
    else:
        (checkpoint / name).mkdir()
    return f"added {name}"


def _forge_manifest(run: Path, world: Watched, draw: random.Random) -> str:
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
