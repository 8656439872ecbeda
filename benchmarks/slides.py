"""Synthetic slides embedded from HDF5 by the command: slides per minute, peak memory, a kill half-way and resumption.

    python -m benchmarks.slides [--slides 100] [--least 500] [--most 20000] [--layers 12] [--precision float32]
        [--batch-tiles N] [--threads N] [--folder FOLDER] [--output FILE]

Slides are files as TRIDENT writes them, with random features and different tiles; their sizes are log-uniform between
--least and --most. The encoder has the released sizes, random weights and ``--layers`` layers. Five broken files are
among the slides. The command is killed (SIGKILL) when half of the slides are embedded, and started again. Its output is
compared with the encoder on single slides, and a file written before the kill must not have changed.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.models import SlideEncoder, SlideEncoderConfig, load_slide_encoder
from dilated_attention_pytorch.slides import read_slide

from .options import parse, parser_of, write_results

TILE_SIZE, SIDE = 512, 1000
COMPARED = 3
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2, "float16": 0.05}
"""Absolute, for outputs of size 1 after a norm, between the command's precision and float32."""
_MEASURED = re.compile(r"a tile takes ([\d,]+) kB on this device \(measured\): ([\d,]+) tiles at once")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One process of the command."""

    seconds: float
    """Wall-clock time including imports and the measurement of memory."""
    embedded: int
    """Number of slides it embedded."""
    tiles: int
    exit_code: int
    peak_bytes: int
    """Peak resident memory, including interpreter and weights."""
    skipped: int
    """Number of files it reported as broken."""
    tile_bytes: int | None
    """Its own measurement of memory per tile."""
    batch_tiles: int | None


def make_slides(folder: Path, number: int, least: int, most: int) -> dict[str, int]:
    """Write slides and five broken files among them; returns the number of tiles by slide."""
    import h5py

    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    sizes = {
        f"slide{index:04}": round(math.exp(draw.uniform(math.log(least), math.log(most)))) for index in range(number)
    }
    folder.mkdir()
    for name, tiles in sizes.items():
        places = torch.randperm(SIDE * SIDE, generator=generator)[:tiles].sort().values
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["features"] = torch.randn(tiles, 1536, generator=generator).numpy()
            file["coords"] = (TILE_SIZE * torch.stack((places // SIDE, places % SIDE), dim=-1)).numpy()
            file["coords"].attrs["patch_size_level0"] = TILE_SIZE
    whole = (folder / f"{next(iter(sizes))}.h5").read_bytes()
    (folder / "slide0000_cut.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "slide0001_text.h5").write_text("this is no slide\n")
    features, corners = torch.randn(700, 1536, generator=generator), torch.arange(1400).view(700, 2) * TILE_SIZE
    contents = {
        "slide0002_nowhere": {"features": features},
        "slide0003_uneven": {"features": features, "coords": corners[:699]},
        "slide0004_nan": {"features": features.index_fill(0, torch.tensor([300]), math.nan), "coords": corners},
    }
    for name, content in contents.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for key, value in content.items():
                file[key] = value.numpy()
                file[key].attrs["patch_size_level0"] = TILE_SIZE
    return sizes


def run(words: list[str], out: Path, sizes: dict[str, int], kill_at: int | None) -> Part:
    """Run the command; kill it as soon as ``kill_at`` embeddings exist."""
    before = {path.stem for path in out.glob("*.h5")}
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(words, stdout=said, stderr=complained)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if kill_at is not None and len(list(out.glob("*.h5"))) >= kill_at:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        complained.seek(0)
        measured = _MEASURED.search(said.read())
        sentences = complained.read()
    new = {path.stem for path in out.glob("*.h5")} - before
    counts = None if measured is None else [int(word.replace(",", "")) for word in measured.groups()]
    return Part(
        seconds=time.perf_counter() - begun,
        embedded=len(new),
        tiles=sum(sizes[name] for name in new),
        exit_code=process.returncode,
        peak_bytes=usage.ru_maxrss * 1024,
        skipped=sentences.count("skipped "),
        tile_bytes=None if counts is None else counts[0] * 1000,
        batch_tiles=None if counts is None else counts[1],
    )


@torch.no_grad()
def largest_difference(features: Path, out: Path, checkpoint: Path, sizes: dict[str, int]) -> float:
    """Largest difference between the command's output for the smallest slides and the encoder on each alone."""
    import h5py

    encoder, found = load_slide_encoder(checkpoint), 0.0
    for name in sorted(sizes, key=sizes.__getitem__)[:COMPARED]:
        slide = read_slide(features / f"{name}.h5")
        expected = encoder(slide.features[None], slide.coordinates[None], tile_size=TILE_SIZE)
        with h5py.File(out / f"{name}.h5") as file:
            found = max(found, float((torch.from_numpy(file["layers"][()]) - expected.layers[0]).abs().max()))
    return found


