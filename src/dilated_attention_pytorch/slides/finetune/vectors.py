"""The vectors of a frozen encoder, computed once or read from embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.autocast import autocast

from .cases import CaseEmbeddings, CaseFiles
from .labels import Case
from .model import SlideModel
from .results import write_tensors

_SAVE_SECONDS = 5.0
"""Between two writes of the file."""


def computed_vectors(
    model: SlideModel,
    files: CaseFiles,
    cases: Sequence[Case],
    path: Path,
    device: torch.device,
    precision: str,
    report: Callable[[int], None],
) -> Tensor:
    """What the classifier reads of every case, ``[cases, len(layers) E]`` on the CPU.

    A command that is stopped loses the vectors of a few seconds; another one over the same folder waits.

    Args:
        model: a model with its encoder.
        files: files of the cases.
        cases: the cases.
        path: file that keeps the vectors.
        device, precision: as for training.
        report: called with the number of tiles that are done.

    Raises:
        RunError: a file cannot be read, or a vector is not finite.
    """
    model.eval()
    with FileLock(f"{path}.lock"):
        vectors = [*load_file(path)["vectors"]] if path.is_file() else []
        done, last = sum(map(files.num_tiles, cases[: len(vectors)])), time.monotonic()
        for case in cases[len(vectors) :]:
            tiles = files.read(case)
            with torch.no_grad(), autocast(precision, device.type):
                vector = model.vectors(tiles.features.to(device), tiles.grid.to(device))[0].float().cpu()
            if not bool(vector.isfinite().all()):
                raise RunError(
                    f"the vector of case {case.name} is not finite in {precision}: use --precision float32 and another "
                    "--output, or extract its features again"
                )
            vectors.append(vector)
            done += tiles.num_tiles
            report(done)
            if time.monotonic() - last > _SAVE_SECONDS or len(vectors) == len(cases):
                last = time.monotonic()
                write_tensors(path, {"vectors": torch.stack(vectors)})
    return torch.stack(vectors)


def stored_vectors(embeddings: CaseEmbeddings, cases: Sequence[Case], layers: Sequence[int]) -> Tensor:
    """The same from files that `embed` wrote.

    Raises:
        RunError: a file has no such layers, or the files are not of one encoder.
    """
    vectors = [embeddings.read(case) for case in cases]
    for case, of_case in zip(cases, vectors, strict=True):
        if of_case.shape != vectors[0].shape or len(of_case) <= max(layers):
            raise RunError(
                f"case {case.name} has vectors {list(of_case.shape)}, expected {list(vectors[0].shape)} with layers "
                f"up to {max(layers)} (--layers): embed all slides with one checkpoint, or pass other --layers"
            )
    return torch.stack([of_case[list(layers)].flatten() for of_case in vectors])
