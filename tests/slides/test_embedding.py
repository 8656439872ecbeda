"""The command that embeds slides: what it writes is what the encoder says; broken files, stops and memory."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.slides import (
    Embedder,
    EmbedOutcome,
    EmbedSettings,
    SlideEncoder,
    SlideEncoderConfig,
    load_slide_encoder,
    read_slide,
    reading,
    worker,
)
from dilated_attention_pytorch.slides import folder as output_folder
from dilated_attention_pytorch.slides.memory import TileLimits, measure_limits
from dilated_attention_pytorch.slides.store import Store
from slides.made_slides import CONFIG, SIZE, WIDTH, checkpoint, tiles_of, write_hdf5, write_slides
from support.processes import fork

NUMBERS = [40, 1, 300, 17]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return checkpoint(tmp_path)


@pytest.fixture(autouse=True)
def _memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tile takes is measured by one test: beside others it is something else each time."""
    monkeypatch.setattr(
        worker,
        "measure_limits",
        lambda encoder, device, precision, batch_tiles, memory, **_: TileLimits(
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
    assert (
        embedded("other size", "--tile-size", 1024, "--tile-spacing", SIZE, features=whole) - first
    ).abs().max() > 1e-3
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
    write_hdf5(
        folder / "slide0_unsized.h5", features, corners[0] + 384 * torch.tensor([[n // 3, n % 3] for n in range(9)])
    )
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
        (
            "slide0_unsized.h5",
            "pass --tile-size (tiles are 384 apart: --tile-size 384 if they do not overlap), with another --output if",
        ),
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
def test_the_same_command_keeps_what_is_there_and_embeds_what_changed_or_was_removed(
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
    (out / f".slide2.{kind}.part").write_text("what a killed command left")
    assert code_of("embed", moved, *words[2:]) == 1
    said = capsys.readouterr()
    assert "2 slides of 302 tiles embedded" in said.out
    assert f"{damaged} is not an embedding that `embed` wrote, or it is damaged; it is not replaced" in said.err
    damaged.unlink()
    assert code_of("embed", moved, *words[2:]) == 0
    assert "1 slides of 17 tiles embedded" in capsys.readouterr().out
    changed = {path.stem for path in out.iterdir() if before.get(path) != path.stat().st_mtime_ns}
    assert changed == {"slide1", "slide2", "slide3"}
    assert not list(out.glob("*.part"))


@pytest.mark.parametrize("changed", ["tiles/a.coordinates.npz", "tile_embeddings/a.meta.json"])
def test_a_file_of_slide2vec_is_embedded_again_where_a_file_beside_it_changed(
    changed: str, weights: Path, tmp_path: Path
) -> None:
    features, corners = tiles_of(4, 0)
    for name in ("tiles", "tile_embeddings"):
        (tmp_path / name).mkdir()
    torch.save(features, tmp_path / "tile_embeddings" / "a.pt")
    x, y = corners.numpy().T
    np.savez(tmp_path / "tiles" / "a.coordinates.npz", x=x, y=y)
    (tmp_path / "tile_embeddings" / "a.meta.json").write_text(json.dumps({"tile_size_lv0": SIZE}))

    def run() -> EmbedOutcome:
        return Embedder([tmp_path / "tile_embeddings"], weights, tmp_path / "out", EmbedSettings()).run()

    assert (run().embedded, run().kept) == (1, 1)
    os.utime(tmp_path / changed, ns=(2**61, 2**61))
    assert (run().embedded, run().kept) == (1, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_killed_leaves_whole_files_and_goes_on_with_the_rest(
    number: signal.Signals, weights: Path, tmp_path: Path
) -> None:
    paths = write_slides(tmp_path / "features", NUMBERS * 2)
    out = tmp_path / "out"
    words = ["embed", tmp_path / "features", "--checkpoint", weights, "--output", out, "--batch-tiles", 1]
    replace, files = os.replace, iter(range(4))

    def replace_some(staged: Path, path: Path) -> None:
        """Stop the command when the fourth file is written and has not its name yet."""
        if path.suffix == ".h5" and next(files) == 3:
            os.kill(os.getpid(), number)
        replace(staged, path)

    def stopped() -> None:
        os.replace = replace_some
        main([str(word) for word in words])

    process = fork(stopped).ended()
    said, whole = process.stderr, sorted(out.glob("*.h5"))
    assert [path.name for path in whole] == [path.name for path in paths[:3]]
    left = [f".{paths[3].name}.part"] if number == signal.SIGKILL else []
    assert [path.name for path in out.glob("*.part")] == left
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


@pytest.mark.parametrize("kind", ["h5", "parquet"])
@pytest.mark.parametrize("is_of_one_version", [False, True])
def test_another_slide_of_the_same_name_is_refused_before_anything_is_computed(
    is_of_one_version: bool, kind: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    first = write_hdf5(tmp_path / "a" / "slide1.h5", *tiles_of(40, 1), patch_size_level0=SIZE)
    write_hdf5(tmp_path / "b" / "slide0.h5", *tiles_of(40, 0), patch_size_level0=SIZE)
    second = write_hdf5(tmp_path / "b" / "slide1.h5", *tiles_of(40, 2), patch_size_level0=SIZE)
    if is_of_one_version:
        os.utime(second, ns=(first.stat().st_atime_ns, first.stat().st_mtime_ns))
        assert second.stat().st_size == first.stat().st_size
    out = tmp_path / "out"
    words = ("--checkpoint", weights, "--output", out, "--format", kind)
    assert code_of("embed", tmp_path / "a", *words) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    assert code_of("embed", tmp_path / "b", *words) == 2
    assert (
        f"holds the embedding of another slide slide1: expected that of {second}, got that of {first}; pass another "
        f"--output, or rename {second}"
    ) in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    # By another path the same file is the same slide.
    assert code_of("embed", tmp_path / "linked", *words) == 0
    assert "1 of 1 slides were embedded before" in capsys.readouterr().out


def test_relative_paths_in_two_folders_are_two_slides(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, name in enumerate(("a", "b")):
        write_hdf5(tmp_path / name / "features" / "slide1.h5", *tiles_of(4, index), patch_size_level0=SIZE)
    monkeypatch.chdir(tmp_path / "a")
    Embedder([Path("features")], weights, tmp_path / "out", EmbedSettings()).run()
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(RunError, match="holds the embedding of another slide slide1"):
        Embedder([Path("features")], weights, tmp_path / "out", EmbedSettings()).run()


def test_a_folder_of_parquet_files_reads_as_a_table_of_whole_rows_after_a_stop(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slides(tmp_path / "features", NUMBERS)
    replace, left = os.replace, [True]

    def stop_at_the_second(staged: Path, path: Path) -> None:
        if path.suffix == ".parquet" and not left:
            # What a killed command leaves; a stopped one takes its own away.
            staged.with_name(".killed.parquet.part").write_bytes(staged.read_bytes()[:100])
            raise KeyboardInterrupt
        if path.suffix == ".parquet":
            left.pop()
        replace(staged, path)

    monkeypatch.setattr(os, "replace", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        embedder(tmp_path, weights, format="parquet").run()
    assert len(list((tmp_path / "out").glob("*.part"))) == 1
    assert parquet.read_table(tmp_path / "out").column("slide").to_pylist() == ["slide0"]


@pytest.mark.parametrize("name", ["_slide1", ".slide1"])
def test_a_name_that_readers_of_parquet_folders_skip_is_skipped(name: str, weights: Path, tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / f"{name}.h5", *tiles_of(4, 0), patch_size_level0=SIZE)
    outcome = Embedder([path], weights, tmp_path / "table", EmbedSettings(format="parquet")).run()
    assert "skip names that begin with _ or a dot; rename it, or pass --format h5" in outcome.failed[path]
    assert Embedder([path], weights, tmp_path / "out", EmbedSettings()).run().embedded == 1


@pytest.mark.parametrize(
    ("recorded", "options", "reason"),
    [
        ({"encoder": "uni_v2"}, {}, "are of the tile encoder uni_v2, as it records, expected gigapath: extract"),
        ({"encoder": "hoptimus1"}, {"encoder": "uni_v2"}, "tile encoder hoptimus1, as it records, expected uni_v2"),
        ({"encoder": "gigapath"}, {"encoder": "uni_v2"}, "tile encoder gigapath, as it records, expected uni_v2"),
        ({"encoder": "uni_v2"}, {"encoder": "UNI-v2"}, None),
        ({"encoder": "prov-gigapath"}, {}, None),
        ({"extractor": "hf_hub:prov-gigapath/prov-gigapath"}, {}, None),
        ({"extractor": "gigapath-1a2b3c4d"}, {}, None),
        ({"extractor": "uni2-1a2b3c4d"}, {"encoder": "uni2"}, None),
        ({"encoder": "gigapath-slide"}, {}, None),
        (
            {"target_magnification": 10},
            {},
            "its tiles are magnified 10 times, as it records, expected 20: extract them",
        ),
        ({"target_magnification": 10}, {"magnification": 10.0}, None),
        (
            {"tile_size_um": 256.0, "tile_size_px": 224},
            {},
            "its tiles are magnified 8.75 times, as it records, expected",
        ),
        ({"target_magnification": 19.8}, {}, None),
    ],
)
def test_another_tile_encoder_or_magnification_than_is_meant_is_skipped(
    recorded: dict[str, Any], options: dict[str, Any], reason: str | None, weights: Path, tmp_path: Path
) -> None:
    check_refusal(tmp_path, weights, {"patch_size_level0": SIZE, **recorded}, options, reason)


@pytest.mark.parametrize(
    ("recorded", "options", "reason"),
    [
        (
            {},
            {"tile_size": 256},
            "its tiles stand 512 pixels apart, and a tile is 256 pixels (--tile-size): pass --tile-",
        ),
        (
            {},
            {"tile_size": 1024},
            "stand 512 pixels apart, and a tile is 1024 pixels (--tile-size): pass --tile-size 512",
        ),
        ({"patch_size_level0": 256}, {}, "a tile is 256 pixels (as the file records): extract its features again if"),
        ({"patch_size_level0": 1024}, {}, "or pass --tile-spacing 512 if the tiles overlap or have gaps"),
        ({}, {"tile_size": 256, "tile_spacing": 512}, None),
        (
            {},
            {"tile_size": 256, "tile_spacing": 500},
            "expected tiles 500 pixels apart (--tile-spacing), got tiles 512",
        ),
        ({"patch_size_level0": 683, "patch_size": 256, "overlap": 64}, {}, None),
        ({}, {"tile_size": 512}, None),
        ({"patch_size_level0": 510}, {}, None),
    ],
)
def test_a_tile_size_that_the_places_contradict_is_refused_with_both_numbers(
    recorded: dict[str, Any], options: dict[str, Any], reason: str | None, weights: Path, tmp_path: Path
) -> None:
    check_refusal(tmp_path, weights, recorded, options, reason)


def check_refusal(
    folder: Path, weights: Path, recorded: dict[str, Any], options: dict[str, Any], reason: str | None
) -> None:
    """A slide of 5 x 5 tiles side by side is refused for this reason, or embedded if there is none."""
    corners = SIZE * torch.tensor([[n // 5, n % 5] for n in range(25)])
    write_hdf5(folder / "features" / "a.h5", tiles_of(25, 0)[0], corners, **recorded)
    outcome = embedder(folder, weights, **options).run()
    assert outcome.embedded == (reason is None)
    assert all(reason is not None and reason in said for said in outcome.failed.values())


@pytest.mark.parametrize(
    ("recorded", "remedy"),
    [
        ({"patch_size_level0": 1024}, "--tile-spacing 512"),
        ({"patch_size_level0": 512, "encoder": "uni_v2"}, "--encoder uni_v2"),
        ({"patch_size_level0": 512, "target_magnification": 10}, "--magnification 10"),
    ],
)
def test_what_a_refusal_advises_is_taken_in_the_same_folder(
    recorded: dict[str, Any], remedy: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corners = SIZE * torch.tensor([[n // 5, n % 5] for n in range(25)])
    write_hdf5(tmp_path / "features" / "a.h5", tiles_of(25, 0)[0], corners, **recorded)
    words = ("embed", tmp_path / "features", "--checkpoint", weights, "--output", tmp_path / "out")
    assert code_of(*words) == 1
    assert f"pass {remedy}" in " ".join(capsys.readouterr().err.split())
    assert code_of(*words, *remedy.split()) == 0


@pytest.mark.parametrize("kind", ["h5", "parquet"])
def test_nothing_that_embed_did_not_write_is_replaced(kind: str, weights: Path, tmp_path: Path) -> None:
    paths = write_slides(tmp_path / "features", [4, 5, 6, 7, 8])
    out = tmp_path / "out"
    assert embedder(tmp_path, weights, format=kind).run().embedded == 5
    mine = write_hdf5(out / "mine.h5", *tiles_of(9, 9), patch_size_level0=SIZE)
    foreign = [out / f"slide{index}.{kind}" for index in range(4)]
    for path in foreign:
        path.unlink()
    foreign[0].write_text("precious")
    write_hdf5(foreign[1], *tiles_of(3, 3))
    foreign[2].mkdir()
    foreign[3].symlink_to(tmp_path / "elsewhere")
    before = mine.read_bytes(), foreign[1].read_bytes()
    for index, path in enumerate(paths):
        write_hdf5(path, *tiles_of(9, index), patch_size_level0=SIZE)
    outcome = Embedder([tmp_path / "features", mine], weights, out, EmbedSettings(format=kind)).run()
    # The changed slide whose own embedding is there, and in a table the file whose embedding has another ending.
    assert outcome.embedded == 1 + (kind == "parquet")
    assert len(outcome.failed) == 4 + (kind == "h5")
    assert all("it is not replaced" in outcome.failed[path] for path in paths[:4])
    assert kind == "parquet" or "it lies where its embedding would" in outcome.failed[mine]
    assert (mine.read_bytes(), foreign[1].read_bytes()) == before
    assert foreign[0].read_text() == "precious"
    assert foreign[2].is_dir()
    assert foreign[3].is_symlink()


def test_what_appears_while_a_slide_is_embedded_is_not_replaced(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slides(tmp_path / "features", [4, 5])
    compute = worker.Worker._compute

    def meanwhile(self: worker.Worker, batch: list[reading.TileSequence]) -> Any:
        (tmp_path / "out" / "slide0.h5").write_text("precious")
        return compute(self, batch)

    monkeypatch.setattr(worker.Worker, "_compute", meanwhile)
    outcome = embedder(tmp_path, weights).run()
    assert outcome.embedded == 1
    assert "it is not replaced" in next(iter(outcome.failed.values()))
    assert (tmp_path / "out" / "slide0.h5").read_text() == "precious"
    assert not list((tmp_path / "out").glob(".*"))


def test_a_file_that_changes_while_it_is_read_is_skipped(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slides(tmp_path / "features", [4, 5])
    read = reading.read_slide

    def meanwhile(path: Path, width: int) -> Any:
        found = read(path, width)
        if path.stem == "slide0":
            os.utime(path, ns=(0, 0))
        return found

    monkeypatch.setattr(reading, "read_slide", meanwhile)
    outcome = embedder(tmp_path, weights).run()
    assert outcome.embedded == 1
    assert list(outcome.failed.values()) == [
        "it changed while it was read; run the same command again when it is written"
    ]


@pytest.mark.parametrize("kind", ["h5", "parquet"])
def test_a_name_that_no_embedding_can_have_is_skipped_and_the_rest_goes_on(
    kind: str, weights: Path, tmp_path: Path
) -> None:
    longest = 255 - len("..part") - len(kind) - 1
    names = {
        "é" * (longest // 2): None,
        os.fsdecode(b"\xff"): "not valid UTF-8",
        "x" * (longest + 1): "too long by 1 bytes",
    }
    for name in names:
        write_hdf5(tmp_path / "features" / f"{name}.h5", *tiles_of(4, 0), patch_size_level0=SIZE)
    os.mkfifo(tmp_path / "features" / "pipe.h5")
    outcome = embedder(tmp_path, weights, format=kind).run()
    assert outcome.embedded == 1
    reasons = {path.stem: reason for path, reason in outcome.failed.items()}
    assert reasons.pop("pipe") == "it is a pipe or a device, expected a file"
    assert len(reasons) == 2
    assert all(str(names[name]) in reason for name, reason in reasons.items())


def test_a_link_that_leads_nowhere_is_skipped_and_the_rest_goes_on(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "features"
    write_slides(folder, [4, 5])
    (folder / "a_lost.h5").symlink_to(tmp_path / "nothing.h5")
    assert code_of("embed", folder, folder, "--checkpoint", weights, "--output", tmp_path / "out") == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"skipped {folder / 'a_lost.h5'}: it cannot be opened (No such file or directory); copy it again, or mend the "
        "link if it is one"
    ]
    assert "2 slides of 9 tiles embedded" in said.out


def test_a_file_that_records_another_tile_size_than_the_given_one_is_skipped(weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [4])
    write_hdf5(tmp_path / "features" / "other.h5", *tiles_of(4, 1), patch_size=256, downsample=4.0)
    write_hdf5(tmp_path / "features" / "unsized.h5", *tiles_of(4, 2))
    outcome = embedder(tmp_path, weights, tile_size=SIZE).run()
    assert outcome.embedded == 2
    assert {path.stem: reason for path, reason in outcome.failed.items()} == {
        "other": "expected tiles of 512 pixels (--tile-size), got a file that records 1024; embed it without "
        "--tile-size into another folder, or extract its features again if 1024 is wrong"
    }


def test_a_recorded_tile_size_that_is_no_size_is_the_matter_of_its_file(weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [4])
    features, corners = tiles_of(4, 1)
    for name, size in {"nan": float("nan"), "endless": float("inf"), "huge": 1e300, "zero": 0.0}.items():
        write_hdf5(tmp_path / "features" / f"{name}.h5", features, corners, patch_size_level0=size)
        content = {"features": features, "coords": corners, "patch_size_level0": size}
        torch.save(content, tmp_path / "features" / f"{name}_too.pt")
    outcome = embedder(tmp_path, weights).run()
    assert outcome.embedded == 1
    assert len(outcome.failed) == 8
    for reason in outcome.failed.values():
        assert reason.startswith("it does not give its tile size (the attribute patch_size_level0 of coords, a number")


def embedder(tmp_path: Path, weights: Path, **options: Any) -> Embedder:
    return Embedder([tmp_path / "features"], weights, tmp_path / "out", EmbedSettings(**options))


def test_slides_lie_together_up_to_the_budget_and_never_beyond(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slides(tmp_path / "features", [40, 1, 300, 17, 43])
    batches = []
    compute = worker.Worker._compute

    def noted(self: worker.Worker, batch: list[reading.TileSequence]) -> Any:
        batches.append([sequence.num_tiles for sequence in batch])
        return compute(self, batch)

    monkeypatch.setattr(worker.Worker, "_compute", noted)
    embedder(tmp_path, weights, batch_tiles=60).run()
    assert batches == [[40, 1], [300], [17, 43]]


def test_a_slide_that_does_not_fit_is_named_with_what_it_takes(weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [40, 300])
    outcome = embedder(tmp_path, weights, memory=0.2).run()
    assert outcome.embedded == 1
    ((path, reason),) = outcome.failed.items()
    assert path.stem == "slide1"
    assert reason == "its 300 tiles take about 300 MB, and 200 MB are available; pass a larger --memory"


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


@pytest.mark.parametrize(
    ("precision", "remedy"),
    [
        ("bfloat16", "use --precision float32"),
        ("float32", "its features are too large (up to 2.5e+39), extract them again"),
    ],
)
def test_an_embedding_that_overflows_is_not_written(precision: str, remedy: str, weights: Path, tmp_path: Path) -> None:
    features, corners = tiles_of(9, 0)
    features[0, 0] = 2.5
    large = 1e39 * features.double().clamp(-2.5, 2.5)
    write_hdf5(tmp_path / "features" / "large.h5", large, corners, patch_size_level0=SIZE)
    write_slides(tmp_path / "features", [4])
    outcome = embedder(tmp_path, weights, precision=precision).run()
    assert outcome.embedded == 1
    assert list(outcome.failed.values()) == [f"its embedding is not finite in {precision}; {remedy}"]


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
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert "full exists and is not empty" in refusal(features, "--checkpoint", weights, "--output", full)
    assert "is not empty" in refusal(features, "--checkpoint", weights, "--output", features)
    assert "_embed.json is damaged" in refusal(features, "--checkpoint", weights, "--output", broken)
    assert "there is no such file; pass the file of a slide" in refusal(features, *base[2:], "--checkpoint", full / "x")
    wrong = tmp_path / "text.pth"
    assert f"--checkpoint {wrong} cannot be read as weights" in refusal(features, *base[2:], "--checkpoint", wrong)
    assert "num_heads must divide embed_dim, got 7" in refusal(features, *base, "--num-heads", 7)
    assert "begins with 'x.'" in refusal(features, *base, "--prefix", "x.")
    assert "tile_size must be at least 1, got 0" in refusal(features, *base, "--tile-size", 0)


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


@pytest.mark.parametrize("has_links", [False, True])
def test_commands_that_begin_a_folder_at_once_share_it(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    made_with = {"pooling": "mean"}
    first, second = Store(tmp_path / "out", "h5"), Store(tmp_path / "out", "h5")
    begin_meanwhile(second, made_with, monkeypatch)
    first.begin(made_with)
    assert os.listdir(tmp_path / "out") == ["_embed.json"]
    assert json.loads((tmp_path / "out" / "_embed.json").read_text()) == made_with


def test_of_two_commands_with_other_settings_that_begin_at_once_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Store(tmp_path / "out", "h5"), Store(tmp_path / "out", "h5")
    begin_meanwhile(second, {"pooling": "mean"}, monkeypatch)
    with pytest.raises(RunError, match="made with other settings \\(pooling mean, now class\\)"):
        first.begin({"pooling": "class"})
    assert json.loads((tmp_path / "out" / "_embed.json").read_text()) == {"pooling": "mean"}


def test_a_folder_that_another_command_begins_during_the_check_is_not_a_foreign_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Store(tmp_path / "out", "h5"), Store(tmp_path / "out", "h5")
    check = output_folder.check_free_folder

    def begin_first(*words: Any, **options: Any) -> None:
        monkeypatch.setattr(output_folder, "check_free_folder", check)
        second.begin({"pooling": "mean"})
        check(*words, **options)

    monkeypatch.setattr(output_folder, "check_free_folder", begin_first)
    with pytest.raises(RunError, match="made with other settings"):
        first.check({"pooling": "class"})
    first.check({"pooling": "mean"})


def test_what_a_command_left_that_was_killed_while_it_began_is_no_obstacle(weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [4])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_embed.json.0123456789abcdef.part").write_text("{")
    assert embedder(tmp_path, weights).run().embedded == 1
    made_with = json.loads((tmp_path / "out" / "_embed.json").read_text())
    assert (made_with["checkpoint"], len(made_with["sha256"])) == ("slide_encoder.pth", 64)


def test_a_folder_of_before_the_settings_of_tiles_goes_on(weights: Path, tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [4, 5])
    words = ("embed", tmp_path / "features", "--checkpoint", weights, "--output", tmp_path / "out")
    assert code_of(*words) == 0
    file = tmp_path / "out" / "_embed.json"
    made_with = json.loads(file.read_text())
    for name in ("encoder", "magnification", "tile_spacing"):
        made_with.pop(name, None)
    file.write_text(json.dumps(made_with))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.h5")}
    assert code_of(*words) == 0
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.h5")}


@pytest.mark.parametrize("kind", ["h5", "parquet"])
def test_a_limit_on_the_size_of_files_ends_it_in_a_sentence_and_what_was_written_stays(
    kind: str, weights: Path, tmp_path: Path
) -> None:
    write_slides(tmp_path / "features", [3, 4])
    words = ["embed", tmp_path / "features", "--checkpoint", weights, "--output", tmp_path / "out", "--format", kind]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        main([str(word) for word in words])

    done = fork(limited).ended()
    assert done.returncode == 2, done.stderr
    assert "a file would be larger than the limit of this shell (ulimit -f)" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"_embed.json", "_embed.json.claims"}


def no_links(*words: object) -> None:
    """What `os.link` does on a file system without hard links."""
    raise OSError(errno.EPERM, "Operation not permitted")


def begin_meanwhile(second: Store, made_with: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a second command begin while the settings of the first are on their way to the disk."""
    fsync, waiting = os.fsync, [second]

    def begin_first(descriptor: int) -> None:
        if waiting:
            waiting.pop().begin(made_with)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", begin_first)