def main() -> int:
    """Print and write the results, with the machine and the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--slides", type=int, default=100)
    parser.add_argument("--least", type=int, default=500, help="tiles of the smallest slide")
    parser.add_argument("--most", type=int, default=20_000, help="tiles of the largest slide")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--precision", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--batch-tiles", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="where made slides lie meanwhile (6 kB a tile)")
    arguments = parse(parser, "slides.json")
    if arguments.tiny:
        arguments.slides, arguments.least, arguments.most, arguments.layers = 12, 20, 60, 1
    torch.set_num_threads(arguments.threads)
    here = origin(module_command())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        features, out, checkpoint = Path(made) / "features", Path(made) / "out", Path(made) / "slide_encoder.pth"
        torch.manual_seed(0)
        torch.save({"model": SlideEncoder(SlideEncoderConfig(num_layers=arguments.layers)).state_dict()}, checkpoint)
        sizes = make_slides(features, arguments.slides, arguments.least, arguments.most)
        print(f"{len(sizes)} slides of {sum(sizes.values()):,} tiles, {arguments.layers} layers of 768", flush=True)
        words = [
            sys.executable,
            "-m",
            "dilated_attention_pytorch",
            "embed",
            str(features),
            "--checkpoint",
            str(checkpoint),
            "--output",
            str(out),
            "--precision",
            arguments.precision,
            "--threads",
            str(arguments.threads),
            "--batch-tiles",
            str(arguments.batch_tiles),
        ]
        parts = [run(words, out, sizes, kill_at=len(sizes) // 2)]
        times = {path: path.stat().st_mtime_ns for path in out.glob("*.h5")}
        parts.append(run(words, out, sizes, kill_at=None))
        unchanged = {path: path.stat().st_mtime_ns for path in times} == times
        difference = largest_difference(features, out, checkpoint, sizes)
        missing = sorted(sizes.keys() - {path.stem for path in out.glob("*.h5")})
    seconds = sum(part.seconds for part in parts)
    results = {
        "machine": here,
        "layers": arguments.layers,
        "precision": arguments.precision,
        "slides": len(sizes),
        "tiles": sum(sizes.values()),
        "largest_slide": max(sizes.values()),
        "killed": asdict(parts[0]),
        "resumed": asdict(parts[1]),
        "slides_a_minute": 60 * len(sizes) / seconds,
        "tiles_a_second": sum(sizes.values()) / seconds,
        "peak_bytes": max(part.peak_bytes for part in parts),
        "kept_files_unchanged": unchanged,
        "largest_difference": difference,
    }
    for name, part in zip(("killed", "resumed"), parts, strict=True):
        print(
            f"{name}: {part.embedded} slides of {part.tiles:,} tiles in {part.seconds:.1f} s, exit code "
            f"{part.exit_code}, {part.skipped} skipped, peak {part.peak_bytes / 1e6:,.0f} MB"
        )
    print(
        f"{results['slides_a_minute']:.2f} slides a minute, {results['tiles_a_second']:,.0f} tiles a second, largest "
        f"difference to a slide alone {difference:.1e}"
    )
    write_results(arguments.output, "slides", results)
    print(f"written: {arguments.output}")
    is_right = (
        not missing
        and unchanged
        and difference < TOLERANCE[arguments.precision]
        and (parts[0].exit_code, parts[1].exit_code, parts[1].skipped) == (-signal.SIGKILL, 1, 5)
    )
    if not is_right:
        print(f"not as it should be: missing {missing}, unchanged {unchanged}", file=sys.stderr)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
