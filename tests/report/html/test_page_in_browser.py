"""The page in a browser: it draws, zooms and jumps to gaps without an error or a request."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Final

import pytest

import gputrace
from gputrace.analyzers.timeline_model import Scene, read_scene
from gputrace.analyzers.timeline_model.trace_rows import merge_narrow, read_window_rows
from gputrace.model.options import Options
from gputrace.readers.open import open_traces
from gputrace.report.html.page import render
from gputrace.report.html.timeline import TraceParts, gather, read_parts, read_window
from gputrace.report.palette import LOOKS
from gputrace.units import parse_duration
from tests.helpers import command
from tests.helpers.chromium import Browser, chromium, needs_chromium
from tests.helpers.command import ROOT, assert_refused, environment
from tests.helpers.examples import few
from tests.helpers.recordings import SMALL
from tests.report.html.test_page import HOSTILE, STARVED, USAGE, hostile
from tests.synthetic import Plan, simulate, write_nsys

__all__ = ["hostile"]

pytestmark = needs_chromium

RANGE: Final = "Bokeh.documents[0].get_model_by_name('timeline').x_range"
SHOWN: Final = f"[{RANGE}.start * 1e9, {RANGE}.end * 1e9]"
BARS: Final = "Bokeh.documents[0].get_model_by_name('timeline-bars').data"
WORDS: Final = "Bokeh.documents[0].get_model_by_name('timeline-words').data.text"
FRAME: Final = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
SLOW_LOADER: Final = "own/h200x2-resnet18-slow-loader.sqlite"
OTHERS: Final = (
    "profiling-lm-da6bcc3f.nvprof",
    "tracelens-falconsai.json.gz",
    "tensorflow-8gpu.xplane.pb",
    "hta-large-integer.pt.trace.json.gz",
    SLOW_LOADER,
)
"""Of other recorders, in tests/data."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as started:
        yield started


def write(trace: Path, target: Path) -> str:
    with gputrace.open(trace) as opened:
        opened.report(target)
    return target.as_uri()


@pytest.fixture(scope="module")
def address_of(page_of: Callable[[str], Path]) -> Callable[[str], str]:
    """The address of the page of a recording."""
    return lambda name: page_of(name).as_uri()


@pytest.fixture(scope="module")
def starved(address_of: Callable[[str], str]) -> str:
    return address_of(STARVED)


@pytest.fixture(scope="module")
def small(address_of: Callable[[str], str]) -> str:
    """The page that opens fastest, for what any page would do."""
    return address_of("pipit-saxpy-mpi.sqlite")


def assert_nothing_wrong(browser: Browser) -> None:
    assert browser.complaints == []
    outside = [url for url in browser.requests if not url.startswith(("file:", "data:"))]
    assert outside == []


def shown(browser: Browser) -> tuple[float, float]:
    start, end = browser.run(f"{FRAME}.then(() => {SHOWN})")
    return start, end


@pytest.mark.parametrize("name", [*OTHERS, *reversed(SMALL)][: few(7)])
def test_real_traces_are_drawn_zoomed_and_searched(
    name: str, browser: Browser, address_of: Callable[[str], str]
) -> None:
    browser.open(address_of(name))
    before = shown(browser)
    assert browser.run(f"{BARS}.left.length")
    browser.run("document.querySelector('[data-do=in]').click()")
    after = shown(browser)
    assert before[0] < after[0] < after[1] < before[1]
    rows = browser.run("document.querySelectorAll('tr[data-start]').length")
    if rows:
        browser.run("document.querySelectorAll('tr[data-start]')[0].click()")
        start, end = shown(browser)
        gap = browser.run(
            "(row => [Number(row.dataset.start), Number(row.dataset.end)])"
            "(document.querySelector('tr[aria-current]'))"
        )
        assert start <= gap[0] + 1 and gap[1] - 1 <= end  # noqa: PT018
        assert end - start < 4 * (gap[1] - gap[0]) + 10_000
    assert_nothing_wrong(browser)


def test_the_gap_of_the_sleep_is_named_at_first_glance(browser: Browser, starved: str) -> None:
    browser.open(starved)
    words = browser.run(WORDS)
    assert sum(bool(re.fullmatch(r"25\.\d ms data feeding", word)) for word in words) >= 8
    top = browser.run("document.querySelector('#timeline').getBoundingClientRect().top")
    assert top < 800


ROWS: Final = "Bokeh.documents[0].get_model_by_name('rows-{}')"


