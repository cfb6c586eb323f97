"""Figures of a run for experiment trackers: TensorBoard, Weights & Biases, MLflow.

    from gputrace.loggers import lightning_callback, log

    log("trace.sqlite", wandb.init(project="resnet"))
    Trainer(callbacks=[lightning_callback()], logger=TensorBoardLogger("logs"))

A tracker gets the time of each step and of each class in it (means over the GPUs, in milliseconds,
under the names of the JSON), the verdict, the report as Markdown, and the page. Callbacks send what
is recorded when training ends; they do nothing in a program that is not recorded.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from gputrace.api import OpenTrace, open
from gputrace.errors import GputraceError, MissingError, UsageError
from gputrace.marks import recording_folder
from gputrace.model.time_class import CLASSES
from gputrace.report.wording import finding_text, verdict
from gputrace.sanitize import sentence

if TYPE_CHECKING:
    from gputrace.model.results import Analysis, Step

__all__ = ["keras_callback", "lightning_callback", "log", "log_recording", "transformers_callback"]

_METRICS: Final = (*CLASSES, "communication_wait", "host_data")
_PAGE: Final = "gputrace.html"
_NS_PER_MS: Final = 1e6
_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_MOST_METRICS: Final = 1000
"""Metrics that MLflow takes in one call."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Content of a run that trackers get."""

    verdict: str
    """Cause of the lost time, and what to do about it."""
    report: str
    """Report as Markdown."""
    steps: Sequence[tuple[int, Mapping[str, float]]]
    """Number of each step, from 0 on, with its metrics in milliseconds."""
    means: Mapping[str, float]
    """Metrics of the measured steps; empty without steps."""
    page: Path
    """Page of `gputrace report`."""


def log(trace: str | PathLike[str] | OpenTrace, *trackers: Any) -> None:
    """Send a run's step times, classes of time, verdict, report and page to each tracker.

    Args:
        trace: a trace file, or what `gputrace.open` returned.
        trackers: each a ``SummaryWriter``, a run of wandb, the module ``mlflow`` (its active run)
            or a run of it, a logger of Lightning; or ``tensorboard:FOLDER``, ``wandb:PROJECT``,
            ``mlflow:EXPERIMENT``, which begin a run and end it.

    Raises InputError if the trace cannot be read, UsageError for what is no tracker, MissingError
    if a tracker's package is not installed; what the tracker itself raises passes through.
    """
    if not isinstance(trace, OpenTrace):
        with open(trace) as opened:
            log(opened, *trackers)
        return
    senders = [_sender(tracker) for tracker in trackers]
    with _figures_of(trace) as figures:
        for send in senders:
            send(figures)


@contextmanager
def _figures_of(trace: OpenTrace) -> Iterator[Figures]:
    """Analyze a trace; the page is there as long as the block."""
    analysis = trace.analyze()
    with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
        page = Path(folder) / _PAGE
        trace.report(page)
        yield Figures(
            sentence(" ".join(finding_text(analysis, each) for each in analysis.findings[:1]))
            or verdict(analysis),
            analysis.render("markdown"),
            _steps(analysis),
            _means(analysis),
            page,
        )


def _steps(analysis: Analysis) -> list[tuple[int, dict[str, float]]]:
    """Return the metrics of each step, as means over the ranks and GPUs that have it."""
    by_number: defaultdict[int, list[Step]] = defaultdict(list)
    for step in analysis.step_list:
        by_number[step.step].append(step)
    return [(number, _metrics(by_number[number])) for number in sorted(by_number)]


def _metrics(rows: Sequence[Step]) -> dict[str, float]:
    metrics = {"gputrace/step_ms": fmean(row.end_ns - row.start_ns for row in rows) / _NS_PER_MS}
    for name in _METRICS:
        known = [ns for row in rows if (ns := getattr(row, f"{name}_ns")) is not None]
        if known:
            metrics[f"gputrace/{name}_ms"] = fmean(known) / _NS_PER_MS
    return metrics


def _means(analysis: Analysis) -> dict[str, float]:
    """Return the metrics of the mean measured step, as means over the ranks and GPUs."""
    rows = [row for row in analysis.breakdown if row.steps]
    names = [name for name in _METRICS if any(getattr(row, f"{name}_ns") for row in rows)]
    times = {name: [row.of(name) / row.steps for row in rows] for name in names}
    if rows:
        times["step"] = [row.total_ns / row.steps for row in rows]
    return {f"gputrace/mean/{name}_ms": fmean(row) / _NS_PER_MS for name, row in times.items()}


# ---- trackers


_Sender = Callable[[Figures], None]


