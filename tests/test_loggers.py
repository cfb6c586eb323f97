"""`gputrace.loggers`: what trackers get of a run, by fakes of them; and by TensorBoard if it is
installed."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gputrace
from gputrace import loggers
from gputrace.errors import UsageError
from tests.helpers import command
from tests.helpers.handmade import MS, Run, train

STEP_MS, WAIT_MS = 3.34, 0.95


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps of 3.34 ms, of which 0.95 ms wait for data."""
    run = Run()
    train(run, wait=MS)
    return run.export.write(tmp_path_factory.mktemp("loggers") / "trace.sqlite")


class Writer:
    """A SummaryWriter."""

    def __init__(self, folder: Path) -> None:
        self.log_dir = str(folder)
        self.scalars: dict[tuple[str, int], float] = {}
        self.texts: dict[str, str] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name] = text

    def flush(self) -> None: ...


class WandbRun:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.log = self.rows.append

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...


class MlflowClient:
    def __init__(self) -> None:
        self.metrics: list[SimpleNamespace] = []
        self.kept: dict[str, str] = {}

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        assert len(metrics) <= 1000
        self.metrics += metrics

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.kept[name] = value

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self.kept[file] = text

    def log_artifact(self, run_id: str, path: str, folder: str) -> None:
        self.kept[f"{folder}/{Path(path).name}"] = Path(path).read_text()


def fake(patch: pytest.MonkeyPatch, name: str, **content: Any) -> Any:
    """A package of this name, with these things in it."""
    module = ModuleType(name)
    vars(module).update(content)
    patch.setitem(sys.modules, name, module)
    return module


Sent = tuple[Writer, WandbRun, MlflowClient]


@pytest.fixture(scope="module")
def sent(trace: Path) -> Iterator[Sent]:
    """Return what each of them got of the trace."""
    writer, run, client = Writer(trace.parent), WandbRun(), MlflowClient()
    active = SimpleNamespace(info=SimpleNamespace(run_id="r"))
    with pytest.MonkeyPatch.context() as patch:
        fake(patch, "wandb", Html=lambda page, inject: page)
        fake(
            patch,
            "mlflow.entities",
            Metric=lambda key, value, _, step: SimpleNamespace(key=key, step=step, value=value),
        )
        mlflow = fake(patch, "mlflow", MlflowClient=lambda: client, active_run=lambda: active)
        with gputrace.open(trace) as opened:
            # The second is as loggers of Lightning have it.
            loggers.log(opened, writer, SimpleNamespace(experiment=run), mlflow)
        yield writer, run, client


def test_tensorboard_gets_each_step_the_verdict_and_the_page(sent: Sent, trace: Path) -> None:
    writer, _, _ = sent
    assert writer.scalars["gputrace/step_ms", 10] == pytest.approx(STEP_MS, abs=0.1)
    assert writer.scalars["gputrace/data_feeding_ms", 10] == pytest.approx(WAIT_MS, abs=0.1)
    assert {step for _, step in writer.scalars} == set(range(20))
    assert re.search(r"waits for data .* What to do: give", writer.texts["gputrace/verdict"])
    assert "| compute |" in writer.texts["gputrace/report"]
    assert trace.with_name("gputrace.html").read_text().startswith("<!DOCTYPE html>")


def test_wandb_gets_steps_on_an_axis_of_their_own_and_means(sent: Sent) -> None:
    _, run, _ = sent
    *steps, page = run.rows
    assert [row["gputrace/step"] for row in steps] == list(range(20))
    assert page["gputrace/page"].startswith("<!DOCTYPE html>")
    assert run.summary["gputrace/mean/step_ms"] == pytest.approx(STEP_MS, rel=0.01)
    assert "waits for data" in run.summary["gputrace/verdict"]


def test_mlflow_gets_metrics_a_tag_and_files(sent: Sent) -> None:
    _, _, client = sent
    values = {(metric.key, metric.step): metric.value for metric in client.metrics}
    assert values["gputrace/data_feeding_ms", 10] == pytest.approx(WAIT_MS, abs=0.1)
    assert values["gputrace/mean/step_ms", 0] == pytest.approx(STEP_MS, rel=0.01)
    assert set(client.kept) == {"gputrace.verdict", "gputrace/report.md", "gputrace/gputrace.html"}


@pytest.mark.parametrize("tracker", ["tensorboard", "comet:project", object()])
def test_what_is_no_tracker_is_refused(trace: Path, tracker: object) -> None:
    with pytest.raises(UsageError, match="is not a tracker"):
        loggers.log(trace, tracker)


def test_a_package_that_is_missing_is_named(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(gputrace.GputraceError, match="pip install wandb"):
        loggers.log(trace, "wandb:project")


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_command_writes_what_tensorboard_reads(trace: Path, tmp_path: Path) -> None:
    event_accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")

    ran = command.gputrace("log", trace, "--to", f"tensorboard:{tmp_path}")
    assert (ran.code, ran.err) == (0, f"gputrace: logged to tensorboard:{tmp_path}\n")
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Scalars("gputrace/step_ms")) == 20
    (verdict,) = events.Tensors("gputrace/verdict")
    assert verdict.tensor_proto.string_val[0].startswith(b"The GPUs wait")


PROGRAM = """
import sys, time, types
class Callback: pass
class Logger:
    log_dir = sys.argv[1]
    def add_scalar(self, name, value, step): print(name, step)
    def add_text(self, name, text, step): print(name)
    def flush(self): raise OSError("the tracker is gone")
lightning = sys.modules["lightning"] = types.ModuleType("lightning")
lightning.pytorch = sys.modules["lightning.pytorch"] = types.ModuleType("lightning.pytorch")
lightning.pytorch.Callback = Callback
import gputrace
from gputrace.loggers import lightning_callback
callback = lightning_callback()
for step in range(12):
    with gputrace.step():
        time.sleep(0.002)
trainer = types.SimpleNamespace(is_global_zero=True, loggers=[Logger()])
callback.on_fit_end(trainer, None)
print("trained on")
"""


def test_a_callback_reaches_the_ranks_that_a_trainer_spawns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lightning = ModuleType("lightning.pytorch")
    lightning.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", lightning)
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    trainer = SimpleNamespace(is_global_zero=True, loggers=["of the trainer"])
    logged: list[object] = []
    monkeypatch.setattr(loggers, "log_recording", lambda *trackers: logged.extend(trackers))
    for callback in (loggers.lightning_callback(), loggers.lightning_callback("tensorboard:x")):
        pickle.loads(pickle.dumps(callback)).on_fit_end(trainer, None)
    assert logged == ["of the trainer", "tensorboard:x"]


def test_a_callback_logs_what_is_recorded_so_far_and_never_fails(tmp_path: Path) -> None:
    program, trace = tmp_path / "train.py", tmp_path / "trace.sqlite"
    program.write_text(PROGRAM)
    arguments = (sys.executable, program, tmp_path)
    alone = command.python(str(program), str(tmp_path))
    assert (alone.out, alone.err) == ("trained on\n", "")
    ran = command.gputrace("record", "--backend", "host", "-o", trace, "--", *arguments)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "gputrace/step_ms 0"
    assert lines[-3:] == ["gputrace/verdict", "gputrace/report", "trained on"]
    assert "gputrace: not logged: OSError: the tracker is gone" in ran.err
    assert len(gputrace.open(trace).analyze().step_list) >= 11
