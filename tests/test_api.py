"""``import gputrace``: what a program or a notebook does with it."""

from __future__ import annotations

import gc
import json
import sqlite3
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import pytest

import gputrace
from gputrace.api import Report
from gputrace.errors import InputError, MissingError, UsageError
from gputrace.store.sqlite_reader import Database
from tests.helpers import command
from tests.helpers.exports import Export
from tests.helpers.recordings import SMALL

HARMLESS = {
    *("div", "p", "b", "small", "ul", "li", "table", "caption", "thead", "tbody", "tr", "th", "td"),
}
TABLES = ("breakdown", "gpus", "step_list", "phases", "gaps", "findings")


@pytest.fixture(scope="module")
def report(h100: Path) -> Iterator[Report]:
    with gputrace.open(h100) as trace:
        yield trace.analyze()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """100 ns from 1000 on, with a gap of 20 ns in them."""
    return Export().kernel(1000, 1050).kernel(1070, 1100).write(tmp_path / "trace.sqlite")


@pytest.mark.parametrize("form", ["text", "json", "markdown", "csv"])
def test_a_report_is_what_the_command_prints(form: str, report: Report, h100: Path) -> None:
    assert report.render(form) == command.gputrace("analyze", "--format", form, h100).out


def test_the_text_is_what_print_shows(report: Report) -> None:
    assert str(report) == report.render() == report.render("text")


def test_the_fields_are_the_names_of_the_json(report: Report) -> None:
    found = json.loads(report.render("json"))
    assert [field.name for field in fields(report)] == list(found)
    assert report.gpus[0].h2d_ns == found["gpus"][0]["h2d_ns"]
    assert report.findings[0].advice == found["findings"][0]["advice"]


def test_a_report_cannot_be_changed_by_accident(report: Report) -> None:
    with pytest.raises(AttributeError):
        report.span_ns = 0  # type: ignore[misc]


def test_a_report_is_a_dataclass_to_other_programs(report: Report) -> None:
    assert is_dataclass(report)
    assert asdict(report)["gpus"][0]["h2d_ns"] == report.gpus[0].h2d_ns
    changed = replace(report.gpus[0], name="another card")
    assert (changed.name, changed.h2d_ns) == ("another card", report.gpus[0].h2d_ns)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_text(kind: type[str] | type[Path], path: Path) -> None:
    with gputrace.open(kind(path)) as trace:
        assert trace.analyze().path == str(path)


def test_a_trace_may_be_analyzed_more_than_once(path: Path) -> None:
    with gputrace.open(path) as trace:
        assert trace.analyze() == trace.analyze()


@pytest.mark.parametrize("time", ["1020ns:1060ns", (1020, 1060)])
def test_a_window_is_text_or_nanoseconds(time: str | tuple[int, int], path: Path) -> None:
    with gputrace.open(path) as trace:
        (gpu,) = trace.analyze(time=time).gpus
    assert (gpu.start_ns, gpu.span_ns, gpu.compute_ns, gpu.idle_ns) == (1020, 40, 30, 10)


def test_either_side_of_a_window_may_be_left_open(path: Path) -> None:
    with gputrace.open(path) as trace:
        assert trace.analyze(time=":1060ns").span_ns == 60
        assert trace.analyze(time="1060ns:").span_ns == 40
        assert trace.analyze(time=":").span_ns == 100


def test_windows_side_by_side_add_up(report: Report, h100: Path) -> None:
    names = [field.name for field in fields(report.gpus[0]) if field.name.endswith("_ns")]
    with gputrace.open(h100) as trace:
        parts = [trace.analyze(time=time).gpus for time in (":155800ms", "155.8s:")]
    for whole, first, second in zip(report.gpus, *parts, strict=True):
        for name in set(names) - {"start_ns"}:
            assert getattr(first, name) + getattr(second, name) == getattr(whole, name)
        assert first.start_ns + first.span_ns == second.start_ns


@pytest.mark.parametrize("time", ["", "12s", "2s:1s", "now:then", "0s:900ns", (0, 900), (9, 5)])
def test_a_window_without_anything_in_it_is_wrong_usage(
    time: str | tuple[int, int], path: Path
) -> None:
    with gputrace.open(path) as trace, pytest.raises(UsageError):
        trace.analyze(time=time)


