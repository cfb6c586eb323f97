"""Kernels of sketches: slow cards and grown families that were planted, and healthy runs.

In each window every rank runs the same kernels, with times that differ by a few per cent from card
to card and from window to window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.analyzers.sketches import (
    Windows,
    classify,
    compare_cards,
    grown_kernels,
    kernel_times,
    read_windows,
    report_sketches,
    slow_cards,
)
from gputrace.model.sketches import CardSpeed, Slowdown
from gputrace.store.sketches import (
    COLLECTIVE,
    FAMILY,
    KERNEL,
    KERNELS,
    STEP,
    RankSketch,
    SketchWriter,
    Steps,
)
from tests.analyzers.test_sketches import train
from tests.helpers import command

RUNS: Final = 20
STEP_NS: Final = 50_000_000
NAMES: Final = ("gemm", "attention", "elementwise", "communication", "AllReduce", *"abcdefgh")
"""Families, a collective, and the kernels that are compared, the first half of them of `gemm`."""


def train_nothing() -> Steps:
    """Returns no steps."""
    return np.zeros(0, STEP)


def windows(
    seed: int,
    *,
    cards: Sequence[str] = ("0", "1", "2", "3"),
    slow: Mapping[str, float] | None = None,
    since: int = 0,
    grown: tuple[str, Sequence[int], float] | None = None,
    late: int | None = None,
    count: int = 12,
    program: int | None = None,
) -> list[RankSketch]:
    """Returns ranks with a window every 1,000 steps.

    Plants: ``slow`` has the share by which a card's kernels take longer from a window on; ``grown``
    a family, its ranks, and the share of a step that it takes more from the half on; the ``late``
    rank does not wait in its collective, in which the others do. Runs of one ``program`` have the
    same kernels.
    """
    random, drawn = np.random.default_rng(seed), []
    usual = np.random.default_rng(seed if program is None else program).uniform(0.5e6, 3e6, 8)
    for rank, card in enumerate(cards):
        own, rows = random.normal(1, 0.007), []
        for at in range(count):
            pace = own * random.normal(1, 0.004)
            if slow is not None and at >= since:
                pace *= 1 + slow.get(card, 0)
            each = usual * pace * random.normal(1, 0.01, 8)
            of = {
                "gemm": each[:4].sum(),
                "attention": each[4:6].sum(),
                "elementwise": each[6:].sum(),
            }
            wait = 0 if late == rank else 8e6 if late is not None else random.uniform(0, 4e6)
            of["communication"] = of["AllReduce"] = 5e6 * random.normal(1, 0.02) + wait
            if grown is not None and rank in grown[1] and at >= count // 2:
                of[grown[0]] += grown[2] * STEP_NS
            for number, name in enumerate(NAMES, 1):
                kind = COLLECTIVE if name == "AllReduce" else FAMILY if name in of else KERNEL
                ns = of[name] if name in of else each[number - 6]
                rows.append((1000 * at, 3, kind, number, 30, round(ns / 10), round(3 * ns)))
        kernels = np.array(rows, KERNELS)
        drawn.append(
            RankSketch(
                *("job", rank, f"node{int(card) // 8}", rank, 0, 12_000),
                load=train_nothing,
                lines=NAMES,
                load_kernels=partial(np.copy, kernels),
                gpu=f"GPU-{card}",
                card="H200",
            )
        )
    return drawn


def changes(seed: int, **plant: object) -> list[Slowdown]:
    read = read_windows(windows(seed, **plant))  # type: ignore[arg-type]
    return [*slow_cards(read, STEP_NS), *grown_kernels(read, STEP_NS)]


def test_healthy_runs_have_no_slow_card_and_no_grown_kernels() -> None:
    for seed in range(RUNS):
        cards = [str(n) for n in range((1, 2, 4, 8)[seed % 4])]
        late = 0 if seed % 5 == 4 and len(cards) > 1 else None
        assert changes(seed, cards=cards, late=late, count=3 + seed) == []


def test_a_slow_card_is_named_with_how_much_and_since_when() -> None:
    right = []
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        cards = [str(n) for n in range((2, 3, 4, 8)[seed % 4])]
        rank, since, share = int(random.integers(len(cards))), seed % 5, random.uniform(0.08, 0.4)
        found = changes(seed, cards=cards, slow={str(rank): share}, since=since)
        right.append(
            [(each.kind, each.rank, each.since_step) for each in found if each.kind == "slow-card"]
            == [("slow-card", rank, 1000 * since)]
        )
    assert sum(right) >= RUNS - 1


def test_a_family_that_grew_is_named_with_its_rank_or_for_all() -> None:
    right = []
    for seed in range(RUNS):
        name, ranks = ("gemm", "attention")[seed % 2], (range(4), (seed % 4,))[seed // 2 % 2]
        found = changes(seed, grown=(name, ranks, 0.1 + 0.02 * seed))
        grown = [(each.part, each.rank, each.since_step) for each in found]
        right.append(grown == [(name, ranks[0] if len(ranks) == 1 else None, 6000)])
    assert sum(right) >= RUNS - 1


def test_a_collective_has_grown_only_where_no_rank_is_waited_for() -> None:
    (slower,) = changes(1, grown=("AllReduce", range(4), 0.2))
    assert (slower.part, slower.rank) == ("AllReduce", None)
    assert "AllReduce kernels take" in slower.message
    assert changes(1, grown=("AllReduce", (0, 1, 3), 0.2)) == []


def test_ranks_with_other_kernels_or_other_cards_are_not_compared() -> None:
    ranks = windows(2, slow={"1": 0.5})
    others = [*ranks[:1], replace(ranks[1], lines=[*NAMES[:5], *"ijklmnop"])]
    assert list(slow_cards(read_windows(others), STEP_NS)) == []
    others = [*ranks[:1], replace(ranks[1], card="H100")]
    assert list(slow_cards(read_windows(others), STEP_NS)) == []


def test_times_of_families_and_collectives_are_those_of_a_step() -> None:
    times = {row.name: row for row in kernel_times(read_windows(windows(3, slow={"2": 0.3})))}
    assert times.keys() == set(NAMES[:5])
    assert {row.kind for row in times.values()} == {"family", "collective"}
    assert (times["gemm"].count, times["gemm"].most_rank) == (10, 2)
    assert times["gemm"].most_ns > 1.2 * times["gemm"].ns
    assert abs(times["gemm"].first_ns / times["gemm"].ns - 1) < 0.05


def weeks(seed: int, slow: Mapping[str, float]) -> list[CardSpeed]:
    """Compares cards over eight runs of 8 to 16 of 32 cards of four nodes."""
    random = np.random.default_rng(seed)
    runs: list[Windows] = []
    for run in range(8):
        cards = random.choice(32, int(random.integers(8, 17)), replace=False)
        cards[0] = 5 if run % 2 == 0 and 5 not in cards else cards[0]
        where = list(map(str, cards.tolist()))
        runs.append(read_windows(windows(100 * seed + run, cards=where, slow=slow, count=4)))
    return compare_cards(runs)


def test_a_card_that_is_always_slow_is_named_and_no_healthy_one() -> None:
    right = []
    for seed in range(RUNS):
        planted = {"5": 0.05 + 0.01 * seed}
        right.append([row.gpu for row in weeks(seed, planted) if row.message] == ["GPU-5"])
        assert [row for row in weeks(seed, {}) if row.message] == []
    assert sum(right) >= RUNS - 1


def test_cards_that_train_alone_are_compared_by_the_same_kernels() -> None:
    """As in a search for parameters, where each run has one card."""
    planted = {"3": 0.1}
    alone = [windows(n, cards=[str(n % 8)], slow=planted, program=7)[0] for n in range(40)]
    cards = compare_cards([read_windows(alone)])
    assert [(row.gpu, row.runs) for row in cards if row.message] == [("GPU-3", 5)]


def test_cards_of_a_slow_node_come_first() -> None:
    slow = {str(n): 0.12 for n in range(8, 16)}
    runs = [
        read_windows(windows(n, cards=[str(c) for c in range(32)], slow=slow)) for n in range(3)
    ]
    cards = compare_cards(runs)
    assert [row.host for row in cards[:8]] == ["node1"] * 8
    assert all("of node1 is always slow" in row.message for row in cards[:8])
    assert not any(row.message for row in cards[8:])


def test_runs_are_told_apart_and_cards_only_where_there_are_several() -> None:
    one = [replace(rank, load=steps.load) for rank, steps in zip(windows(4), train(4), strict=True)]
    assert report_sketches(one).cards == ()
    report = report_sketches([*one, *(replace(rank, job="b") for rank in one)])
    assert {row.job for row in report.kernels} == {"job", "b"}
    assert [row.runs for row in report.cards] == [2, 2, 2, 2]


def test_names_are_classified_as_by_the_analyzers() -> None:
    assert classify("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)") == ("communication", "AllReduce")
    assert classify("void sgemm_128x64(float*)")[0] == "gemm"


def test_the_folders_of_several_runs_of_one_name_say_which_card_is_always_slow(
    tmp_path: Path,
) -> None:
    for run in range(3):
        folder = tmp_path / str(run)
        folder.mkdir()
        for rank in windows(run, slow={"2": 0.1}):
            about = {"job": "train", "rank": rank.rank, "host": rank.host, "pid": rank.pid}
            writer = SketchWriter(folder, about)
            assert [writer.number(name) for name in NAMES][-1] == len(NAMES)
            writer.append(train(run)[rank.rank].load())
            writer.append_kernels(rank.load_kernels(), rank.gpu, rank.card)
    shown = command.gputrace("analyze", *(tmp_path / str(run) for run in range(3)))
    assert "H200 GPU-2 of node0 is always slow: the same kernels take" in shown.out
    assert shown.out.count("has a slow card: its kernels take") == 3
    assert re.search(r"node0 +GPU-2 +H200 +3 +3 +1\.\d\d\d", shown.out)
    assert re.search(r"gemm +10 +\S+ ms +\S+ ms +\S+ ms \(rank 2\)", shown.out)


def test_kernels_of_nonsense_end_in_an_answer() -> None:
    steps = train(5, ranks=1)[0].load
    for seed in range(RUNS):
        raw = np.random.default_rng(seed).bytes(KERNELS.itemsize * 60)
        rows = [np.frombuffer(raw, KERNELS), np.frombuffer(raw[::-1], KERNELS)]
        ranks = [
            replace(rank, load_kernels=partial(np.copy, each), load=steps)
            for rank, each in zip(windows(5, cards=("0", "1")), rows, strict=True)
        ]
        report_sketches(ranks)
