"""Completeness of recordings: rows that lack their counterpart, and what is said of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import numpy as np
import pytest

from gputrace.analyzers.audit import _lone_collectives
from gputrace.analyzers.collectives import Collectives, RankGroup
from gputrace.analyzers.gpu_shards import PerGpu
from gputrace.api import Report
from gputrace.model.intervals import union
from tests.helpers import lookups, recordings
from tests.helpers.examples import few
from tests.helpers.exports import Export
from tests.helpers.handmade import Run, analyze, train
from tests.helpers.sentences import words_of
from tests.synthetic import PLANTS, planted
from tests.synthetic.lost_rows import LOSSES, Loss, lose

RUNS: Final = (1, 6)
"""Seeds of generated runs."""
PLANT: Final = PLANTS[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Path], Path]:
    made: dict[int, bytes] = {}

    def copy(seed: int, folder: Path) -> Path:
        if seed not in made:
            path = tmp_path_factory.mktemp("whole") / "run.sqlite"
            PLANT.write(planted(PLANT, seed), path)
            made[seed] = path.read_bytes()
        (folder / "run.sqlite").write_bytes(made[seed])
        return folder / "run.sqlite"

    return copy


@pytest.mark.parametrize("seed", RUNS)
def test_a_whole_recording_lacks_nothing(
    seed: int, whole: Callable[[int, Path], Path], tmp_path: Path
) -> None:
    report = lookups.analyze(whole(seed, tmp_path))
    assert report.missing == ()
    assert "lost-records" not in {finding.id for finding in report.findings}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("seed", RUNS[: few(1)])
def test_two_per_cent_of_the_rows_are_missed(
    seed: int, loss: Loss, whole: Callable[[int, Path], Path], tmp_path: Path
) -> None:
    path = whole(seed, tmp_path)
    lose(path, loss, 0.02, random.Random(seed))
    report = lookups.analyze(path)
    assert report.missing
    assert 0.01 <= report.missing[0].share <= 0.04
    assert report.missing[0].gpu is not None
    (finding,) = (finding for finding in report.findings if finding.id == "lost-records")
    assert finding.severity == "low"
    assert str(report.missing[0]) in words_of(finding)


def test_without_a_fifth_of_the_operations_no_verdict_is_given(
    whole: Callable[[int, Path], Path], tmp_path: Path
) -> None:
    path = whole(RUNS[0], tmp_path)
    lose(path, LOSSES[0], 0.2, random.Random(1))
    report = lookups.analyze(path)
    assert report.findings[0].id == "lost-records"
    assert report.findings[0].severity == "high"
    first = report.render("text").splitlines()[0]
    assert first.startswith("No verdict is possible: the recording lacks 2")


def test_memsets_of_nothing_lack_nothing(tmp_path: Path) -> None:
    """They return at once, without an operation; others of the name have one."""
    run = Run()
    train(run, 30)
    for number, row in enumerate(run.export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][::3]):
        at = int(str(row["start"])) + 10
        again = {**row, "start": at, "end": at + 100, "correlationId": 1_000_000 + number}
        run.export.add("CUPTI_ACTIVITY_KIND_RUNTIME", **again)
    assert analyze(run, tmp_path).missing == ()


def test_collectives_that_the_other_ranks_have_are_missed() -> None:
    collectives = _all_reduces(ranks=4, count=60)
    whole = tuple(_lone_collectives(*collectives(lost=())))
    assert whole == ()
    (part,) = _lone_collectives(*collectives(lost=(20, 21, 33)))
    assert (part.rows, part.rank, part.gpu, part.count) == ("collectives", 2, 2, 3)
    assert part.share == pytest.approx(3 / 60)


def test_collectives_at_the_edges_are_not_missed() -> None:
    """A rank whose recording begins later or ends earlier lacks none."""
    collectives = _all_reduces(ranks=4, count=60)
    assert not tuple(_lone_collectives(*collectives(lost=(0, 1, 2, 58, 59))))


def test_a_communicator_of_fewer_ranks_is_none_that_lacks_one() -> None:
    collectives = _all_reduces(ranks=4, count=60)
    assert not tuple(_lone_collectives(*collectives(lost=range(1, 59, 2))))


@pytest.mark.parametrize("late", ["CUPTI", "CUPTI_ACTIVITY_KIND_RUNTIME", "KERNEL|MEMCPY"])
def test_a_recording_that_begins_late_lacks_nothing(late: str, tmp_path: Path) -> None:
    """The GPU is still at what it was given before the calls, or is recorded after them."""
    run = Run()
    train(run, 30)
    export = Export()
    cut = sorted(int(str(row["start"])) for row in run.export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"])[
        300
    ]
    for table, rows in run.export.rows.items():
        for row in rows:
            is_late = re.search(late, table) is not None
            if not is_late or int(str(row["start"])) >= cut:
                export.add(table, **row)
    assert analyze(export, tmp_path).missing == ()


def test_steps_without_work_are_missed(tmp_path: Path) -> None:
    run = Run()
    marks = []
    for _ in range(40):
        begin = run.now
        train(run, 1)
        marks.append((begin, run.now))
    for number, (begin, end) in enumerate(marks):
        run.range(begin, end, f"step {number}")
    until = marks[4][1]
    for table in ("KERNEL", "MEMCPY", "RUNTIME"):
        rows = run.export.rows[f"CUPTI_ACTIVITY_KIND_{table}"]
        rows[:] = [row for row in rows if int(str(row["start"])) >= until]
    report = analyze(run, tmp_path)
    assert [(part.rows, part.count, part.evidence) for part in report.missing] == [
        ("operations", 5, "steps without any work")
    ]


def _all_reduces(ranks: int, count: int) -> Callable[..., tuple[PerGpu, Collectives]]:
    """Return a function that gives all-reduces of all ranks without some of those of rank 2."""

    def collectives(lost: Collection[int]) -> tuple[PerGpu, Collectives]:
        pairs = [(n, r) for n in range(count) for r in range(ranks) if r != 2 or n not in lost]
        instance, lane = np.array(pairs, np.int64).T
        nothing = np.zeros(len(pairs), np.int64)
        start = instance * 1_000
        table = Collectives(
            instance=instance,
            lane=lane.astype(np.int16),
            row=nothing,
            start=start,
            end=start + 500,
            arrival=start,
            operation=nothing.astype(np.int16),
            name=nothing.astype(np.int32),
            correlation=nothing,
            bytes=nothing,
            group=nothing.astype(np.int32),
            operations=("AllReduce",),
            groups=(RankGroup(tuple(range(ranks))),),
            sends=np.empty((0, 2), np.int64),
        )
        spans = [start[lane == rank] for rank in range(ranks)]
        own = [
            SimpleNamespace(
                gpu=SimpleNamespace(rank=rank, gpu=rank),
                recorded=union(span[:1], span[-1:] + 500),
            )
            for rank, span in enumerate(spans)
        ]
        return cast(PerGpu, SimpleNamespace(operations=own)), table

    return collectives


KINETO: Final = (
    recordings.DATA / "tracelens-falconsai.json.gz",
    recordings.shared(
        "traces", "tracelens", "google_owlv2-large-patch14-ensemble__1016001.json.gz"
    ),
)
"""Recordings with memsets of nothing."""


@pytest.mark.parametrize("path", KINETO, ids=lambda path: path.name)
def test_real_recordings_with_memsets_of_nothing_lack_nothing(path: Path) -> None:
    if not path.exists():
        pytest.skip(f"{path} is not here")
    assert lookups.analyze(path).missing == ()


@pytest.mark.parametrize("name", recordings.SMALL)
def test_real_recordings_lack_nothing(name: str, analyzed: Callable[[str], Report]) -> None:
    assert analyzed(name).missing == ()