def test_a_cell_of_a_notebook_shows_the_page_in_a_frame_of_its_own(
    browser: Browser, saxpy: Path, tmp_path: Path
) -> None:
    with gputrace.open(saxpy) as trace:
        cell = trace.page(height=640)._repr_html_()
    assert ' sandbox="allow-scripts' in cell
    target = tmp_path / "notebook.html"
    # Without the sandbox, a script may look into the frame.
    open_frame = cell.replace("sandbox=", "data-sandbox=")
    target.write_text(f"<!doctype html><body data-ready=yes>{open_frame}", encoding="utf-8")
    browser.open(target.as_uri())
    browser.until("frames[0]?.document.body?.dataset.ready === 'yes'")
    assert browser.run("document.querySelector('iframe').clientHeight") == 640
    seen = f"{RANGE}.end - {RANGE}.start".replace("Bokeh", "frames[0].Bokeh")
    before = browser.run(f"frames[0].focus(), {seen}")
    browser.key("w")
    browser.until(f"{seen} < {before}")
    assert_nothing_wrong(browser)


def test_zoomed_in_boxes_have_names_and_details_and_point_to_their_launch(
    browser: Browser, starved: str
) -> None:
    browser.open(starved)
    browser.until("document.body.dataset.rows")
    pressed = (
        "[...document.querySelectorAll('#groups [aria-pressed=true]')].map(b => b.textContent)"
    )
    streams, thread, _ = browser.run(pressed)
    assert browser.run("document.getElementById('open').textContent").endswith(" open")
    assert re.fullmatch(r"gpu \d streams", streams)
    assert re.fullmatch(r"gpu \d thread \d+", thread)
    browser.run("document.getElementById('lanes').focus()")
    browser.key("/")
    browser.run("document.activeElement.value = 'batch_norm_backward_reduce'")
    browser.run("document.activeElement.dispatchEvent(new Event('input'))")
    found = browser.run("document.getElementById('hits').textContent")
    assert int(found.removesuffix(" found").replace(",", "")) > 10
    assert browser.run("Bokeh.documents[0].get_model_by_name('overview-hits').data.left.length")
    browser.key("Enter")
    browser.run(FRAME)
    first = browser.run("document.getElementById('detail').innerText")
    assert "batch_norm_backward_reduce" in first
    assert re.search(r"cudaLaunchKernel\w* by thread \d+, [\d.]+ (µs|ms) earlier", first)
    assert re.search(r"step\s+\d+", first)
    assert re.search(r"gpu \d, stream \d+", first)
    assert browser.run(ROWS.format("hits") + ".data.left.length")
    browser.run("document.getElementById('hit-next').click()")
    assert browser.run("document.getElementById('detail').innerText") != first
    browser.run("document.getElementById('hit-previous').click()")
    assert browser.run("document.getElementById('detail').innerText") == first
    browser.run("document.getElementById('to-launch').click()")
    browser.run(FRAME)
    assert browser.run(ROWS.format("arrow") + ".data.x.length") == 1
    browser.run("document.getElementById('to-selected').click()")
    browser.run(FRAME)
    named = browser.run(ROWS.format("words") + ".data.text")
    assert any(name.startswith("batch_norm_backward_reduce") for name in named)
    assert_nothing_wrong(browser)


def test_the_longest_launch_is_a_column_and_a_click_away(
    browser: Browser, address_of: Callable[[str], str]
) -> None:
    browser.open(address_of(OTHERS[1]))
    browser.until("document.body.dataset.rows")
    heads = "[...document.querySelectorAll('#kernels thead th')]"
    at = browser.run(f"{heads}.findIndex(head => head.textContent === 'longest')")
    browser.run(f"{heads}[{at}].firstElementChild.click()")
    first = "document.querySelector('#kernels tbody tr')"
    length = browser.run(f"{first}.cells[{at}].textContent")
    name = browser.run(f"{first}.cells[0].title")
    shown_name = browser.run(f"{first}.cells[0].textContent")
    assert len(name) > len(shown_name), "it is the whole one"
    browser.run(f"{first}.querySelector('button').click()")
    browser.run(FRAME)
    detail = browser.run("document.getElementById('detail').innerText")
    assert name[:200] in detail
    assert parse_duration(re.search(r"length\s+([\d.]+ [µm]s)", detail)[1]) == pytest.approx(  # type: ignore[index]
        parse_duration(length), rel=0.01
    )
    assert "finds every launch" in browser.run("document.getElementById('all-kernels').textContent")
    assert_nothing_wrong(browser)


def test_a_click_on_a_box_selects_it(browser: Browser, small: str) -> None:
    browser.open(small)
    browser.until("document.body.dataset.rows")
    boxes = ROWS.format("boxes")
    longest = browser.run(
        f"(data => data.name.findIndex(n => n && !n.endsWith('zoom in')))({boxes}.data)"
    )
    name = browser.run(f"{boxes}.data.name[{longest}]")
    browser.run(f"void ({boxes}.selected.indices = [{longest}])")
    assert name in browser.run("document.getElementById('detail').innerText")


