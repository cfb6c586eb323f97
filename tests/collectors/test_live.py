"""A recording under way: `gputrace browse NAME.sqlite.spool`, and what it is drawn from."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.timeline_model.cells import make_curve
from gputrace.cli.record_live import RecordingFeed
from gputrace.collectors import live, spool
from gputrace.collectors.finalize import DOMAIN_CREATED
from gputrace.collectors.job_tasks import Team, holds_lock
from gputrace.collectors.live import RecordingFollower
from gputrace.collectors.spool import CHUNK, HEADER, ChunkTail, Format, LineTail
from gputrace.collectors.spool.activity import read_spool
from gputrace.collectors.spool.host_events import join_hosts, read_host_file
from gputrace.readers.open import open_traces
from gputrace.report.tui.live import CardNow, LiveApp, Now, Pace
from tests.helpers import command
from tests.helpers.on_terminal import OnTerminal
from tests.native.build import Machine

PATIENCE_S: Final = 60.0
FORMAT: Final = Format(b"TESTTEST", 1, "a test", "a file of a test")
HOSTILE: Final = "[bold]x[/] \x1b[31m\x1b]0;t\x07 <script>\n" + "k" * 10_000
STEPS: Final = """
import time, gputrace
for _ in range({steps}):
    with gputrace.annotate("load batch"):
        time.sleep(0.002)
    time.sleep(0.003)
    gputrace.step()
