"""The browser, driven key by key on real traces and on made ones."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, combinations
from pathlib import Path
from typing import Final

import pytest
from textual.pilot import Pilot

from gputrace.analyzers import timeline_model
from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.timeline_model import Scene, full_scene
from gputrace.errors import InputError
from gputrace.model.results import Analysis
from gputrace.report.palette import Palette
from gputrace.report.tui.app import BrowseApp
from gputrace.report.tui.screen import KEYS, Help, Prompt, picture
from tests.analyzers.test_host_only_traces import Made
from tests.analyzers.test_host_only_traces import train as host_steps
from tests.helpers import command
from tests.helpers.browsing import answer, browse, loaded, press, screen, settled, until
from tests.helpers.command import assert_refused
from tests.helpers.exports import Export
from tests.helpers.rank_files import Node, write_parts
from tests.synthetic import Plan, simulate, write_nsys, write_nvml

STARVED: Final = "h200x4-ddp-starved-9-15.sqlite"
MISSING, UNREADABLE, USAGE = 4, 3, 2
HOSTILE: Final = (
    "[bold red]kernel[/bold red][/]",
    "\x1b[2J\x1b]0;owned\x07kernel",
    "<script>alert(1)</script>",
    "long_" * 2_000,
    "\u202ekernel\u2066",
    "日本語のカーネル",
)


@pytest.fixture(scope="module", autouse=True)
def analyzed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache, so that each trace is analyzed by the first test that opens it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUTRACE_CACHE", str(tmp_path_factory.mktemp("kept")))
        yield


@pytest.fixture(scope="module")
def starved(recording: Callable[[str], Path]) -> Path:
    """Four GPUs whose data loaders sleep 25 ms before each batch."""
    return recording(STARVED)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browse") / "two.sqlite"
    plan = Plan(ranks=2, steps=8, data_wait_ns=3_000_000, allreduces=2, sync_every_step=True)
    write_nsys(simulate(plan), path)
    return path


def test_the_gap_that_the_sleep_makes_is_seen_and_named_at_first_glance(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        lines = screen(app)
        assert "wait for data" in lines[0]
        lanes = [line for line in lines if "data feeding 25." in line and "▾" not in line]
        assert len(lanes) >= 4
        text = app.detail_text.plain
        assert "nothing for 25." in text
        assert "system call clock_nanosleep 25." in text
        assert "why\n- input: waiting for the next batch 25." in text
        assert "data-feeding: the GPUs wait" in text
        assert "what to do: find out why that thread" in text
        assert re.search(r"between step \d+ \(.*\) and step \d+", text)
        assert re.search(r"after: .*38,535,168 bytes", text)
        assert len(re.findall(r"gpu \d: data feeding \d", text)) == 3

    browse([starved], drive, size=(160, 45))


SIZES: Final = ((60, 20), (40, 12), (80, 24), (120, 40), (160, 45))
PANES: Final = ("1", "4")


def test_a_screen_of_any_size_is_the_same_after_a_resize_from_any_other(starved: Path) -> None:
    fresh: dict[tuple[str, tuple[int, int]], list[str]] = {}

    async def keep(app: BrowseApp, pilot: Pilot[None]) -> None:
        for pane in PANES:
            await press(pilot, pane)
            fresh[pane, app.size] = await settled(pilot, app)

    async def resize(app: BrowseApp, pilot: Pilot[None]) -> None:
        for pane in PANES:
            await press(pilot, pane)
            # From each size to each other one, once.
            for size in (*chain.from_iterable(combinations(SIZES, 2)), SIZES[0]):
                before = app.size
                await pilot.resize_terminal(*size)
                assert await settled(pilot, app) == fresh[pane, size], (pane, before, size)

    for size in SIZES:
        browse([starved], keep, size=size)
    for lines in fresh.values():
        assert any(line.startswith("▸gpu 3") for line in lines)
    browse([starved], resize, size=SIZES[0])


def test_sixty_columns_have_the_verdict_the_legend_and_the_way_out(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        lines = screen(app)
        assert re.search(r"wait for data \d+% of each step \(.* ms\)\.", " ".join(lines[:2]))
        assert lines[-1].split()[:4] == ["?", "help", "q", "quit"]
        legend = [line for line in lines if "█ compute" in line or "█ idle?" in line]
        assert "█ compute  █ comm  █ h2d  " in legend[0]
        assert legend[-1].rstrip().endswith("█ idle?")
        assert any(line.rstrip().endswith("busy") for line in lines)

    browse([starved], drive, size=(60, 24))


@pytest.mark.parametrize("size", [(60, 24), (80, 24), (120, 40)])
def test_findings_kernels_and_steps_are_shown_in_place_of_the_gaps(
    starved: Path, size: tuple[int, int]
) -> None:
    shown = {
        "2": ("data-feeding The GPUs wait", "Expected gain: "),
        "3": ("Kernels that take most time", "share"),
        "4": ("steady steps, mean of 4 GPUs; the longest takes",),
        "1": ("length▾", "nothing for 25."),
    }

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        for key, words in shown.items():
            await press(pilot, key)
            text = "\n".join(screen(app))
            assert all(word in text for word in words)
            assert f"{key} {app.pane}" in text

    browse([starved], drive, size=size)


def test_a_chart_has_a_bar_for_each_steady_step(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "4", "l")
        lines = screen(app)
        first = next(n for n, line in enumerate(lines) if "the longest takes" in line)
        bars = [line[10:] for line in lines[first + 1 : -2]]
        assert scene_analysis(app).steps.count == len(scene_analysis(app).step_list) // 4
        assert any("D" in bar for bar in bars)
        assert "█" in bars[-1]

    browse([starved], drive, size=(80, 30))


def scene_analysis(app: BrowseApp) -> Analysis:
    (scene,) = app.board.scenes
    assert scene is not None
    assert scene.analysis is not None
    return scene.analysis


def test_letters_keep_the_columns_of_colours(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "l", "l")  # Drawn anew, without what was shown while it was read.
        colored = screen(app)
        await press(pilot, "l")
        for before, after in zip(colored, screen(app), strict=True):
            for word in re.finditer(r"[\w.]+", before):
                assert after[slice(*word.span())] == word[0]

    browse([starved], drive, size=(120, 40))


def test_a_copy_is_called_by_its_kind(tmp_path: Path) -> None:
    export = Export().kernel(0, 100).copy(100, 10_000).kernel(10_050, 10_100)

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "0")
        text = "\n".join(screen(app))
        assert "h2d██" in text
        assert "<name" not in text

    browse([export.write(tmp_path / "copy.sqlite")], drive, size=(80, 24))


def test_a_lane_says_where_nothing_of_its_gpu_was_recorded(tmp_path: Path) -> None:
    export = Export().kernel(0, 1_000).kernel(9_000, 10_000, deviceId=1)

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "0")
        assert "\n".join(screen(app)).count("nothing recorded") == 2

    browse([export.write(tmp_path / "apart.sqlite")], drive, size=(80, 24))


def test_every_key_is_answered(starved: Path) -> None:
    leaves = {"quit", "export"}

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        for key in KEYS:
            if key.action in leaves:
                continue
            for each in key.keys.split(","):
                await press(pilot, each)
                if isinstance(app.screen, (Help, Prompt)):
                    await press(pilot, "escape")
                assert app.board.view.low <= app.board.view.start < app.board.view.end
        await pilot.pause(0.3)
        assert app.is_running

    browse([starved], drive, size=(80, 24))


def test_lanes_are_there_while_causes_are_still_looked_for(
    starved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_CACHE", "off")
    go_on = threading.Event()

    def slow(facts: Facts, analysis: Analysis) -> Scene:
        go_on.wait(60)
        return full_scene(facts, analysis)

    monkeypatch.setattr(timeline_model, "full_scene", slow)

    async def run() -> None:
        app = BrowseApp([[starved]])
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.board.lanes)
            lines = screen(app)
            assert "gaps, causes and steps follow" in lines[0]
            assert any("gpu 3" in line and "%" in line for line in lines)
            for key in ("plus", "right", "n", "]", "e", "g", "f", "S", "o", "c", "A", "y"):
                await press(pilot, key)
            go_on.set()
            await until(pilot, lambda: loaded(app))
            assert "wait for data" in screen(app)[0]

    asyncio.run(run())


def test_the_files_of_one_run_are_one_timeline(tmp_path: Path) -> None:
    nodes = [Node("node0", (0,)), Node("node1", (1,))]
    plan = Plan(ranks=2, steps=8, data_wait_ns=3_000_000, allreduces=2)
    paths = write_parts(simulate(plan), tmp_path / "run", nodes)

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        assert len(app.board.gpus) == 2
        await press(pilot, "n", "g", "H")
        await until(pilot, lambda: len(app.board.lanes) > 2)

    browse(paths, drive)


def test_gaps_follow_one_another_by_length_and_their_detail_with_them(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        board, lengths = app.board, []
        for _ in range(4):
            assert board.selected is not None
            start, end = board.gap_span(board.selected)
            lengths.append(end - start)
            assert board.view.start <= start
            assert end <= board.view.end
            await press(pilot, "n")
        assert lengths == sorted(lengths, reverse=True)
        await press(pilot, "p", "p", "p", "p", "p", "p")
        assert app.gap_list.index == 0
        await press(pilot, "pagedown")
        assert app.gap_list.index > 1
        await press(pilot, "home")
        assert app.gap_list.index == 0

    browse([starved], drive)


def test_gaps_are_sorted_and_filtered(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        board = app.board
        await press(pilot, "o")
        assert board.sort == "start"
        starts = board.table.start[board.rows]
        assert (starts[1:] >= starts[:-1]).all()
        await press(pilot, "O")
        starts = board.table.start[board.rows]
        assert (starts[1:] <= starts[:-1]).all()
        count = len(board.rows)
        await answer(pilot, "F", "gpu=2 len>20ms")
        assert 0 < len(board.rows) < count
        assert {board.gpus[lane].label for lane in board.table.lane[board.rows]} == {"gpu 2"}
        await answer(pilot, "F", "gpu=2 len>20ms why=data")
        assert 0 < len(board.rows) < count
        await answer(pilot, "F", "gpu=2 len>20ms why=garbage")
        assert not len(board.rows)
        await answer(pilot, "F", "colour=red")
        assert isinstance(app.screen, Prompt)
        await press(pilot, "escape")
        await answer(pilot, "F", "")
        await press(pilot, "B")
        assert board.table.between[board.rows].all()

    browse([starved], drive)


def test_steps_zoom_pan_and_fit_move_the_window(two_ranks: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        board = app.board
        await press(pilot, "0")
        whole = board.view
        assert (whole.start, whole.end) == (whole.low, whole.high)
        await answer(pilot, "t", "#2")
        await press(pilot, "f")
        span = board.step_span(board.cursor)
        assert span is not None
        assert board.view.start <= span[0] < span[1] <= board.view.end
        assert board.view.length < 1.1 * (span[1] - span[0])
        before = board.cursor
        await press(pilot, "]")
        assert board.cursor > before
        await press(pilot, "[")
        assert board.cursor <= before
        length = board.view.length
        await press(pilot, "plus")
        assert board.view.length == pytest.approx(length / 2, rel=0.01)
        start = board.view.start
        await press(pilot, "right")
        assert board.view.start > start
        await press(pilot, "left")
        assert board.view.start == pytest.approx(start, abs=2)
        await answer(pilot, "t", "#3")
        steps = board.steps_at(board.lane_at_cursor)
        assert steps is not None
        assert board.cursor == steps.start[3]
        at = board.cursor
        await answer(pilot, "t", "+2ms")
        assert board.cursor == at + 2_000_000
        await answer(pilot, "t", "5h")
        assert isinstance(app.screen, Prompt)

    browse([two_ranks], drive)


def test_two_marks_measure(two_ranks: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await answer(pilot, "t", "#3")
        await press(pilot, "m")
        await answer(pilot, "t", "+2ms")
        await press(pilot, "m")
        assert app.board.marks[1] - app.board.marks[0] == 2_000_000
        assert any("a to b 2.00 ms" in line for line in screen(app))
        await press(pilot, "escape")
        assert app.board.marks == ()

    browse([two_ranks], drive)


def test_a_kernel_is_found_by_name_and_followed_to_its_launch(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "0")
        await answer(pilot, "/", "nccl.*AllReduce")
        picked = app.board.picked
        assert picked is not None
        await until(pilot, lambda: "ncclDevKernel_AllReduce" in app.detail_text.plain)
        assert "of communication" in app.detail_text.plain
        assert "issued by cuLaunchKernelEx" in app.detail_text.plain
        own = picked.lane.lane.operations
        assert own is not None
        started = int(own.start[picked.row]) - picked.lane.zero
        await press(pilot, "c")
        await until(pilot, lambda: app.board.cursor < started)
        assert app.board.view.start <= app.board.cursor
        await press(pilot, "c")
        assert app.board.cursor == started
        await press(pilot, ">")
        assert app.board.cursor > started
        await press(pilot, "<")
        assert app.board.cursor <= started
        await answer(pilot, "/", "no such kernel")
        assert isinstance(app.screen, Prompt)

    browse([starved], drive)


def test_ranks_are_shown_alone_or_two_side_by_side(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        board = app.board

        def labels() -> list[str]:
            return [shown.label for shown in board.lanes]

        await answer(pilot, "R", "1,3")
        assert labels() == ["gpu 1", "gpu 3"]
        assert set(board.table.lane[board.rows].tolist()) == {1, 3}
        await press(pilot, "b")
        assert labels() == ["gpu 0", "gpu 1", "gpu 2", "gpu 3"]
        await press(pilot, "k", "k", "k", "k", "b")
        assert labels() == ["gpu 0", "gpu 1"]

    browse([starved], drive)


def test_streams_and_host_threads_get_lanes_of_their_own(two_ranks: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "S")
        await until(pilot, lambda: any(s.lane.part.startswith("stream") for s in app.board.lanes))
        await press(pilot, "H")
        await until(pilot, lambda: any(s.lane.part.startswith("thread") for s in app.board.lanes))
        await press(pilot, "S", "H")
        await until(pilot, lambda: len(app.board.lanes) == 2)

    browse([two_ranks], drive)


def test_what_nvml_sampled_is_drawn_below_each_gpu(tmp_path: Path) -> None:
    recording = simulate(Plan(ranks=2, steps=8, data_wait_ns=3_000_000))
    path = tmp_path / "sampled.sqlite"
    write_nsys(recording, path)
    write_nvml(recording, path)

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        assert app.board.curve == "utilization"
        labels = [shown.label.strip() for shown in app.board.lanes]
        assert labels == ["gpu 0", "use", "gpu 1", "use"]
        for unit in ("MHz", "W", "GiB", "°C"):
            await press(pilot, "v")
            lanes = [line for line in screen(app) if line.rstrip().endswith(unit)]
            assert len(lanes) == 2
        await press(pilot, "v")
        assert [shown.label for shown in app.board.lanes] == ["gpu 0", "gpu 1"]

    browse([path], drive)


def test_two_traces_lie_side_by_side_and_are_aligned(two_ranks: Path, starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        board = app.board
        assert [shown.label for shown in board.lanes][:3] == ["A gpu 0", "A gpu 1", "B gpu 0"]
        assert set(board.table.lane.tolist()) == set(range(6))
        await press(pilot, "j")
        await until(pilot, lambda: app.detail_text)
        await answer(pilot, "t", "#4")
        chosen = board.selected
        await press(pilot, "A")
        assert chosen is not None
        assert board.selected == chosen == board.rows[app.gap_list.index]
        assert app.detail_text
        starts: tuple[set[int], set[int]] = (set(), set())
        for shown in board.gpus:
            steps = board.steps_at(shown)
            assert steps is not None
            starts[shown.trace].add(int(steps.start[4]))
        assert board.cursor in starts[0] & starts[1]
        assert board.lane_at_cursor is not None
        whose = ("A " + two_ranks.name, "B " + starved.name)[board.lane_at_cursor.trace]
        for key in ("2", "3", "4"):
            await press(pilot, key)
            assert any(f"{whose}, the trace" in line for line in screen(app))

    browse([two_ranks], drive, beside=[starved])


def test_the_mouse_zooms_drags_and_picks(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        board = app.board
        timeline, x = app.timeline, app.timeline.gutter_width + 40
        length, at = board.view.length, board.view.moment_of(40, timeline.cells)
        await pilot._post_mouse_events(
            [__import__("textual").events.MouseScrollUp], timeline, (x, 0)
        )
        await pilot.pause()
        assert board.view.length < length
        assert abs(board.view.moment_of(40, timeline.cells) - at) < board.view.length / 40
        start = board.view.start
        await pilot.mouse_down(timeline, offset=(x, 0))
        await pilot.hover(timeline, offset=(x - 10, 0))
        await pilot.mouse_up(timeline, offset=(x - 10, 0))
        await pilot.pause()
        assert board.view.start > start
        await press(pilot, "g")
        assert board.selected is not None
        lane = int(board.table.lane[board.selected])
        other = (lane + 1) % 4
        await pilot.click(timeline, offset=(x + 20, other * timeline.lane_height))
        await pilot.pause()
        assert board.cursor_lane == other
        top = round(app.gap_list.scroll_offset.y)
        await pilot.click(app.gap_list, offset=(5, 3))
        await pilot.pause()
        assert app.gap_list.index == top + 2

    browse([starved], drive)


def test_the_detail_is_copied_and_the_view_is_written(starved: Path, tmp_path: Path) -> None:
    target, part = tmp_path / "view.svg", tmp_path / "part.sqlite"

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "y")
        assert app.clipboard == app.detail_text.plain
        await answer(pilot, "x", str(target))
        await until(pilot, target.exists)
        await press(pilot, "f")
        await answer(pilot, "x", str(part))
        await until(pilot, part.exists)
        await answer(pilot, "x", str(part))
        assert isinstance(app.screen, Prompt)

    browse([starved], drive)
    assert target.read_text(encoding="utf-8").startswith("<svg")
    assert command.gputrace("analyze", part).code == 0


def test_the_screen_looks_as_it_did(two_ranks: Path, golden: Callable[[str, str], None]) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        app.use_palette(Palette())
        await press(pilot, "B")
        await until(pilot, lambda: "between step" in app.detail_text.plain)
        golden("browse.svg", picture(app))

    browse([two_ranks], drive, size=(80, 24))


def test_help_lists_every_key(two_ranks: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "?")
        assert isinstance(app.screen, Help)
        shown = "\n".join(screen(app))
        assert all(key.does[:30] in shown for key in KEYS)
        await press(pilot, "escape")
        assert not isinstance(app.screen, Help)

    browse([two_ranks], drive, size=(120, 80))


def test_the_command_palette_finds_what_keys_do(two_ranks: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        whole = app.board.view.whole()
        assert app.board.view != whole
        await press(pilot, "ctrl+p")
        await press(pilot, *"fit", "space", *"the", "space")
        await press(pilot, *"whole")
        await pilot.pause(0.5)
        await press(pilot, "enter")
        await until(pilot, lambda: app.board.view == whole)

    browse([two_ranks], drive)


def test_letters_stand_for_colours(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "l", "0")
        lanes = [line for line in screen(app) if line.startswith((" gpu", "▸gpu"))]
        assert all("D" in line and "█" in line for line in lanes[:4])

    browse([starved], drive)


def test_names_of_strangers_are_neither_markup_nor_escape_sequences(tmp_path: Path) -> None:
    export = Export()
    for step in range(6):
        for place, name in enumerate(HOSTILE):
            start = step * 1_000_000 + place * 100_000
            export.kernel(start, start + 60_000, name=name)
    path = export.write(tmp_path / "[red]trace[red].sqlite")

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        for _ in HOSTILE:
            await press(pilot, "n", "g", "e", "S", "minus", "e")
        await answer(pilot, "/", "bold")
        await until(pilot, lambda: "[bold red]kernel" in app.detail_text.plain)
        text = "\n".join(screen(app)) + app.detail_text.plain
        assert "\x1b" not in text
        assert "\u202e" not in text

    browse([path], drive, size=(80, 24))


@pytest.mark.parametrize("name", ["nsys-ai-h100_2gpu_1s.sqlite", "pipit-saxpy-mpi.sqlite"])
def test_traces_without_steps_are_shown(name: str, recording: Callable[[str], Path]) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "]", "f", "n", "g", "e", "c", "0")
        assert app.is_running

    browse([recording(name)], drive)


def test_a_file_that_is_no_trace_ends_it_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no trace")
    app = BrowseApp([[path]])
    app.run(headless=True)
    assert isinstance(app.error, InputError)
    assert str(path) in str(app.error)


def test_without_a_terminal_it_says_so(starved: Path) -> None:
    assert_refused(command.gputrace("browse", starved), USAGE, "terminal", "gputrace analyze")


def on_a_terminal(
    *arguments: str, env: dict[str, str] | None = None, end_it: bool = False
) -> tuple[int, str]:
    """Exit code and output of the command on a terminal.

    Once something is drawn, presses q, or ends it with a signal.
    """
    master, slave = pty.openpty()
    ran = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=command.environment({"TERM": "xterm"} | (env or {})),
    )
    os.close(slave)
    seen, end = b"", time.monotonic() + 60
    while ran.poll() is None and time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                seen += os.read(master, 1 << 16)
            except OSError:
                break
        if b"gap 1 of" in seen and end_it:
            ran.terminate()
            end_it, seen = False, seen.replace(b"gap 1 of", b"")
        elif b"gap 1 of" in seen:
            os.write(master, b"q")
    code = ran.wait(60)
    while select.select([master], [], [], 0.1)[0]:
        try:
            seen += os.read(master, 1 << 16)
        except OSError:
            break
    os.close(master)
    return code, seen.decode(errors="replace")


@pytest.mark.parametrize("words", [(), ("--demo", "trace.sqlite")])
def test_either_a_trace_or_the_demo_is_shown(words: tuple[str, ...]) -> None:
    assert_refused(command.gputrace("browse", *words), USAGE, "either a TRACE or --demo")


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colours", "no colours"])
def test_the_command_draws_and_leaves_the_terminal_as_it_was(
    starved: Path, env: dict[str, str]
) -> None:
    code, drawn = on_a_terminal("-m", "gputrace", "browse", str(starved), env=env)
    assert code == 0
    assert "input: waiting for the" in drawn
    assert drawn.count("\x1b[?1049h") == drawn.count("\x1b[?1049l") == 1


def test_a_signal_gives_the_terminal_back_too(starved: Path) -> None:
    code, drawn = on_a_terminal("-m", "gputrace", "browse", str(starved), end_it=True)
    assert code == 128 + 15
    assert drawn.count("\x1b[?1049h") == drawn.count("\x1b[?1049l") == 1


def test_the_command_tells_what_is_wrong_with_a_file_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no trace")
    code, drawn = on_a_terminal("-m", "gputrace", "browse", str(path))
    assert code == UNREADABLE
    last = drawn.rpartition("\x1b[?1049l")[2]
    assert re.search(r"gputrace: .*notes\.txt: not a trace", last)
    assert "Traceback" not in drawn


def test_without_textual_it_says_what_to_install(starved: Path) -> None:
    program = (
        "import sys; sys.modules['textual'] = None\n"
        "from gputrace.cli import end, run; end(run(['browse', sys.argv[1]]))"
    )
    code, drawn = on_a_terminal("-c", program, str(starved))
    assert code == MISSING
    assert "pip install textual" in drawn


def test_a_key_says_why_the_step_under_the_cursor_was_slow(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "2", "W")
        await until(pilot, lambda: app.detail_text.plain.startswith("Step 3 took"))
        assert app.pane == "gaps"
        assert "\ngpu 3, at the cursor: 64.3 ms (+1.26 ms)" in app.detail_text.plain
        assert "- host: launch overhead +" in app.detail_text.plain
        # It waits as long as the median step.
        assert "- input: waiting for the next batch" not in app.detail_text.plain
        assert "\nlongest gap\n- 25." in app.detail_text.plain
        assert "\nwhat to do\n" in app.detail_text.plain

    browse([starved], drive)


def test_without_a_gpu_no_list_is_empty_and_steps_are_explained(tmp_path: Path) -> None:
    made = Made(tmp_path / "host.sqlite")
    made.process(1, 0)
    host_steps(made)
    made.report()

    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        text = "\n".join(screen(app))
        assert app.pane == "findings"
        assert "data-feeding" in text
        assert " 1 step   2 findings   4 steps" in text
        assert not re.search(r"gap \d|3 kernels", text)
        await press(pilot, "1")
        await until(pilot, lambda: "Step 0 took 20.0 ms" in "\n".join(screen(app)))
        assert "length" not in "\n".join(screen(app))

    browse([made.path], drive)


def test_down_scrolls_what_is_shown_in_place_of_the_gaps(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        selected = app.board.selected
        await press(pilot, "4", "down")
        assert app.board.selected == selected
        await press(pilot, "1", "down")
        assert app.board.selected != selected

    browse([starved], drive)


def test_all_gaps_open_at_their_longest(starved: Path) -> None:
    async def drive(app: BrowseApp, pilot: Pilot[None]) -> None:
        await press(pilot, "i")
        assert app.gap_list.index == 0
        assert re.search(r"gap 1 of [\d,]+ in all", "\n".join(screen(app)))

    browse([starved], drive)
