"""Weights & Biases (offline) and MLflow hold what the log holds. By `make trackers`: too large for the gate."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import PartialState

from dilated_attention_pytorch.training import RunError, train
from dilated_attention_pytorch.training.trackers import check_trackers, tracking
from training.runs import Heard, open_run, quiet, tiny_settings, without_checks_of_settings, write_texts

_REASON = "Weights & Biases and MLflow are not installed here; `make trackers` installs them"
wandb = pytest.importorskip("wandb", reason=_REASON)
mlflow = pytest.importorskip("mlflow", reason=_REASON)
wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")

_BLOCK, _HEAD = 1 << 15, 7


def wandb_records(file: Path) -> Iterator[wandb_internal_pb2.Record]:
    """What an offline run wrote: records in LevelDB's log format, after a head of 7 bytes."""
    data, place, record = file.read_bytes(), _HEAD, b""
    while place + _HEAD <= len(data):
        if _BLOCK - place % _BLOCK < _HEAD:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + _HEAD : place + _HEAD + length]
        place += _HEAD + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def wandb_history(folder: Path) -> list[dict[str, float]]:
    entries = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                entries.append({name: json.loads(value) for name, value in items.items()})
    return entries


@pytest.mark.filterwarnings("ignore")  # theirs
def test_wandb_writes_an_offline_run_of_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # what it read of the environment before
    settings = tiny_settings(tmp_path, track=("wandb",))
    check_trackers(settings)
    PartialState()  # as transformers' trainer makes it
    with tracking(settings, open_run(tmp_path)) as trackers:
        trackers.log(2, {"loss": 1.5, "mfu": 0.25})
        trackers.log(4, {"loss": 1.25})
    wandb.teardown()  # the process that writes has ended
    found = [(entry["_step"], entry["loss"], entry.get("mfu")) for entry in wandb_history(tmp_path)]
    assert found == [(2, 1.5, 0.25), (4, 1.25, None)]


@pytest.mark.filterwarnings("ignore")
def test_wandb_without_a_login_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    with pytest.raises(RunError, match="nobody is logged in at Weights & Biases here; run `wandb login`"):
        check_trackers(tiny_settings(tmp_path, track=("wandb",)))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_every_figure_once_where_a_run_goes_on(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, track=("mlflow",))
    for steps in ((2, 4), (4, 6)):
        with tracking(settings, open_run(tmp_path)) as trackers:
            for step in steps:
                trackers.log(step, {"loss": 1.0 / step, "mfu": 0.25})
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    (experiment,) = [found for found in client.search_experiments() if found.name == "dilated-attention"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(2, 0.5), (4, 0.25), (6, 1.0 / 6)]
    assert run.data.params["steps"] == "9"
    assert run.info.status == "FINISHED"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "bogus://x"])
def test_an_mlflow_server_that_does_not_answer_is_refused_before_the_run(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(RunError, match=f"--track mlflow: MLFLOW_TRACKING_URI {uri} does not answer .*; start the ser"):
        train(tiny_settings(write_texts(tmp_path / "texts"), track=("mlflow",)), tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_server_that_goes_away_is_given_up_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    without_checks_of_settings(monkeypatch)
    said = Heard()
    settings = tiny_settings(write_texts(tmp_path / "texts"), steps=3, track=("mlflow",))
    assert train(settings, tmp_path / "run", said).step == 3
    assert said.said.count("--track mlflow is dropped, as its server does not respond (API request to http://") == 1


@pytest.mark.filterwarnings("ignore")
def test_a_key_that_wandb_refuses_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "too short")
    wandb.teardown()
    with pytest.raises(RunError, match="--track wandb: Weights & Biases refuses the login"):
        check_trackers(tiny_settings(tmp_path, track=("wandb",)))
