"""Embedding of sequences that no other process embeds: claim, read, batch, compute, write."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import choose_device, require, set_threads
from dilated_attention_pytorch.memory import in_bytes, is_out_of_memory
from dilated_attention_pytorch.ops import attention_calls, attention_maps, attention_rollout
from dilated_attention_pytorch.training.autocast import autocast

from .checkpoint import load_slide_encoder
from .claims import Claims, local_process
from .encoder import Pooling, SlideEmbeddings, SlideEncoder, SlideEncoderConfig, pack_slides, states_after
from .files import Source, UnreadableFileError
from .memory import TileLimits, measure_limits
from .reading import TileSequence, read_sequence
from .settings import EmbedSettings, TileSettings
from .store import SequenceResult, Store
from .titan import WEIGHTS_NAME, TitanEncoder, load_titan_encoder

BATCH_TILES = 16384
"""Of a batch on a GPU, unless the settings say otherwise."""
Inputs = Sequence[tuple[str, Sequence[Path]]]
"""Names of slides or patients, and their files in order."""


class Done(NamedTuple):
    """What became of a slide or a patient."""

    name: str
    tiles: int = 0
    """Of the embedding that was computed; 0 if there is none."""
    failed: str = ""
    """The file that could not be used."""
    reason: str = ""


class Worker:
    """An encoder on a device, and the output folder of its embeddings.

    Args:
        checkpoint, output, settings: as for :class:`.embedding.Embedder`.

    Raises:
        RunError: an input is missing or invalid, or the output cannot be written. The message says what to do.
    """

    def __init__(self, checkpoint: Path, output: Path, settings: EmbedSettings) -> None:
        self.settings = settings
        self.device = torch.device(choose_device(settings.device))
        if self.device.type == "cuda":  # a GPU for each process of a launcher
            torch.cuda.set_device(local_process(os.environ) % torch.cuda.device_count())
        set_threads(settings.threads)
        self.limits: TileLimits | None = None
        self._is_measured = False
        self.store = Store(output, settings.format, settings.vector.layout, by_patient=settings.patients is not None)
        self.claims = Claims(output)
        self.encoder = _load(checkpoint, settings).to(self.device)
        self.made_with = settings.of_result(checkpoint, _digest(checkpoint))
        self.store.check(self.made_with)

    def read(self, name: str, paths: Sequence[Path]) -> TileSequence:
        """The tiles of an input; see :func:`read_sequence`."""
        return read_sequence(name, paths, self.encoder.config, self.settings)

    def work(
        self,
        inputs: Inputs,
        done: Callable[[Done], None],
        *,
        say: Callable[[str], None] = lambda sentence: None,
        computing: Callable[[float], None] = lambda tiles: None,
        read: Callable[[str, Sequence[Path]], TileSequence] | None = None,
    ) -> None:
        """Embed what has no embedding yet, and what no other process is embedding.

        Args:
            inputs: names and files.
            done: called for every input that has an embedding now, or cannot have one; not for those that another
                process is embedding.
            say: called with a message on memory.
            computing: called with the tiles of the current batch that are computed.
            read: called for the tiles of an input; None = :meth:`read`.
        """

        def finish(result: Done) -> None:
            self.claims.release(result.name)
            done(result)

        def fail(name: str, path: Path, reason: str) -> None:
            of_patient = f" (patient {name} is left out)" if self.settings.patients is not None else ""
            finish(Done(name, failed=str(path), reason=f"{reason}{of_patient}"))

        def claimed() -> Iterator[TileSequence]:
            for name, paths in inputs:
                if not self.claims.take(name):
                    continue
                try:
                    source = Source.of(name, paths)
                    if self.store.is_of(self.store.before(source), source):
                        finish(Done(name))
                        continue
                    sequence = (read or self.read)(name, paths)
                    self._check_size(sequence.num_tiles, self._limits(say))
                except UnreadableFileError as error:
                    fail(name, error.path, str(error))
                except RunError as error:
                    fail(name, paths[0], str(error))
                else:
                    yield sequence

        for batch in self._batches(claimed()):
            tiles = sum(sequence.num_tiles for sequence in batch)
            with _counting_layers(self.encoder, self._num_layers, computing, tiles):
                for sequence, outcome in self._embed(batch):
                    name, path = sequence.source.name, sequence.slides[0].path
                    if isinstance(outcome, str):
                        fail(name, path, outcome)
                        continue
                    self.store.begin(self.made_with)  # the first result binds the folder to its settings
                    try:
                        if self.settings.maps:
                            self.store.write_geojson(sequence, outcome)
                        self.store.write(sequence, outcome)  # last: what has an embedding is finished
                    except RunError as error:
                        fail(name, path, str(error))
                        continue
                    finish(Done(name, sequence.num_tiles))

    def _limits(self, say: Callable[[str], None]) -> TileLimits | None:
        """The tiles that fit into memory, measured once."""
        if self._is_measured:
            return self.limits
        settings = self.settings
        self._is_measured = True
        self.limits = measure_limits(
            self.encoder,
            self.device,
            settings.precision,
            settings.batch_tiles or (BATCH_TILES if self.device.type == "cuda" else 1),
            settings.memory,
            keeps_calls=settings.rollout,
        )
        if self.limits is None:
            say("memory cannot be measured on this system: slides are embedded one by one")
        else:
            limits = self.limits
            fits = f"slides of up to {limits.of_slide:,} tiles fit"
            if limits.of_batch > 1:
                fits = f"{limits.of_batch:,} tiles at once"
            say(f"a tile takes {limits.tile_bytes / 1e3:,.0f} kB on this device (measured): {fits}")
        return self.limits

    def _batches(self, sequences: Iterable[TileSequence]) -> Iterator[list[TileSequence]]:
        """Sequences in order, batched up to the tile limit; one larger than a batch comes alone."""
        batch: list[TileSequence] = []
        for sequence in sequences:
            together = sum(other.num_tiles for other in batch) + sequence.num_tiles
            if batch and (self.limits is None or together > self.limits.of_batch):
                yield batch
                batch = []
            batch.append(sequence)
        if batch:
            yield batch

    def _check_size(self, tiles: int, limits: TileLimits | None) -> None:
        """Raise :class:`RunError` if a slide does not fit into memory alone."""
        if limits is not None and tiles > limits.of_slide:
            needed, given = tiles * limits.tile_bytes, limits.of_slide * limits.tile_bytes
            from_where = "pass a larger --memory" if self.settings.memory is not None else "use a device with more"
            raise RunError(
                f"its {tiles:,} tiles take about {in_bytes(needed)}, and {in_bytes(given)} are available; {from_where}"
            )

    def _embed(self, batch: list[TileSequence]) -> Iterator[tuple[TileSequence, SequenceResult | str]]:
        """The result of each sequence, or why it has none."""
        try:
            computed = self._compute(batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) > 1:
                for sequence in batch:
                    yield from self._embed([sequence])
            else:
                yield batch[0], "memory ran out; use a device with more, or close other programs on this one"
            return
        for sequence, result in zip(batch, computed, strict=True):
            if all(bool(values.isfinite().all()) for values in (*result.embeddings, *result.of_tiles.values())):
                yield sequence, result
            else:
                reason = f"its embedding is not finite in {self.settings.precision}; {self._remedy(sequence)}"
                yield sequence, reason

    def _remedy(self, sequence: TileSequence) -> str:
        """What to do about an embedding that is not finite."""
        if self.settings.precision != "float32":
            return "use --precision float32"
        largest = max(float(slide.features.abs().max()) for slide in sequence.slides)
        return f"its features are too large (up to {largest:.3g}), extract them again"

    @property
    def _num_layers(self) -> int | None:
        """The first layers, of which all that is written is computed; None = all layers."""
        settings = self.settings
        if settings.vector.layout == "own" or settings.maps or settings.rollout:
            return None
        assert settings.vector.layer is not None
        return max(settings.vector.layer, settings.tiles or 1)

    def _compute(self, batch: list[TileSequence]) -> list[SequenceResult]:
        """Results of the sequences of a batch, in float32 on the CPU."""
        settings, encoder = self.settings, self.encoder
        # The dtype can differ from file to file.
        slides = [(slide.features.float(), slide.grid) for sequence in batch for slide in sequence.slides]
        features, grid, _ = pack_slides(slides)
        ends = [0, *accumulate(sequence.num_tiles for sequence in batch)]
        # Row 0 of every sequence is its class token.
        rows = [(start + index, stop + index + 1) for index, (start, stop) in enumerate(pairwise(ends))]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(autocast(settings.precision, self.device.type))
            pooled = pooled_rows(rows, settings.vector.pooling)
            maps = stack.enter_context(attention_maps(pooled)) if settings.maps else []
            calls = stack.enter_context(attention_calls()) if settings.rollout else []
            states: list[Tensor] = []
            if settings.tiles is not None and isinstance(encoder, SlideEncoder):
                states = stack.enter_context(states_after(encoder, settings.tiles))
            stop_early = {} if self._num_layers is None else {"num_layers": self._num_layers}
            embeddings, layers = encoder(
                features.to(self.device),
                grid.to(self.device),
                tile_size=1,
                cu_seqlens=torch.tensor(ends, dtype=torch.int32),
                **stop_early,
            )
            rollout = attention_rollout(calls, pooled) if calls else None
        if settings.vector.layer is not None:
            embeddings = layers[:, settings.vector.layer]
        results = []
        for index, (first, stop) in enumerate(rows):
            of_tiles = {} if rollout is None else {"rollout": rollout[0, index, first + 1 : stop]}
            if maps:
                attention = torch.stack([one[0, index, :, first:stop] for one in maps])
                of_tiles |= {"attention": attention[..., 1:], "attention_to_class": attention[..., 0]}
            if states:
                of_tiles["states"] = states[0][0, first + 1 : stop]
            of_tiles = {name: values.float().cpu().contiguous() for name, values in of_tiles.items()}
            vectors = SlideEmbeddings(embeddings[index].float().cpu(), layers[index].float().cpu())
            results.append(SequenceResult(vectors, of_tiles))
        return results


def pooled_rows(rows: Sequence[tuple[int, int]], pooling: Pooling) -> Tensor:
    """What embeddings are pooled from, as queries of an attention map: class tokens, or the mean of the tiles.

    Args:
        rows: first row, the class token, and end of each sequence.
        pooling: of the encoder.
    """
    if pooling == "class":
        return torch.tensor([first for first, _ in rows])
    weights = torch.zeros(len(rows), rows[-1][1])
    for sequence, (first, stop) in enumerate(rows):
        weights[sequence, first + 1 : stop] = 1 / (stop - first - 1)
    return weights


@contextmanager
def _counting_layers(
    encoder: SlideEncoder | TitanEncoder, num_layers: int | None, computing: Callable[[float], None], tiles: int
) -> Iterator[None]:
    """Count the tiles of a batch by the layers that are computed, the first ``num_layers``."""
    layers = encoder.encoder.layers if isinstance(encoder, SlideEncoder) else encoder.blocks["modules_list"]
    computed = list(layers.children())[:num_layers]

    def count(index: int) -> Callable[..., None]:
        return lambda *_: computing(tiles * (index + 1) / len(computed))

    hooks = [layer.register_forward_hook(count(index)) for index, layer in enumerate(computed)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def load_encoder(checkpoint: Path, settings: TileSettings, **options: Any) -> SlideEncoder:
    """GigaPath's encoder from a file.

    Args:
        checkpoint: the file.
        settings: its heads and the prefix of its weights.
        options: of :class:`SlideEncoderConfig`, which the weights do not determine.

    Raises:
        RunError: see :func:`load_slide_encoder`.
    """
    try:
        config = SlideEncoderConfig(num_heads=settings.num_heads, embed_dim=4 * settings.num_heads, **options)
        return load_slide_encoder(checkpoint, config=config, prefix=settings.prefix)
    except (ValueError, FileNotFoundError) as error:
        raise RunError(f"--checkpoint {error}") from error


def _load(checkpoint: Path, settings: EmbedSettings) -> SlideEncoder | TitanEncoder:
    if checkpoint.is_dir():
        return _load_titan(checkpoint, settings)
    if checkpoint.suffix == ".safetensors":
        require("a .safetensors file", ("safetensors",), "slides")
    encoder = load_encoder(checkpoint, settings, pooling=settings.vector.pooling)
    layers = encoder.config.num_layers
    for flag, layer in (("--layer", settings.vector.layer), ("--tiles", settings.tiles)):
        if layer is not None and layer > layers:
            of_tool = f", which --like {settings.like} takes" if flag == "--layer" and settings.like else ""
            raise RunError(f"{flag} must be 0 to {layers}, the layers of {checkpoint}, got {layer}{of_tool}")
    return encoder


def _load_titan(folder: Path, settings: EmbedSettings) -> TitanEncoder:
    require("a .safetensors file", ("safetensors",), "slides")
    of_gigapath = {
        "--like": settings.like,
        "--pooling": settings.pooling,
        "--layer": settings.layer,
        "--maps": settings.maps,
        "--rollout": settings.rollout,
        "--tiles": settings.tiles,
        "--prefix": settings.prefix,
        "--patients": settings.patients,
    }
    given = [flag for flag, value in of_gigapath.items() if value not in (None, False, "")]
    if given:
        raise RunError(
            f"{given[0]} is for GigaPath's encoder, and --checkpoint {folder} is a folder, TITAN's: leave it out"
        )
    try:
        return load_titan_encoder(folder)
    except (ValueError, FileNotFoundError) as error:
        raise RunError(f"--checkpoint {error}") from error


def _digest(checkpoint: Path) -> str:
    file = checkpoint / WEIGHTS_NAME if checkpoint.is_dir() else checkpoint
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
