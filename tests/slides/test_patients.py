"""The slides of a patient are one sequence; a wrong table is refused in a sentence."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from matplotlib.image import imread
from pyarrow import parquet
from torch import Tensor

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.slides import Embedder, EmbedSettings, load_slide_encoder, worker
from dilated_attention_pytorch.slides.memory import TileLimits
from dilated_attention_pytorch.slides.patients import read_patients
from slides.made_slides import SIZE, checkpoint, tiles_of, write_hdf5

TILES = {"a": 40, "b": 7, "c": 30, "d": 1}
SIZES = {"a": SIZE, "b": SIZE // 2, "c": SIZE, "d": SIZE}
TABLE = "slide,age,patient\nc,61,anna\na,61,anna\nd,50,otto\nb,61,anna\n"


@pytest.fixture(autouse=True)
def _memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = TileLimits(tile_bytes=10**6, of_batch=1, of_slide=100)
    monkeypatch.setattr(worker, "measure_limits", lambda *_, **__: limits)


def tiles(slide: str) -> tuple[Tensor, Tensor]:
    """Features and corners; the corners of all slides begin at the same cells, so that cells overlap."""
    features, _ = tiles_of(TILES[slide], ord(slide))
    rows = torch.arange(TILES[slide])
    return features, SIZES[slide] * torch.stack((rows // 6, rows % 6), dim=-1)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    for slide in TILES:
        attributes = {"patch_size_level0": SIZES[slide], "level0_width": 6 * SIZES[slide], "level0_height": 7 * SIZE}
        write_hdf5(tmp_path / "features" / f"{slide}.h5", *tiles(slide), **attributes)
    (tmp_path / "patients.csv").write_text(TABLE, encoding="utf-8-sig")
    checkpoint(tmp_path)
    return tmp_path


def embedder(world: Path, **options: Any) -> Embedder:
    settings = EmbedSettings(patients=world / "patients.csv", **options)
    return Embedder([world / "features"], world / "slide_encoder.pth", world / "out", settings)


@pytest.mark.parametrize("kind", ["h5", "parquet"])
def test_the_slides_of_a_patient_are_one_sequence_in_the_order_of_the_table(kind: Any, world: Path) -> None:
    assert embedder(world, format=kind).run().embedded == 2
    encoder = load_slide_encoder(world / "slide_encoder.pth").eval()
    for patient, slides in {"anna": "cab", "otto": "d"}.items():
        features = torch.cat([tiles(slide)[0] for slide in slides])
        cells = torch.cat([tiles(slide)[1] // SIZES[slide] for slide in slides])
        with torch.no_grad():
            expected = encoder(features[None], cells[None], tile_size=1).embedding[0]
        if kind == "parquet":
            rows = parquet.read_table(world / "out").to_pylist()
            (row,) = (row for row in rows if row["patient"] == patient)
            found, source = torch.tensor(row["embedding"]), row["source"]
        else:
            with h5py.File(world / "out" / f"{patient}.h5") as file:
                found, source = torch.from_numpy(file["embedding"][()]), list(file.attrs["source"])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        assert [Path(path).stem for path in source] == list(slides)


def test_maps_say_of_which_slide_a_tile_is(world: Path) -> None:
    embedder(world, maps=True, rollout=True).run()
    file = world / "out" / "anna.h5"
    with h5py.File(file) as stored:
        index, attention = torch.from_numpy(stored["slide_index"][()]), torch.from_numpy(stored["attention"][()])
        assert torch.equal(torch.from_numpy(stored["coords"][()]), torch.cat([tiles(slide)[1] for slide in "cab"]))
        assert stored["coords"].attrs["patch_size_level0"].tolist() == [SIZES[slide] for slide in "cab"]
    assert index.tolist() == [0] * 30 + [1] * 40 + [2] * 7
    assert sorted(path.name for path in (world / "out").glob("*.geojson")) == [f"{slide}.geojson" for slide in "abcd"]
    tile = json.loads((world / "out" / "b.geojson").read_text())["features"][2]
    assert tile["geometry"]["coordinates"][0][2] == (tiles("b")[1][2] + SIZES["b"]).tolist()
    assert tile["properties"]["measurements"]["attention layer 1"] == pytest.approx(float(attention[0, :, 72].mean()))


def test_a_picture_shows_one_slide_of_a_patient(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embedder(world, maps=True).run()
    file = world / "out" / "anna.h5"
    with pytest.raises(SystemExit):
        main(["heatmap", str(file)])
    assert "is of a patient with several slides: name one by --slide, of c, a, b" in said(capsys)
    main(["heatmap", str(file), "--slide", "b"])
    assert imread(world / "out" / "b.png").ndim == 3
    main(["heatmap", str(world / "out" / "otto.h5")])
    assert (world / "out" / "otto.png").is_file()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_a_patient_is_embedded_again_where_one_of_its_files_or_their_order_changed(world: Path) -> None:
    assert (embedder(world).run().embedded, embedder(world).run().kept) == (2, 2)
    os.utime(world / "features" / "b.h5", ns=(1, 1))  # older than all others
    outcome = embedder(world).run()
    assert (outcome.embedded, outcome.kept) == (1, 1)
    lines = TABLE.splitlines()
    (world / "patients.csv").write_text("\n".join([lines[0], *sorted(lines[1:])]))
    outcome = embedder(world).run()
    assert (outcome.embedded, outcome.kept) == (1, 1)
    (world / "features").rename(world / "moved")
    (world / "features").symlink_to(world / "moved")
    assert embedder(world).run().kept == 2


def test_another_patient_of_the_same_name_is_refused(world: Path) -> None:
    embedder(world).run()
    for slide in "ef":
        write_hdf5(world / "other" / f"{slide}.h5", *tiles("b"), patch_size_level0=SIZES["b"])
    (world / "other.csv").write_text("slide,patient\ne,anna\nf,anna\n")
    settings = EmbedSettings(patients=world / "other.csv")
    with pytest.raises(RunError, match=r"holds the embedding of another patient anna: .*; pass another --output"):
        Embedder([world / "other"], world / "slide_encoder.pth", world / "out", settings).run()
    with pytest.raises(RunError, match=r"other settings \(patients True, now None\)"):
        Embedder([world / "other"], world / "slide_encoder.pth", world / "out", EmbedSettings())


def test_a_broken_slide_leaves_its_patient_out_and_no_other(world: Path) -> None:
    broken = world / "features" / "a.h5"
    broken.write_bytes(broken.read_bytes()[:1000])
    outcome = embedder(world).run()
    assert outcome.embedded == 1
    assert [*outcome.failed] == [broken]
    assert outcome.failed[broken].endswith("(patient anna is left out)")
    assert not (world / "out" / "anna.h5").exists()


def test_the_tiles_of_a_patient_must_fit_together(world: Path) -> None:
    write_hdf5(world / "features" / "e.h5", *tiles("c"), patch_size_level0=SIZE)
    (world / "patients.csv").write_text(f"{TABLE}e,1,anna\n")
    outcome = embedder(world).run()
    assert outcome.embedded == 1
    assert "its 107 tiles take about" in outcome.failed[world / "features" / "c.h5"]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (None, "--patients .*patients.csv does not exist; pass a CSV or TSV file"),
        ("", "is empty; its first line must name the columns, 'slide' among them"),
        ("slide;patient\na;p\n", "has no column 'slide'; its first line, .*, has 'slide;patient'"),
        ("slide,patient,slide\na,p,b\n", "has 2 columns 'slide'"),
        (b"slide,patient\n\xff,p\n", "line 2 is not UTF-8"),
        ('slide,patient\n"a,p\n', "is not a line of a CSV file"),
        (f"{TABLE}\na,1,paul\n", "line 7: slide 'a' also stands in .*patients.csv, line 3"),
        (f"{TABLE}b,1,anna\n", "line 6: slide 'b' also stands in .*patients.csv, line 5"),
        (f"{TABLE}e,1,anna\n", "line 6: there is no file of slide e .in all, 1 of 5 slides have none"),
        (TABLE.replace("\na,", "\na.svs,"), "no file of slide a.svs .*named as their files, without the ending"),
        (
            TABLE.replace("d,50,otto\n", ""),
            "d.h5 belongs to no patient: .* has no line for slide d .in all, for 1 of 4",
        ),
        (f"{TABLE}e,1,\n", "line 6 has an empty patient; fill it in, or remove the line"),
        (f"{TABLE}e\n", "line 6 has 1 cells, the header 3"),
        (TABLE.replace("otto", "../otto"), "line 4: an embedding's file is named after its patient, and '../otto'"),
    ],
)
def test_a_wrong_table_is_refused_in_a_sentence(table: str | bytes | None, sentence: str, world: Path) -> None:
    (world / "patients.csv").unlink()
    if table is not None:
        (world / "patients.csv").write_bytes(table.encode() if isinstance(table, str) else table)
    with pytest.raises(RunError, match=sentence):
        embedder(world)
    assert not (world / "out").exists()


@pytest.mark.parametrize(("seed", "number"), [(0, 100), pytest.param(1, 2000, marks=pytest.mark.slow)])
def test_a_mangled_table_is_read_as_it_is_or_refused(seed: int, number: int, tmp_path: Path) -> None:
    draw, table = random.Random(seed), tmp_path / "patients.csv"
    slides = {slide: tmp_path / f"{slide}.h5" for slide in TILES}
    refusals = []
    new = [b"\0", b'"', b",", b"\n", b"\r", b"\xef\xbb\xbf", b"x", b""]
    for _ in range(number):
        content = bytearray(TABLE.encode())
        for _ in range(draw.choice([0, 1, 1, 2, 9])):
            place = draw.randrange(len(content))
            content[place : place + draw.randrange(3)] = draw.choice(new)
        table.write_bytes(content)
        try:
            found = read_patients(table, slides)
        except RunError as error:
            refusals.append(str(error))
        else:
            assert sorted(path for paths in found.values() for path in paths) == sorted(slides.values())
    assert 0 < len(refusals) < number
    assert all(str(table) in reason and "\n" not in reason for reason in refusals)
