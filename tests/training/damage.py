"""Ways in which a file is damaged: bits, lengths, pages, what stands in its place, values, programs to be executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from dilated_attention_pytorch.training.manifest import sealed


class Payload:
    """What makes the file ``canary`` when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


@dataclass(frozen=True)
class Watched:
    """A folder in which a payload would leave a file."""

    folder: Path

    @property
    def canary(self) -> Path:
        """What a payload makes."""
        return self.folder / "canary"

    @property
    def other(self) -> Path:
        """A run with the settings of the one that is damaged."""
        return self.folder / "other"


class NothingLeft(Exception):
    """There is nothing that this damage could be done to."""


def whole(path: Path) -> Path:
    """``path``, if it is a file that can be damaged: no link, no pipe, not empty."""
    if path.is_symlink() or not path.is_file() or not path.stat().st_size:
        raise NothingLeft
    return path


def flip_bits(path: Path, draw: random.Random) -> str:
    """Turn some bits over."""
    found = bytearray(whole(path).read_bytes())
    count = draw.choice([1, 1, 1, 2, 8])
    for _ in range(count):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    path.write_bytes(found)
    return f"{count} bits of {path.name}"


def cut(path: Path, draw: random.Random) -> str:
    """Cut the end off."""
    size = whole(path).stat().st_size
    os.truncate(path, draw.choice([0, 1, draw.randrange(size), size - 1]))
    return f"{path.name} cut"


def lengthen(path: Path, draw: random.Random) -> str:
    """Write more after the end."""
    with whole(path).open("ab") as file:
        file.write(draw.choice([b"\0", b"\n", bytes(4096), draw.randbytes(draw.randrange(1, 300))]))
    return f"{path.name} lengthened"


def zero_a_page(path: Path, draw: random.Random) -> str:
    """Write zeros, or anything, over a page of the disk."""
    found = bytearray(whole(path).read_bytes())
    start = 4096 * draw.randrange(-(-len(found) // 4096))
    length = min(4096, len(found) - start)
    found[start : start + length] = bytes(length) if draw.random() < 0.7 else draw.randbytes(length)
    path.write_bytes(found)
    return f"a page of {path.name}"


def remove(path: Path, draw: random.Random) -> str:
    """Remove the file, sometimes for a folder of its name."""
    whole(path).unlink()
    if draw.random() < 0.3:
        path.mkdir()
    return f"{path.name} removed"


def pipe(path: Path, draw: random.Random) -> str:
    """Put a pipe in its place, which nobody writes to."""
    whole(path).unlink()
    os.mkfifo(path)
    return f"{path.name} a pipe"


def link(path: Path, draw: random.Random, *targets: Path) -> str:
    """Put a link in its place: to a device, to nothing, to itself, or to one of ``targets``."""
    whole(path).unlink()
    target = draw.choice([Path("/dev/zero"), Path("/dev/full"), path.with_name("nothing"), path, *targets])
    path.symlink_to(target)
    return f"{path.name} a link to {target.name}"


def payload(path: Path, draw: random.Random, canary: Path) -> str:
    """Write a file that is executed where it is unpickled in any of the ways that there are."""
    if path.is_symlink() or path.is_fifo() or not path.parent.is_dir():
        raise NothingLeft
    program = Payload(canary)
    way = draw.choice(["zip", "zip beside tensors", "old", "plain"])
    if way == "plain":
        path.write_bytes(pickle.dumps(program))
    elif way == "old":
        torch.save({"state": program}, path, _use_new_zipfile_serialization=False)
    elif way == "zip":
        torch.save(program, path)
    else:
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        torch.save({**state, "state": {}, "param_groups": [], "more": [program]}, path)
    return f"{path.name} a payload ({way})"


ODD: list[Any] = [
    None, True, -1, 0, 3, 1.5, 1e308, 10**30, float("nan"), float("-inf"), "", "x", "\udc80", "../../etc/passwd", [],
    {}, [[]], ["x", 3], {"x": {"y": []}}, "9" * 5000,
]  # fmt: skip
"""Values that no file of ours holds where they are put."""


def change_values(path: Path, draw: random.Random) -> str:
    """Change values of a JSON, JSONL or TOML file; one with a checksum of its own gets one that fits, half the time."""
    text = whole(path).read_bytes()
    try:
        if path.suffix == ".toml":
            path.write_bytes(tomli_w.dumps(_changed(tomllib.loads(text.decode()), draw)).encode())
        elif path.suffix == ".jsonl":
            lines = text.decode().splitlines()
            number = draw.randrange(len(lines))
            lines[number] = _as_json(_changed(json.loads(lines[number]), draw))
            path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        else:
            values = _changed(json.loads(text), draw)
            is_sealed = isinstance(values, dict) and "sha256" in values and draw.random() < 0.5
            path.write_text(sealed(values) if is_sealed else _as_json(values), errors="surrogatepass")
    except (AttributeError, TypeError, ValueError) as error:  # another damage came before, or TOML has no such value
        raise NothingLeft from error
    return f"values of {path.name}"


def _as_json(values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


def _changed(values: Any, draw: random.Random) -> Any:
    """``values`` with one of them changed, at any depth."""
    if isinstance(values, dict) and values and draw.random() < 0.9:
        name = draw.choice(list(values))
        way = draw.random()
        if way < 0.1:
            return {key: value for key, value in values.items() if key != name}
        if way < 0.2:
            return {**values, draw.choice(["x", "", name + "_", "__class__"]): draw.choice(ODD)}
        return {**values, name: _changed(values[name], draw)}
    if isinstance(values, list) and values and draw.random() < 0.8:
        place = draw.randrange(len(values))
        return [*values[:place], _changed(values[place], draw), *values[place + 1 :]]
    return draw.choice(ODD)


DAMAGES = [flip_bits, flip_bits, cut, lengthen, zero_a_page, remove, pipe, link, change_values, change_values]
"""Those of a file by itself."""