def test_zooming_ends_at_the_shortest_operation(browser: Browser, small: str) -> None:
    browser.show(small)
    shortest = browser.run("JSON.parse(document.getElementById('facts').textContent).shortest")
    for _ in range(40):
        browser.run("document.querySelector('[data-do=in]').click()")
    start, end = shown(browser)
    assert end - start == pytest.approx(shortest, rel=0.01)
    assert shortest >= 500


def range_of(name: str, browser: Browser) -> tuple[float, float]:
    plot = f"Bokeh.documents[0].get_model_by_name('{name}')"
    start, end = browser.run(f"{FRAME}.then(() => [{plot}.x_range.start, {plot}.x_range.end])")
    return start, end


def test_warm_up_is_folded_until_it_is_asked_for_or_looked_at(
    browser: Browser, trace_of: Callable[[str], Path], address_of: Callable[[str], str]
) -> None:
    with gputrace.open(trace_of(SLOW_LOADER)) as opened:
        report = opened.analyze()
    steady = [step for step in report.step_list if step.phase == "steady"]
    assert len(steady) < len(report.step_list)
    first = (min(step.start_ns for step in steady) - report.origin_ns) / 1e9
    browser.open(address_of(SLOW_LOADER))
    folded = {name: range_of(name, browser) for name in ("overview", "busy", "steps")}
    length = folded["overview"][1] - folded["overview"][0]
    for name in ("overview", "busy"):
        assert first - 0.05 * length < folded[name][0] <= first
    assert folded["steps"][0] == min(step.step for step in steady) - 0.5
    browser.run("document.querySelector('button[data-fold]').click()")
    for name, (start, _) in folded.items():
        assert range_of(name, browser)[0] < start
        assert range_of(name, browser)[0] >= (-0.5 if name == "steps" else 0)
    browser.run("document.querySelector('[data-do=measured]').click()")
    assert range_of("overview", browser) == folded["overview"]
    assert shown(browser)[0] == pytest.approx(folded["overview"][0] * 1e9)
    browser.run("document.querySelector('[data-do=run]').click()")
    assert range_of("overview", browser)[0] < folded["overview"][0]
    assert_nothing_wrong(browser)


def test_contents_and_findings_lead_to_their_places(browser: Browser, starved: str) -> None:
    browser.open(starved)
    links = browser.run("[...document.querySelectorAll('nav a')].map(a => a.textContent)")
    assert {"Also found", "The largest gaps", "Where the time goes", "Kernels"} <= {*links}
    # Those with "=" name a part of the timeline.
    inside = 'a[href^="#"]:not([href*="="])'
    there = f"[...document.querySelectorAll('{inside}')].map(a => a.hash.slice(1))"
    for target in browser.run(there):
        assert browser.run(f"document.getElementById('{target}') !== null"), target
    browser.run("document.querySelector('header [data-finding=data-feeding]').click()")
    chosen = "document.querySelector('tr[aria-current]')"
    assert browser.run(f"{chosen}.dataset.of") == "data-feeding"
    why = browser.run("document.getElementById('why').textContent")
    assert re.fullmatch(r"The gap of 25\.\d ms: input: waiting for the next batch 25\.\d ms.*", why)
    start, end = shown(browser)
    assert start < float(browser.run(f"{chosen}.dataset.start")) < end


def test_columns_sort_by_length_number_and_name(browser: Browser, starved: str) -> None:
    browser.show(starved)

    def column(heading: str, at: int) -> list[str]:
        rows = f"document.querySelector('[aria-labelledby={heading}] tbody').rows"
        texts: list[str] = browser.run(f"[...{rows}].map(row => row.cells[{at}].textContent)")
        return texts

    def press(heading: str, at: int) -> None:
        heads = f"document.querySelectorAll('[aria-labelledby={heading}] thead button')"
        browser.run(f"{heads}[{at}].click()")

    before = column("h-kernels", 4)
    press("h-kernels", 4)
    lengths = [parse_duration(text) for text in column("h-kernels", 4)]
    assert lengths == sorted(lengths, reverse=True)
    assert column("h-kernels", 4) != before
    press("h-kernels", 4)
    assert [parse_duration(text) for text in column("h-kernels", 4)] == lengths[::-1]
    press("h-kernels", 4)
    assert column("h-kernels", 4) == before
    press("h-kernels", 0)
    names = [name.lower() for name in column("h-kernels", 0)]
    assert names[0] > names[-1]
    press("h-step", 1)
    breakdown = "document.querySelector('[aria-labelledby=h-step] tbody')"
    assert browser.run(f"{breakdown}.rows[0].cells[0].textContent") != "total"
    assert browser.run(f"[...{breakdown}.rows].at(-1).cells[0].textContent") == "total"


