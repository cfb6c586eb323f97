"""Change over the run: steps that grow, jump or have two sizes; and none where there is noise."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from gputrace.analyzers.findings.growing_steps import find_drift
from tests.helpers.examples import few
from tests.helpers.exports import STEP, global_id
from tests.helpers.handmade import MS, US, Run, analyze

RANGES: Final = "GPUTRACE_HOST_RANGE"
COUNTERS: Final = "GPUTRACE_HOST_COUNTER"


def noise(seed: int, count: int) -> NDArray[np.float64]:
    """Lengths about 20 ms: scatter, a pace that wanders, hiccups and the tail of a warm-up."""
    draw = np.random.default_rng(seed)
    lengths = 20 * MS * draw.lognormal(0, draw.uniform(0, 0.15), count)
    shocks = draw.normal(0, 0.008, count - 1).tolist()
    pace = list(accumulate(shocks, lambda before, shock: 0.95 * before + shock, initial=0.0))
    lengths *= 1 + np.array(pace)
    lengths[draw.random(count) < 0.03] *= draw.uniform(2, 10)
    if draw.random() < 0.5:
        lengths *= 1 + 0.5 * np.exp(-np.arange(count) / draw.uniform(2, count / 8))
    return lengths


@pytest.mark.parametrize("count", [40, 60, 200, 3_000])
def test_noise_is_no_drift(count: int) -> None:
    found = [find_drift(noise(seed, count), {}) for seed in range(250)]
    assert sum(drift is not None for drift in found) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_growth_is_found_through_noise(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, factor = int(draw.integers(60, 400)), draw.uniform(1.8, 4)
    steps = 10 * MS * np.linspace(1, factor, count)
    lengths = steps * draw.lognormal(0, 0.08, count)
    lengths[draw.random(count) < 0.03] *= 5
    drift = find_drift(lengths, {"launch": lengths - 10 * MS, "compute": np.full(count, 10 * MS)})
    assert drift is not None
    assert drift.shape == "grow"
    assert drift.from_ns == pytest.approx(10 * MS, rel=0.15)
    assert drift.to_ns == pytest.approx(factor * 10 * MS, rel=0.1)
    assert [name for name, _ in drift.grew] == ["launch"]


@pytest.mark.parametrize("seed", range(20))
def test_a_jump_is_found_with_the_step_it_comes_at(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(60, 400))
    since = int(count * draw.uniform(0.25, 0.75))
    lengths = 10 * MS * draw.lognormal(0, 0.05, count)
    lengths[since:] *= 1.6
    drift = find_drift(lengths, {})
    assert drift is not None
    assert (drift.shape, drift.since) == ("jump", since)
    assert drift.from_ns == pytest.approx(10 * MS, rel=0.05)
    assert drift.to_ns == pytest.approx(16 * MS, rel=0.05)


@pytest.mark.parametrize("pattern", [[10, 16], [10, 10, 10, 16], [10, 16, 16]])
def test_two_sizes_are_no_jump(pattern: list[int]) -> None:
    lengths = (
        np.array(pattern * 30) * MS * np.random.default_rng(1).lognormal(0, 0.03, 30 * len(pattern))
    )
    drift = find_drift(lengths, {})
    assert drift is not None
    assert drift.shape == "two sizes"
    assert (drift.from_ns / MS, drift.to_ns / MS) == pytest.approx((10, 16), rel=0.03)


@pytest.mark.parametrize("length", [0, 10 * MS])
def test_equal_steps_do_not_change(length: float) -> None:
    assert find_drift(np.full(100, length), {}) is None


def test_steps_that_become_shorter_are_not_told() -> None:
    assert find_drift(np.linspace(30, 10, 100) * MS, {}) is None


def test_a_queue_of_batches_that_runs_empty_is_no_jump() -> None:
    assert find_drift([10 * MS] * 10 + [20 * MS] * 90, {}) is None


def test_a_slow_stretch_that_ends_is_no_jump() -> None:
    lengths = np.full(200, 10 * MS)
    lengths[80:120] *= 2
    assert find_drift(lengths, {}) is None


class Grower(Run):
    """A loop of 100 steps of about 5 ms, one part of which grows by a factor, by chance more or
    less; what the process holds is counted now and then.
    """

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.kind, self._draw = kind, np.random.default_rng(seed)
        self.grown = int(self._draw.integers(4, 12)) * US * 1_000
        self.export.rows["GPUTRACE_META"] = []
        self.export.give("GPUTRACE_META", "name", "value")
        self.export.give(RANGES, "start", "end", "globalTid", "nameId", "kind")
        self.export.give(COUNTERS, "start", "end", "globalTid", "nameId", "value")
        for number in range(100):
            begin = self.now
            self._step(number / 99)
            name = self.export.string("gputrace.step")
            row = {"globalTid": global_id(100, thread=100), "nameId": name, "step": number}
            self.export.add(STEP, start=begin, end=self.now, **row)
            if not number % 20 or number == 99:
                self._count(number)

    def _step(self, part: float) -> None:
        extra = int(part * self.grown * self._draw.uniform(0.9, 1.1))
        self._spend(MS // 2 + extra * (self.kind == "data-feeding"), "next batch", 1)
        self.input_copy()
        base, longer = 50 * US, extra // 20
        for index in range(40):
            # Longer inputs lengthen products, a lower clock everything.
            alike = self.kind == "clock" or (self.kind == "inputs" and index % 2)
            more = {"clock": longer // 2, "inputs": longer}.get(self.kind, 0) if alike else 0
            self.kernel(base + more, f"void at::native::layer_{index % 10}")
        for _ in range(extra // (100 * US) if self.kind == "kernels" else 0):
            self.kernel(95 * US, "void at::native::layer_1")
        if self.kind == "communication-exposed":
            self.kernel(100 * US + extra, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
        self.synchronize()
        for _ in range(extra // MS if self.kind == "host-work" else 0):
            self.wait_at("train.py:12 log")
        self.optimizer()
        self.synchronize()
        if self.kind == "garbage-collection":
            self._spend(extra, "generation 2", 3)

    def _spend(self, nanoseconds: int, name: str, kind: int) -> None:
        row = {"globalTid": global_id(100, thread=100), "nameId": self.export.string(name)}
        self.export.add(RANGES, start=self.now, end=self.now + nanoseconds, kind=kind, **row)
        self.wait(nanoseconds)

    def _count(self, step: int) -> None:
        held = {"process on core": 1, "on core": MS, "open files": 10}
        held |= {"Python blocks": 10**6 + 30_000 * step * (self.kind == "garbage-collection")}
        for name, value in held.items():
            who = {"globalTid": global_id(100, thread=100), "nameId": self.export.string(name)}
            self.export.add(COUNTERS, start=self.now - MS, end=self.now, value=value, **who)


@pytest.mark.parametrize("seed", range(few(3)))
@pytest.mark.parametrize(
    ("kind", "row", "detail"),
    [
        ("inputs", "compute", "as with longer inputs"),
        ("clock", "compute", "as with a lower clock"),
        ("kernels", "compute", "kernels instead of"),
        ("communication-exposed", "communication-exposed", "transfer"),
        ("data-feeding", "data-feeding", "waiting for the next batch"),
        ("host-work", "host-work", "the host is at train.py:12 log for"),
        ("garbage-collection", "garbage-collection", "Python's objects grow from 1,000,000 to"),
    ],
)
def test_the_row_that_grows_is_named(
    kind: str, row: str, detail: str, seed: int, tmp_path: Path
) -> None:
    run = Grower(kind, seed)
    (found,) = (one for one in analyze(run, tmp_path).findings if one.id == "steps-grow")
    assert found.evidence["row"] == row
    assert detail in "; ".join(found.details)
    assert found.evidence["row_ns"] == pytest.approx(0.8 * run.grown, rel=0.2)
    assert ("open files" in "; ".join(found.details)) is False
