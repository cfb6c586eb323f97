"""Memory by the events of PyTorch's profiler: who holds it at the peak, and its curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.timeline_model import full_scene
from gputrace.api import Report
from gputrace.readers.registry import open_trace

MB: Final = 1 << 20
TRAINS, BACKWARD = 4242, 4243
WEIGHTS: Final = 3 * MB


class Profile:
    """A training step in microseconds: forward to 40, backward to 80, the optimizer to 100."""

    def __init__(self, stacks: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self.held, self.at = WEIGHTS, dict[str, tuple[int, int]]()
        self._call("kernel", "gemm", 0, 100, pid=0, tid=7)
        if stacks:
            self._call("python_function", "train.py(9): <module>", 0, 100)
            self._call("python_function", "train.py(3): forward", 5, 40)
            self._call("python_function", "torch/nn/modules/module.py(9): _call_impl", 4, 40)
        self._call("cpu_op", "aten::linear", 10, 30)
        name = "autograd::engine::evaluate_function: "
        self._call("cpu_op", f"{name}MmBackward0", 42, 60, tid=BACKWARD)
        self._call("cpu_op", f"{name}torch::autograd::AccumulateGrad", 62, 70, tid=BACKWARD)
        self._call("user_annotation", "Optimizer.step#AdamW.step", 82, 100)
        self.takes("activation", 12, 8 * MB)
        self.takes("gradient", 64, 4 * MB, BACKWARD)
        self.gives("activation", 66, BACKWARD)
        self.takes("moments", 84, 2 * MB)
        self.gives("gradient", 90)
        self.takes("activation of the next step", 101, MB)

    def _call(self, cat: str, name: str, start: int, end: int, **where: int) -> None:
        who = {"pid": TRAINS, "tid": TRAINS} | where
        args = {"device": 0, "stream": 7} if cat == "kernel" else {}
        row = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}
        self.events.append(row | who)

    def takes(self, name: str, at: int, size: int, thread: int = TRAINS) -> None:
        self.at[name] = (0x7F0000000000 + len(self.at) * 64 * MB, size)
        self._note(at, *self.at[name], thread)

    def gives(self, name: str, at: int, thread: int = TRAINS) -> None:
        address, size = self.at[name]
        self._note(at, address, -size, thread)

    def _note(self, at: int, address: int, size: int, thread: int) -> None:
        self.held += size
        args = {"Total Reserved": 32 * MB, "Total Allocated": self.held, "Bytes": size}
        args |= {"Addr": address, "Device Id": 0, "Device Type": 1, "Ev Idx": len(self.events)}
        row = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "ts": at}
        self.events.append(row | {"pid": TRAINS, "tid": thread, "args": args})

    def write(self, folder: Path) -> Path:
        path = folder / "host_4242.pt.trace.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return path


def analyzed(profile: Profile, folder: Path) -> Report:
    with gputrace.open(profile.write(folder)) as trace:
        return trace.analyze()


def test_holders_at_the_peak_are_named_by_kind_and_line(tmp_path: Path) -> None:
    (device,) = analyzed(Profile(), tmp_path).memory
    assert (device.moments[0].moment, device.moments[0].allocated_bytes) == ("peak", 15 * MB)
    assert (device.moments[0].reserved_bytes, device.moments[0].largest_free_bytes) == (
        32 * MB,
        None,
    )
    assert {row.name: row.held_bytes for row in device.kinds} == {
        "activations": 8 * MB,
        "gradients": 4 * MB,
        "unknown": WEIGHTS,
    }
    assert {row.name: row.held_bytes for row in device.lines} == {
        "train.py:3 forward": 8 * MB,
        "AccumulateGrad": 4 * MB,
        "(before the history)": WEIGHTS,
    }
    assert [row.name for row in device.modules] == ["train"]


def test_without_stacks_operators_are_named(tmp_path: Path) -> None:
    (device,) = analyzed(Profile(stacks=False), tmp_path).memory
    assert device.lines[0].name == "aten::linear"
    assert device.lines[0].kind == "activations"


def test_the_report_shows_holders_and_the_curve(tmp_path: Path) -> None:
    report = analyzed(Profile(), tmp_path)
    shown = report.render()
    assert "who holds the memory at the peak" in shown
    assert "train.py:3 forward" in shown
    assert report.utilization is not None
    (gpu,) = report.utilization.gpus
    (curve,) = (curve for curve in gpu.curves if curve.name == "memory")
    assert [round(high / MB) for high in curve.high] == [11, 15, 7, 9, 5]


def test_the_browser_draws_what_tensors_hold(tmp_path: Path) -> None:
    facts: list[Facts] = []

    class Watcher:
        def operations_read(self, operations: object) -> None: ...
        def facts_found(self, found: Facts) -> None:
            facts.append(found)

    with open_trace(Profile().write(tmp_path)) as trace:
        analysis = analyze(trace, watcher=Watcher())
        (lane,) = full_scene(facts[0], analysis).lanes
    (curve,) = lane.curves
    assert (curve.name, curve.top) == ("memoryUsed", 15 * MB)


@pytest.mark.parametrize(
    "change",
    [{"Total Allocated": "much"}, {"Device Type": 0, "Device Id": -1}, {"Device Id": None}],
)
def test_events_of_other_memory_or_without_figures_are_left_out(
    change: dict[str, Any], tmp_path: Path
) -> None:
    profile = Profile()
    for event in profile.events:
        if event["name"] == "[memory]":
            event["args"] |= change
    report = analyzed(profile, tmp_path)
    assert report.memory == ()
    assert "who holds" not in report.render()


def test_memory_beside_calls_alone_is_no_gpu_activity(tmp_path: Path) -> None:
    profile = Profile()
    profile.events = [event for event in profile.events if event.get("cat") != "kernel"]
    with open_trace(profile.write(tmp_path)) as trace:
        assert trace.no_gpu is not None
