"""Runs of fine-tuning: every task, resumed runs, frozen encoders, maps, and refusals."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from safetensors.torch import load_file

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.slides import Embedder, EmbedSettings, load_slide_encoder
from dilated_attention_pytorch.slides.finetune import cases, page, results, run, trainer, vectors
from dilated_attention_pytorch.slides.finetune.run import Finetuner
from slides.finetune.made_cohort import SLIDES, Cohort, small_settings
from slides.made_slides import CONFIG, tiles_of, write_hdf5

_FORK = multiprocessing.get_context("fork")


def predictions(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def results_of(output: Path) -> dict[str, bytes]:
    """All that a finished command leaves, by name; weights of the optimizer and locks are gone."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.name != ".lock" and path.suffix != ".html"
    }


FOLDS = {"folds": 2, "patient_column": "alone"}
"""Every slide is a patient."""


@pytest.fixture(scope="module")
def finished(cohort: Cohort, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of two folds."""
    output = tmp_path_factory.mktemp("finished") / "out"
    cohort.tuner(output, **FOLDS).run()
    return output


def test_two_folds_test_every_case_once_and_are_not_repeated(cohort: Cohort, finished: Path) -> None:
    output, before = finished, results_of(finished)
    outcome = cohort.tuner(output, **FOLDS).run()
    assert results_of(output) == before
    assert (outcome.runs, outcome.finished, outcome.total) == (0, 2, 2)
    assert outcome.metrics == json.loads((output / "metrics.json").read_text())
    tested: list[str] = []
    for fold in (1, 2):
        folder = output / f"fold{fold}-seed0"
        rows = [row for row in predictions(folder) if row["split"] == "test"]
        tested += [row["case"] for row in rows]
        assert not {row["patient"] for row in rows} & {
            row["patient"] for row in predictions(folder) if row["split"] != "test"
        }
        for row in rows:
            assert float(row["probability_0"]) + float(row["probability_1"]) == pytest.approx(1)
            assert int(row["target"]) == int(row["case"].removeprefix("slide")) // 2 % 2
        record = json.loads((folder / "run.json").read_text())
        assert [epoch["epoch"] for epoch in record["epochs"]] == [1, 2, 3]
        assert record["results"]["test"]["cases"] == [row["case"] for row in rows]
        assert {path.name for path in folder.iterdir()} == {".lock", "model.safetensors", "predictions.csv", "run.json"}
    assert sorted(tested) == sorted(f"slide{index}" for index in range(SLIDES))


def test_the_weights_are_those_of_the_predictions_and_embed_takes_them(
    cohort: Cohort, finished: Path, tmp_path: Path
) -> None:
    folder = finished / "fold1-seed0"
    encoder = load_slide_encoder(folder / "model.safetensors", config=CONFIG, prefix="slide_encoder.")
    weights = load_file(folder / "model.safetensors")
    for row in predictions(folder):
        features, corners = read(cohort, row["case"])
        with torch.no_grad():
            vectors = encoder(features[None], corners[None], tile_size=512).layers[0, [1, 2]].flatten()
        scores = weights["classifier.0.weight"] @ vectors + weights["classifier.0.bias"]
        expected = torch.tensor([float(row["score_0"]), float(row["score_1"])])
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    settings = EmbedSettings(prefix="slide_encoder.")
    embedder = Embedder([cohort.features], folder / "model.safetensors", tmp_path / "embeddings", settings)
    assert embedder.run().embedded == SLIDES


def read(cohort: Cohort, slide: str) -> tuple[torch.Tensor, torch.Tensor]:
    with h5py.File(cohort.features / f"{slide}.h5") as file:
        return torch.from_numpy(file["features"][()]), torch.from_numpy(file["coords"][()])


@pytest.mark.parametrize(
    ("changes", "columns", "metric"),
    [
        ({"task": "multilabel", "label_column": ("label", "other")}, ["score_label", "target_other"], "auroc"),
        ({"task": "regression", "label_column": ("size",)}, ["prediction_size", "target_size"], "r2"),
        ({"task": "survival", "by_patient": True, "test": 0.4}, ["log_risk", "time", "event"], "c_index"),
    ],
)
def test_every_task_is_trained(
    changes: dict[str, Any], columns: list[str], metric: str, cohort: Cohort, tmp_path: Path
) -> None:
    if changes["task"] == "survival":
        cohort = of_patients(cohort, tmp_path)
    outcome = cohort.tuner(tmp_path / "out", epochs=1, **changes).run()
    assert outcome.metrics is not None
    assert metric in outcome.metrics["mean"]
    rows = predictions(tmp_path / "out" / "fold1-seed0")
    assert set(columns) <= rows[0].keys()
    if changes["task"] == "regression":  # in the units of the targets
        assert all(50 < float(row["prediction_size"]) < 250 for row in rows)
        weights = load_file(tmp_path / "out" / "fold1-seed0" / "model.safetensors")
        encoder = load_slide_encoder(
            tmp_path / "out" / "fold1-seed0" / "model.safetensors", config=CONFIG, prefix="slide_encoder."
        )
        features, corners = read(cohort, rows[0]["case"])
        with torch.no_grad():
            vectors = encoder(features[None], corners[None], tile_size=512).layers[0, [1, 2]].flatten()
        score = float(weights["classifier.0.weight"][0] @ vectors + weights["classifier.0.bias"][0])
        assert score == pytest.approx(float(rows[0]["prediction_size"]), rel=1e-4)


def of_patients(cohort: Cohort, folder: Path) -> Cohort:
    """The same slides, with the time and event of each patient's first one."""
    with cohort.labels.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    first = {row["patient"]: row for row in reversed(rows)}
    with (folder / "labels.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, ["slide", "patient", "time", "event"])
        table.writeheader()
        for row in rows:
            of = first[row["patient"]]
            table.writerow({**{n: row[n] for n in ("slide", "patient")}, "time": of["time"], "event": of["event"]})
    (folder / "features").symlink_to(cohort.features)
    return Cohort(folder, cohort.weights)


def command(cohort: Cohort, output: Path, disturb: Callable[[], None], changes: dict[str, Any]) -> None:
    """A command in a process of its own."""
    disturb()
    torch.manual_seed(random.SystemRandom().getrandbits(32))
    cohort.tuner(output, **changes).run()


def run_forked(cohort: Cohort, output: Path, disturb: Callable[[], None], **changes: Any) -> int:
    process = _FORK.Process(target=command, args=(cohort, output, disturb, changes))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def killing(module: Any, name: str, call: int) -> Callable[[], None]:
    """Have the process killed when it calls a function for the ``call``-th time."""

    def disturb() -> None:
        original, calls = getattr(module, name), 0

        def kill_or_call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(module, name, kill_or_call)

    return disturb


MOMENTS = [
    (trainer, "write_manifest", 2),  # the second checkpoint is written and not complete
    (trainer.FinetuneTrainer, "predict_scores", 2),  # in the last epoch
    (results, "write_text", 2),  # predictions.csv is there, and run.json is not
]
FURTHER_MOMENTS = [
    (trainer.Inputs, "scores", 4),  # in the first epoch
    (trainer, "write_manifest", 1),  # there is no checkpoint yet
    (trainer.FinetuneTrainer, "_save_checkpoint", 1),  # the best weights are newer than the checkpoint
    (run, "remove_checkpoints", 1),
    (page, "write_page", 1),
]


def check_killed(cohort: Cohort, folder: Path, moments: list[tuple[Any, str, int]], **changes: Any) -> None:
    """Compare a command that is killed at these moments with one that is not."""
    cohort.tuner(folder / "alone", **changes).run()
    for moment in moments:
        assert run_forked(cohort, folder / "killed", killing(*moment), **changes) == -signal.SIGKILL, moment
    cohort.tuner(folder / "killed", **changes).run()
    assert results_of(folder / "killed") == results_of(folder / "alone")


def test_a_killed_command_ends_with_the_same_bits(cohort: Cohort, tmp_path: Path) -> None:
    check_killed(cohort, tmp_path, MOMENTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "changes"),
    [
        (FURTHER_MOMENTS, {}),
        (MOMENTS, {"lora": 2, "precision": "bfloat16"}),
        (MOMENTS[:2], {"freeze": True}),
        (MOMENTS[:2], {"task": "survival", "by_patient": True, "test": 0.4}),
        ([(vectors, "write_tensors", 1), (results, "save", 1)], {"freeze": True}),
    ],
)
def test_other_commands_that_are_killed_end_with_the_same_bits(
    moments: list[tuple[Any, str, int]], changes: dict[str, Any], cohort: Cohort, tmp_path: Path
) -> None:
    check_killed(of_patients(cohort, tmp_path) if "task" in changes else cohort, tmp_path, moments, **changes)


@pytest.mark.slow
def test_a_command_that_is_killed_at_any_time_ends_with_the_same_bits(cohort: Cohort, tmp_path: Path) -> None:
    changes = {**FOLDS, "epochs": 8}
    cohort.tuner(tmp_path / "alone", **changes).run()
    drawn, kills = random.Random(0), 0
    while kills < 10:
        process = _FORK.Process(target=command, args=(cohort, tmp_path / "killed", lambda: None, changes))
        process.start()
        process.join(drawn.uniform(0.5, 3.0))
        if process.exitcode == 0:
            assert results_of(tmp_path / "killed") == results_of(tmp_path / "alone")
            shutil.rmtree(tmp_path / "killed")
            continue
        process.kill()
        process.join()
        kills += 1
    cohort.tuner(tmp_path / "killed", **changes).run()
    assert results_of(tmp_path / "killed") == results_of(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora": 4}, {"task": "regression", "label_column": ("size",)}])
def test_what_tells_the_classes_is_learned(changes: dict[str, Any], cohort: Cohort, tmp_path: Path) -> None:
    outcome = cohort.tuner(tmp_path / "out", epochs=8, pooling="mean", **changes).run()
    record = json.loads((tmp_path / "out" / "fold1-seed0" / "run.json").read_text())
    first, *_, last = (epoch["loss"] for epoch in record["epochs"])
    assert last < 0.8 * first
    if "task" not in changes:
        assert outcome.metrics is not None
        assert outcome.metrics["mean"]["auroc"] == 1.0


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_taken(cohort: Cohort, tmp_path: Path) -> None:
    cohort.tuner(tmp_path / "alone").run()
    output = tmp_path / "damaged"
    assert run_forked(cohort, output, killing(trainer, "write_manifest", 2)) == -signal.SIGKILL
    finished, _unfinished = sorted((output / "fold1-seed0").glob("checkpoint-*"))
    (finished / "optimizer.pt").write_bytes(b"damaged")
    cohort.tuner(output).run()
    assert results_of(output) == results_of(tmp_path / "alone")


def test_a_checkpoint_that_cannot_be_written_is_a_sentence(
    cohort: Cohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.FinetuneTrainer, "_save_optimizer_and_scheduler", no_space)
    said = refusal(cohort, tmp_path / "out", epochs=1)
    assert "the checkpoint of step 1 cannot be written" in said
    assert "(unexpected pos 64 vs 0); make room on the disk" in said
    assert not [*(tmp_path / "out" / "fold1-seed0").glob("checkpoint-*")]


def no_space(self: trainer.FinetuneTrainer, folder: str) -> None:
    raise RuntimeError("unexpected pos 64 vs 0")  # PyTorch's words on a full disk


@pytest.mark.slow
def test_training_ends_when_the_metric_does_not_rise(cohort: Cohort, tmp_path: Path) -> None:
    changes = {"epochs": 9, "patience": 2, "learning_rate": 1e-9}
    cohort.tuner(tmp_path / "out", **changes).run()
    record = json.loads((tmp_path / "out" / "fold1-seed0" / "run.json").read_text())
    assert record["best_epoch"] == 1
    assert len(record["epochs"]) == 3
    # Stopped after its last checkpoint: no further epoch is trained.
    moment = killing(trainer.FinetuneTrainer, "predict_scores", 4)
    assert run_forked(cohort, tmp_path / "killed", moment, **changes) == -signal.SIGKILL
    cohort.tuner(tmp_path / "killed", **changes).run()
    assert results_of(tmp_path / "killed") == results_of(tmp_path / "out")


def test_a_frozen_encoder_is_that_of_embed_and_only_the_classifier_is_trained(cohort: Cohort, tmp_path: Path) -> None:
    as_embedded = EmbedSettings(device="cpu", pooling="mean")
    embedder = Embedder([cohort.features], cohort.weights, tmp_path / "embeddings", as_embedded)
    embedder.run()
    changes = {"freeze": True, "epochs": 20, "learning_rate": 1e-2, "pooling": "mean"}
    outcome = cohort.tuner(tmp_path / "tiles", **changes).run()
    assert outcome.metrics is not None
    assert outcome.metrics["mean"]["auroc"] == 1.0
    settings = small_settings(**changes)
    Finetuner([tmp_path / "embeddings"], cohort.labels, None, tmp_path / "probe", settings).run()
    settings = small_settings(**{**changes, "pooling": "class"})
    with pytest.raises(RunError, match="the embeddings are of --pooling mean, got class"):
        Finetuner([tmp_path / "embeddings"], cohort.labels, None, tmp_path / "class", settings)
    one, other = (predictions(tmp_path / name / "fold1-seed0") for name in ("tiles", "probe"))
    for row, again in zip(one, other, strict=True):
        assert row["case"] == again["case"]
        assert float(row["score_0"]) == pytest.approx(float(again["score_0"]), abs=1e-4)
    weights = load_file(tmp_path / "tiles" / "fold1-seed0" / "model.safetensors")
    assert set(weights) == {"classifier.0.weight", "classifier.0.bias"}
    assert load_file(tmp_path / "tiles" / "vectors.safetensors")["vectors"].shape == (SLIDES, 64)


def test_a_frozen_encoder_reads_every_slide_once_and_broken_ones_are_named_or_left_out(
    cohort: Cohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, output = Cohort(tmp_path / "own", cohort.weights), tmp_path / "out"
    shutil.copytree(cohort.folder, own.folder)
    (own.features / "slide5.h5").write_bytes(b"cut")
    read: list[str] = []
    original = cases.read_sequence
    monkeypatch.setattr(cases, "read_sequence", lambda name, *rest: read.append(name) or original(name, *rest))
    said = refusal(own, output, freeze=True)
    assert "1 of 12 cases cannot be read, the first: slide slide5" in said
    assert not (output / "finetune.json").exists()
    names = [f"slide{index}" for index in range(SLIDES)]
    assert read == names
    # Killed when it has written some vectors, and before it knows of the broken slide.
    changes = {"freeze": True, "skip_missing": True, "epochs": 2}

    def disturb() -> None:
        vectors._SAVE_SECONDS = -1.0
        killing(vectors, "write_tensors", 5)()

    assert run_forked(own, output, disturb, **changes) == -signal.SIGKILL
    assert load_file(output / "vectors.safetensors")["vectors"].shape == (4, 64)
    read.clear()
    own.tuner(output, **changes).run()
    assert read == names[4:]
    assert json.loads((output / "finetune.json").read_text())["left_out"] == ["slide5"]
    tuner = own.tuner(output, **changes)
    assert tuner.left_out == ["slide5"]
    assert tuner.run().runs == 0
    assert read == names[4:]
    own.tuner(tmp_path / "alone", **changes).run()
    assert results_of(output) == results_of(tmp_path / "alone")
    of_earlier = load_file(output / "vectors.safetensors")["vectors"]  # an earlier version wrote no names
    shutil.rmtree(output / "fold1-seed0")
    results.write_tensors(output / "vectors.safetensors", {"vectors": of_earlier})
    read.clear()
    own.tuner(output, **changes).run()
    assert read == []
    assert predictions(output / "fold1-seed0") == predictions(tmp_path / "alone" / "fold1-seed0")


@pytest.mark.slow
def test_embeddings_of_patients_are_those_of_their_slides_together(cohort: Cohort, tmp_path: Path) -> None:
    embed = EmbedSettings(device="cpu", patients=cohort.labels)
    Embedder([cohort.features], cohort.weights, tmp_path / "embeddings", embed).run()
    changes = {"freeze": True, "by_patient": True, "test": 0.34, "epochs": 2}
    cohort.tuner(tmp_path / "tiles", **changes).run()
    settings = small_settings(**changes)
    Finetuner([tmp_path / "embeddings"], cohort.labels, None, tmp_path / "probe", settings).run()
    one, other = (predictions(tmp_path / name / "fold1-seed0") for name in ("tiles", "probe"))
    for row, again in zip(one, other, strict=True):
        assert row["case"] == again["case"]
        assert float(row["score_0"]) == pytest.approx(float(again["score_0"]), abs=1e-4)


def test_maps_of_the_test_part_are_drawn(cohort: Cohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"maps": True, "lora": 2, "epochs": 1}
    cohort.tuner(tmp_path / "out", **changes).run()
    folder = tmp_path / "out" / "fold1-seed0"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    weights = load_file(folder / "model.safetensors")
    encoder = load_slide_encoder(folder / "model.safetensors", config=CONFIG, prefix="slide_encoder.")
    tested = [row["case"] for row in predictions(folder) if row["split"] == "test"]
    maps = sorted(f"{name}{ending}" for name in tested for ending in (".h5", ".png"))
    assert sorted(path.name for path in (folder / "maps").iterdir()) == maps
    assert f"{folder.name}/maps/{tested[0]}.png" in (tmp_path / "out" / "report.html").read_text()
    features, corners = read(cohort, tested[0])
    with h5py.File(folder / "maps" / f"{tested[0]}.h5") as file:
        contribution = torch.from_numpy(file["contribution"][()])
        assert contribution.shape == (2, len(features))
        assert file["rollout"].shape == (len(features),)
        assert torch.equal(torch.from_numpy(file["coords"][()]), corners)
    features.requires_grad_()
    vectors = encoder(features[None], corners[None], tile_size=512).layers[0, [1, 2]].flatten()
    (gradient,) = torch.autograd.grad(weights["classifier.0.weight"][1] @ vectors, features)
    torch.testing.assert_close(contribution[1], (gradient * features).sum(-1).detach(), rtol=0, atol=1e-5)
    picture = tmp_path / "map.png"
    file = str(folder / "maps" / f"{tested[0]}.h5")
    main(["heatmap", file, "--contribution", "1", "--output-file", str(picture)])
    assert picture.stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["heatmap", file, "--contribution", "2", "--output-file", str(tmp_path / "other.png")])
    before = (folder / "maps" / f"{tested[0]}.h5").stat().st_mtime_ns
    monkeypatch.setattr(run, "FinetuneTrainer", None)
    cohort.tuner(tmp_path / "out", **changes).run()
    assert (folder / "maps" / f"{tested[0]}.h5").stat().st_mtime_ns == before


@pytest.mark.slow
def test_two_commands_share_the_runs(cohort: Cohort, tmp_path: Path) -> None:
    output, changes = tmp_path / "out", {"seeds": (0, 1), "epochs": 1}
    others = []

    def meanwhile(sentence: str) -> None:
        if sentence.startswith("fold 1, seed 0:") and not others:
            others.append(None)
            others.append(cohort.tuner(output, **changes).run())

    outcome = cohort.tuner(output, **changes).run(say=meanwhile)
    assert (others[1].runs, others[1].finished, others[1].metrics) == (1, 1, None)
    assert (outcome.runs, outcome.finished) == (1, 2)
    assert outcome.metrics is not None
    cohort.tuner(tmp_path / "alone", **changes).run()
    assert results_of(output) == results_of(tmp_path / "alone")


def refusal(cohort: Cohort, output: Path, **changes: Any) -> str:
    """Why a command does not begin; nothing is written."""
    with pytest.raises(RunError) as refused:
        cohort.tuner(output, **changes).run()
    return str(refused.value)


def test_wrong_inputs_are_sentences(cohort: Cohort, finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert "got 11; pass for example --layers 2, the last" in refusal(cohort, output, layers=(11,))
    assert "has no column 'died'" in refusal(cohort, output, task="survival", event_column="died")
    assert "7 folds need as many patients, got 6" in refusal(cohort, output, folds=7)
    with pytest.raises(RunError, match="--checkpoint must name the weights"):
        Finetuner([cohort.features], cohort.labels, None, output, small_settings())
    with pytest.raises(RunError, match="does not exist"):
        Finetuner([tmp_path / "none"], cohort.labels, cohort.weights, output, small_settings())
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(RunError, match="holds no slide encoder"):
        Finetuner([cohort.features], cohort.labels, tmp_path / "other.pth", output, small_settings())
    assert not output.exists()
    assert "other settings or files (epochs 3, now 2)" in refusal(cohort, finished, epochs=2, **FOLDS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "exists and is not empty" in refusal(cohort, tmp_path / "full")


def test_missing_and_broken_slides_are_named_or_left_out(cohort: Cohort, tmp_path: Path) -> None:
    own = Cohort(tmp_path / "own", cohort.weights)
    shutil.copytree(cohort.folder, own.folder)
    (own.features / "slide3.h5").unlink()
    assert "1 of 12 slides of the labels have no file among the 11 given, the first slide3" in refusal(
        own, tmp_path / "out"
    )
    (own.features / "slide5.h5").write_bytes(b"cut")
    said = refusal(own, tmp_path / "out", skip_missing=False) and refusal_with_one(own, tmp_path)
    assert "1 of 12 cases cannot be read, the first: slide slide5" in said
    tuner = own.tuner(tmp_path / "out", skip_missing=True, epochs=1)
    heard: list[str] = []
    tuner.run(say=heard.append)
    assert len(tuner.labels.cases) == 10
    assert any(sentence.startswith("left out: slide slide5") for sentence in heard)
    again = own.tuner(tmp_path / "out", skip_missing=True, epochs=1)
    assert again.splits == tuner.splits
    assert again.left_out == tuner.left_out == ["slide3", "slide5"]
    assert again.run().runs == 0


def refusal_with_one(own: Cohort, folder: Path) -> str:
    """Why a command does not begin whose slides are all there, and one is broken."""
    write_hdf5(own.features / "slide3.h5", *tiles_of(9, 3), patch_size_level0=512)
    said = refusal(own, folder / "out")
    assert not (folder / "out" / "finetune.json").exists()
    (own.features / "slide3.h5").unlink()
    return said


def test_a_case_that_does_not_fit_into_memory_is_named(
    cohort: Cohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "free_memory", lambda device: 50 * 10**6)
    said = refusal(cohort, tmp_path / "out")
    assert "case slide11 has 53 tiles, which take about" in said
    assert not (tmp_path / "out" / "finetune.json").exists()


def test_embeddings_train_a_classifier_alone(cohort: Cohort, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "slide0.h5", "w") as file:
        file["layers"] = torch.ones(3, 32).numpy()
    paths = {"slide0": tmp_path / "slide0.h5"}
    assert cases.are_embeddings(paths)
    assert not cases.are_embeddings({"slide0": cohort.features / "slide0.h5"})
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label\nslide0,a\nslide1,b\n")
    for changes, said in (({}, "pass --freeze"), ({"freeze": True, "maps": True}, "--maps needs the tiles")):
        with pytest.raises(RunError, match=said):
            Finetuner(
                [tmp_path / "slide0.h5"], labels, None, tmp_path / "o", small_settings(skip_missing=True, **changes)
            )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": ()}, "layers must be different numbers"),
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"validation": 0.5, "test": 0.6}, "must leave patients to train on"),
        ({"freeze": True, "lora": 4}, "leave out one of them"),
        ({"cases_per_step": 0}, "cases_per_step must be at least 1"),
        ({"label_column": ()}, "label_column must name"),
        ({"tile_size": 0}, "tile_size must be at least 1"),
    ],
)
def test_wrong_settings_are_sentences(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small_settings(**changes)


def test_the_command_runs_and_ctrl_c_is_a_sentence(
    cohort: Cohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", str(cohort.features), str(cohort.labels), "--checkpoint", str(cohort.weights)]
    words += ["--output", str(tmp_path / "out"), "--layers", "1", "--epochs", "1", "--device", "cpu"]
    main(words)
    said = capsys.readouterr().out
    assert "auroc:" in said
    assert "runs trained: 1; there before: 0" in said
    monkeypatch.setattr(Finetuner, "run", interrupted)
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(words)
    assert "once per GPU" in capsys.readouterr().err


def interrupted(self: Finetuner, **_: Any) -> Any:
    raise KeyboardInterrupt
