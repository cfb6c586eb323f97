"""The page of `gputrace report`, as a file: what is in it, and what cannot get out of it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from msgspec.structs import replace

import gputrace
from gputrace.analyzers import timeline_model
from gputrace.analyzers.timeline_model import read_scene
from gputrace.analyzers.timeline_model.trace_rows import read_track_rows
from gputrace.errors import UsageError
from gputrace.model.options import Options
from gputrace.model.results import Step
from gputrace.model.time_class import CLASSES
from gputrace.readers.open import open_traces
from gputrace.report.html import timeline
from gputrace.report.html.charts import step_chart
from gputrace.report.html.page import hashes
from gputrace.units import format_ns
from tests.analyzers.test_host_only_traces import Made
from tests.analyzers.test_host_only_traces import train as host_steps
from tests.analyzers.test_host_state import Looked, Spent
from tests.helpers import command
from tests.helpers.cache_writing import wait_until_kept
from tests.helpers.command import assert_refused
from tests.helpers.exports import H2D, NVTX, PUSH_POP_RANGE, Export, global_id
from tests.helpers.handmade import MS, Run
from tests.synthetic import Plan, simulate, write_nsys
from tests.synthetic.link_plants import write_switches

MISSING, UNREADABLE, USAGE = 4, 3, 2
MOST_BYTES: Final = 5_000_000
STARVED: Final = "h200x4-ddp-starved-9-15.sqlite"
HOSTILE: Final = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</script><script>document.title='owned'</script>",
    "{{ 7 * 191 }}{% raw %}",
    "[bold]kernel[/bold]",
    "$$\\frac{owned}{$$}$$",
    "\x1b[2J\u202ekernel\u2066",
    "long_" * 2_000,
)


class Page(HTMLParser):
    """Parser of what a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.facts: Any = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or tag if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        if self._inside == "facts":
            self.facts = json.loads(data)
        if not self._inside:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def made(page_of: Callable[[str], Path]) -> Callable[[str], str]:
    """The page of a recording, as text."""
    return lambda name: page_of(name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace all of whose names are attacks; its own name is one too."""
    export = Export()
    for step in range(8):
        for place, name in enumerate(HOSTILE):
            start = step * 10_000_000 + place * 500_000
            export.kernel(start, start + 60_000, name=name)
        export.copy(step * 10_000_000 + 9_000_000, step * 10_000_000 + 9_100_000, H2D)
    export.add("TARGET_INFO_GPU", id=0, name=HOSTILE[1], cuDevice=0)
    return export.write(tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(1)>.sqlite")


def test_the_verdict_and_the_gap_of_the_sleep_come_first(made: Callable[[str], str]) -> None:
    page = Page(made(STARVED))
    verdict = page.text.index(" for data ")
    gap = re.search(r"25\.\d ms", page.text[page.text.index("The largest gaps") :])
    assert verdict < page.text.index("Also found") < page.text.index("What each GPU did when")
    assert gap is not None
    assert "waiting for the next batch 25." in page.text


def test_the_page_says_of_a_slow_step_what_the_command_says(tmp_path: Path) -> None:
    """Its wait for a core, too, which only the trace has."""
    path = Looked(Spent(9.5, 0.5, 0), {12: Spent(10, 55, 5)}, 0).analyze(tmp_path).path
    with gputrace.open(path) as trace:
        trace.report(tmp_path / "page.html")
        said = trace.explain_step(12).message
    assert "queued for a core" in said
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.facts["why"]["12"] == f"S{said[1:]}."


def test_every_gap_of_the_list_is_in_the_analysis(
    made: Callable[[str], str], recording: Callable[[str], Path]
) -> None:
    page = Page(made(STARVED))
    report = gputrace.open(recording(STARVED)).analyze()
    rows = [row for row in page.of("tr") if "data-start" in row]
    told = {(row["data-start"], row["data-end"]) for row in rows}
    largest = {*report.gaps.largest, *report.gaps.largest_in_steps}
    origin = report.origin_ns
    assert told == {(str(gap.start_ns - origin), str(gap.end_ns - origin)) for gap in largest}
    assert len(rows) == len(largest)
    assert page.facts["lanes"] == [f"gpu {gpu}" for gpu in range(4)]


def test_the_page_says_why_below_where_and_for_each_gap(
    made: Callable[[str], str], recording: Callable[[str], Path]
) -> None:
    page = made(STARVED)
    report = gputrace.open(recording(STARVED)).analyze()
    where, why = page.index("<caption>Where the time of"), page.index("<caption>Why (a step, per")
    assert where < why < page.index('id="h-run"')
    longest = format_ns(report.gaps.largest_in_steps[0].charges["data-feeding"])
    assert f'data-label="cause">input: waiting for the next batch {longest}' in page


def unpack(page: Page) -> Any:
    """The streams and threads of a page."""
    return json.loads(gzip.decompress(base64.b64decode(page.facts["rows"])))


def test_streams_and_threads_are_below_their_lanes(tmp_path: Path) -> None:
    export = Export()
    for step in range(8):
        start = step * 10_000_000
        export.call(start, start + 5_000, "cudaLaunchKernel", correlation=step + 1)
        export.kernel(
            start + 100_000,
            start + 400_000,
            name="void ns::gemm<float>(int)",
            correlationId=step + 1,
        )
        export.copy(start + 1_000_000, start + 1_200_000, H2D)
        values = {"eventType": PUSH_POP_RANGE, "globalTid": global_id(100, thread=100)}
        export.add(NVTX, start=start, end=start + 9_000, text="forward", domainId=0, **values)
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        trace.report(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    rows = unpack(page)
    streams, ranges, calls = rows["rows"]
    assert {rows["names"][name] for name in ranges["name"]} == {"forward"}
    assert (streams["lane"], streams["group"], streams["track"]) == (0, "streams", -1)
    assert rows["within"] is None
    assert {rows["names"][name] for name in streams["name"]} >= {"void ns::gemm<float>(int)"}
    assert "gemm" in {rows["short"][name] for name in streams["name"]}
    launched = [link for link in streams["link"] if link in calls["link"]]
    assert len(launched) == 8
    # With one GPU, a column for the others would be empty.
    assert "evidence" in page.text
    assert "the other GPUs meanwhile" not in page.text


def test_of_a_large_trace_names_are_kept_around_the_listed_gaps(
    recording: Callable[[str], Path],
) -> None:
    with open_traces([str(recording(STARVED))]) as trace:
        material = timeline.gather(read_scene(trace, Options()), timeline.TraceParts())
        rows, within = read_track_rows(
            trace, material.scene, [worst.around for worst in material.gaps], 400
        )
    operations = [row for row in rows if row.on_gpu]
    assert 0 < sum(len(row.track.events) for row in operations) <= 450
    assert within is not None
    assert within.contains([material.gaps[0].gap.start_ns]).all()
    for row in rows:
        events = row.track.events
        assert len(events)
        assert (within.within(events.start, events.end) > 0).any()


def test_of_a_large_trace_the_longest_kernel_is_kept_wherever_it_is(tmp_path: Path) -> None:
    run = Run()
    for step in range(40):
        run.wait(9 * MS if step == 5 else MS)
        run.input_copy()
        run.kernel(3 * MS if step == 30 else MS, "gemm")
        run.optimizer()
        run.synchronize()
    with open_traces([str(run.export.write(tmp_path / "run.sqlite"))]) as trace:
        page = timeline.read_parts(trace, read_scene(trace, Options()), most=40)
    packed = json.loads(gzip.decompress(base64.b64decode(page.rows)))
    assert packed["within"] is not None
    assert any(3 * MS in row["length"] for row in packed["rows"] if row["track"] < 0)


@pytest.mark.parametrize(
    "name", [STARVED, "h200x2-ddp-validation-12-19.sqlite", "pipit-saxpy-mpi.sqlite"]
)
def test_the_page_is_small_and_loads_nothing(name: str, made: Callable[[str], str]) -> None:
    text = made(name)
    assert len(text.encode()) < MOST_BYTES
    page = Page(text)
    for tag, attributes in page.tags:
        assert not attributes.get("src"), tag
        assert (attributes.get("href") or "data:,") == "data:," or (attributes["href"] or "")[
            0
        ] == "#"
        assert not [attribute for attribute in attributes if attribute.startswith("on")]
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert styles
    assert not [style for style in styles if "url(" in style or "@import" in style]


def test_the_policy_lets_only_the_scripts_of_the_page_run(made: Callable[[str], str]) -> None:
    text = made(STARVED)
    (meta,) = [tag for tag in Page(text).of("meta") if "http-equiv" in tag]
    policy = {part.split()[0]: part.split()[1:] for part in str(meta["content"]).split(";")}
    assert policy["default-src"] == ["'none'"]
    assert "connect-src" not in policy
    scripts = re.findall(r"<script(?: type=\"text/javascript\")?>.*?</script>", text, re.DOTALL)
    assert sorted(policy["script-src"]) == sorted(hashes("".join(scripts)).split())
    assert not [source for source in policy["script-src"] if not source.startswith("'sha256-")]


def request(address: str, path: str, **headers: str) -> int:
    """The status that a server gives, whatever a browser would not send."""
    host, _, port = address.partition(":")
    asked = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n{asked}\r\n".encode())
        return int(connection.makefile("rb").readline().split()[1])


SOCKET: Final = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def test_a_served_page_answers_only_to_its_token_and_its_own_origin(saxpy: Path) -> None:
    program = [sys.executable, "-m", "gputrace", "report", "--serve", str(saxpy)]
    env = command.environment({"BOKEH_ALLOW_WS_ORIGIN": "*"})
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=env) as server:
        assert server.stderr is not None
        url = server.stderr.readline().rpartition(" ")[2].strip()
        try:
            _, _, address, token, _ = url.split("/")
            assert address.startswith("127.0.0.1:")
            assert len(token) == 32
            assert request(address, f"/{token}/") == 200
            assert request(address, "/") == 404
            assert request(address, f"/{token[:-1]}/") == 404
            for origin in ("http://evil.example", "null", f"http://evil.example:{address[10:]}"):
                assert request(address, f"/{token}/ws", Origin=origin, **SOCKET) == 403
            assert request(address, f"/{token}/ws", Origin=f"http://{address}", **SOCKET) == 101
            assert request(address, "/ws", Origin=f"http://{address}", **SOCKET) == 404
            # A client that names no origin is no browser; it needs the token all the same.
            assert request(address, f"/{token}/ws", **SOCKET) == 101
            for path in ("/ws", f"/{token[:-1]}/ws"):
                assert request(address, path, **SOCKET) == 404
        finally:
            server.send_signal(signal.SIGINT)
        assert server.stderr.read().lstrip() == "gputrace: interrupted\n"


def test_names_of_strangers_are_text(hostile: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    with gputrace.open(hostile) as trace:
        trace.report(target)
    text = target.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.of("img")
    assert "<script>document.title" in page.text
    assert "{{ 7 * 191 }}" in page.text
    assert "1337" not in page.text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "long_" * 200 not in text  # Titles have up to 1,000 characters.
    assert "<img src=x onerror=alert(1)>.sqlite" in unescape(page.text)


def test_charts_have_words_and_tables_beside_them(made: Callable[[str], str]) -> None:
    page = Page(made(STARVED))
    figures = page.of("figure")
    assert len(figures) >= 3
    assert all(len(str(figure["aria-label"])) > 20 for figure in figures)
    assert len(page.of("figcaption")) == len(figures)
    assert all("scope" in head for head in page.of("th"))
    assert page.of("html")[0]["lang"] == "en"


class TestCommand:
    def test_writes_the_file_and_says_so(self, saxpy: Path, tmp_path: Path) -> None:
        target = tmp_path / "out.html"
        ran = command.gputrace("report", saxpy, "-o", target)
        assert (ran.code, ran.out) == (0, "")
        assert ran.err == f"gputrace: wrote {target}\n"

    def test_replaces_a_file_only_when_told_to(self, saxpy: Path, tmp_path: Path) -> None:
        target = tmp_path / "out.html"
        target.write_text("mine")
        assert_refused(command.gputrace("report", saxpy, "-o", target), USAGE, "exists", "--force")
        assert target.read_text() == "mine"
        assert command.gputrace("report", saxpy, "-o", target, "--force").code == 0
        assert target.read_text() != "mine"

    def test_never_replaces_the_trace(self, saxpy: Path) -> None:
        ran = command.gputrace("report", saxpy, "-o", saxpy, "--force")
        assert_refused(ran, USAGE, "is the trace itself")

    def test_a_file_that_is_no_trace_is_refused(self, tmp_path: Path) -> None:
        broken = tmp_path / "broken.sqlite"
        broken.write_bytes(b"nothing")
        ran = command.gputrace("report", broken, "-o", tmp_path / "out.html")
        assert_refused(ran, UNREADABLE, str(broken))
        assert not (tmp_path / "out.html").exists()

    def test_writing_and_serving_exclude_each_other(self, saxpy: Path, tmp_path: Path) -> None:
        ran = command.gputrace("report", saxpy, "--serve", "-o", tmp_path / "out.html")
        assert_refused(ran, USAGE, "--serve")

    def test_without_bokeh_it_says_what_to_install(self, saxpy: Path, tmp_path: Path) -> None:
        hidden = "import sys; sys.modules['bokeh'] = None"
        (tmp_path / "sitecustomize.py").write_text(hidden)
        ran = command.gputrace(
            "report", saxpy, "-o", tmp_path / "out.html", env={"PYTHONPATH": str(tmp_path)}
        )
        assert_refused(ran, MISSING, "bokeh", "pip install")


@pytest.mark.parametrize(
    ("ranks", "gpus", "labels"),
    [
        ((0, 1), (0, 1), ["gpu 0", "gpu 1"]),
        ((0, 0), (0, 1), ["all GPUs"]),
        ((0, 0, 1, 1), (0, 1, 2, 3), ["rank 0", "rank 1"]),
        ((4,), (None,), ["rank 4"]),
    ],
)
def test_the_chart_of_steps_names_what_the_trace_has(
    ranks: tuple[int, ...], gpus: tuple[int | None, ...], labels: list[str], h100: Path
) -> None:
    with gputrace.open(h100) as trace:
        analysis = trace.analyze()
    spent = {f"{name}_ns": 0 for name in (*CLASSES, "communication_wait", "host_data")}
    steps = [
        Step(step=number, rank=rank, gpu=gpu, start_ns=0, end_ns=MS, phase="steady", **spent)
        for rank, gpu in zip(ranks, gpus, strict=True)
        for number in range(3)
    ]
    totals = [
        replace(analysis.gpus[0], gpu=gpu, rank=rank, gpu_known=True)
        for rank, gpu in zip(ranks, gpus, strict=True)
        if gpu is not None
    ]
    chart = step_chart(replace(analysis, step_list=tuple(steps), gpus=tuple(totals)))
    assert chart is not None
    items: list[Any] = chart.legend[0].items
    assert [item.label.value for item in items] == labels


def test_a_trace_that_was_opened_before_is_not_analyzed_again(
    recording: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_CACHE", str(tmp_path / "kept"))

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("it is analyzed again")

    with gputrace.open(recording(STARVED)) as trace:
        first = trace.material()
        wait_until_kept()
        monkeypatch.setattr(timeline_model, "analyze", refuse)
        monkeypatch.setattr(timeline, "read_track_rows", refuse)
        again = trace.material()
        assert again.analysis == first.analysis
        assert again.gaps == first.gaps
        assert again.parts == first.parts != timeline.TraceParts()
        for own, other in zip(again.runs, first.runs, strict=True):
            assert own.length.tobytes() == other.length.tobytes()
            assert own.kind.tobytes() == other.kind.tobytes()
        with pytest.raises(AssertionError, match="again"):
            trace.material(steps="2:4")


class TestComparison:
    def test_shows_speed_up_and_efficiency_of_runs(self, tmp_path: Path) -> None:
        traces = []
        for ranks in (1, 2):
            traces.append(tmp_path / f"on{ranks}.sqlite")
            plan = Plan(ranks=ranks, steps=12, data_wait_ns=1_000_000)
            write_nsys(simulate(plan), traces[-1])
        target = tmp_path / "out.html"
        ran = command.gputrace("report", "--compare", *traces, "-o", target)
        assert (ran.code, ran.err) == (0, f"gputrace: wrote {target}\n")
        page = Page(target.read_text(encoding="utf-8"))
        assert len(target.read_bytes()) < MOST_BYTES
        shown = gputrace.compare(*traces)
        assert shown.scaling is not None
        efficiency = shown.scaling.rows[1].efficiency
        assert efficiency is not None
        assert f"efficiency {efficiency:.0%}" in page.text
        with pytest.raises(UsageError, match="is the trace itself"):
            shown.save(traces[0], force=True)

    def test_two_runs_alike_are_compared_by_class(self, h100: Path, tmp_path: Path) -> None:
        target = tmp_path / "out.html"
        gputrace.compare(h100, h100).save(target)
        page = Page(target.read_text(encoding="utf-8"))
        assert "Where the time goes in each run" in page.text
        assert not [tag for tag in page.of("script") if tag.get("src")]

    def test_runs_have_the_labels_and_the_samples_given(self, tmp_path: Path) -> None:
        traces = []
        for ranks in (1, 2):
            traces.append(tmp_path / f"on{ranks}.sqlite")
            write_nsys(simulate(Plan(ranks=ranks, steps=12)), traces[-1])
        target = tmp_path / "out.html"
        labels = ["--label", "alone", "--label", "<b>both</b>", "--batch", "32"]
        ran = command.gputrace("report", "--compare", *traces, *labels, "-o", target)
        assert ran.code == 0
        page = Page(target.read_text(encoding="utf-8"))
        assert "alone: " in page.text
        assert "<b>both</b>: " in page.text
        runs = gputrace.compare(*traces, batch=32).runs
        assert "samples/s" in page.text
        for run in runs:
            assert run.throughput is not None
            assert f"{run.throughput:,.0f}" in page.text

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--batch", "32"), "need --compare"),
            (("--label", "a"), "need --compare"),
            (("--compare", "--label", "a"), "a label of its own"),
            (("--compare", "--batch", "many"), "'many' is not a batch"),
            (("--compare", "--time", "1s:2s"), "--time"),
            (("--compare", "--keep-going"), "--keep-going"),
        ],
    )
    def test_what_is_of_runs_alone_or_of_none_is_refused(
        self, h100: Path, tmp_path: Path, arguments: tuple[str, ...], told: str
    ) -> None:
        target = tmp_path / "out.html"
        ran = command.gputrace("report", h100, h100, "-o", target, *arguments)
        assert_refused(ran, USAGE, told)
        assert not target.exists()

    def test_is_of_files_not_served(self, h100: Path) -> None:
        ran = command.gputrace("report", "--compare", "--serve", h100, h100)
        assert_refused(ran, USAGE, "--compare")


def test_the_matrix_of_links_has_the_bandwidth_measured_over_each(tmp_path: Path) -> None:
    """A ring of four cards, two under each switch: half of its links are 1.5 times as slow."""
    plan = Plan(
        steps=12,
        gpus_per_process=4,
        exchange="ring",
        exchange_bytes=20_000_000,
        slow_pairs=((1, 2), (3, 0)),
        slow_link=1.5,
        seed=3,
    )
    path, target = tmp_path / "ring.sqlite", tmp_path / "ring.html"
    write_switches(simulate(plan), path)
    with gputrace.open(path) as trace:
        trace.report(target)
        links = {(link.from_, link.to): link.bandwidth for link in trace.analyze().links}
    fast, slow = links[0, 1], links[1, 2]
    assert fast is not None
    assert slow is not None
    assert fast / slow == pytest.approx(1.5, rel=0.02)
    # The cells of its rows, one after the other.
    text = Page(target.read_text(encoding="utf-8")).text
    assert f"gpu 0–PIX {fast / 1e9:.3g} GB/sPHBPHB" in text
    assert f"gpu 1PIX–PHB {slow / 1e9:.3g} GB/sPHB" in text
    assert f"gpu 3PHB {slow / 1e9:.3g} GB/sPHBPIX–" in text


def test_what_is_no_regular_file_is_never_replaced(h100: Path, tmp_path: Path) -> None:
    """A device, say: /dev/null of all users, where root asks for it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ran = command.gputrace("report", h100, "-o", pipe, "--force")
    assert_refused(ran, USAGE, "not a regular file, and not replaced")
    assert pipe.is_fifo()


def test_a_window_and_steps_may_be_asked_for(
    recording: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "part.html"
    with gputrace.open(recording(STARVED)) as trace:
        trace.report(target, steps="2:4", gaps=3)
        with pytest.raises(UsageError, match="exists"):
            trace.report(target)
    rows = [row for row in Page(target.read_text(encoding="utf-8")).of("tr") if "data-start" in row]
    assert 3 <= len(rows) <= 6


def test_a_chart_of_several_ranks_says_how_far_apart_they_are(tmp_path: Path) -> None:
    write_nsys(simulate(Plan(ranks=8, steps=8, allreduces=2)), tmp_path / "eight.sqlite")
    with gputrace.open(tmp_path / "eight.sqlite") as trace:
        trace.report(tmp_path / "page.html")
        steps = [step for step in trace.analyze().step_list if step.phase == "steady"]
    lengths: dict[int, list[int]] = {}
    for step in steps:
        lengths.setdefault(step.step, []).append(step.end_ns - step.start_ns)
    apart = format_ns(max(max(known) - min(known) for known in lengths.values()))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"In a step the ranks differ by at most {apart}. Lines may cover each other" in text


def test_a_page_without_a_gpu_has_no_section_without_content(tmp_path: Path) -> None:
    made = Made(tmp_path / "host.sqlite")
    made.process(1, 0)
    host_steps(made)
    made.report()
    with gputrace.open(made.path) as trace:
        trace.report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'id="h-run"' not in text
    assert "Shorter gap" not in text
    assert text.count("<section") == text.count("</section>")
