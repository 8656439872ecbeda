"""The vectors of a frozen encoder, computed once or read from embeddings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from safetensors import safe_open
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.autocast import autocast

from .cases import CaseFiles, embedding_of
from .labels import LabelledCase
from .model import SlideModel
from .results import write_tensors

_SAVE_SECONDS = 5.0
"""Between two writes of the file."""


class CaseVectors(NamedTuple):
    """What the classifier reads of each case."""

    vectors: dict[str, Tensor]
    """By case, ``[len(layers) E]`` on the CPU."""
    problems: dict[str, str]
    """By case, why its files cannot be read."""


def computed_vectors(
    model: SlideModel,
    files: CaseFiles,
    cases: Sequence[LabelledCase],
    path: Path,
    *,
    device: torch.device,
    precision: str,
    may_skip: bool,
    begin: Callable[[], None],
    report: Callable[[int], None],
) -> CaseVectors:
    """Compute the vectors of the cases; each is read once.

    A command that is stopped loses the vectors of a few seconds; another one over the same folder waits.

    Args:
        model: a model with its encoder.
        files: files of the cases.
        cases: the cases.
        path: file that keeps the vectors.
        device, precision: as for training.
        may_skip: whether to go on after a case that cannot be read; else the others are read alone.
        begin: called before the file is written.
        report: called with the number of tiles that are done.

    Raises:
        RunError: a vector is not finite.
    """
    model.eval()
    with FileLock(path.with_name(f"finetune.json.{path.name}.lock")):
        kept, problems = _KeptVectors(path, cases, begin), dict[str, str]()
        done = sum(files.num_tiles(case) for case in cases if case.name in kept.vectors)
        for case in cases:
            if case.name in kept.vectors:
                continue
            try:
                tiles = files.read(case)
            except RunError as error:
                problems[case.name] = str(error)
                continue
            if may_skip or not problems:
                with torch.no_grad(), autocast(precision, device.type):
                    vector = model.vectors(tiles.features.to(device), tiles.grid.to(device))[0].float().cpu()
                if not bool(vector.isfinite().all()):
                    raise RunError(
                        f"the vector of case {case.name} is not finite in {precision}: use --precision float32 and "
                        "another --output, or extract its features again"
                    )
                kept.add(case.name, vector)
            done += tiles.num_tiles
            report(done)
        if may_skip or not problems:
            kept.save()
    return CaseVectors(kept.vectors, problems)


class _KeptVectors:
    """The vectors of cases in a file, which is written every few seconds; see :func:`computed_vectors`."""

    def __init__(self, path: Path, cases: Sequence[LabelledCase], begin: Callable[[], None]) -> None:
        self.path, self.begin, self.last = path, begin, time.monotonic()
        self.vectors: dict[str, Tensor] = {}
        if path.is_file():
            with safe_open(path, "pt") as file:
                metadata, rows = file.metadata() or {}, file.get_tensor("vectors")
            # A file of an earlier version has no names, and the vectors of the first cases.
            names = json.loads(metadata["cases"]) if "cases" in metadata else [case.name for case in cases[: len(rows)]]
            self.vectors = dict(zip(names, rows, strict=True))
        self.num_saved = len(self.vectors)

    def add(self, name: str, vector: Tensor) -> None:
        self.vectors[name] = vector
        if time.monotonic() - self.last > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file, if there are new vectors."""
        if len(self.vectors) > self.num_saved:
            self.begin()
            names = json.dumps([*self.vectors])
            write_tensors(self.path, {"vectors": torch.stack([*self.vectors.values()])}, {"cases": names})
            self.num_saved, self.last = len(self.vectors), time.monotonic()


def stored_vectors(paths: Mapping[str, Path], cases: Sequence[LabelledCase], layers: Sequence[int]) -> CaseVectors:
    """The same from files that `embed` wrote.

    Raises:
        RunError: a file has no such layers, or the files are not of one encoder.
    """
    found, problems = dict[str, Tensor](), dict[str, str]()
    for case in cases:
        try:
            found[case.name] = embedding_of(case, paths)
        except RunError as error:
            problems[case.name] = str(error)
    for name, of_case in found.items():
        first = next(iter(found.values()))
        if of_case.shape != first.shape or len(of_case) <= max(layers):
            raise RunError(
                f"case {name} has vectors {list(of_case.shape)}, expected {list(first.shape)} with layers up to "
                f"{max(layers)} (--layers): embed all slides with one checkpoint, or pass other --layers"
            )
    return CaseVectors({name: of_case[list(layers)].flatten() for name, of_case in found.items()}, problems)
