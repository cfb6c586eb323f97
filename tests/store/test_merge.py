"""Several files of one run are read as one: the figures are those of one file with everything."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.api import Report
from gputrace.errors import InputError, UsageError
from gputrace.model.options import Window
from gputrace.model.trace import FROM_THE_START, Coverage
from gputrace.readers import open as opening
from gputrace.store.merge import Numbering
from gputrace.units import format_ranges
from tests.helpers import command
from tests.helpers.exports import Export
from tests.helpers.lookups import analyze, fields_of
from tests.helpers.rank_files import Node, write_parts, write_whole
from tests.synthetic import Plan, Recording, simulate

PLANS = {
    "starved": Plan(steps=10, ranks=4, allreduces=3, data_wait_ns=3_000_000, isolated=True),
    "late": Plan(
        steps=10, ranks=4, allreduces=2, late_host_rank=2, late_host_ns=2_000_000, streams=2,
        sync_every_step=True,
    ),
    "graph": Plan(steps=10, ranks=4, graph=True, pageable=True, data_wait="python",
                  data_wait_ns=900_000),
}  # fmt: skip
NODES = [Node("node0", (0, 1)), Node("node1", (2, 3), began_ns=5_000_000)]
RANKS = [Node("node0", (rank,), began_ns=rank * 1_000_003) for rank in range(4)]


@pytest.fixture(scope="module", params=list(PLANS))
def recording(request: pytest.FixtureRequest) -> Recording:
    return simulate(PLANS[request.param])


@pytest.fixture(scope="module")
def small() -> Recording:
    return simulate(Plan(steps=6, ranks=4, kernels_per_step=20, allreduces=1))


def figures(report: Report, *without: str) -> dict[str, list[dict[str, Any]]]:
    """Everything of a report that does not depend on how many files it came from."""
    tables = {
        name: [fields_of(row, *without) for row in getattr(report, name)]
        for name in ("gpus", "step_list", "phases", "breakdown", "findings")
    }
    for name in ("largest", "largest_in_steps"):
        tables[name] = [fields_of(gap, *without) for gap in getattr(report.gaps, name)]
    tables["totals"] = [{"steps": report.steps, "span": report.span_ns, "gaps": report.gaps.count}]
    return tables


class TestFiguresAreThoseOfOneFile:
    def test_where_each_rank_has_a_file(self, recording: Recording, tmp_path: Path) -> None:
        whole = analyze(write_whole(recording, tmp_path / "whole.sqlite"))
        merged = analyze(*write_parts(recording, tmp_path / "parts", RANKS))
        assert figures(merged) == figures(whole)

    def test_where_each_node_has_a_file(self, recording: Recording, tmp_path: Path) -> None:
        """Nodes count their cards from 0, and their processes may have the same ids."""
        whole = analyze(write_whole(recording, tmp_path / "whole.sqlite"))
        parts = write_parts(recording, tmp_path / "parts", NODES, same_pids=True, first_gpus=(0, 2))
        merged = analyze(*parts)
        # These count cards, which each node does for itself, or name the host.
        without = ("gpu", "gpus", "host", "device")
        assert figures(merged, *without) == figures(whole, *without)
        assert [(gpu.gpu, gpu.rank, gpu.host) for gpu in merged.gpus] == [
            (0, 0, "node0"), (1, 1, "node0"), (0, 2, "node1"), (1, 3, "node1"),
        ]  # fmt: skip

    def test_in_a_window_of_time(self, small: Recording, tmp_path: Path) -> None:
        whole = write_whole(small, tmp_path / "whole.sqlite")
        parts = write_parts(small, tmp_path / "parts", RANKS)
        with gputrace.open(whole) as one, gputrace.open(*parts) as several:
            start, end = (one.analyze().step_list[2].start_ns, one.analyze().step_list[4].end_ns)
            assert figures(several.analyze(time=(start, end))) == figures(
                one.analyze(time=(start, end))
            )

    def test_in_whatever_order_files_are_named(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", [*RANKS[:2], NODES[1]])
        first, *others = (analyze(*order) for order in permutations(parts))
        assert all(report == first for report in others)

    def test_where_a_folder_is_named(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", NODES)
        assert analyze(tmp_path / "parts") == analyze(*parts)

    def test_where_the_exports_have_no_ranks_and_no_hosts(self, tmp_path: Path) -> None:
        """Cards of the same number in two files, say of nsys, are two cards."""
        paths = []
        for number in range(2):
            export = Export().card(0, "0000:01:00.0").ordinal(100, 0, 0)
            export.give("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
            export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=10**18 + number)
            export.kernel(1000, 1050 + number).kernel(1070, 1100)
            paths.append(export.write(tmp_path / f"node{number}.sqlite"))
        report = analyze(*paths)
        assert [(g.gpu, g.host, g.kernels, g.idle_ns) for g in report.gpus] == [
            (0, "node0", 2, 20), (0, "node1", 2, 19),
        ]  # fmt: skip
        assert report.span_ns == 101


class TestAPersonIsTold:
    def test_of_files_and_hosts(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", NODES, first_gpus=(0, 2))
        ran = command.gputrace("analyze", *parts)
        assert ran.code == 0
        assert "2 files of 2 hosts: node0 has ranks 0-1; node1 has ranks 2-3." in ran.out
        assert "gpu 1 rank 3" in ran.out
        told = " ".join(ran.out.split())
        assert "The clocks of hosts are aligned by 24 ends of collectives, to within 0 ns" in told

    def test_nothing_of_clocks_where_the_host_is_one(
        self, small: Recording, tmp_path: Path
    ) -> None:
        report = analyze(*write_parts(small, tmp_path / "parts", RANKS))
        assert report.warnings == ()
        assert "lost-records" not in [finding.id for finding in report.findings]

    def test_of_ranks_that_are_missing(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", RANKS)
        report = analyze(parts[0], parts[2])
        assert report.warnings == ("ranks 1, 3 of 4 are missing: no file of theirs was given",)

    def test_of_several_jobs(self, small: Recording, tmp_path: Path) -> None:
        """Each node is a step of its own here, started by hand."""
        nodes = [replace(node, host="a", job=f"slurm 7.{n}") for n, node in enumerate(NODES)]
        (told,) = analyze(*write_parts(small, tmp_path / "parts", nodes)).warnings
        assert told == "of several jobs (slurm 7.0, slurm 7.1): see that they are one run"

    def test_the_json_names_all_files(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", NODES)
        report = analyze(*reversed(parts))
        assert (report.source, report.path) == ("gputrace", str(parts[0]))
        assert report.paths == tuple(map(str, parts))

    def test_which_file_lost_records(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", NODES)
        with closing(sqlite3.connect(parts[1])) as database, database:
            database.execute("CREATE TABLE GPUTRACE_LOSS (records INTEGER, reason TEXT)")
            database.execute("INSERT INTO GPUTRACE_LOSS VALUES (3, 'the disk was full')")
        report = analyze(*parts)
        assert report.warnings[0] == "run.1.sqlite: 3 records lost: the disk was full"
        assert "lost-records" in [finding.id for finding in report.findings]

    def test_which_files_have_nothing_in_a_window(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", NODES)
        ran = command.gputrace("analyze", "--time", "900s:", *parts)
        command.assert_refused(ran, 2, f"{parts[0]} and 1 more: no GPU activity in that window")


class TestRefused:
    """With one line and exit code 3."""

    @staticmethod
    def refused(paths: Sequence[Path], *words: str) -> None:
        with pytest.raises(InputError) as caught:
            gputrace.open(*paths).analyze()
        for word in words:
            assert word in str(caught.value)
        command.assert_refused(command.gputrace("analyze", *paths), 3, *words)

    def test_a_file_given_twice(self, small: Recording, tmp_path: Path) -> None:
        path, _ = write_parts(small, tmp_path / "parts", NODES)
        (tmp_path / "link.sqlite").symlink_to(path)
        self.refused([path, tmp_path / "link.sqlite"], "given twice", str(path))

    def test_two_files_of_one_rank(self, small: Recording, tmp_path: Path) -> None:
        nodes = [NODES[0], Node("node1", (1, 2))]
        self.refused(write_parts(small, tmp_path / "parts", nodes), "has rank 1", "run.0.sqlite")

    def test_a_copy_of_a_file_without_ranks(self, tmp_path: Path) -> None:
        export = Export().kernel(0, 10).give("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=10**18)
        paths = [export.write(tmp_path / f"{name}.sqlite") for name in "ab"]
        self.refused(paths, "a copy of", "a.sqlite")

    def test_runs_of_different_size(self, small: Recording, tmp_path: Path) -> None:
        nodes = [NODES[0], replace(NODES[1], world_size=8)]
        parts = write_parts(small, tmp_path / "parts", nodes)
        self.refused(parts, "a run of 8 ranks", "from one of 4")

    def test_runs_one_after_the_other(self, small: Recording, tmp_path: Path) -> None:
        parts = write_parts(small, tmp_path / "parts", NODES)
        later = write_parts(small, tmp_path / "later", NODES)
        with closing(sqlite3.connect(later[1])) as database, database:
            database.execute(
                "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = utcEpochNs + 3600000000000"
            )
        self.refused([parts[0], later[1]], "s after the end of", "not one run")

    def test_a_file_that_does_not_say_when(self, tmp_path: Path) -> None:
        paths = [Export().kernel(0, 10).write(tmp_path / f"{name}.sqlite") for name in "ab"]
        self.refused(paths, "does not say when")

    def test_a_folder_without_traces(self, tmp_path: Path) -> None:
        self.refused([tmp_path], "is a directory without traces")

    def test_a_broken_file_among_good_ones(self, small: Recording, tmp_path: Path) -> None:
        path, other = write_parts(small, tmp_path / "parts", NODES)
        other.write_bytes(b"nothing")
        self.refused([path, other], "run.1.sqlite", "not a trace")


Ids = st.lists(st.tuples(st.integers(0, 2), st.integers(-(1 << 31), (1 << 31) - 1)), max_size=30)


@given(Ids)
def test_numbers_are_dense_and_lead_back(ids: list[tuple[int, int]]) -> None:
    numbering = Numbering()
    numbers = [int(numbering.number(part, np.array([id], np.int32))[0]) for part, id in ids]
    known = {pair: number for pair, number in zip(ids, numbers, strict=True) if pair[1] != -1}
    assert sorted(known.values()) == list(range(len(known)))
    assert all(number == -1 for (_, id), number in zip(ids, numbers, strict=True) if id == -1)
    back = {
        (part, id): number
        for part, own, merged in numbering.by_part(np.array(list(known.values()), np.int64))
        for id, number in zip(own.tolist(), merged.tolist(), strict=True)
    }
    assert back == known


@given(st.lists(st.lists(st.integers(-50, 50), max_size=40), max_size=4))
def test_numbering_in_bulk_is_numbering_one_by_one(columns: list[list[int]]) -> None:
    bulk, single = Numbering(), Numbering()
    for column in columns:
        ids = np.array(column, np.int32)
        for id in np.unique(ids):
            single.number(0, np.array([id]))
        assert bulk.number(0, ids).tolist() == [
            int(single.number(0, np.array([id]))[0]) for id in column
        ]


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, format_ranges(sorted(numbers)).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


def test_a_run_of_many_files_may_open_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(64, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(opening, "_FEW_FILES", 2)
    paths = [tmp_path / f"{number}.sqlite" for number in range(3)]
    for path in paths:
        path.write_text("no trace")
    for _ in range(2):
        with pytest.raises(InputError, match="not a trace"):
            gputrace.open(*paths)
        assert limits[-1] == (103, 1024)
    limits.append((64, 80))
    with pytest.raises(UsageError, match=r"3 files are 103 open ones, and this system allows 80"):
        gputrace.open(*paths)


def test_a_clock_that_was_shifted_leaves_it_known_that_recording_began_with_the_process() -> None:
    since_start, later = ([Window(start, 100)] for start in (FROM_THE_START, 5))
    for shift in (0, 10**15, -(10**15)):
        assert Coverage(since_start).moved(shift).from_the_start
        assert not Coverage(later).moved(shift).from_the_start
    assert Coverage().is_whole
    assert Coverage(since_start).is_whole
    assert not Coverage(since_start * 2).is_whole
    assert not Coverage(since_start, calls=()).is_whole