def _named(tracker: str) -> _Sender:
    """Return what begins a run of the tracker that a text names, sends figures, and ends it."""
    kind, _, where = tracker.partition(":")
    if kind not in _BEGIN or not where:
        forms = "tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT"
        raise UsageError(f"{tracker!r} is not a tracker; write {forms}")
    if find_spec(kind) is None:
        raise MissingError(f"{tracker}: needs {kind}; pip install {kind}")
    return lambda figures: _BEGIN[kind](where, figures)


def _sender(tracker: Any) -> _Sender:
    """Return what sends figures to a tracker, as `log` takes it."""
    if isinstance(tracker, str):
        return _named(tracker)
    run_id = None
    if hasattr(tracker, "experiment"):  # A logger of Lightning; MLflow's has a client there.
        run_id, tracker = getattr(tracker, "run_id", None), tracker.experiment
    if (mlflow := sys.modules.get("mlflow")) is not None:
        run = mlflow.active_run() if tracker is mlflow else tracker
        if hasattr(run, "info"):
            tracker, run_id = mlflow.MlflowClient(), run.info.run_id
    if run_id is not None and hasattr(tracker, "log_batch"):
        return lambda figures: _to_mlflow(tracker, run_id, figures)
    if hasattr(tracker, "add_scalar") and hasattr(tracker, "add_text"):
        return lambda figures: _to_tensorboard(tracker, figures)
    if hasattr(tracker, "define_metric"):
        return lambda figures: _to_wandb(tracker, figures)
    kinds = "a SummaryWriter, an active run of wandb or MLflow, or a logger of Lightning for these"
    raise UsageError(f"{sentence(repr(tracker))} is not a tracker; give {kinds}")


def _to_tensorboard(writer: Any, figures: Figures) -> None:
    """Write scalars and texts to a SummaryWriter, and the page beside its files."""
    for number, metrics in figures.steps:
        for name, value in metrics.items():
            writer.add_scalar(name, value, number)
    page = Path(writer.log_dir) / _PAGE
    page.write_bytes(figures.page.read_bytes())
    writer.add_text("gputrace/verdict", f"{figures.verdict} The page: `{page}`", 0)
    writer.add_text("gputrace/report", figures.report, 0)
    writer.flush()


def _to_wandb(run: Any, figures: Figures) -> None:
    """Log to a run of Weights & Biases, on an axis of its own, since the run's only ascends."""
    run.define_metric("gputrace/step")
    run.define_metric("gputrace/*", step_metric="gputrace/step")
    for number, metrics in figures.steps:
        run.log({"gputrace/step": number, **metrics})
    run.summary.update({"gputrace/verdict": figures.verdict, **figures.means})
    page = import_module("wandb").Html(figures.page.read_text("utf-8"), inject=False)
    run.log({"gputrace/page": page})


def _to_mlflow(client: Any, run_id: str, figures: Figures) -> None:
    """Log metrics, a tag and artifacts to a run of MLflow, which may have ended."""
    make = import_module("mlflow.entities").Metric
    now = time.time_ns() // 1_000_000
    rows = [*figures.steps, (0, figures.means)]
    metrics = [
        make(name, value, now, number) for number, row in rows for name, value in row.items()
    ]
    for at in range(0, len(metrics), _MOST_METRICS):
        client.log_batch(run_id, metrics[at : at + _MOST_METRICS])
    client.set_tag(run_id, "gputrace.verdict", figures.verdict)
    client.log_text(run_id, figures.report, "gputrace/report.md")
    client.log_artifact(run_id, str(figures.page), "gputrace")


def _begin_tensorboard(folder: str, figures: Figures) -> None:
    with closing(_EventWriter(folder)) as writer:
        _to_tensorboard(writer, figures)


def _begin_wandb(project: str, figures: Figures) -> None:
    with import_module("wandb").init(project=project, job_type="gputrace") as run:
        _to_wandb(run, figures)


def _begin_mlflow(experiment: str, figures: Figures) -> None:
    mlflow = import_module("mlflow")
    mlflow.set_experiment(experiment)
    with mlflow.start_run() as run:
        _to_mlflow(mlflow.MlflowClient(), run.info.run_id, figures)


_BEGIN: Final = {"tensorboard": _begin_tensorboard, "wandb": _begin_wandb, "mlflow": _begin_mlflow}