time.sleep({rest})
"""


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Starts recordings, and gives their folders once they are there; ends them."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str, env: dict[str, str] | None = None, backend: str = "host") -> Path:
        trace = tmp_path / "t.sqlite"
        options = ["-o", str(trace), "--no-nvml", "--backend", backend]
        words = (sys.executable, "-m", "gputrace", "record", *options, "--", *words)
        running.append(
            subprocess.Popen(words, env=command.environment(env), stderr=subprocess.DEVNULL)
        )
        folder = tmp_path / "t.sqlite.spool"
        until(lambda: (folder / "meta.json").exists())
        return folder

    yield start
    for process in running:
        process.terminate()
        process.wait(PATIENCE_S)


def chunk(tag: bytes, body: bytes) -> bytes:
    return CHUNK.pack(tag, len(body)) + body


@given(
    bodies=st.lists(
        st.tuples(st.sampled_from([b"KERN", b"NAME"]), st.binary(max_size=40)), max_size=8
    ),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_a_file_read_while_it_grows_gives_each_whole_chunk_once(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    whole = HEADER.pack(FORMAT.magic, FORMAT.version, 7, 11, 13)
    whole += b"".join(chunk(*each) for each in bodies)
    path = tmp_path_factory.mktemp("tail") / "host.7.spool"
    reader, seen = ChunkTail(path, FORMAT), []
    for end in [*sorted(cuts), len(whole)]:
        path.write_bytes(whole[:end])
        seen += reader.read({b"KERN"})
    assert seen == bodies
    assert reader.head is not None
    assert (reader.head.pid, reader.head.host, reader.head.started) == (7, "host", 11)


def test_of_a_large_file_names_are_read_and_the_last_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_MOST_AT_ONCE", 250)
    whole = HEADER.pack(FORMAT.magic, FORMAT.version, 7, 11, 13) + chunk(b"NAME", b"first")
    whole += b"".join(chunk(b"KERN", bytes([at]) * 100) for at in range(9))
    path = tmp_path / "host.7.spool"
    path.write_bytes(whole)
    seen = ChunkTail(path, FORMAT).read({b"KERN"})
    assert [(tag, body[:1]) for tag, body in seen] == [
        (b"NAME", b"f"),
        (b"KERN", bytes([7])),
        (b"KERN", bytes([8])),
    ]


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"."))),
    cuts=st.lists(st.integers(0, 99)),
)
def test_a_log_read_while_it_grows_gives_each_whole_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    path = tmp_path_factory.mktemp("tail") / "n.nvml.jsonl"
    reader, seen = LineTail(path), list[bytes]()
    for end in [*sorted(cuts), len(whole)]:
        path.write_bytes(whole[:end])
        seen += (line.rstrip(b"\n") for line in reader.read())
    assert seen == lines


def test_steps_are_seen_while_they_are_made(started: Callable[..., Path]) -> None:
    folder = started(sys.executable, "-c", STEPS.format(steps=10_000, rest=0))
    feed = RecordingFeed(folder)
    # The hooks write four times a second, with the next event.
    until(lambda: (paces := feed.look().paces) and len(paces[0].lengths) == 30)
    now = feed.look()
    (pace,) = now.paces
    assert (now.state, now.processes, pace.rank, len(pace.lengths)) == ("running", 1, 0, 30)
    assert pace.mean_ns >= 5_000_000
    assert now.bytes > 0
    assert now.name == "t.sqlite"


def test_what_is_followed_is_what_the_files_say_in_the_end(started: Callable[..., Path]) -> None:
    folder = started(sys.executable, "-c", STEPS.format(steps=10_000, rest=0))
    (path,) = list_until(folder, "*.host")
    follower = live.RecentHost(path)

    def has_steps() -> bool:
        follower.read()
        return follower.host is not None and len(follower.host.records["step"]) > 100

    until(has_steps)
    whole = join_hosts([read_host_file(path)])
    follower.read()
    assert follower.host is not None
    assert len(whole.records["step"]) > 100
    for kind in ("step", "data_wait"):
        # It has gone on meanwhile.
        seen = follower.host.records[kind][: len(whole.records[kind])]
        assert seen.tolist() == whole.records[kind].tolist()
    assert follower.host.names == whole.names


def list_until(folder: Path, pattern: str) -> list[Path]:
    until(lambda: list(folder.glob(pattern)))
    return list(folder.glob(pattern))


def busy(machine: Machine, started: Callable[..., Path], script: str) -> Path:
    """A program that plays a GPU, tests/native/workload.c."""
    libraries = {
        "GPUTRACE_CUPTI": str(machine.folder / "libcupti.so.13"),
        "LD_LIBRARY_PATH": str(machine.folder),
    }
    words = machine.command(f"inject {script} wait")
    return started(*words, env=libraries, backend="cupti")


def test_the_gpus_last_moments_are_analyzed_while_it_runs(
    machine: Machine, started: Callable[..., Path]
) -> None:
    feed = RecordingFeed(busy(machine, started, "run 60000 1 5"))
    until(lambda: feed.look().analysis)
    now = feed.look()
    assert now.analysis is not None
    (gpu,) = now.analysis.gpus
    (row,) = now.analysis.breakdown
    assert gpu.kernels > 100
    assert row.total_ns <= now.window[1] - now.window[0] <= live.WINDOW_NS
    assert now.window[1] <= now.time_ns


def test_however_busy_it_is_only_so_much_is_analyzed(
    machine: Machine, started: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(live, "MOST_RECORDS", 1000)
    followed = RecordingFollower(busy(machine, started, "storm 100 1 sleep 10 " * 25))
    (path,) = list_until(followed.folder, "*.spool")

    def written() -> int:
        return len(read_spool(path).records[b"KERN"])

    until(lambda: written() == 2500)
    followed.read()
    window = followed.window()
    assert window is not None
    followed.write(tmp_path / "end.sqlite", window)
    kernels = read_spool(path).records[b"KERN"]
    inside = (kernels["start"] >= window[0]) & (kernels["end"] <= window[1])
    assert 0 < inside.sum() <= 1000
    with open_traces([tmp_path / "end.sqlite"]) as trace:
        assert sum(gpu.kernels for gpu in analyze(trace).gpus) == inside.sum()


def test_what_is_named_once_is_known_in_any_later_window(machine: Machine, tmp_path: Path) -> None:
    done = machine.run(tmp_path, "inject nvtx sample ranges")
    assert done.returncode == 0
    (path,) = tmp_path.glob("*.spool")
    follower, whole = live.RecentSpool(path), read_spool(path)
    follower.read()
    later = follower.between(1 << 62, 1 << 62)
    assert later is not None
    assert (later.names, later.info) == (whole.names, whole.info)
    assert len(later.records[b"KERN"]) == 0
    for tag in (b"DEVI", b"CLOK"):
        assert later.records[tag].tolist() == whole.records[tag].tolist()
    domains = whole.records[b"NVTX"][whole.records[b"NVTX"]["kind"] == DOMAIN_CREATED]
    assert len(domains) > 0
    assert later.records[b"NVTX"].tolist() == domains.tolist()


def test_files_of_nobody_cost_nothing(started: Callable[..., Path]) -> None:
    folder = started(sys.executable, "-c", STEPS.format(steps=10_000, rest=0))
    (folder / "x.1.spool").write_bytes(b"no spool" * 9)
    (folder / "x.2.host").write_bytes(b"GPUTRHST" + b"\xff" * 90)
    (folder / "x.3.host").write_bytes(b"")
    (folder / "x.nvml.jsonl").write_bytes(b'{"devices": 3}\n[[[\n\xff\n{"gpus": {}}\n')
    feed = RecordingFeed(folder)
    until(lambda: feed.look().paces)


def test_the_end_is_told(started: Callable[..., Path], tmp_path: Path) -> None:
    folder = started(sys.executable, "-c", STEPS.format(steps=200, rest=0.5))
    feed = RecordingFeed(folder)
    until(lambda: feed.look().paces)
    until(lambda: feed.look().state == "ended")
    assert feed.trace == tmp_path / "t.sqlite"
    assert feed.trace.exists()
    assert feed.look().paces


def test_a_recorder_that_was_killed_is_told(tmp_path: Path) -> None:
    team = Team(tmp_path / "t.sqlite.spool")
    feed = RecordingFeed(team.folder)
    assert feed.look().state == "running"
    team.forget()  # as the kernel does when its process is killed
    assert feed.look().state == "cut"


def test_looking_touches_no_lock_of_the_recorder(tmp_path: Path) -> None:
    team = Team(tmp_path / "t.sqlite.spool")
    assert holds_lock(team.folder)
    team.forget()
    assert not holds_lock(team.folder)


def test_a_recording_that_was_cut_short_is_named_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "t.sqlite.spool"
    Team(folder).forget()
    program = (
        "import sys; sys.stdin.isatty = sys.stdout.isatty = lambda: True\n"
        "from gputrace.cli import end, run; end(run(['browse', sys.argv[1]]))"
    )
    for name in (folder, tmp_path / "t.sqlite"):
        ran = command.python("-c", program, str(name), env={"TERM": "xterm"})
        command.assert_refused(ran, 2, "has ended", f"gputrace recover {folder}")


class Played:
    """A feed of moments that a test makes up."""

    def __init__(self, *moments: Now) -> None:
        self.moments = list(moments)

    @property
    def trace(self) -> Path:
        return Path("t.sqlite")

    def look(self) -> Now:
        return self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]


def moment(**changes: object) -> Now:
    second = 1_000_000_000
    time_ns = np.arange(100 * second, 160 * second, second // 4)
    values = {"utilization": 97.0, "power": 612_000.0, "smClock": 1980.0}
    curves = {}
    for name, value in values.items():
        curve = make_curve(name, time_ns, np.full(len(time_ns), value), None)
        assert curve is not None
        curves[name] = curve
    now = Now(
        name="t.sqlite",
        state="running",
        time_ns=160 * second,
        elapsed_ns=60 * second,
        bytes=34_200_000,
        processes=2,
        paces=tuple(Pace(rank, 1234, (40_000_000,) * 30, 25.0) for rank in range(2)),
        cards=(CardNow(0, curves),),
        why_not="nothing of a GPU is recorded yet",
    )
    return replace(now, **changes)  # type: ignore[arg-type]


def drawn(
    feed: Played,
    *keys: str,
    size: tuple[int, int] = (120, 30),
    output: Callable[[int], list[str]] | None = None,
) -> tuple[list[str], LiveApp]:
    """The lines of the screen after some keys, and what became of it."""

    async def run() -> tuple[list[str], LiveApp]:
        app = LiveApp(feed, output)
        async with app.run_test(size=size) as pilot:
            await seen(pilot, app)
            await pilot.press(*keys)
            await pilot.pause()
            lines = [
                "".join(segment.text for segment in strip)
                for strip in app.screen._compositor.render_strips()
            ]
        return lines, app

    return asyncio.run(run())


async def seen(pilot: Pilot[str], app: LiveApp) -> None:
    end = time.monotonic() + PATIENCE_S
    while app.now is None and time.monotonic() < end:
        await pilot.pause(0.02)
    await pilot.pause(0.3)


def test_steps_size_and_curves_are_shown() -> None:
    lines, _ = drawn(Played(moment()))
    text = "\n".join(lines)
    for told in ("nothing of a GPU", "34.2 MB, 0.6 MB/s", "processes: 2", "rank 1"):
        assert told in text
    (rank,) = [line for line in lines if "rank 0" in line]
    assert "step 1,234" in rank
    assert "25.00 a second" in rank
    assert "40.0 ms" in rank
    (card,) = [line for line in lines if "gpu 0" in line]
    assert "97 %" in card
    assert "612 W" in card
    assert "1,980 MHz" in card
    assert "█" in card


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 50), (20, 4)])
def test_it_fits_any_screen(size: tuple[int, int]) -> None:
    lines, _ = drawn(Played(moment()), size=size, output=lambda most: ["said"] * most)
    assert len(lines) == size[1]


def test_words_of_strangers_are_neither_markup_nor_escape_sequences() -> None:
    strange = moment(name=HOSTILE, why_not=HOSTILE)
    lines, _ = drawn(Played(strange), output=lambda _: [HOSTILE])
    text = "\n".join(lines)
    assert "[bold]x[/]" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_the_trace_is_opened_once_the_recording_has_ended() -> None:
    lines, app = drawn(Played(moment(state="ended")), "enter")
    assert "Enter opens the trace" in "\n".join(lines)
    assert app.return_value == "open"
    _, app = drawn(Played(moment()), "enter")
    assert app.return_value is None


def test_a_feed_that_fails_is_told_and_asked_again() -> None:
    class Failing(Played):
        def look(self) -> Now:
            if len(self.moments) == 2:
                self.moments.pop()
                raise OSError(5, "the disk is gone")
            return super().look()

    _, app = drawn(Failing(moment(), moment()))
    assert app.now is not None


def test_the_command_shows_a_recording_by_the_name_of_its_trace(
    started: Callable[..., Path], tmp_path: Path
) -> None:
    folder = started(sys.executable, "-c", STEPS.format(steps=10_000, rest=0))
    for name in (folder, tmp_path / "t.sqlite"):
        shown = OnTerminal("browse", str(name))
        shown.until("rank 0")
        shown.type("q")
        assert shown.end() == 0
