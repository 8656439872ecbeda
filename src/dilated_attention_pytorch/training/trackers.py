"""Experiment trackers for a run's figures, in the first process only."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require

from .together import is_first_process

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from .lifecycle import OpenRun
    from .run_settings import RunSettings, TrackerName

TENSORBOARD_NAME = "tensorboard"
MLFLOW_NAME = "mlflow"
PROMETHEUS_NAME = "metrics.prom"
_PROJECT = "dilated-attention"
_LOCAL = ("", "file", "sqlite")
"""Schemes of a MLFLOW_TRACKING_URI without a server."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Default retry limits for MLflow's client, whose own make all processes wait for minutes."""
_PACKAGES: dict[TrackerName, tuple[str, str]] = {
    "tensorboard": ("tensorboard", "train"),
    "wandb": ("wandb", "track"),
    "mlflow": ("mlflow", "track"),
    "prometheus": ("prometheus_client", "track"),
}
"""Import name of each tracker, and the extra that installs it."""


class Tracker(Protocol):
    """Receives the figures of a run."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of a step by their names in the log."""
        ...

    def close(self) -> None:
        """Finish the tracker."""
        ...


def check_trackers(settings: RunSettings) -> None:
    """Raise :class:`RunError` unless :func:`tracking` can open the trackers here. Writes nothing."""
    for name in settings.track:
        package, extra = _PACKAGES[name]
        require(f"--track {name}", (package,), extra)
    if not is_first_process():
        return
    if "wandb" in settings.track:
        _check_wandb()
    if "mlflow" in settings.track:
        _check_mlflow()
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
    """Context with the trackers of the settings; empty in processes other than the first.

    A resumed run continues in the same tracker runs, without duplicating repeated steps. A tracker whose server does
    not respond is dropped with a message.
    """
    trackers: list[Tracker] = []
    with _said_once():
        try:
            for name in settings.track if is_first_process() else ():
                trackers.append(_WhileAnswered(name, settings, place))
            yield trackers
        except BaseException:
            for tracker in trackers:
                with suppress(OSError):  # report the first error only
                    tracker.close()
            raise
        for tracker in trackers:
            tracker.close()


@contextmanager
def _said_once() -> Iterator[None]:
    """Suppress what TensorBoard's thread prints of a disk error: the next call of the writer raises it."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs, /) -> None:
        is_passed_on = isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")
        if not is_passed_on:
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


class _WhileAnswered:
    """A tracker that is dropped when its server fails to respond; the run continues without it."""

    def __init__(self, name: TrackerName, settings: RunSettings, place: OpenRun) -> None:
        self._name, self._say = name, place.say
        self._failures = _FAILURES[name]()
        self._tracker: Tracker | None = None
        with self._giving_up():
            self._tracker = _OPEN[name](settings, place)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        with self._giving_up():
            if self._tracker is not None:
                self._tracker.log(step, figures)

    def close(self) -> None:
        with self._giving_up():
            if self._tracker is not None:
                self._tracker.close()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            self._tracker = None
            self._say(
                f"--track {self._name} is given up, as it does not answer ({_first_line(error)}); the run goes on "
                "without it, and metrics.jsonl has all figures"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _failures_of_wandb() -> tuple[type[Exception], ...]:
    from wandb.errors import Error

    return (Error, ConnectionError, TimeoutError)


def _failures_of_mlflow() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    return (MlflowException,)


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
    """Weights & Biases: online, or with WANDB_MODE=offline to ``wandb/`` of the run folder."""

    def __init__(self, settings: RunSettings, place: OpenRun) -> None:
        import wandb

        self._run = wandb.init(
            project=_PROJECT,
            id=place.run_id,
            name=place.folder.name,
            dir=place.folder,
            config=settings.to_dict(),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # wandb rejects steps before its last one.
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _check_wandb() -> None:
    import wandb
    from wandb.errors import Error

    try:
        is_known = wandb.setup().settings.mode not in ("online", "shared") or wandb.login(prompt=False)
    except (Error, ValueError) as error:
        raise RunError(
            f"--track wandb: Weights & Biases refuses the login ({_first_line(error)}); run `wandb login`, or set "
            "WANDB_MODE=offline to have the figures written into the run folder"
        ) from error
    if not is_known:
        raise RunError(
            "--track wandb: nobody is logged in at Weights & Biases here; run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline to have the figures written into the run folder"
        )


def _check_mlflow() -> None:
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if urlsplit(uri).scheme in _LOCAL:
        return
    from mlflow.exceptions import MlflowException

    try:
        _mlflow_client(uri).search_experiments(max_results=1)
    except MlflowException as error:
        raise RunError(
            f"--track mlflow: MLFLOW_TRACKING_URI {uri} does not answer ({_first_line(error)}); start the server, name "
            "another one, or unset it to have the figures written into the run folder"
        ) from error


def _mlflow_client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    return MlflowClient(tracking_uri=uri)


class _MLflow:
    """MLflow at MLFLOW_TRACKING_URI; by default a database in ``mlflow/`` of the run folder."""

    def __init__(self, settings: RunSettings, place: OpenRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            (place.folder / MLFLOW_NAME).mkdir(exist_ok=True)
            uri = f"sqlite:///{(place.folder / MLFLOW_NAME / 'mlflow.db').absolute()}"
        self._client = _mlflow_client(uri)
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
        """The last step recorded for a figure."""
        if name not in self._last:
            history = self._client.get_metric_history(self._run, name)
            self._last[name] = max((metric.step for metric in history), default=-1)
        return self._last[name]

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Prometheus:
    """Prometheus: a text file for node_exporter and, with a port, an HTTP endpoint."""

    def __init__(self, settings: RunSettings, place: OpenRun) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry = CollectorRegistry()
        self._file = str(place.folder / PROMETHEUS_NAME)
        self._run = place.folder.name
        self._gauges: dict[str, Gauge] = {}
        self._server = None
        if settings.prometheus_port:
            try:
                self._server, self._thread = start_http_server(settings.prometheus_port, registry=self._registry)
            except OSError as error:  # the port was free when it was checked
                place.say(
                    f"--prometheus-port {settings.prometheus_port} cannot be served ({error.strerror}); "
                    f"{PROMETHEUS_NAME} is written all the same"
                )

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


_FAILURES: dict[TrackerName, Callable[[], tuple[type[Exception], ...]]] = {
    "tensorboard": tuple,
    "wandb": _failures_of_wandb,
    "mlflow": _failures_of_mlflow,
    "prometheus": tuple,
}
"""Exceptions of each tracker when its server does not respond. Disk errors belong to the run."""

_OPEN: dict[TrackerName, Callable[[RunSettings, OpenRun], Any]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
    "prometheus": _Prometheus,
}
