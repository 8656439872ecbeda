"""Experiment trackers for a run's figures, in the first process only.

TensorBoard and Weights & Biases are opened by accelerate's trackers. transformers' callbacks would not do: they rename
figures, log repeated steps of a resumed run twice, and log to MLflow in the background, where nobody sees its errors.
MLflow's functions, which accelerate calls, have one active run per process; a client leaves a caller's own run alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require

from .process_group import is_first_process

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


class Trackers:
    """The trackers of a run. One whose server does not respond is dropped with a message; the run continues."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[TrackerName, Any] = {}

    def open(self, settings: RunSettings, run: OpenRun) -> None:
        """Open the trackers of the settings, in the first process."""
        for name in settings.track if is_first_process() else ():
            with self._dropping(name):
                self._open[name] = _opened(name, settings, run)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of a step by their names in the log."""
        for name, tracker in [*self._open.items()]:
            with self._dropping(name):
                tracker.log({**figures}, step)

    def finish(self, *ignored: type[Exception]) -> None:
        """Close the trackers; errors of the types ``ignored`` are not raised."""
        for name, tracker in [*self._open.items()]:
            with self._dropping(name), suppress(*ignored):
                tracker.finish()

    @contextmanager
    def _dropping(self, name: TrackerName) -> Iterator[None]:
        try:
            yield
        except _failures(name) as error:
            self._open.pop(name, None)
            self._say(
                f"--track {name} is dropped, as its server does not respond ({_first_line(error)}); the run goes on "
                "without it, and metrics.jsonl has all figures"
            )


@contextmanager
def tracking(settings: RunSettings, run: OpenRun) -> Iterator[Trackers]:
    """Context with the trackers of the settings; there are none in processes other than the first.

    A resumed run continues in the same tracker runs, without duplicating repeated steps.
    """
    with _said_once():
        trackers = Trackers(run.say)
        try:
            trackers.open(settings, run)
            yield trackers
        except BaseException:
            trackers.finish(OSError)  # report the first error only
            raise
        trackers.finish()


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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _failures(name: TrackerName) -> tuple[type[Exception], ...]:
    """Exceptions of a tracker when its server does not respond. Disk errors belong to the run."""
    if name == "wandb":
        from wandb.errors import Error

        return (Error, ConnectionError, TimeoutError)
    if name == "mlflow":
        from mlflow.exceptions import MlflowException

        return (MlflowException,)
    return ()


def _opened(name: TrackerName, settings: RunSettings, run: OpenRun) -> Any:
    """A tracker with the methods ``log`` and ``finish`` of :class:`accelerate.tracking.GeneralTracker`."""
    from accelerate import tracking as of_accelerate

    if name == "mlflow":
        return _MLflow(settings, run)
    if name == "prometheus":
        return _Prometheus(settings, run)
    tracker: Any
    if name == "tensorboard":
        tracker = of_accelerate.TensorBoardTracker(TENSORBOARD_NAME, run.folder, purge_step=run.step + 1)
    else:
        import wandb

        # wandb rejects steps before its last one. With WANDB_MODE=offline it writes to ``wandb/`` of the run folder.
        tracker = of_accelerate.WandBTracker(
            _PROJECT,
            id=run.run_id,
            name=run.folder.name,
            dir=run.folder,
            config=settings.to_dict(),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
    tracker.start()
    return tracker


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

    def __init__(self, settings: RunSettings, run: OpenRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            (run.folder / MLFLOW_NAME).mkdir(exist_ok=True)
            uri = f"sqlite:///{(run.folder / MLFLOW_NAME / 'mlflow.db').absolute()}"
        self._client = _mlflow_client(uri)
        experiment = self._client.get_experiment_by_name(_PROJECT)
        number = self._client.create_experiment(_PROJECT) if experiment is None else experiment.experiment_id
        begun = self._client.search_runs([number], f"tags.run = '{run.run_id}'")
        if begun:
            self._run_id = begun[0].info.run_id
        else:
            created = self._client.create_run(number, run_name=run.folder.name, tags={"run": run.run_id})
            self._run_id = created.info.run_id
            for name, value in settings.to_dict().items():
                self._client.log_param(self._run_id, name, value)
        self._last: dict[str, int] = {}

    def log(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = [Metric(name, figure, now, step) for name, figure in figures.items() if step > self._last_step(name)]
        self._client.log_batch(self._run_id, metrics=new)

    def _last_step(self, name: str) -> int:
        """The last step recorded for a figure."""
        if name not in self._last:
            history = self._client.get_metric_history(self._run_id, name)
            self._last[name] = max((metric.step for metric in history), default=-1)
        return self._last[name]

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


class _Prometheus:
    """Prometheus: a text file for node_exporter and, with a port, an HTTP endpoint."""

    def __init__(self, settings: RunSettings, run: OpenRun) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry = CollectorRegistry()
        self._file = str(run.folder / PROMETHEUS_NAME)
        self._run = run.folder.name
        self._gauges: dict[str, Gauge] = {}
        self._server = None
        if settings.prometheus_port:
            try:
                self._server, self._thread = start_http_server(settings.prometheus_port, registry=self._registry)
            except OSError as error:  # the port was free when it was checked
                run.say(
                    f"--prometheus-port {settings.prometheus_port} cannot be served ({error.strerror}); "
                    f"{PROMETHEUS_NAME} is written all the same"
                )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        from prometheus_client import Gauge, write_to_textfile

        for name, figure in {"step": step, **figures}.items():
            if name not in self._gauges:
                words = f"{name.replace('_', ' ')} of a training run"
                self._gauges[name] = Gauge(f"dilated_attention_{name}", words, ["run"], registry=self._registry)
            self._gauges[name].labels(run=self._run).set(figure)
        write_to_textfile(self._file, self._registry)

    def finish(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