def test_nothing_is_wider_than_the_window(
    browser: Browser, address_of: Callable[[str], str]
) -> None:
    browser.open(address_of(SLOW_LOADER))
    size = {"height": 1000, "deviceScaleFactor": 1, "mobile": False}
    try:
        for width, columns in ((1400, 3), (768, 2), (390, 1)):
            browser.ask("Emulation.setDeviceMetricsOverride", width=width, **size)
            shown(browser)
            assert browser.run("document.documentElement.scrollWidth") <= width
            gaps = browser.run("document.querySelector('.gaps').scrollWidth")
            assert gaps <= width
            tops = "[...document.querySelectorAll('.grid figure')].map(f => f.offsetLeft)"
            assert len(set(browser.run(tops))) == columns
    finally:
        browser.ask("Emulation.clearDeviceMetricsOverride")


def test_no_tooltip_is_printed(browser: Browser, small: str) -> None:
    browser.show(small)
    browser.run("document.getElementById('classes').scrollIntoView({ block: 'center' })")
    x, y = browser.run(
        "(box => [box.left + 150, box.top + 30])"
        "(document.getElementById('classes').getBoundingClientRect())"
    )
    tips = """(function find(root) {
        return [...root.querySelectorAll("*")].flatMap(one => [
            ...(one.classList.contains("bk-Tooltip") && one.getClientRects().length ? [one] : []),
            ...(one.shadowRoot ? find(one.shadowRoot) : [])]);
    })(document).filter(one => getComputedStyle(one).visibility === "visible").length"""
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.until(tips)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(tips) == 0


