"""Where the figures of a run go beside its log: each tracker by its own library, in the first process alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require

from .together import is_first_process

if TYPE_CHECKING:
    from .lifecycle import OpenRun
    from .run_settings import RunSettings, TrackerName

TENSORBOARD_NAME = "tensorboard"
MLFLOW_NAME = "mlflow"
PROMETHEUS_NAME = "metrics.prom"
_PROJECT = "dilated-attention"
_PACKAGES: dict[TrackerName, tuple[str, str]] = {
    "tensorboard": ("tensorboard", "train"), "wandb": ("wandb", "track"), "mlflow": ("mlflow", "track"),
    "prometheus": ("prometheus_client", "track"),
}  # fmt: skip
"""What each is called where it is imported, and the extra that brings it."""


class Tracker(Protocol):
    """Takes the figures of a run."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step, by their names in the log."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


def check_trackers(settings: RunSettings) -> None:
    """Raise :class:`RunError` unless what :func:`tracking` opens can be opened here. Writes nothing."""
    for name in settings.track:
        package, extra = _PACKAGES[name]
        require(f"--track {name}", (package,), extra)
    if not is_first_process():
        return
    if "wandb" in settings.track:
        _check_wandb()
    if settings.prometheus_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", settings.prometheus_port))
            except OSError as error:
                raise RunError(
                    f"--prometheus-port {settings.prometheus_port} cannot be served ({error.strerror}); name another "
                    "one, or leave it out and have metrics.prom collected"
                ) from error


@contextmanager
def tracking(settings: RunSettings, place: OpenRun) -> Iterator[Sequence[Tracker]]:
    """The trackers that the settings name, while the run lasts; none in other processes than the first.

    A run that goes on goes on in all of them: what they hold of steps that are taken again is not written twice.
    """
    trackers: list[Tracker] = []
    try:
        for name in settings.track if is_first_process() else ():
            trackers.append(_OPEN[name](settings, place))
        yield trackers
    except BaseException:
        for tracker in trackers:
            with suppress(OSError):  # what went wrong first is what is said
                tracker.close()
        raise
    for tracker in trackers:
        tracker.close()


class _TensorBoard:
    def __init__(self, _: RunSettings, place: OpenRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(place.folder / TENSORBOARD_NAME), purge_step=place.step + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, figure in figures.items():
            self._writer.add_scalar(name, figure, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Online, or, with WANDB_MODE=offline, into ``wandb/`` of the run folder."""

    def __init__(self, settings: RunSettings, place: OpenRun) -> None:
        import wandb

        self._run = wandb.init(
            project=_PROJECT, id=place.run_id, name=place.folder.name, dir=place.folder, config=settings.to_dict(),
            resume="allow", settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # It takes no step before the last that it has.
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _check_wandb() -> None:
    import wandb

    if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False):
        raise RunError(
            "--track wandb: nobody is logged in at Weights & Biases here; run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline to have the figures written into the run folder"
        )


class _MLflow:
    """At MLFLOW_TRACKING_URI, or without it into a database in ``mlflow/`` of the run folder."""

    def __init__(self, settings: RunSettings, place: OpenRun) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            (place.folder / MLFLOW_NAME).mkdir(exist_ok=True)
            uri = f"sqlite:///{(place.folder / MLFLOW_NAME / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(_PROJECT)
        number = self._client.create_experiment(_PROJECT) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], f"tags.run = '{place.run_id}'")
        if found:
            self._run = found[0].info.run_id
        else:
            self._run = self._client.create_run(
                number, run_name=place.folder.name, tags={"run": place.run_id}
            ).info.run_id
            for name, value in settings.to_dict().items():
                self._client.log_param(self._run, name, value)
        self._last: dict[str, int] = {}

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = [Metric(name, figure, now, step) for name, figure in figures.items() if step > self._last_step(name)]
        self._client.log_batch(self._run, metrics=new)

    def _last_step(self, name: str) -> int:
        """The last step of which a figure is held."""
        if name not in self._last:
            history = self._client.get_metric_history(self._run, name)
            self._last[name] = max((metric.step for metric in history), default=-1)
        return self._last[name]

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Prometheus:
    """The last figures: a text file for node_exporter, and with a port for whoever asks there."""

    def __init__(self, settings: RunSettings, place: OpenRun) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry = CollectorRegistry()
        self._file = str(place.folder / PROMETHEUS_NAME)
        self._run = place.folder.name
        self._gauges: dict[str, Gauge] = {}
        self._server = None
        if settings.prometheus_port:
            self._server, self._thread = start_http_server(settings.prometheus_port, registry=self._registry)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from prometheus_client import Gauge, write_to_textfile

        for name, figure in {"step": step, **figures}.items():
            if name not in self._gauges:
                words = f"{name.replace('_', ' ')} of a training run"
                self._gauges[name] = Gauge(f"dilated_attention_{name}", words, ["run"], registry=self._registry)
            self._gauges[name].labels(run=self._run).set(figure)
        write_to_textfile(self._file, self._registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


_OPEN: dict[TrackerName, Callable[[RunSettings, OpenRun], Any]] = {
    "tensorboard": _TensorBoard, "wandb": _WeightsAndBiases, "mlflow": _MLflow, "prometheus": _Prometheus,
}  # fmt: skip
