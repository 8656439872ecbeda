"""The slides of labelled cases: found, checked and read as the encoder takes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError, first_line
from dilated_attention_pytorch.slides.contents import HDF5, num_tiles
from dilated_attention_pytorch.slides.encoder import SlideEncoderConfig
from dilated_attention_pytorch.slides.files import UnreadableFileError
from dilated_attention_pytorch.slides.reading import TileSequence, read_sequence
from dilated_attention_pytorch.slides.settings import TileSettings
from dilated_attention_pytorch.slides.store import SETTINGS_NAME

from .labels import LabelledCase, Labels


class CaseFiles:
    """Files of tile features of the slides of cases.

    Args:
        paths: files by slide.
        config: the encoder that takes them.
        settings: what the files must agree with, as for :class:`.embedding.Embedder`.
    """

    def __init__(self, paths: Mapping[str, Path], config: SlideEncoderConfig, settings: TileSettings) -> None:
        self.paths, self.config, self.settings = paths, config, settings
        self._tiles: dict[str, int] = {}

    def read(self, case: LabelledCase) -> TileSequence:
        """Read the slides of a case as one sequence, each tile at its place on its own slide.

        Raises:
            RunError: a file is damaged or does not match the encoder.
        """
        try:
            return read_sequence(case.name, [self.paths[name] for name in case.slides], self.config, self.settings)
        except UnreadableFileError as error:
            raise RunError(f"slide {error.path.stem} ({error.path}): {error}") from error

    def num_tiles(self, case: LabelledCase) -> int:
        """Tiles of a case, from the heads of its files; 0 for a file that cannot be read."""
        if case.name not in self._tiles:
            self._tiles[case.name] = sum(num_tiles(self.paths[name]) for name in case.slides)
        return self._tiles[case.name]


def embedding_of(case: LabelledCase, paths: Mapping[str, Path]) -> Tensor:
    """Vectors of all layers ``[L + 1, E]``, the mean over the slides of the case, from files that `embed` wrote.

    Raises:
        RunError: a file is not one that `embed` wrote.
    """
    return torch.stack([_layers(paths[name]) for name in case.slides]).mean(dim=0)


def are_embeddings(paths: Mapping[str, Path]) -> bool:
    """Whether the first file is one that `embed` wrote."""
    import h5py

    path = next(iter(paths.values()))
    if path.suffix.lower() not in HDF5:
        return False
    try:
        with h5py.File(path) as file:
            return "layers" in file and "features" not in file
    except OSError:
        return False  # reported where it is read


def pooling_of(paths: Mapping[str, Path]) -> str | None:
    """How the vectors of the first file were pooled, if the folder of `embed` is whole."""
    file = next(iter(paths.values())).with_name(SETTINGS_NAME)
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["pooling"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _layers(path: Path) -> Tensor:
    import h5py

    try:
        with h5py.File(path) as file:
            found = torch.from_numpy(file["layers"][()])
    except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RunError(
            f"{path} holds no embedding ({first_line(error)}); pass the folder that `dilated-attention embed` wrote"
        ) from error
    if found.dim() != 2 or not bool(found.isfinite().all()):
        raise RunError(f"{path}: layers must be finite [layers + 1, width], got {list(found.shape)}; embed it again")
    return found


def without_missing(labels: Labels, paths: Mapping[str, Path], *, may_skip: bool) -> tuple[Labels, list[str]]:
    """The labels of cases of which all slides are there, and the names of the others.

    A patient's file that `embed --patients` wrote stands for the slides of a case of this name.

    Raises:
        RunError: slides are missing, and ``may_skip`` is false; or no case is left.
    """
    cases = [
        dataclasses.replace(case, slides=(case.name,))
        if case.name in paths and not set(case.slides) <= paths.keys()
        else case
        for case in labels.cases
    ]
    labels = dataclasses.replace(labels, cases=tuple(cases))
    missing = [name for case in labels.cases for name in case.slides if name not in paths]
    if missing and not may_skip:
        number = sum(len(case.slides) for case in labels.cases)
        raise RunError(
            f"{len(missing):,} of {number:,} slides of the labels have no file among the {len(paths):,} given, the "
            f"first {missing[0]} (a slide is named as its file without the ending); add the files, or pass "
            "--skip-missing to leave those cases out"
        )
    absent = set(missing)
    left_out = [case.name for case in labels.cases if absent & set(case.slides)]
    return without(labels, left_out), left_out


def without(labels: Labels, names: Collection[str]) -> Labels:
    """The labels without the cases of these names.

    Raises:
        RunError: no case is left.
    """
    kept = [index for index, case in enumerate(labels.cases) if case.name not in names]
    if not kept:
        raise RunError(f"none of the {len(labels.cases):,} cases has readable slides; check the paths and the labels")
    cases = tuple(labels.cases[index] for index in kept)
    return dataclasses.replace(labels, cases=cases, targets=labels.targets[kept])
