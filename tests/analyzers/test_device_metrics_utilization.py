"""Curves of the whole run: bounded in points, exact in what they keep."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.device_metrics import MOST_POINTS, find_utilization
from gputrace.model.cards import Curve, GpuCurves
from gputrace.model.nvml import Nvml, Samples
from gputrace.model.options import Window
from tests.helpers.per_gpu import no_gpus
from tests.synthetic import Plan, simulate, write_nsys, write_nvml


def sampled(times: list[int], powers: list[float]) -> Nvml:
    order = np.argsort(times, kind="stable")
    zeros = np.zeros(len(times), np.int64)
    values = {"power": np.array(powers, np.float64)[order]}
    return Nvml(samples=Samples(np.array(times, np.int64)[order], zeros, zeros, values))


def power(nvml: Nvml, window: Window | None = None) -> Curve:
    found = find_utilization(nvml, no_gpus(), window)
    assert found is not None
    return named(found.gpus[0], "power")


def named(gpu: GpuCurves, name: str) -> Curve:
    return next(curve for curve in gpu.curves if curve.name == name)


@given(
    count=st.integers(MOST_POINTS + 1, 3 * MOST_POINTS),
    span=st.sampled_from([10, 1_000, 10**12]),
    draw=st.randoms(use_true_random=False),
)
def test_many_samples_keep_their_extremes_and_their_mean(
    count: int, span: int, draw: Random
) -> None:
    # Numbers drawn one by one from strategies would take most of the time.
    source = Random(draw.getrandbits(32))
    times = [source.randint(0, span) for _ in range(count)]
    watts = [float(source.randint(0, 10**6)) for _ in range(count)]
    curve = power(sampled(times, [watt * 1000 for watt in watts]))
    assert len(curve.time_ns) == len(curve.low) == len(curve.mean) == len(curve.high)
    assert 0 < len(curve.time_ns) <= MOST_POINTS
    assert (min(curve.low), max(curve.high)) == (min(watts), max(watts))
    spread = zip(curve.low, curve.mean, curve.high, strict=True)
    assert all(low - 0.01 <= mean <= high + 0.01 for low, mean, high in spread)
    assert list(curve.time_ns) == sorted(set(curve.time_ns))


def test_few_samples_are_points_as_they_are() -> None:
    curve = power(sampled([10, 30, 70], [1000.0, 5000.0, 2000.0]))
    assert curve == Curve("power", "W", (10, 30, 70), *[(1.0, 5.0, 2.0)] * 3)


def test_what_was_not_sampled_has_no_curve() -> None:
    found = find_utilization(sampled([1, 2], [1.0, 2.0]), no_gpus())
    assert found is not None
    assert [curve.name for curve in found.gpus[0].curves] == ["power"]
    assert find_utilization(Nvml(), no_gpus()) is None


def test_only_the_window_is_shown() -> None:
    curve = power(sampled([10, 30, 70], [1000.0, 5000.0, 2000.0]), Window(20, 70))
    assert curve.time_ns == (30,)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path, recording = tmp_path / "run.sqlite", simulate(Plan(steps=12, ranks=2, allreduces=2))
    write_nsys(recording, path)
    write_nvml(recording, path, every_ns=500_000)
    return path


def test_the_busy_share_is_that_of_the_breakdown(path: Path) -> None:
    with gputrace.open(path) as trace:
        report = trace.analyze()
    use = report.utilization
    assert use is not None
    for gpu, total in zip(use.gpus, report.gpus, strict=True):
        busy = named(gpu, "busy")
        assert len(busy.mean) == MOST_POINTS
        share = (total.span_ns - total.idle_ns) / (use.end_ns - use.start_ns)
        assert np.mean(busy.mean) == pytest.approx(100 * share, abs=0.1)


def test_the_json_has_the_curves_of_each_card(path: Path) -> None:
    with gputrace.open(path) as trace:
        found = json.loads(trace.analyze().render("json"))["utilization"]
    assert [(gpu["gpu"], gpu["rank"], gpu["name"]) for gpu in found["gpus"]] == [
        (0, 0, "NVIDIA H200"), (1, 1, "NVIDIA H200")
    ]  # fmt: skip
    curves = found["gpus"][1]["curves"]
    assert [curve["name"] for curve in curves] == [
        "busy", "utilization", "memory", "power", "sm_clock", "memory_clock", "temperature"
    ]  # fmt: skip
    assert all(len(curve["mean"]) <= MOST_POINTS for curve in curves)
    clock = curves[4]
    assert (min(clock["low"]), max(clock["high"]), clock["unit"]) == (345, 1980, "MHz")


def test_without_samples_the_busy_share_stands_alone(tmp_path: Path) -> None:
    write_nsys(simulate(Plan(steps=6)), tmp_path / "t")
    with gputrace.open(tmp_path / "t") as trace:
        use = trace.analyze().utilization
    assert use is not None
    assert [curve.name for curve in use.gpus[0].curves] == ["busy"]