class Viewer(BaseHTTPRequestHandler):
    """A viewer that the person runs: it answers as Perfetto's does, and keeps what it was sent."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(
            b"<script>onmessage = e => { if (e.data === 'PING') e.source.postMessage('PONG', '*');"
            b"else fetch('/', { method: 'POST', body: e.data.perfetto.buffer })"
            b".then(() => close()); }</script>"
        )

    def do_POST(self) -> None:
        received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


received: Queue[Any] = Queue()


def test_the_trace_is_handed_to_a_viewer_that_the_person_runs_when_asked(
    browser: Browser, starved: str
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Viewer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        browser.show(starved)
        browser.until("document.body.dataset.rows")
        assert_nothing_wrong(browser)
        browser.run("document.getElementById('viewer').value = 'javascript:alert(1)'")
        browser.run("document.getElementById('to-perfetto').click()")
        assert "no address" in browser.run("document.getElementById('sent').textContent")
        address = f"http://127.0.0.1:{server.server_port}"
        browser.run(f"document.getElementById('viewer').value = '{address}'")
        browser.ask(
            "Runtime.evaluate",
            expression="document.getElementById('to-perfetto').click()",
            userGesture=True,
        )
        browser.until("document.getElementById('sent').textContent === 'The viewer has the trace.'")
        events = received.get(timeout=60)["traceEvents"]
        browser.ask("Page.bringToFront")
        server.shutdown()
    assert any("batch_norm_backward_reduce" in event["name"] for event in events)
    assert {"gpu 0", "gpu 3"} <= {event["args"].get("name") for event in events}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_what_moves_too_fast_to_be_drawn_in_full_is_when_it_stands(
    browser: Browser, starved: str
) -> None:
    browser.show(starved)
    browser.run("document.querySelector('[data-do=run]').click()")
    full = browser.run(f"{FRAME}.then(() => {BARS}.left.length)")
    # Each frame comes late, as where there is too much to draw.
    moving = f"""(async () => {{
        let least = Infinity;
        for (let frame = 0; frame < 8; frame++) {{
            {RANGE}.start += 1e-6;
            for (const end = performance.now() + 30; performance.now() < end;);
            await {FRAME};
            least = Math.min(least, {BARS}.left.length);
        }}
        return least;
    }})()"""
    assert browser.run(moving) < full * 0.8
    browser.until(f"Math.abs({BARS}.left.length - {full}) < {full} * 0.1")


def test_a_drag_moves_the_lanes_at_once_and_the_charts_when_it_rests(
    browser: Browser, small: str
) -> None:
    browser.open(small)
    browser.until("document.body.dataset.rows")
    browser.run("document.getElementById('lanes').scrollIntoView()")
    browser.run("document.querySelector('[data-do=in]').click()")
    before = shown(browser)
    left, top, width, height = browser.run(
        "(box => [box.x, box.y, box.width, box.height])"
        "(document.getElementById('timeline').getBoundingClientRect())"
    )

    def mouse(kind: str, x: float, **more: Any) -> None:
        at = {"x": left + x, "y": top + height / 2}
        browser.ask("Input.dispatchMouseEvent", type=kind, **at, **more)

    mouse("mousePressed", width / 2, button="left", buttons=1, clickCount=1)
    mouse("mouseMoved", width / 2 - 10, button="left", buttons=1)
    visible, areas, still = browser.run(f"""(async () => {{
        const to = x => window.dispatchEvent(new PointerEvent("pointermove", {{ clientX: x }}));
        to({left + width / 2 - 100});
        await {FRAME};
        const canvas = document.querySelector("#timeline canvas.moving");
        const {{ width, height }} = canvas, areas = {{}};
        const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        for (let at = 0; at < pixels.length; at += 4) {{
            const bytes = [...pixels.slice(at, at + 3)];
            const color = bytes.map(byte => byte.toString(16).padStart(2, "0")).join("");
            areas[color] = (areas[color] || 0) + 1;
        }}
        return [!canvas.hidden, areas, {SHOWN}];
    }})()""")
    assert visible
    assert still == pytest.approx(before), "the charts wait"
    mouse("mouseReleased", width / 2 - 100, button="left", clickCount=1)
    browser.until("document.querySelector('#timeline canvas.moving').hidden")
    after = shown(browser)
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    # Both show as much of each class, but for the words in front.
    colors, area = browser.run(f"""[{BARS}.color, {BARS}.left.map((left, at) =>
        (Math.min({BARS}.right[at], {RANGE}.end) - Math.max(left, {RANGE}.start))
        * ({BARS}.top[at] - {BARS}.bottom[at]))]""")
    charted = dict.fromkeys(colors, 0.0)
    for color, size in zip(colors, area, strict=True):
        charted[color] += size
    most, next_ = sorted(charted, key=lambda color: -charted[color])[:2]
    ratio = areas[most[1:]] / areas[next_[1:]]
    assert ratio == pytest.approx(charted[most] / charted[next_], rel=0.1)
    assert_nothing_wrong(browser)


def test_the_wheel_zooms_at_the_pointer_with_ctrl(browser: Browser, small: str) -> None:
    browser.open(small)
    browser.until("document.body.dataset.rows")
    before = shown(browser)
    turn = """document.getElementById("{}").dispatchEvent(new WheelEvent("wheel",
        {{ deltaY: -100, ctrlKey: {}, clientX: innerWidth / 2, cancelable: true }}))"""
    assert browser.run(turn.format("timeline", "false")), "the page scrolls"
    assert not browser.run(turn.format("timeline", "true"))
    browser.until(f"{SHOWN}[0] > {before[0]} && {SHOWN}[1] < {before[1]}")
    between = shown(browser)
    assert not browser.run(turn.format("rows", "true"))
    browser.until(f"{SHOWN}[0] > {between[0]} && {SHOWN}[1] < {between[1]}")
    assert_nothing_wrong(browser)


def test_every_key_does_what_the_page_says(browser: Browser, small: str) -> None:
    browser.open(small)
    browser.until("document.body.dataset.rows")
    assert browser.run("document.activeElement === document.body"), "they need no click before"
    first = shown(browser)
    width = first[1] - first[0]
    browser.key("+")
    zoomed = shown(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx(width / 2)
    browser.key("ArrowRight")
    assert shown(browser)[0] == pytest.approx(zoomed[0] + width / 8)
    browser.key("ArrowLeft")
    browser.key("-")
    assert shown(browser) == pytest.approx(first)
    browser.key("0")
    whole = shown(browser)
    assert whole[1] - whole[0] > width
    browser.key("n")
    browser.key("n")
    second = browser.run(
        "[...document.querySelectorAll('tr[data-start]')].findIndex(r => r.ariaCurrent)"
    )
    browser.key("p")
    assert browser.run("document.querySelector('tr[data-start]').ariaCurrent") == "true"
    assert second == 1
    gap = shown(browser)
    browser.run("document.querySelector('.scroll[tabindex]').focus()")
    browser.key("ArrowRight")
    assert shown(browser) == gap, "it scrolls the table"
    browser.key("/")
    browser.key("-")
    assert shown(browser) == gap, "it is typed into the search"
    browser.run("document.getElementById('h-kernels').scrollIntoView()")
    browser.run("document.activeElement.blur()")
    browser.key("0")
    assert shown(browser) == pytest.approx(whole)
    assert browser.run("document.getElementById('timeline').getBoundingClientRect().top") < 500
    assert_nothing_wrong(browser)


def drawn_compute(browser: Browser, window: tuple[int, int]) -> float:
    """Shows a window; gives the area of compute in the first of four lanes, in nanoseconds."""
    browser.run(f"void {RANGE}.setv({{start: {window[0]} / 1e9, end: {window[1]} / 1e9}})")
    shown(browser)
    area = browser.run(f"""(bars => bars.left.reduce((sum, left, at) => sum +
        (bars.bottom[at] >= 3 && bars.what[at].startsWith("compute")
        ? (Math.min(bars.right[at] * 1e9, {window[1]}) - Math.max(left * 1e9, {window[0]}))
        * (bars.top[at] - bars.bottom[at]) / Lanes.HEIGHT : 0), 0))({BARS})""")
    return float(area)


@pytest.mark.parametrize("most", [400_000, 6_000])
def test_what_is_drawn_is_exact_at_every_zoom(
    most: int, browser: Browser, recording: Callable[[str], Path], tmp_path: Path
) -> None:
    """The area of a class is its time, in a page that holds all runs and in one that cannot."""
    target = tmp_path / "page.html"
    with open_traces([str(recording(STARVED))]) as trace:
        material = gather(read_scene(trace, Options()), TraceParts(), most)
    is_whole = all(lane.whole for lane in material.runs)
    assert is_whole == (most > 6_000)
    target.write_text(render(material), encoding="utf-8")
    browser.open(target.as_uri())
    scene, lane = material.scene, material.scene.lanes[0]
    start, end = lane.window.start - scene.origin, lane.window.end - scene.origin
    widths = (end - start, (end - start) // 7, 30_000_000 if is_whole else 150_000_000)
    for width in widths:
        edges = [scene.origin + start, scene.origin + start + width]
        expected = int(lane.layers.split(edges)[0, 0])
        close = 1e-3 if is_whole else 0.03
        assert drawn_compute(browser, (start, start + width)) == pytest.approx(expected, rel=close)
    assert_nothing_wrong(browser)


HASH: Final = "location.hash"
NAME: Final = "(document.querySelector('#detail dd') || {}).innerText"
WHY: Final = "document.getElementById('why').textContent"


def test_a_link_opens_where_it_was_copied_and_back_goes_back(
    browser: Browser, starved: str
) -> None:
    browser.open(starved)
    browser.until("document.body.dataset.rows")
    first = shown(browser)
    browser.key("w")
    browser.until(f"{HASH}.startsWith('#t=')")
    zoomed, link = shown(browser), browser.run(HASH)
    browser.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    browser.key("c")
    browser.until("document.getElementById('where').textContent.startsWith('Link copied')")
    assert browser.run("window.copied") == f"{starved}{link}"
    browser.run("document.getElementById('search').value = 'nccl'")
    browser.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    browser.run("document.getElementById('hit-next').click()")
    browser.until(f"{HASH}.includes('sel=box.') && {HASH}.includes('q=nccl')")
    selected, name = (
        browser.run(HASH),
        browser.run(NAME),
    )
    browser.run("history.back()")
    browser.until(f"{HASH} === '{link}'")
    browser.until(f"Math.abs({SHOWN}[0] - {zoomed[0]}) < 2")
    assert browser.run("document.getElementById('search').value") == ""
    browser.run("history.back()")
    browser.until(f"{HASH} === '' && Math.abs({SHOWN}[0] - {first[0]}) < 2")
    browser.open(f"{starved}{selected}")
    browser.until(f"({NAME}) !== undefined")
    assert browser.run(NAME) == name
    assert browser.run("document.getElementById('search').value") == "nccl"
    browser.open(f"{starved}{link}")
    browser.until("document.body.dataset.rows && scrollY > 0")
    browser.until(f"Math.abs({SHOWN}[0] - {zoomed[0]}) < 2")
    assert browser.run(HASH) == link
    launch = browser.run("document.querySelector('a[href^=\"#t=\"]').getAttribute('href')")
    browser.run("document.querySelector('a[href^=\"#t=\"]').click()")
    start = float(launch[3:].partition("-")[0]) * 1e9
    browser.until(f"Math.abs({SHOWN}[0] - {start}) < 2")
    browser.until("document.getElementById('lanes').getBoundingClientRect().top < innerHeight / 2")
    assert_nothing_wrong(browser)


def test_a_step_is_shown_by_its_number_and_by_a_click_on_its_spike(
    browser: Browser, tmp_path: Path
) -> None:
    plan = Plan(ranks=2, steps=16, allreduces=2, sync_every_step=True)
    plan = replace(plan, late_host_rank=1, late_host_ns=30_000_000, odd_steps=(9,))
    write_nsys(simulate(plan), tmp_path / "late.sqlite")
    address = write(tmp_path / "late.sqlite", tmp_path / "page.html")
    browser.open(address)
    browser.until("document.body.dataset.rows")
    browser.run("document.getElementById('search').value = '9'")
    browser.run("document.getElementById('search').focus()")
    browser.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    assert browser.run("document.getElementById('hits').textContent") == "Enter shows step 9"
    browser.key("Enter")
    why = browser.run(WHY)
    assert re.match(r"Step 9 took [\d.]+ ms on GPU 1, [\d.]+ ms longer than the median step", why)
    there = shown(browser)
    browser.run("document.querySelector('[data-do=run]').click()")
    x, y = browser.run(
        "(view => [view.el.getBoundingClientRect().x + view.frame.bbox.x"
        " + (9 - view.model.x_range.start) / (view.model.x_range.end - view.model.x_range.start)"
        " * view.frame.bbox.width, view.el.getBoundingClientRect().y + view.frame.bbox.y + 20])"
        "(Bokeh.index.get(Bokeh.documents[0].get_model_by_name('steps')))"
    )
    browser.run(
        "document.getElementById('steps').firstElementChild.dispatchEvent("
        f"new MouseEvent('click', {{ clientX: {x}, clientY: {y}, bubbles: true }}))"
    )
    assert shown(browser) == pytest.approx(there)
    assert browser.run(WHY) == why
    browser.open(f"{address}#step=slowest")
    assert browser.run(WHY) == why, "before the streams and threads are there"
    browser.until("document.body.dataset.rows")
    said, lanes = (
        browser.run(f"document.getElementById('{name}').getBoundingClientRect().top")
        for name in ("why", "timeline")
    )
    assert -1 < said < lanes < browser.run("innerHeight")
    browser.until(f"{HASH} === '#step=9'")
    assert shown(browser) == pytest.approx(there)
    browser.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    browser.key("c")
    browser.until("window.copied")
    assert browser.run("window.copied") == f"{address}#step=9"
    browser.key("w")
    browser.until(f"{HASH}.startsWith('#t=')")
    browser.run("location.hash = 'step=99'")
    browser.until(f"({WHY}) === 'There is no step 99 here: the page has steps 0 to 15.'")
    browser.run("location.hash = 'step=9'")
    browser.until(f"({WHY}).startsWith('Step 9 took')")
    assert shown(browser) == pytest.approx(there)
    assert_nothing_wrong(browser)


@pytest.fixture(scope="module")
def cut(
    recording: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Scene, str]:
    """What a page shows that has the names of few of its steps, and its address."""
    with open_traces([recording(STARVED)]) as trace:
        scene = read_scene(trace, Options())
        packed = read_parts(trace, scene, most=6_000)
    page = tmp_path_factory.mktemp("cut") / "page.html"
    page.write_text(render(gather(scene, packed)), encoding="utf-8")
    return scene, page.as_uri()


def test_a_merged_box_has_the_colour_of_most_of_its_time_and_what_is_absent_is_hatched(
    browser: Browser, cut: tuple[Scene, str]
) -> None:
    browser.open(cut[1])
    browser.until("document.body.dataset.rows")
    browser.run("document.querySelector('[data-do=run]').click()")
    shown(browser)
    boxes, absent = (
        browser.run(f"Bokeh.documents[0].get_model_by_name('rows-{name}').data")
        for name in ("boxes", "absent")
    )
    compute = next(look.color for name, look in LOOKS.items() if name == "compute")
    merged = [row for row, name in enumerate(boxes["name"]) if "mostly compute" in name]
    assert merged
    assert {boxes["color"][row] for row in merged} == {compute}
    assert absent["left"]
    named = browser.run("document.getElementById('named').textContent")
    assert re.match(r"Hatched: not in this file, which has the names of \d of 7 steps;", named)
    assert_nothing_wrong(browser)


def test_two_fingers_zoom_the_lanes(browser: Browser, small: str) -> None:
    browser.open(small)
    browser.run("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    start, end = shown(browser)
    y = browser.run(
        "(box => box.y + box.height / 2)"
        "(document.getElementById('timeline').getBoundingClientRect())"
    )
    for kind, apart in (("touchStart", 100), ("touchMove", 150), ("touchMove", 200)):
        points = [{"x": 700 - apart, "y": y, "id": 0}, {"x": 700 + apart, "y": y, "id": 1}]
        browser.ask("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    browser.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.until(f"Math.abs({SHOWN}[1] - {SHOWN}[0] - {(end - start) / 2}) < {(end - start) / 50}")
    assert_nothing_wrong(browser)


def test_a_page_that_cannot_hold_all_says_so_where_it_matters(
    browser: Browser, recording: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    with open_traces([str(recording(STARVED))]) as trace:
        target.write_text(
            render(gather(read_scene(trace, Options()), TraceParts(), 20_000)), encoding="utf-8"
        )
    browser.open(target.as_uri())
    browser.run("document.querySelector('tr[data-start]').click()")
    shown(browser)
    words = browser.run(WORDS)
    named = browser.run("document.querySelector('tr[data-start] button').textContent")
    assert f"{named} data feeding" in words
    told = "document.getElementById('reduced').textContent"
    browser.run("document.querySelector('[data-do=run]').click()")
    shown(browser)
    assert "shares" not in browser.run(told)
    browser.run(f"void {RANGE}.setv({{start: {RANGE}.start, end: {RANGE}.start + 0.02}})")
    shown(browser)
    assert "not their order" in browser.run(told)
    assert_nothing_wrong(browser)


def test_attacks_stay_text(browser: Browser, hostile: Path, tmp_path: Path) -> None:
    browser.open(write(hostile, tmp_path / "page.html"))
    text = browser.run("document.body.innerText")
    assert "owned" not in browser.run("document.title")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE[0] in text
    for row in range(3):
        browser.run(f"document.querySelectorAll('tr[data-start]')[{row}].click()")
    assert_nothing_wrong(browser)


def test_a_script_that_gets_in_does_not_run(browser: Browser, saxpy: Path, tmp_path: Path) -> None:
    """The policy is the second wall: as if escaping had failed."""
    target = tmp_path / "page.html"
    write(saxpy, target)
    attack = '<script>document.title="owned"</script><img src="http://127.0.0.1:9/x" onerror="1">'
    text = target.read_text(encoding="utf-8").replace("<header>", f"<header>{attack}")
    target.write_text(text, encoding="utf-8")
    browser.open(target.as_uri())
    assert browser.run("document.title") != "owned"
    assert any("Content Security Policy" in told for told in browser.complaints)


def test_a_comparison_is_drawn(browser: Browser, h100: Path, tmp_path: Path) -> None:
    target = tmp_path / "compare.html"
    gputrace.compare(h100, h100).save(target)
    browser.open(target.as_uri())
    assert browser.run("Bokeh.documents[0].roots().length") == 1
    assert_nothing_wrong(browser)


class TestServe:
    @pytest.fixture
    def served(self, saxpy: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
        program = [sys.executable, "-m", "gputrace", "report", "--serve", str(saxpy)]
        with subprocess.Popen(
            program, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
        ) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            yield line.rpartition(" ")[2].strip(), process
            process.kill()

    def test_the_page_is_served_to_who_knows_the_token(
        self,
        served: tuple[str, subprocess.Popen[str]],
        browser: Browser,
        saxpy: Path,
    ) -> None:
        address, process = served
        assert address.startswith("http://127.0.0.1:")
        browser.open(address)
        browser.run("document.querySelector('tr[data-start]').click()")
        assert shown(browser)
        assert browser.complaints == []
        assert all(url.startswith((address, "data:")) for url in browser.requests)
        root = address[: address.rindex("/", 0, -1)]
        for path in ("/", "/static/js/bokeh.min.js", "/ws", "/" + "x" * 32 + "/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(root + path, timeout=60)
        port = address.split(":")[2].partition("/")[0]
        other = urllib.request.Request(address, headers={"Host": f"elsewhere.example:{port}"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(other, timeout=60)
        taken = command.gputrace("report", saxpy, "--serve", "--port", port)
        assert_refused(taken, USAGE, f"port {port}", "--port")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr is not None
        assert process.stderr.read().lstrip() == "gputrace: interrupted\n"


def test_all_kernels_are_in_a_table_that_filters(browser: Browser, starved: str) -> None:
    browser.show(starved)
    browser.until("document.body.dataset.rows")
    rows = "[...document.querySelectorAll('details.kernels tbody tr')]"
    count = browser.run(f"{rows}.length")
    assert count == int(
        browser.run("document.querySelector('details.kernels summary').innerText").split()[1]
    )
    browser.run("document.querySelector('details.kernels').open = true")
    browser.run("document.querySelector('[data-filter]').value = 'vectorized Add'")
    browser.run("document.querySelector('[data-filter]').dispatchEvent(new Event('input'))")
    left = browser.run(
        f"{rows}.filter(row => !row.hidden).map(row => row.cells[0].title.toLowerCase())"
    )
    assert 0 < len(left) < count
    assert all("vectorized" in name and "add" in name for name in left)
    browser.run(f"{rows}.find(row => !row.hidden).querySelector('button.named').click()")
    assert browser.run(NAME).lower()[:200] == left[0][:200]
    assert_nothing_wrong(browser)


def test_a_server_sends_every_stream_of_a_window_and_the_page_draws_it(
    browser: Browser, recording: Callable[[str], Path], cut: tuple[Scene, str]
) -> None:
    scene, address = cut
    with open_traces([recording(STARVED)]) as trace:
        whole = read_window(trace, scene, scene.span)
        merged = [
            merge_narrow(trace, row, scene.span, 100)
            for row in read_window_rows(trace, scene, scene.span, 1 << 40)
        ]
    for row in merged:
        assert row.counts is not None
        assert len(row.counts) == len(row.track.events)
    browser.open(address)
    browser.until("document.body.dataset.rows")
    browser.run("document.querySelector('[data-do=run]').click()")
    shown(browser)
    absent = "Bokeh.documents[0].get_model_by_name('rows-absent').data.left.length"
    boxes = "Bokeh.documents[0].get_model_by_name('rows-boxes').data.left.length"
    assert browser.run(absent)
    before = browser.run(boxes)
    served = "Bokeh.documents[0].get_model_by_name('rows').tags[0]"
    browser.run(f"void ({served}.data = {{ text: ['{whole}'] }})")
    browser.until(f"{absent} === 0")
    assert browser.run(boxes) > before
    assert browser.run("document.getElementById('named').textContent") == ""
    assert browser.run("document.getElementById('open').textContent").endswith("3 of 54 open")
    assert_nothing_wrong(browser)