def test_as_many_gaps_are_listed_as_asked_for(path: Path) -> None:
    with gputrace.open(path) as trace:
        (gap,) = trace.analyze().gaps.largest
        assert (gap.start_ns, gap.end_ns, gap.length_ns) == (1050, 1070, 20)
        assert trace.analyze(gaps=0).gaps == replace(trace.analyze().gaps, largest=())


def test_progress_is_told_in_rows(h100: Path) -> None:
    told: list[tuple[int, int]] = []
    with gputrace.open(h100) as trace:
        trace.analyze(progress=lambda done, total: told.append((done, total)))
    assert told
    assert all(0 < done <= total for done, total in told)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files cannot be counted here")
def test_a_closed_trace_says_so(path: Path, tmp_path: Path) -> None:
    with gputrace.open(path) as trace:
        pass
    for ask in (trace.analyze, lambda: trace.export("csv", tmp_path / "tables")):
        with pytest.raises(UsageError, match="the trace is closed; open it again"):
            ask()
    assert trace.left_out == ()
    assert repr(trace) == f"<gputrace.OpenTrace {path}, closed>"


def test_what_open_and_analyze_give_shows_the_verdict(path: Path) -> None:
    with gputrace.open(path) as trace:
        report = trace.analyze()
        verdict = "Too short to judge: 2 kernels, 100 ns."
        assert repr(trace) == str(trace) == f"<gputrace.OpenTrace {path}: {verdict}>"
    assert repr(report) == f"<gputrace.Report {path}: {verdict}>"
    both = gputrace.compare(path, path)
    assert both.message in repr(both)


def test_a_trace_that_cannot_be_analyzed_shows_why(path: Path) -> None:
    with gputrace.open(path) as trace:
        with sqlite3.connect(path) as database:
            database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        assert repr(trace).startswith(f"<gputrace.OpenTrace {path}: ")


def test_a_trace_that_nobody_closes_is_closed_with_its_last_use(path: Path) -> None:
    """From 3.13 on, Python warns of connections to SQLite that are not."""
    database = Database(path)
    connection = database._connection
    del database
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_a_closed_trace_holds_no_file(path: Path, tmp_path: Path) -> None:
    host_only = Export().call(0, 1, "cudaMalloc").write(tmp_path / "host.sqlite")
    before = open_files()
    with gputrace.open(path) as trace:
        trace.analyze()
    assert open_files() == before
    with pytest.raises(InputError) as caught:
        gputrace.open(host_only)
    assert caught.value.__traceback__ is not None  # it keeps the reader's frames alive
    assert open_files() == before


def test_errors_have_one_base() -> None:
    with pytest.raises(gputrace.GputraceError, match="no such file"):
        gputrace.open("/nowhere/trace.sqlite")
    for kind in (InputError, MissingError, UsageError):
        assert issubclass(kind, gputrace.GputraceError)
    assert [kind.exit_code for kind in (UsageError, InputError, MissingError)] == [2, 3, 4]


def test_an_unknown_format_names_those_there_are(report: Report) -> None:
    with pytest.raises(UsageError, match="text, json, markdown, csv"):
        report.render("xml")


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        _ = gputrace.analyse
    assert set(gputrace.__all__) == {
        *(
            "GputraceError",
            "__version__",
            "annotate",
            "arm",
            "compare",
            "environment",
            "open",
            "step",
            "try_cures",
        ),
    }
    assert dir(gputrace) == sorted(gputrace.__all__)


@pytest.mark.parametrize("table", TABLES)
def test_every_table_is_a_data_frame(table: str, report: Report) -> None:
    pytest.importorskip("pandas")
    rows = report.gaps.largest if table == "gaps" else getattr(report, table)
    frame = report.to_pandas(table)
    assert len(frame) == len(rows)
    for index, row in enumerate(rows):
        for field in fields(row):
            value = getattr(row, field.name)
            if value is not None:
                assert frame[field.name][index] == value


def test_the_breakdown_is_the_table_when_none_is_named(report: Report) -> None:
    pytest.importorskip("pandas")
    frame = report.to_pandas()
    assert frame.equals(report.to_pandas("breakdown"))
    assert frame["h2d_ns"].tolist() == [row.h2d_ns for row in report.breakdown]


def test_a_table_without_rows_has_its_columns(path: Path) -> None:
    pytest.importorskip("pandas")
    with gputrace.open(path) as trace:
        frame = trace.analyze(gaps=0).to_pandas("gaps")
    assert len(frame) == 0
    assert {"gpu", "start_ns", "end_ns", "cause"} <= set(frame.columns)


