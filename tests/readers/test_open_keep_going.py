"""Runs of which some files cannot be read: analyzed on request, with a note on the others."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

import gputrace
from gputrace.api import Report
from gputrace.errors import ExitCode, InputError
from gputrace.model.events import Kind
from gputrace.readers.registry import open_trace
from tests.helpers import command, xplane
from tests.helpers.command import UNREADABLE, assert_refused
from tests.helpers.kineto import kernel, write
from tests.helpers.nvprof import Nvvp
from tests.synthetic import Plan, Recording, simulate, write_kineto, write_nvprof

IN_PART = int(ExitCode.DONE_IN_PART)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return simulate(Plan(steps=4, ranks=3, kernels_per_step=20, allreduces=1))


@pytest.fixture
def ranks(recording: Recording, tmp_path: Path) -> list[Path]:
    return write_kineto(recording, tmp_path)


def goes_on(folder: Path, *lost: str) -> Report:
    """Without ``--keep-going`` one line refuses; with it, one names each loss, and so does JSON."""
    refused = command.gputrace("analyze", folder)
    assert_refused(refused, UNREADABLE)
    ran = command.gputrace("analyze", folder, "--json", "--keep-going")
    assert ran.code == IN_PART, ran.err
    lines = ran.err.splitlines()
    assert len(lines) == len(lost), ran.err
    told = json.loads(ran.out)
    for line, loss, words in zip(lines, told["left_out"], lost, strict=True):
        assert line.startswith("gputrace: not all read: ")
        assert words in line
        assert line.endswith(loss["problem"])
        assert f"{loss['path']}: {loss['problem']}" in told["warnings"]
    (finding,) = (one for one in told["findings"] if one["id"] == "lost-records")
    assert finding["evidence"]["left_out"] == len(lost)
    with gputrace.open(folder, keep_going=True) as trace:
        report = trace.analyze()
        assert [one.path for one in trace.left_out] == [one["path"] for one in told["left_out"]]
    assert [row.rank for row in report.gpus] == [row["rank"] for row in told["gpus"]]
    return report


def ranks_of(report: Report) -> list[int]:
    return sorted(row.rank for row in report.gpus)


class TestAFolder:
    def test_with_an_empty_file(self, ranks: list[Path]) -> None:
        ranks[1].write_bytes(b"")
        report = goes_on(ranks[0].parent, "rank1.pt.trace.json: the file is empty")
        assert ranks_of(report) == [0, 2]
        assert "rank 1 of 3 is missing: no file of its own was given" in report.warnings

    def test_with_a_file_that_is_no_trace_but_has_a_trace_s_name(self, ranks: list[Path]) -> None:
        ranks[2].write_bytes(b"\0" * 100)
        assert ranks_of(goes_on(ranks[0].parent, "not a trace that gputrace knows")) == [0, 1]

    def test_with_a_zip_bomb(self, ranks: list[Path]) -> None:
        start = gzip.compress(b'{"schemaVersion": 1, "x": "')
        ranks[0].write_bytes(start + gzip.compress(b" " * (1 << 24)) * 64)
        lost = "is followed by 16 MiB without an end of an event: not a trace"
        ran = command.gputrace("analyze", ranks[0].parent, "--json", "--keep-going")
        assert (ran.code, ran.err.count("\n"), lost in ran.err) == (IN_PART, 1, True)
        assert sorted(row["rank"] for row in json.loads(ran.out)["gpus"]) == [1, 2]

    def test_with_two_files_of_one_rank(self, ranks: list[Path]) -> None:
        shutil.copy(ranks[1], ranks[1].with_name("again.pt.trace.json"))
        with pytest.raises(InputError, match=r"has rank 1, as .* each rank once"):
            gputrace.open(ranks[0].parent)
        report = goes_on(ranks[0].parent, "of another run than")
        assert ranks_of(report) == [0, 1, 2]

    def test_of_two_runs_is_told_run_by_run_and_the_larger_is_taken(
        self, ranks: list[Path]
    ) -> None:
        folder = ranks[0].parent
        other = simulate(Plan(steps=4, ranks=2, kernels_per_step=20, allreduces=1))
        (folder / "b").mkdir()
        for path in write_kineto(other, folder / "b"):
            path.rename(folder / f"b-{path.name}")
        runs = (
            "files of 2 runs (rank0.pt.trace.json, rank1.pt.trace.json, rank2.pt.trace.json; "
            "b-rank0.pt.trace.json, b-rank1.pt.trace.json); name those of one"
        )
        assert_refused(command.gputrace("analyze", folder), UNREADABLE, str(folder), runs)
        report = goes_on(folder, "b-rank0", "b-rank1")
        assert ranks_of(report) == [0, 1, 2]

    def test_of_two_runs_of_nvprof_one_after_the_other(
        self, recording: Recording, tmp_path: Path
    ) -> None:
        folder = tmp_path / "nvprof"
        write_nvprof(recording, folder)
        late = Nvvp(folder / "late.nvvp")
        late.kernel(10**18, 10**18 + 5)
        late.save()
        report = goes_on(folder, "late.nvvp: of another run than")
        assert len(report.gpus) == 3

    def test_of_nvprof_with_a_process_that_used_no_gpu(
        self, recording: Recording, tmp_path: Path
    ) -> None:
        folder = tmp_path / "nvprof"
        write_nvprof(recording, folder)
        Nvvp(folder / "launcher.nvvp").save()
        report = goes_on(folder, "launcher.nvvp: nvprof recorded no GPU activity")
        assert len(report.gpus) == 3

    def test_with_an_sqlite_file_cut_short_or_broken_inside(
        self, recording: Recording, tmp_path: Path
    ) -> None:
        folder = tmp_path / "nvprof"
        write_nvprof(recording, folder)
        first, second, _ = sorted(folder.iterdir())
        first.write_bytes(first.read_bytes()[:-5000])
        content = bytearray(second.read_bytes())
        for page in range(4096, len(content), 4096):
            content[page : page + 8] = b"\xff" * 8
        second.write_bytes(content)
        report = goes_on(folder, f"{first.name}: truncated", f"{second.name}: broken SQLite file")
        assert len(report.gpus) == 1

    def test_in_which_nothing_can_be_read_is_refused(self, tmp_path: Path) -> None:
        for name in ("a.nvvp", "b.nvvp"):
            (tmp_path / name).write_bytes(b"")
        ran = command.gputrace("analyze", tmp_path, "--keep-going")
        assert_refused(ran, UNREADABLE, "the file is empty", "and 1 more cannot be read")

    def test_is_exported_without_what_cannot_be_read(self, ranks: list[Path]) -> None:
        ranks[1].write_bytes(b"")
        target = ranks[0].with_name("out.json.gz")
        to = ("export", ranks[0].parent, "--to", "perfetto", "-o", target)
        assert_refused(command.gputrace(*to), UNREADABLE, "the file is empty")
        ran = command.gputrace(*to, "--keep-going")
        assert (ran.code, target.exists()) == (IN_PART, True)
        assert "not all read: " in ran.err


def test_a_file_named_that_is_not_there_is_left_out(ranks: list[Path]) -> None:
    lost = ranks[0].with_name("rank9.json")
    ran = command.gputrace("analyze", *ranks, lost, "--keep-going")
    assert ran.code == IN_PART
    assert ran.err == f"gputrace: not all read: {lost}: no such file\n"
    assert "lost-records" not in command.gputrace("analyze", *ranks, "--keep-going").out


def starts(path: Path) -> list[int]:
    with open_trace(path, keep_going=True) as trace:
        found = trace.events([Kind.KERNEL], ["start"]).start - trace.origin
        assert len(trace.quality.left_out) == 1
    return sorted(found.tolist())


class TestOneFile:
    """50 kernels, a microsecond each, one every microsecond."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path / "run.json", *(kernel(at, 1) for at in range(50)))

    def test_of_gzip_cut_short_gives_what_came_before(self, path: Path) -> None:
        path.write_bytes(gzip.compress(path.read_bytes())[:-40])
        found = starts(path)
        assert 0 < len(found) < 50
        assert found == [1000 * at for at in range(len(found))]
        ran = command.gputrace("analyze", path, "--keep-going")
        assert ran.code == IN_PART
        assert "cut off: its gzip data end after" in ran.err
        assert "read up to there" in ran.err

    def test_of_text_gives_the_events_before_its_end_wherever_that_is(self, path: Path) -> None:
        text = path.read_bytes()
        events = text.index(b"[") + 1
        for at in range(events + 1, len(text) - 3, 97):
            path.write_bytes(text[:at])
            # A whole event ends with a comma or the end of the list.
            whole = text[:at].count(b"}},")
            if text[:at].endswith((b"}}", b",", b", ")):
                continue
            if whole == 0:
                with pytest.raises(InputError, match="cut off"):
                    open_trace(path, keep_going=True)
            else:
                assert starts(path) == [1000 * number for number in range(whole)]
                with pytest.raises(InputError, match=r"cut off.*--keep-going"):
                    open_trace(path)
        command.assert_unreadable(path, "cut off", "--keep-going")

    def test_of_text_is_refused_in_one_line_or_read_wherever_a_byte_is_wrong(
        self, tmp_path: Path
    ) -> None:
        text = write(tmp_path / "run.json", *(kernel(at, 1) for at in range(3))).read_bytes()
        path, told = tmp_path / "broken.json", set[str]()
        for at in range(len(text)):
            path.write_bytes(text[:at] + b"\x01" + text[at + 1 :])
            for keep_going in (False, True):
                try:
                    open_trace(path, keep_going).close()
                except InputError as error:
                    told.add(str(error))
        assert len(told) > 3
        assert not any("\n" in line for line in told)

    def test_of_a_protobuf_cut_short_gives_the_planes_before(self, tmp_path: Path) -> None:
        gpu, other = (
            xplane.xspace(
                [xplane.Row(f"/device:GPU:{n}", "Stream #1", 1, [xplane.Event("k", 10, 50)])],
                "",
            )
            for n in (0, 1)
        )
        path = tmp_path / "run.xplane.pb"
        path.write_bytes((gpu + other)[:-9])
        with pytest.raises(InputError, match="cut short"):
            open_trace(path)
        with open_trace(path, keep_going=True) as trace:
            assert trace.events([Kind.KERNEL], ["device"]).device.tolist() == [0]
            assert "cut short" in trace.quality.left_out[0].problem
        path.write_bytes(gpu[:-9])
        with pytest.raises(InputError, match="cut short"):
            open_trace(path, keep_going=True)

    def test_of_the_trace_viewer_gives_the_events_before(self, tmp_path: Path) -> None:
        events = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
            {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "Stream #1"}},
            *({"ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": 1, "name": "k"} for at in range(9)),
        ]
        text = json.dumps({"displayTimeUnit": "ns", "traceEvents": events})
        path = tmp_path / "run.trace.json.gz"
        path.write_bytes(gzip.compress(text[:-20].encode()))
        with pytest.raises(InputError, match=r"cut off.*--keep-going"):
            open_trace(path)
        assert len(starts(path)) == 8
