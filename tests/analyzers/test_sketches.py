"""Late ranks and changes by sketches: runs in lockstep with planted faults, and healthy ones.

In each step a rank loads, collects garbage now and then, and passes a batch forward; then all wait
for the last of them. Rank 0 saves a checkpoint in some steps, and a loader starts anew in others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import pytest

from gputrace.analyzers.sketches import find_changes, report_sketches
from gputrace.model.sketches import Slowdown
from gputrace.report import Limits
from gputrace.report.sketches import document
from gputrace.store.sketches import STEP, RankSketch, Steps

RUNS: Final = 20
FORWARD: Final = ("forward", "rest")
"""What a slow forward pass may be called: its end is late, by whatever came before."""


def train(
    seed: int,
    *,
    ranks: int = 4,
    steps: int = 500,
    hosts: int = 1,
    late: tuple[str, int, int, float] | None = None,
    change: tuple[str, int, float] | None = None,
    drift: tuple[str, float] | None = None,
) -> list[RankSketch]:
    """Returns the sketches of a run.

    Plants: ``late`` is a part, a rank, a first step and a share of the step; ``change`` a part, a
    first step and a share; ``drift`` a part and the share that it has grown by at the end.
    """
    random = np.random.default_rng(seed)
    step, noise = random.uniform(15e6, 300e6), random.uniform(0.01, 0.08)
    rows = np.zeros((ranks, steps), STEP)
    now = np.full(ranks, 1.7e18)
    for k in range(steps):
        usual = {"data": random.uniform(0.01, 0.2), "forward": 0.3, "optimizer": 0.1, "rest": 0.1}
        part = {name: s * step * random.lognormal(0, noise, ranks) for name, s in usual.items()}
        part |= {"gc": np.zeros(ranks), "checkpoint": np.zeros(ranks)}
        part["forward"] *= 20 if k < 5 else 1
        part["data"] += 3 * step * (k % 97 == 0)
        part["gc"][random.integers(ranks)] += 0.3 * step * (random.random() < 0.02)
        part["checkpoint"][0] += 4 * step * (k % 200 == 199)
        if late is not None and k >= late[2]:
            part[late[0]][late[1]] += late[3] * step
        if change is not None and k >= change[1]:
            part[change[0]] += change[2] * step
        if drift is not None:
            part[drift[0]] += drift[1] * step * k / steps
        passed = now + part["data"] + part["gc"] + part["forward"]
        met = passed.max() + 0.4 * step * random.lognormal(0, noise)
        end = met + part["optimizer"] + part["rest"] + part["checkpoint"]
        for name in ("data", "gc", "forward", "optimizer", "checkpoint"):
            rows[name][:, k] = part[name]
        rows["backward"][:, k], rows["forward_end"][:, k] = met - passed, passed
        rows["length"][:, k], rows["end"][:, k], rows["step"][:, k] = end - now, end, k
        now = end
    return [sketch(n, rows[n], f"node{n * hosts // ranks}") for n in range(ranks)]


def sketch(rank: int, steps: Steps, host: str = "node0", lines: Sequence[str] = ()) -> RankSketch:
    first, last = int(steps["step"][0]), int(steps["step"][-1])
    return RankSketch("job", rank, host, rank, first, last, partial(np.copy, steps), lines)


def test_healthy_runs_have_no_late_rank_and_no_change() -> None:
    for seed in range(RUNS):
        ranks, steps = (1, 2, 4, 8)[seed % 4], 100 + 40 * seed
        assert find_changes(train(seed, ranks=ranks, steps=steps, hosts=1 + seed % 2)) == []


def test_a_late_rank_is_named_with_its_part_and_since_when() -> None:
    right = []
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        ranks, part = (2, 4, 8)[seed % 3], ("data", "gc", "forward", "rest")[seed % 4]
        rank, since, share = int(random.integers(ranks)), int(random.integers(200)), 0.08
        share += 0.4 * random.random()
        found = find_changes(train(seed, ranks=ranks, late=(part, rank, since, share)))
        late = [change for change in found if change.kind == "late-rank"]
        right.append(
            [change.rank for change in late] == [rank]
            and (late[0].part == part or {part, late[0].part} == {*FORWARD})
            and abs(late[0].since_step - since) < 60
        )
    assert sum(right) >= RUNS - 1


def run_ahead(seed: int, ranks: int = 2, steps: int = 500) -> list[RankSketch]:
    """Returns sketches of hosts that are up to two steps ahead of their GPUs, and wait for nobody
    within that: for long, one is before the other.
    """
    random, step = np.random.default_rng(seed), 30e6
    rows, now = np.zeros((ranks, steps), STEP), np.full(ranks, 1.7e18)
    for k in range(steps):
        began = now
        now = now + step * random.lognormal(0, 0.15, ranks)
        now = np.maximum(now, now.max() - 1.5 * step)
        rows["backward"][:, k], rows["optimizer"][:, k] = 0.6 * (now - began), 0.05 * step
        rows["length"][:, k], rows["end"][:, k], rows["step"][:, k] = now - began, now, k
    return [sketch(n, rows[n]) for n in range(ranks)]


def test_hosts_that_run_ahead_of_their_gpus_are_late_for_nobody() -> None:
    found = [change for seed in range(RUNS) for change in find_changes(run_ahead(seed))]
    assert [change for change in found if change.kind == "late-rank"] == []


def only(found: Sequence[Slowdown]) -> Slowdown:
    (change,) = found
    return change


@pytest.mark.parametrize("part", ["data", "gc", "forward", "rest"])
def test_steps_that_become_longer_at_once_are_a_shift(part: str) -> None:
    for seed in range(RUNS // 4):
        since = 100 + 50 * seed
        found = only(find_changes(train(seed, change=(part, since, 0.15 + 0.2 * seed))))
        assert (found.kind, found.part, found.rank) == ("shift", part, None)
        assert abs(found.since_step - since) < 40


@pytest.mark.parametrize("part", ["data", "gc", "rest"])
def test_steps_that_grow_little_by_little_are_a_drift(part: str) -> None:
    for seed in range(RUNS // 4):
        found = only(find_changes(train(seed, drift=(part, 0.25 + 0.2 * seed))))
        assert (found.kind, found.part) == ("drift", part)


def test_a_rank_that_works_at_a_line_while_the_others_wait_is_late() -> None:
    """As before a barrier: all steps end together, and no part of them is known."""
    lines, held = ["a.py:7 log", "a.py:9 wait"], []
    for rank in range(4):
        rows = np.zeros(300, STEP)
        rows["step"], rows["length"] = np.arange(300), 50_000_000
        rows["end"] = np.cumsum(rows["length"]) + 10**18
        rows["line"] = np.where(np.arange(300) % 5 < 3, 1 if rank == 2 else 2, 2)
        held.append(sketch(rank, rows, lines=lines))
    found = only(find_changes(held))
    assert (found.rank, found.line, found.part) == (2, "a.py:7 log", "rest")
    assert found.ns == pytest.approx(0.6 * 50_000_000, rel=0.05)
    assert find_changes(held[:2]) == []


def test_steps_that_nobody_looked_at_are_left_out() -> None:
    whole = train(1, late=("data", 1, 0, 0.3))
    gaps = [
        sketch(rank.rank, np.delete(rank.load(), slice(100 + rank.rank, 160)), rank.host)
        for rank in whole
    ]
    assert only(find_changes(gaps)).rank == 1


def test_jobs_are_judged_apart_and_ranks_summed_up() -> None:
    ranks = train(3, ranks=2)
    other = [RankSketch("b", r.rank, r.host, 9 + r.rank, r.first, r.last, r.load) for r in ranks]
    report = report_sketches([*ranks, *other])
    assert [(row.job, row.rank, row.steps) for row in report.ranks] == [
        *(("job", 0, 500), ("job", 1, 500), ("b", 0, 500), ("b", 1, 500)),
    ]
    middle = float(np.median(ranks[0].load()["length"][10:]))
    assert report.ranks[0].median_ns == pytest.approx(middle, rel=1e-6)
    assert report.changes == ()


def test_a_rank_that_always_waits_for_data_is_named_though_no_step_became_slower() -> None:
    head = document(report_sketches(train(3, change=("data", 0, 2.0))), Limits()).head
    first, then = (line.text for line in head)
    assert re.match(
        r"Rank \d waits for data 7\d% of the time \([\d.]+ of [\d.]+ ms a step\)\.", first
    )
    assert then == "No rank is late, and no step became slower."


def test_sketches_of_nonsense_end_in_an_answer() -> None:
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        raw = random.bytes(STEP.itemsize * 300)
        rows = [np.frombuffer(raw, STEP), np.frombuffer(raw[::-1], STEP)]
        report_sketches([sketch(rank, each, lines=["a"]) for rank, each in enumerate(rows)])