class _EventWriter:
    """The part of a SummaryWriter that is used here, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: str) -> None:
        file_writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._proto = import_module("tensorboard.compat.proto.summary_pb2")
        self._tensor = import_module("tensorboard.compat.proto.tensor_pb2")
        self._event = import_module("tensorboard.compat.proto.event_pb2").Event
        self.log_dir = folder
        self._writer = file_writer.EventFileWriter(folder)
        self.flush, self.close = self._writer.flush, self._writer.close

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._add(self._proto.Summary.Value(tag=tag, simple_value=value), step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        kind = self._proto.SummaryMetadata.PluginData(plugin_name="text")
        # 7 is DT_STRING in TensorFlow's types.proto.
        tensor = self._tensor.TensorProto(dtype=7, string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        metadata = self._proto.SummaryMetadata(plugin_data=kind)
        self._add(self._proto.Summary.Value(tag=tag, metadata=metadata, tensor=tensor), step)

    def _add(self, value: Any, step: int) -> None:
        summary = self._proto.Summary(value=[value])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))


# ---- what is recorded so far


def log_recording(*trackers: Any) -> None:
    """Send what is recorded so far of the program that calls it; see `log`.

    With no trackers, those that are active: wandb's run and MLflow's. Does nothing in a program
    that is not recorded. Never raises: what went wrong is a warning of the logger ``gputrace``.
    """
    folder = recording_folder()
    if folder is None:
        return
    with _warned(), tempfile.TemporaryDirectory(prefix="gputrace-") as scratch:
        from gputrace.collectors.in_process import save_so_far

        # The page names the trace that the recording is to become.
        name = folder.name.removesuffix(".spool")
        trace = Path(scratch) / (name if name.endswith(".sqlite") else "trace.sqlite")
        save_so_far(folder, trace)
        with open(trace) as opened, _figures_of(opened) as figures:
            for tracker in trackers or active_trackers():
                with _warned():
                    _sender(tracker)(figures)


@contextmanager
def _warned() -> Iterator[None]:
    """Turn any error into a warning: training goes on, whatever a tracker does."""
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, GputraceError) else f"{type(error).__name__}: {error}"
        logging.getLogger("gputrace").warning("gputrace: not logged: %s", sentence(why))


def active_trackers() -> list[Any]:
    """Return the active runs of wandb and MLflow, where the program has imported these."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    runs = [getattr(wandb, "run", None), mlflow.active_run() if mlflow else None]
    return [run for run in runs if run is not None]


def lightning_callback(*trackers: Any) -> Any:
    """Return a callback for Lightning's Trainer that logs when ``fit`` ends.

    It logs to the given trackers, else to the trainer's loggers. Raises MissingError without
    Lightning.
    """
    base = _base("Callback", "lightning.pytorch", "pytorch_lightning")

    class GputraceCallback(base):  # type: ignore[misc, valid-type]
        def __reduce__(self) -> Any:  # A trainer that spawns its ranks pickles it.
            return lightning_callback, trackers

        def on_fit_end(self, trainer: Any, _module: Any) -> None:
            if trainer.is_global_zero:
                log_recording(*(trackers or trainer.loggers))

    return GputraceCallback()


def transformers_callback(*trackers: Any) -> Any:
    """Return a callback for the Trainer of transformers that logs when ``train`` ends.

    It logs to the given trackers, else to those that the trainer reports to. Raises MissingError
    without transformers.
    """
    base = _base("TrainerCallback", "transformers")

    class GputraceCallback(base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, _state: Any, _control: Any, **_others: Any) -> None:
            # The trainer's callbacks have begun their runs, and end them before this one's end.
            self._trackers = [*trackers] or active_trackers()
            if not trackers and (folder := _tensorboard_folder(args)):
                self._trackers.append(f"tensorboard:{folder}")

        def on_train_end(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
            if state.is_world_process_zero:
                log_recording(*self._trackers)

    return GputraceCallback()


def _tensorboard_folder(args: Any) -> str:
    """Return where the Trainer of transformers logs for TensorBoard; empty if it does not."""
    if "tensorboard" not in (args.report_to or ()):
        return ""
    given = getattr(args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if given:
        return str(Path(given).expanduser())
    # Since version 5 its name is nowhere but in the callback; it has just been made.
    runs = Path(args.output_dir, "runs").glob("*/")
    return str(max(runs, key=lambda run: run.stat().st_mtime_ns, default=""))


def keras_callback(*trackers: Any) -> Any:
    """Return a callback for Keras that logs when ``fit`` ends.

    It logs to the given trackers, else to the active runs of wandb and MLflow. Raises MissingError
    without Keras.
    """
    base = _base("Callback", "keras.callbacks", "tensorflow.keras.callbacks")

    class GputraceCallback(base):  # type: ignore[misc, valid-type]
        def on_train_end(self, _logs: Any = None) -> None:
            if all(os.environ.get(name, "0") == "0" for name in _RANKS):
                log_recording(*trackers)

    return GputraceCallback()


def _base(name: str, *modules: str) -> Any:
    """Return a class of the first of these modules that is imported, or else installed."""
    for module in sorted(modules, key=lambda module: module not in sys.modules):
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "."):
                raise
    raise MissingError(f"the callback needs {modules[0]}, which is not installed here")