def test_an_unknown_table_names_those_there_are(report: Report) -> None:
    with pytest.raises(UsageError, match=", ".join(TABLES) + ".*ledger"):
        report.to_pandas("nonsense")


@pytest.mark.parametrize("table", [*TABLES, "cards", "kernels", "ledger"])
def test_arrow_has_the_rows_of_pandas_typed(table: str, report: Report) -> None:
    pytest.importorskip("pandas")
    frame, arrow = report.to_pandas(table), report.to_arrow(table)
    assert arrow.column_names == list(frame.columns)
    assert arrow.num_rows == len(frame)
    times = [field for field in arrow.schema if field.name.endswith("_ns")]
    assert {str(field.type) for field in times} <= {"int64"}
    if table == "findings":
        assert json.loads(arrow["evidence"][0].as_py()) == report.findings[0].evidence


@pytest.mark.parametrize("table", [*TABLES, "cards", "kernels", "ledger"])
def test_polars_has_the_rows_of_arrow(table: str, report: Report) -> None:
    pytest.importorskip("polars")
    assert report.to_polars(table).rows(named=True) == report.to_arrow(table).to_pylist()


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_without_a_library_it_says_what_to_install(
    library: str, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingError, match=library):
        getattr(report, f"to_{library.removeprefix('py')}")()


def hostile(report: Report) -> Report:
    """The report, with what a hostile trace could put into its words."""
    nasty = "<script>alert('x')</script> & | `code` *bold* [link](javascript:x)\n# head"
    finding = replace(report.findings[0], message=nasty, advice=nasty)
    assert report.kernels is not None
    kernels = replace(report.kernels, top=(replace(report.kernels.top[0], short=nasty),))
    said = replace(report, findings=(finding,), warnings=(nasty,), dropped_rows={nasty: 1})
    return replace(said, kernels=kernels)


def test_an_open_trace_shows_its_report_in_a_notebook(h100: Path, tmp_path: Path) -> None:
    with gputrace.open(h100) as trace:
        assert trace._repr_html_() == trace.analyze()._repr_html_()
    with gputrace.open(Export().kernel(0, 0).write(tmp_path / "<i>.sqlite")) as trace:
        assert "&lt;i&gt;.sqlite: no GPU operation" in trace._repr_html_()


def test_html_is_well_formed_and_escapes_what_it_shows(report: Report) -> None:
    for shown in (report, hostile(report)):
        html = shown._repr_html_()
        root = ET.fromstring(html)
        assert root.tag == "div"
        assert {element.tag for element in root.iter()} <= HARMLESS
    assert "alert('x')" in "".join(root.itertext())
    assert "<script" not in html


def test_markdown_escapes_what_it_shows(report: Report) -> None:
    lines = hostile(report).render("markdown").splitlines()
    assert not any(line.startswith("# ") for line in lines)
    assert not any("<script" in line.replace("\\<", "") for line in lines)
    tables = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in tables}) <= 3  # three tables


def test_text_of_a_trace_does_not_style_the_report(report: Report) -> None:
    odd = replace(report, warnings=("[bold red]not markup[/] :smile:",))
    assert "[bold red]not markup[/] :smile:" in str(odd)


@pytest.mark.parametrize("name", SMALL)
def test_text_of_a_recording_fits_80_columns(name: str, analyzed: Callable[[str], Report]) -> None:
    assert max(map(len, str(analyzed(name)).splitlines())) <= 80


def test_text_of_many_gpus_fits_80_columns(tmp_path: Path) -> None:
    export = Export()
    for device in range(12):
        for index in range(4):
            start = 10**13 * index
            export.kernel(start, start + 10**12, deviceId=device, pid=100 + device)
            export.copy(start + 10**12, start + 2 * 10**12, pid=100 + device, deviceId=device)
            export.memset(start + 3 * 10**12, start + 4 * 10**12, pid=100 + device, deviceId=device)
    for gpus in (12, 3, 2, 1):
        for name in export.rows:
            rows = export.rows[name]
            export.rows[name] = [row for row in rows if row.get("deviceId", 0) in range(gpus)]
        path = tmp_path / f"{gpus}.sqlite"
        with gputrace.open(export.write(path)) as trace:
            assert max(map(len, str(trace.analyze()).splitlines())) <= 80


def test_a_report_does_not_depend_on_the_terminal(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = str(report)
    monkeypatch.setenv("COLUMNS", "30")
    assert str(report) == before
