"""Reading GPM, the counters of what the parts of a card do, from the fake library."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gputrace.collectors.nvml.log import NvmlLog, make_steady
from gputrace.collectors.nvml.queries import METRICS, NULL, ActivityReader
from gputrace.collectors.nvml.sampling import OneAtATime
from tests.collectors.nvml.test_sampling import Record, calls, library, record, scripted

__all__ = ["library", "record", "scripted"]

GPM = """
gpus 2
gpm 0 100
metric 2 95.5
metric 5 90
metric 10 17
metric 20 2
"""


def of(log: NvmlLog, column: str) -> list[float]:
    values: list[float] = log.activity[column].tolist()
    return values


@pytest.fixture
def log(record: Record) -> NvmlLog:
    """Two seconds and a half of readings."""
    return record(GPM, ticks=25, hz=10)


def test_activity_is_read_from_change_to_change_of_the_counters(log: NvmlLog) -> None:
    periods = np.array(of(log, "periodNs"))
    assert len(periods) >= 3
    # A busy machine may miss changes, but not take two for one.
    changes = periods / 100e6
    assert np.abs(changes - np.round(changes)).max() < 0.1
    starts = (log.activity["timeNs"] - log.activity["periodNs"])[1:]
    apart = (starts - log.activity["timeNs"][:-1]) / 100e6
    assert np.abs(apart - np.round(apart)).max() < 0.1


def test_values_are_in_percent_and_bytes_and_null_where_unknown(log: NvmlLog) -> None:
    known = {"smActive": 95.5, "tensorActive": 90.0, "dramActive": 17.0, "pcieTxRate": 2**21}
    for name in METRICS:
        assert set(of(log, name)) == {known.get(name, NULL)}, name


def test_only_cards_with_the_counters_have_rows(log: NvmlLog) -> None:
    assert set(of(log, "gpu")) == {0.0}
    assert log.skipped == 0


def test_an_old_driver_is_asked_once_and_everything_else_is_sampled(
    record: Record, tmp_path: Path
) -> None:
    log = record(GPM + "fail GpmQueryDeviceSupport * 13\n")
    assert len(log.activity["gpu"]) == 0
    assert log.samples["power"].max() == 250_000
    assert calls(tmp_path, "GpmQueryDeviceSupport") == 1
    assert calls(tmp_path, "GpmSampleGet") == 0


def test_a_setting_of_the_wall_clock_does_not_move_the_readings(log: NvmlLog) -> None:
    before = log.activity["timeNs"].copy()
    axis = log.clocks[0][0] - log.clocks[0][1]
    log.activity["timeNs"][2:] += 10**9
    log.activity["leadNs"][2:] += 10**9
    log.clocks[2:] = [(wall + 10**9, steady) for wall, steady in log.clocks[2:]]
    make_steady(log, axis)
    assert np.abs(log.activity["timeNs"] - before).max() < 10**6


class Costly:
    """A binding whose counters change every 100 ms, and whose answers take 2 ms of a core."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        self.asked = 0

    c_nvmlGpmMetricsGet_t = staticmethod(
        lambda: SimpleNamespace(metrics=[SimpleNamespace() for _ in METRICS])
    )
    nvmlGpmQueryDeviceSupport = staticmethod(lambda handle: SimpleNamespace(isSupportedDevice=1))
    nvmlGpmSampleAlloc = staticmethod(SimpleNamespace)

    def nvmlGpmSampleGet(self, handle: object, sample: Any) -> None:
        sample.change = time.monotonic_ns() // 100_000_000

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        self.asked += 1
        end = time.thread_time_ns() + 2_000_000
        while time.thread_time_ns() < end:
            pass
        changed = asked.sample1.change < asked.sample2.change
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn, metric.value = 0, 1.0 if changed else math.nan


def test_reading_pauses_for_as_long_as_its_share_of_a_core_asks_for() -> None:
    costly = Costly()
    reader = ActivityReader(costly, None, share=0.01)
    reader.start()
    time.sleep(2)
    first = costly.asked
    # Ten changes cost some 100 ms of a core, which is one percent of ten seconds.
    time.sleep(1)
    reader.ending.set()
    reader.join(5)
    assert not reader.is_alive()
    assert costly.asked == first > 10


def test_threads_call_the_library_in_turn() -> None:
    """As the readers of two cards do, and the thread that samples both."""
    inside, most = 0, 0

    def read(*_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)
        inside -= 1

    binding = SimpleNamespace(nvmlGpmSampleGet=read, nvmlDeviceGetFieldValues=read, c_type=int)
    nv = OneAtATime(binding)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            pool.submit(nv.nvmlGpmSampleGet, 0, 1)
            pool.submit(nv.nvmlDeviceGetFieldValues, 0)
    assert most == 1
    assert nv.c_type is int
    assert not hasattr(nv, "nvmlOfANewerBinding")
