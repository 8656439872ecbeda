"""The example that trains a head on embeddings of slides tells made classes apart, and guesses at drawn ones."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.slides import Embedder, EmbedSettings
from slides.made_slides import SIZE, checkpoint, tiles_of, write_hdf5

EXAMPLE = Path(__file__).parents[2] / "examples" / "slide_head.py"
SLIDES = 60


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides of two classes that differ in half of their tiles, embedded."""
    folder = tmp_path_factory.mktemp("slides")
    for index in range(SLIDES):
        features, corners = tiles_of(40, index)
        features[:20, 0] += 6.0 * (index % 2)
        write_hdf5(folder / "features" / f"slide{index}.h5", features, corners, patch_size_level0=SIZE)
    Embedder([folder / "features"], checkpoint(folder), folder / "embeddings", EmbedSettings(pooling="mean")).run()
    return folder / "embeddings"


def accuracy_of(
    embeddings: Path, labels: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, said: object
) -> float:
    """What the example says of slides that were held out; two slides of every patient."""
    with (folder / "labels.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["slide", "patient", "label"])
        writer.writerows([f"slide{index}", f"patient{index // 2}", label] for index, label in enumerate(labels))
        writer.writerow(["not embedded", "patient0", "a"])
    words = ["slide_head.py", embeddings, folder / "labels.csv", "--layers", 1, -1, "--output", folder / "head.pt"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    words_said = said.readouterr().out  # type: ignore[attr-defined]
    assert "1 slides have no embedding and are left out, the first not embedded" in words_said
    assert "44 slides trained on, 16 held out" in words_said
    found = re.search(r"balanced accuracy ([\d.]+)", words_said)
    assert found is not None
    return float(found[1])


def test_it_tells_classes_that_differ_and_guesses_where_labels_are_drawn(
    embeddings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = accuracy_of(embeddings, [["a", "b"][index % 2] for index in range(SLIDES)], tmp_path, monkeypatch, capsys)
    assert told >= 0.9
    saved = torch.load(tmp_path / "head.pt", weights_only=True)
    assert saved["classes"] == ["a", "b"]
    drawn = torch.randint(2, (SLIDES,), generator=torch.Generator().manual_seed(1)).tolist()
    guessed = accuracy_of(embeddings, [["a", "b"][one] for one in drawn], tmp_path, monkeypatch, capsys)
    # Of 16 fair coins, 14 or more fall alike once in 480 times, to either side.
    assert 0.1 < guessed < 0.9


def test_it_refuses_tables_that_say_nothing(embeddings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Half of the patients are held out: one slide, or one class, is left to train on.
    one_class = "slide,label,patient\nslide0,a,p\nslide2,a,p\nslide1,b,q\nslide3,b,q\n"
    for text, message in (
        ("slide,class\na,b\n", "must have the columns slide and label"),
        ("slide,label\nslide0,a\nslide1,a\n", "a head tells classes apart"),
        ("slide,label\nslide0,a\nslide1,b\n", r"two slides of two classes at least, got 1 of \['[ab]'\] with 1 held"),
        (one_class, r"two slides of two classes at least, got 2 of \['[ab]'\] with 2 held out; label more slides"),
    ):
        (tmp_path / "labels.csv").write_text(text)
        words = ["slide_head.py", embeddings, tmp_path / "labels.csv", "--output", tmp_path / "head.pt"]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit, match=message):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert not (tmp_path / "head.pt").exists()


def test_it_refuses_wrong_options_and_files(
    embeddings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label\n" + "".join(f"slide{index},{'ab'[index % 2]}\n" for index in range(8)))
    features = embeddings.parent / "features"
    for folder, table, options, message in (
        (embeddings, labels, ["--held-out", "0"], "--held-out must be above 0 and below 1, got 0.0"),
        (embeddings, labels, ["--held-out", "1.5"], "--held-out must be above 0 and below 1, got 1.5"),
        (embeddings, labels, ["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (embeddings, labels, ["--layers", "99"], "--layers must be from -"),
        (embeddings, tmp_path / "nowhere.csv", [], "nowhere.csv: name a CSV file with the columns slide and label"),
        (features, labels, [], "holds no embedding: name the folder that `dilated-attention embed` wrote"),
    ):
        words = ["slide_head.py", folder, table, "--output", tmp_path / "head.pt", *options]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit) as refused:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert message in f"{refused.value} {capsys.readouterr().err}"
        assert not (tmp_path / "head.pt").exists()
