"""The command that embeds slides: what it writes is what the encoder says; broken files, stops and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models import SlideEncoder, SlideEncoderConfig, load_slide_encoder
from dilated_attention_pytorch.slides import Embedder, EmbedSettings, read_slide
from dilated_attention_pytorch.slides import embedding as module
from dilated_attention_pytorch.slides.memory import TileLimits, measure_limits
from slides.made_slides import CONFIG, SIZE, WIDTH, checkpoint, tiles_of, write_hdf5, write_slides

NUMBERS = [40, 1, 300, 17]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return checkpoint(tmp_path)


@pytest.fixture(autouse=True)
def _memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tile takes is measured by one test: beside others it is something else each time."""
    monkeypatch.setattr(
        module,
        "measure_limits",
        lambda encoder, device, precision, batch_tiles, memory: TileLimits(
            tile_bytes=10**6, of_batch=batch_tiles, of_slide=10**9 if memory is None else int(memory * 1000)
        ),
    )


def expected(path: Path, weights: Path, tile_size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Embedding and layers of one slide alone."""
    slide = read_slide(path)
    with torch.no_grad():
        found = load_slide_encoder(weights)(slide.features[None], slide.coordinates[None], tile_size=tile_size)
    return found.embedding[0], found.layers[0]


def stored(path: Path) -> tuple[Tensor, Tensor]:
    with h5py.File(path) as file:
        return torch.from_numpy(file["embedding"][()]), torch.from_numpy(file["layers"][()])


def code_of(*words: object) -> int:
    """The exit code of a command line."""
    try:
        main([str(word) for word in words])
    except SystemExit as left:
        return int(str(left.code))
    return 0


@pytest.mark.parametrize("batch_tiles", [1, 60, 10**6])
def test_what_is_written_is_what_the_encoder_says_of_each_slide(
    batch_tiles: int, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_slides(tmp_path / "features", NUMBERS)
    words = ("embed", tmp_path / "features", "--checkpoint", weights, "--batch-tiles", batch_tiles)
    assert code_of(*words, "--output", tmp_path / "h5") == 0
    assert code_of(*words, "--output", tmp_path / "table", "--format", "parquet") == 0
    assert "4 slides of 358 tiles embedded" in capsys.readouterr().out
    table = parquet.read_table(tmp_path / "table")
    rows = {row["slide"]: row for row in table.to_pylist()}
    for path, number in zip(paths, NUMBERS, strict=True):
        embedding, layers = expected(path, weights)
        # Of numbers of size 1 that two orders of summation give in float32.
        got = stored(tmp_path / "h5" / path.name)
        for one, other in zip(got, (embedding, layers), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        row = rows[path.stem]
        assert row["tiles"] == number
        assert torch.equal(torch.tensor(row["embedding"]), got[0])
        for layer in range(CONFIG.num_layers + 1):
            assert torch.equal(torch.tensor(row[f"layer_{layer}"]), got[1][layer])
        with h5py.File(tmp_path / "h5" / path.name) as file:
            assert (file.attrs["slide"], file.attrs["tiles"]) == (path.stem, number)
            assert file.attrs["source"] == str(path)


def test_options_reach_the_encoder(weights: Path, tmp_path: Path) -> None:
    (path,) = write_slides(tmp_path / "features", [50])
    whole = write_hdf5(tmp_path / "other" / "slide0.h5", *tiles_of(50, 0))
    first = expected(path, weights)[1]

    def embedded(name: str, *words: object, features: Path = path) -> Tensor:
        command = ("embed", features, "--checkpoint", weights, "--output", tmp_path / name, *words)
        assert code_of(*command) == 0
        return stored(tmp_path / name / "slide0.h5")[1]

    torch.testing.assert_close(embedded("told", "--tile-size", SIZE, features=whole), first, rtol=0, atol=2e-5)
    assert (embedded("other size", "--tile-size", 256) - first).abs().max() > 1e-3
    assert (embedded("mean", "--pooling", "mean") - first).abs().max() > 1e-3
    assert (embedded("heads", "--num-heads", "8") - first).abs().max() > 1e-5
    lower = embedded("bfloat16", "--precision", "bfloat16")
    assert 0 < (lower - first).abs().max() < 0.1
    named = tmp_path / "tuned.pth"
    content = torch.load(weights, weights_only=True)["model"]
    torch.save({f"slide_encoder.{name}": value for name, value in content.items()}, named)
    again = ("embed", path, "--checkpoint", named, "--output", tmp_path / "tuned", "--prefix", "slide_encoder.")
    assert code_of(*again) == 0
    torch.testing.assert_close(stored(tmp_path / "tuned" / "slide0.h5")[1], first, rtol=0, atol=2e-5)


def test_broken_files_are_named_and_skipped_and_the_rest_goes_on(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "features"
    paths = write_slides(folder, NUMBERS)
    features, corners = tiles_of(9, 0)
    (folder / "a_text.h5").write_text("no slide")
    (folder / "slide0_cut.h5").write_bytes(paths[0].read_bytes()[:-300])
    write_hdf5(folder / "slide0_wide.h5", torch.zeros(9, WIDTH + 1), corners, patch_size_level0=SIZE)
    write_hdf5(folder / "slide0_unsized.h5", features, corners[0] + 384 * torch.eye(2).long().repeat(5, 1)[:9])
    write_hdf5(folder / "slide9_outside.h5", features, corners + 10**6, patch_size_level0=SIZE)
    words = ("embed", folder, "--checkpoint", weights, "--output", tmp_path / "out")
    assert code_of(*words) == 1
    said = capsys.readouterr()
    skipped = said.err.splitlines()
    assert len(skipped) == 5
    for name, sentence in (
        ("a_text.h5", "cannot be read as HDF5"),
        ("slide0_cut.h5", "truncated file"),
        ("slide0_wide.h5", "its features have width 13, and this encoder takes 12: extract them with the tile encoder"),
        ("slide0_unsized.h5", "pass --tile-size (tiles are 384 apart: --tile-size 384 if they do not overlap)"),
        ("slide9_outside.h5", "the grid of 1000 x 1000 tiles of 512 pixels"),
    ):
        assert any(line.startswith(f"skipped {folder / name}: ") and sentence in line for line in skipped)
    assert "4 slides of 358 tiles embedded" in said.out
    assert "0 were there, 5 skipped" in said.out
    assert sorted(path.name for path in (tmp_path / "out").glob("*.h5")) == [path.name for path in paths]
    # Mended, they alone are embedded.
    (folder / "a_text.h5").unlink()
    for name in ("slide0_cut", "slide0_wide", "slide0_unsized", "slide9_outside"):
        write_hdf5(folder / f"{name}.h5", features, corners, patch_size_level0=SIZE)
    assert code_of(*words) == 0
    assert "4 slides of 36 tiles embedded" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["h5", "parquet"])
def test_the_same_command_keeps_what_is_there_and_embeds_what_changed_or_was_damaged(
    kind: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "features", tmp_path / "out"
    write_slides(folder, NUMBERS)
    words = ("embed", folder, "--checkpoint", weights, "--output", out, "--format", kind)
    assert code_of(*words) == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    moved = folder.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert code_of("embed", moved, *words[2:]) == 0
    assert "4 of 4 slides were embedded before" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    write_hdf5(moved / "slide1.h5", *tiles_of(2, 9), patch_size_level0=SIZE)
    damaged = out / f"slide3.{kind}"
    damaged.write_bytes(damaged.read_bytes()[:100])
    (out / f"slide2.{kind}").unlink()
    (out / f"slide2.{kind}.part").write_text("what a killed command left")
    assert code_of("embed", moved, *words[2:]) == 0
    assert "3 slides of 319 tiles embedded" in capsys.readouterr().out
    changed = {path.stem for path in out.iterdir() if before.get(path) != path.stat().st_mtime_ns}
    assert changed == {"slide1", "slide2", "slide3"}
    assert not list(out.glob("*.part"))


# The command, stopped by a signal when the fourth file is written and has not its name yet.
# A shell that starts the tests in the background has them ignore SIGINT: the command must not inherit that.
STOPPED = """
import os, signal, sys
from dilated_attention_pytorch.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
replace, left = os.replace, 3
def replace_some(staged, path):
    global left
    if str(path).endswith(".h5"):
        if not left:
            os.kill(os.getpid(), int(sys.argv[1]))
        left -= 1
    replace(staged, path)
os.replace = replace_some
main(sys.argv[2:])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_killed_leaves_whole_files_and_goes_on_with_the_rest(
    number: signal.Signals, weights: Path, tmp_path: Path
) -> None:
    paths = write_slides(tmp_path / "features", NUMBERS * 2)
    out = tmp_path / "out"
    words = [
        "embed",
        str(tmp_path / "features"),
        "--checkpoint",
        str(weights),
        "--output",
        str(out),
        "--batch-tiles",
        "1",
        "--threads",
        "1",
    ]
    stopped = [sys.executable, "-c", STOPPED, str(int(number)), *words]
    process = subprocess.run(stopped, capture_output=True, text=True, timeout=600, check=False)
    said, whole = process.stderr, sorted(out.glob("*.h5"))
    assert [path.name for path in whole] == [path.name for path in paths[:3]]
    assert [path.name for path in out.glob("*.part")] == [f"{paths[3].name}.part"]
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    if number == signal.SIGINT:
        assert f"what is embedded is kept in {out}, and the same command goes on" in said
        assert "Traceback" not in said
    times = {path: path.stat().st_mtime_ns for path in whole}
    assert code_of(*words) == 0
    assert {path: path.stat().st_mtime_ns for path in whole} == times
    assert not list(out.glob("*.part"))
    for path in paths:
        for got, alone in zip(stored(out / path.name), expected(path, weights), strict=True):
            torch.testing.assert_close(got, alone, rtol=0, atol=2e-5)


def embedder(tmp_path: Path, weights: Path, **options: Any) -> Embedder:
    return Embedder([tmp_path / "features"], weights, tmp_path / "out", EmbedSettings(**options))


def test_slides_lie_together_up_to_the_budget_and_never_beyond(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slides(tmp_path / "features", [40, 1, 300, 17, 43])
    batches = []
    compute = Embedder._compute

    def noted(self: Embedder, batch: list[module.Tiles]) -> Any:
        batches.append([len(slide.features) for slide in batch])
        return compute(self, batch)

    monkeypatch.setattr(Embedder, "_compute", noted)
    embedder(tmp_path, weights, batch_tiles=60).run()
    assert batches == [[40, 1], [300], [17, 43]]


def test_a_slide_that_does_not_fit_is_named_with_what_it_takes(weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [40, 300])
    outcome = embedder(tmp_path, weights, memory=0.2).run()
    assert outcome.embedded == 1
    ((path, reason),) = outcome.failed.items()
    assert path.stem == "slide1"
    assert reason == "its 300 tiles take about 300.0 MB, and 200.0 MB are available; pass a larger --memory"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("can't allocate memory: 9 bytes")]
)
def test_where_memory_runs_out_slides_are_computed_one_by_one(
    error: Exception, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slides(tmp_path / "features", [40, 300, 17])
    forward = SlideEncoder.forward

    def bounded(self: SlideEncoder, features: Tensor, *words: Any, **options: Any) -> Any:
        if features.shape[1] > 200:
            raise error
        return forward(self, features, *words, **options)

    monkeypatch.setattr(SlideEncoder, "forward", bounded)
    outcome = embedder(tmp_path, weights).run()
    assert outcome.embedded == 2
    assert {path.stem: reason.partition(";")[0] for path, reason in outcome.failed.items()} == {
        "slide1": "memory ran out"
    }


def test_another_error_is_not_taken_for_memory(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_slides(tmp_path / "features", [4])

    def broken(self: SlideEncoder, *words: Any, **options: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(SlideEncoder, "forward", broken)
    with pytest.raises(RuntimeError, match="something else"):
        embedder(tmp_path, weights).run()


def test_an_embedding_that_overflows_is_not_written(weights: Path, tmp_path: Path) -> None:
    features, corners = tiles_of(9, 0)
    write_hdf5(tmp_path / "features" / "large.h5", 1e38 * features, corners, patch_size_level0=SIZE)
    write_slides(tmp_path / "features", [4])
    outcome = embedder(tmp_path, weights, precision="bfloat16").run()
    assert outcome.embedded == 1
    (reason,) = outcome.failed.values()
    assert reason.startswith("its embedding is not finite in bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "mean"},
        {"precision": "bfloat16"},
        {"tile_size": 256},
        {"num_heads": 8},
        {"format": "parquet"},
        {"weights": True},
    ],
)
def test_a_folder_holds_embeddings_of_one_kind(change: dict[str, Any], weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [4])
    embedder(tmp_path, weights).run()
    if change.pop("weights", False):
        torch.save({"model": SlideEncoder(CONFIG).state_dict()}, weights)
    with pytest.raises(RunError, match="holds embeddings that were made with other settings"):
        embedder(tmp_path, weights, **change)
    # How they were computed does not matter for what they are.
    if not change:
        return
    renamed = weights.rename(weights.with_name("copied.pth"))
    assert embedder(tmp_path, renamed, batch_tiles=2, memory=9.0, threads=1, device="cpu").run().kept == 1


def test_what_cannot_begin_says_why_and_writes_nothing(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_slides(tmp_path / "features", [4])
    full, broken = tmp_path / "full", tmp_path / "broken"
    for folder in (full, broken):
        folder.mkdir()
    (full / "something").touch()
    (broken / "_embed.json").write_text("{")
    (tmp_path / "text.pth").write_text("no weights")

    def refusal(*words: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert code_of("embed", *words) == 2
        assert sorted(tmp_path.rglob("*")) == before
        return " ".join(capsys.readouterr().err.split())

    base = ("--checkpoint", weights, "--output", tmp_path / "out")
    features = tmp_path / "features"
    assert "nothing does not exist; pass files" in refusal(tmp_path / "nothing", *base)
    assert "at least one file or folder, got none" in refusal(*base)
    assert "full exists and is not empty" in refusal(features, "--checkpoint", weights, "--output", full)
    assert "is not empty" in refusal(features, "--checkpoint", weights, "--output", features)
    assert "_embed.json is damaged" in refusal(features, "--checkpoint", weights, "--output", broken)
    assert "there is no such file; pass the file of a slide" in refusal(features, *base[2:], "--checkpoint", full / "x")
    wrong = tmp_path / "text.pth"
    assert f"--checkpoint {wrong} cannot be read as weights" in refusal(features, *base[2:], "--checkpoint", wrong)
    assert "num_heads must divide embed_dim, got 7" in refusal(features, *base, "--num-heads", 7)
    assert "begins with 'x.'" in refusal(features, *base, "--prefix", "x.")
    assert "memory must be above 0, got 0.0" in refusal(features, *base, "--memory", 0)
    assert "tile_size must be at least 1, got 0" in refusal(features, *base, "--tile-size", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch finds no CUDA device here" in refusal(features, *base, "--device", "cuda")
    find = module.require.__globals__["importlib"].util.find_spec
    monkeypatch.setattr(
        module.require.__globals__["importlib"].util, "find_spec", lambda name: None if name == "h5py" else find(name)
    )
    assert "embedding slides needs h5py, not installed here: pip install" in refusal(features, *base)


def test_what_a_tile_takes_is_measured_and_bounds_a_batch(
    monkeypatch: pytest.MonkeyPatch, figure: Callable[[str, object], None]
) -> None:
    from dilated_attention_pytorch.slides import memory

    encoder = SlideEncoder(SlideEncoderConfig(feature_dim=96, embed_dim=64, num_layers=3, ffn_dim=256)).eval()
    cpu = torch.device("cpu")
    limits = measure_limits(encoder, cpu, "float32", 10**9, 1.0)
    if limits is None:
        pytest.skip("this system does not tell the peak of a call")
    # At the least the features and the tiles themselves, at the most all that a layer makes with nothing given back.
    least, most = 4 * (96 + 64), 4 * (96 + 20 * 64 + 3 * 256) * 3
    figure("slides: measured bytes of a tile, features 96, width 64", limits.tile_bytes)
    assert least <= limits.tile_bytes <= most
    assert limits.of_batch == limits.of_slide == 10**9 // limits.tile_bytes
    assert measure_limits(encoder, cpu, "float32", 100, 1.0).of_batch == 100  # type: ignore[union-attr]
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    monkeypatch.setattr(memory, "peak_memory", lambda call, device: (call() or 1) and (10**6, None))
    free = measure_limits(encoder, cpu, "float32", 10**9, None)
    assert free is not None
    assert (free.of_slide, free.of_batch) == (10**9 // free.tile_bytes, 10**9 // 2 // free.tile_bytes)
    monkeypatch.setattr(memory, "peak_memory", lambda call, device: None)
    assert measure_limits(encoder, cpu, "float32", 100, None) is None


def test_the_settings_file_says_how_the_folder_was_made(weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [4])
    embedder(tmp_path, weights).run()
    made_with = json.loads((tmp_path / "out" / "_embed.json").read_text())
    assert made_with["checkpoint"] == "slide_encoder.pth"
    assert len(made_with["sha256"]) == 64
    assert os.listdir(tmp_path / "out").count("_embed.json") == 1
