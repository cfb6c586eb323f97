"""Plugins of other packages: listed without importing, used like our own, told of when broken."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gputrace import extend, plugins
from gputrace.cli import run
from gputrace.readers import registry
from tests.helpers import command
from tests.helpers.command import UNREADABLE, Ran, assert_refused
from tests.helpers.installed_packages import install, install_example

DONE, USAGE, MISSING = 0, 2, 4
READER = "from gputrace.extend import MemoryTrace, Reader\n"
BY_NAME = "Reader('such files', lambda c: c.path.name == 'some.file', {})\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example of `examples` is installed."""
    folder = tmp_path_factory.mktemp("site")
    install_example(folder)
    return folder


@pytest.fixture(scope="module")
def example(site: Path) -> dict[str, str]:
    """The variables with which it is found."""
    return {"PYTHONPATH": os.pathsep.join([str(command.ROOT), str(site)])}


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 kernels of 4 µs on GPU 0, one each 10 µs, and 20 of 50 µs on GPU 1, one each 100 µs."""
    rows = [f"0,kernel,{i * 10_000},{i * 10_000 + 4_000},tiny\n" for i in range(200)]
    rows += [f"1,kernel,{i * 100_000},{i * 100_000 + 50_000},long\n" for i in range(20)]
    path = tmp_path_factory.mktemp("timeline") / "timeline.csv"
    header = "# timeline 1\ngpu,kind,start_ns,end_ns,name\n"
    path.write_text(header + "".join(rows))
    return path


Here = Callable[..., Ran]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs the command in this process, with packages of some folders installed."""

    def gputrace(*arguments: str | Path, sites: Sequence[Path]) -> Ran:
        plugins._warn.cache_clear()
        registry._of_plugin.cache_clear()
        for site in sites:
            monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "broken", raising=False)
        capsys.readouterr()
        code = run(list(map(str, arguments)))
        return Ran(code, *capsys.readouterr())

    return gputrace


@pytest.fixture(scope="module")
def table(saxpy: Path) -> str:
    """Return a report without plugins as CSV."""
    return command.gputrace("analyze", saxpy, "--format", "csv").out


def broken(folder: Path, kind: str, name: str, code: str, value: str = "it") -> Path:
    """A package with one plugin, whose module is a code."""
    install(
        folder, "their-package", {f"gputrace.{kind}": {name: f"broken:{value}"}}, {"broken": code}
    )
    return folder


def analysis(*arguments: str | Path, env: dict[str, str]) -> Any:
    ran = command.gputrace("analyze", *arguments, "--json", env=env)
    assert (ran.code, ran.err) == (DONE, "")
    return json.loads(ran.out)


def test_a_reader_of_a_plugin_reads_its_files(example: dict[str, str], timeline: Path) -> None:
    found = analysis(timeline, env=example)
    assert found["source"] == "timeline"
    assert [(gpu["gpu"], gpu["kernels"]) for gpu in found["gpus"]] == [(0, 200), (1, 20)]
    assert found["gpus"][0]["compute_ns"] == 200 * 4_000


def test_an_analyzer_of_a_plugin_adds_findings_and_tables(
    example: dict[str, str], timeline: Path
) -> None:
    found = analysis(timeline, env=example)
    (finding,) = [one for one in found["findings"] if one["id"] == "tiny-kernels"]
    assert finding["evidence"] == {"tiny_ns": 800_000, "kernels_ns": 1_800_000}
    rows = [["gpu 0", 200, 200], ["gpu 1", 20, 0]]
    header = ["", "kernels", "tiny"]
    assert found["tables"] == [{"title": "Kernels under 5.00 µs", "header": header, "rows": rows}]


def test_what_it_adds_is_in_the_report_and_on_the_page(
    site: Path, timeline: Path, here: Here, tmp_path: Path
) -> None:
    report = here("analyze", timeline, sites=[site]).out
    assert "tiny-kernels: 44% of the kernels' time is in kernels under 5.00 µs" in report
    assert "Kernels under 5.00 µs\n" in report
    page = tmp_path / "report.html"
    assert here("report", timeline, "-o", page, sites=[]).code == DONE
    assert "<caption>Kernels under 5.00 µs</caption>" in page.read_text()


def test_a_view_of_a_plugin_is_a_format(site: Path, timeline: Path, here: Here) -> None:
    ran = here("analyze", timeline, "--format", "oneline", sites=[site])
    busy = "gpu 0: busy 40.1% of 1.99 ms\ngpu 1: busy 51.3% of 1.95 ms\n"
    assert (ran.code, ran.err, ran.out) == (DONE, "", busy)


def test_a_check_may_fail_on_a_plugins_finding(site: Path, timeline: Path, here: Here) -> None:
    without = here("check", timeline, "--fail-on", "tiny-kernels", sites=[])
    assert_refused(without, USAGE, "'tiny-kernels' is neither a finding")
    ran = here("check", timeline, "--fail-on", "tiny-kernels", sites=[site])
    assert ran.code == 1
    assert "tiny-kernels: 44%" in " ".join(ran.out.split())


CAUSE = """
from gputrace.extend import Cause, union

def claim(host):
    return union([0, 20_000], [5_000, 21_000])

it = Cause({id!r}, {parent!r}, "metrics", {takes!r}, claim)
"""


def cause(
    folder: Path,
    id: str = "metrics",
    parent: str = "host",
    takes: tuple[str, ...] = ("other_idle",),
) -> Path:
    """A package with a cause that applies in the first 5 µs, and from 20 to 21 µs."""
    return broken(folder, "causes", "metrics", CAUSE.format(id=id, parent=parent, takes=takes))


def test_a_cause_of_a_plugin_is_charged_before_ours(
    timeline: Path, site: Path, tmp_path: Path, here: Here
) -> None:
    ran = here("analyze", timeline, "--json", sites=[site, cause(tmp_path)])
    found = json.loads(ran.out)
    assert (ran.code, ran.err) == (DONE, "")
    assert {"id": "metrics", "parent": "host", "label": "metrics"} in found["causes"]
    # GPU 0 idles from 4 to 10 µs, 14 to 20 µs…; GPU 1 from 50 µs.
    (row,) = [row for row in found["ledger"] if row["cause"] == "metrics"]
    assert (row["gpu"], row["ns"], row["path"]) == (0, 1_000, ["host", "metrics"])
    for gpu in found["breakdown"]:
        lost = [row["ns"] for row in found["ledger"] if row["gpu"] == gpu["gpu"]]
        assert sum(lost) == gpu["total_ns"] - gpu["compute_ns"]


def test_a_check_knows_the_causes_of_plugins(
    tmp_path: Path, timeline: Path, site: Path, here: Here
) -> None:
    without = here("check", timeline, "--max-cause", "metrics=1%", sites=[site])
    assert_refused(without, USAGE, "'metrics' is not a cause of lost time")
    ran = here("check", timeline, "--max-cause", "metrics=1%", sites=[cause(tmp_path)])
    assert "max-cause metrics: unknown: no measured steps" in ran.out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"id": "other"}, "its id is 'other'; it must be the entry point's name"),
        ({"parent": "hunger"}, "its parent 'hunger' is none of data, host, "),
        ({"takes": ("compute",)}, "it takes compute; there are communication, h2d, "),
    ],
)
def test_a_cause_that_the_ledger_cannot_use_is_left_out(
    wrong: dict[str, Any], words: str, timeline: Path, site: Path, tmp_path: Path, here: Here
) -> None:
    ran = here("analyze", timeline, "--json", sites=[site, cause(tmp_path, **wrong)])
    assert (ran.code, ran.err.count("\n")) == (DONE, 1)
    assert f"the cause 'metrics' of their-package 1.0 does not work: {words}" in ran.err
    assert "metrics" not in {row["cause"] for row in json.loads(ran.out)["ledger"]}


def test_a_cause_that_raises_an_error_claims_nothing(
    timeline: Path, site: Path, tmp_path: Path, here: Here
) -> None:
    code = CAUSE.format(id="metrics", parent="host", takes=("other_idle",))
    package = broken(tmp_path, "causes", "metrics", code.replace("union([", "union(1 / 0, ["))
    ran = here("analyze", timeline, "--json", sites=[site, package])
    assert ran.code == DONE
    assert "the cause 'metrics' of their-package 1.0 does not work: ZeroDivisionError" in ran.err
    assert "metrics" not in {row["cause"] for row in json.loads(ran.out)["ledger"]}


def test_a_collector_of_a_plugin_records(example: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "t.sqlite"
    program = "import os, gputrace; gputrace.step(); print(os.nice(0)); gputrace.step()"
    record = ("record", "--backend", "niced", "-o", out, "--", sys.executable, "-c", program)
    ran = command.gputrace(*record, env=example)
    assert (ran.code, ran.out) == (DONE, f"{min(os.nice(0) + 10, 19)}\n")
    found = analysis(out, env=example)
    assert found["steps"]["count"] == 1


def test_what_a_plugins_collector_left_needs_the_plugin(
    example: dict[str, str], tmp_path: Path
) -> None:
    spool = tmp_path / "t.sqlite.spool"
    spool.mkdir()
    (spool / "meta.json").write_text('{"backend": "niced"}')
    (spool / "gputrace").touch()
    ran = command.gputrace("recover", spool, "-o", tmp_path / "r.sqlite")
    assert ran.code != DONE
    assert ran.err.count("\n") == 1


def test_plugins_are_listed_without_importing_them(example: dict[str, str], tmp_path: Path) -> None:
    entries = {"gputrace.views": {"worst": "not_there:render", "text": "not_there:render"}}
    install(tmp_path, "worst-package", entries)
    both = {"PYTHONPATH": os.pathsep.join([example["PYTHONPATH"], str(tmp_path)])}
    ran = command.gputrace("plugins", env=both)
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.out.splitlines() == [
        "analyzer  tiny-kernels (gputrace-example 0.1, gputrace_example.analyzer:tiny_kernels)",
        "collector niced (gputrace-example 0.1, gputrace_example.collector:NICED)",
        "reader    csv-timeline (gputrace-example 0.1, gputrace_example.reader:READER)",
        "view      oneline (gputrace-example 0.1, gputrace_example.view:render)",
        "view      text (worst-package 1.0, not_there:render); not used: the name is taken",
        "view      worst (worst-package 1.0, not_there:render)",
    ]


def test_a_check_of_plugins_tells_which_do_not_work(site: Path, here: Here, tmp_path: Path) -> None:
    assert here("plugins", "--check", sites=[site]).code == DONE
    ran = here("plugins", "--check", sites=[broken(tmp_path, "views", "worst", "import nothing")])
    assert ran.code == MISSING
    assert "the view 'worst' of their-package 1.0 does not work: ModuleNotFound" in ran.err


def test_plugins_can_be_left_out(
    site: Path, timeline: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_NO_PLUGINS", "1")
    assert here("plugins", sites=[site]) == (DONE, "", "")
    assert_refused(here("analyze", timeline, sites=[]), UNREADABLE, "not a trace")


FINDING = "def it(facts): yield facts.finding({}, '', '')"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("it = 3", "broken:it cannot be called"),
        ("def it(facts): 1 / 0", "ZeroDivisionError: division by zero"),
        ("def it(facts): raise type('Odd', (BaseException,), {})", "Odd"),
        ("def it(facts): return 'text'", "it gives str, not Finding or ExtraTable"),
        (
            FINDING.format("'other', 'low', 0"),
            "its finding is called 'other'; it must have the analyzer's name",
        ),
        (
            FINDING.format("'mine', 'awful', 0"),
            "its severity 'awful' is none of high, medium, low, info",
        ),
        (
            FINDING.format("'mine', 'low', facts.lanes"),
            "list where Python's own text and numbers belong",
        ),
        (
            "from gputrace.extend import ExtraTable\n"
            "def it(facts): yield ExtraTable('T', ('a', 'b'), ((1,),))",
            "a row of its table 'T' has not as many cells as the header",
        ),
    ],
)
def test_a_broken_analyzer_costs_a_line_and_nothing_else(
    code: str, words: str, saxpy: Path, table: str, here: Here, tmp_path: Path
) -> None:
    site = broken(tmp_path, "analyzers", "mine", code)
    ran = here("analyze", saxpy, "--format", "csv", sites=[site])
    told = f"the analyzer 'mine' of their-package 1.0 does not work: {words}"
    assert ran == (DONE, table, f"gputrace: {told}; left out\n")


def test_what_a_plugin_prints_is_not_in_the_answer(
    saxpy: Path, table: str, here: Here, tmp_path: Path
) -> None:
    site = broken(tmp_path, "analyzers", "mine", "def it(facts): print('so far'); return []")
    assert here("analyze", saxpy, "--format", "csv", sites=[site]) == (DONE, table, "so far\n")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("it = 3", "it gives int, not Reader"),
        (READER + "it = Reader('such', lambda c: 1 / 0, None)", "ZeroDivisionError"),
    ],
)
def test_a_broken_reader_leaves_files_to_others(
    code: str, words: str, site: Path, timeline: Path, here: Here, tmp_path: Path
) -> None:
    sites = [site, broken(tmp_path, "readers", "a", code)]
    ran = here("analyze", timeline, "--format", "oneline", sites=sites)
    assert (ran.code, ran.err.count("\n")) == (DONE, 1)
    assert ran.err.startswith("gputrace: the reader 'a' of their-package 1.0 does not work: ")
    assert words in ran.err


@pytest.mark.parametrize(
    ("opening", "words"),
    [("lambda c: {}['lost']", "KeyError: 'lost'"), ("lambda c: 7", "it gives int, not Trace")],
)
def test_a_reader_that_breaks_over_its_file_is_named(
    opening: str, words: str, here: Here, tmp_path: Path
) -> None:
    site = broken(tmp_path, "readers", "a", f"{READER}it = {BY_NAME.format(opening)}")
    path = tmp_path / "some.file"
    path.write_text("anything")
    ran = here("analyze", path, sites=[site])
    assert_refused(ran, UNREADABLE, str(path), "reader 'a' of their-package 1.0", words)


def test_a_trace_that_breaks_while_it_is_read_names_its_plugin(here: Here, tmp_path: Path) -> None:
    code = READER + (
        "from gputrace.extend import Events, Process\n"
        "import numpy as np\n"
        "class Late(MemoryTrace):\n"
        "    def read(self, *_): raise IndexError('too late')\n"
        "ROW = {'start': 0, 'end': 9, 'kind': 0}\n"
        "def open_it(c):\n"
        "    row = {name: np.array([value]) for name, value in ROW.items()}\n"
        "    return Late(c.path, 'late', [Events(row)], [], [Process(0)])\n"
        f"it = {BY_NAME.format('open_it')}"
    )
    path = tmp_path / "some.file"
    path.write_text("anything")
    ran = here("analyze", path, sites=[broken(tmp_path, "readers", "a", code)])
    assert_refused(ran, MISSING, "reader 'a' of their-package 1.0", "IndexError: too late")


@pytest.mark.parametrize(
    ("code", "words"),
    [("def it(a): return a.nothing", "AttributeError"), ("def it(a): return 7", "int, not str")],
)
def test_a_broken_view_is_refused(
    code: str, words: str, saxpy: Path, here: Here, tmp_path: Path
) -> None:
    ran = here("analyze", saxpy, "--format", "x", sites=[broken(tmp_path, "views", "x", code)])
    assert_refused(ran, MISSING, "the view 'x' of their-package 1.0 does not work", words)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("it = 7", "it gives int, not Backend"),
        ("from gputrace.extend import HOST as it", "its Backend is called 'host'"),
        (
            "from dataclasses import replace\nfrom gputrace.extend import HOST\n"
            "it = replace(HOST, name='mine', launch=lambda *_: 1 / 0)",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_broken_collector_records_nothing(
    code: str, words: str, here: Here, tmp_path: Path
) -> None:
    out, site = tmp_path / "t.sqlite", broken(tmp_path, "collectors", "mine", code)
    ran = here("record", "--backend", "mine", "-o", out, "--", "true", sites=[site])
    assert_refused(ran, 125, "the collector 'mine' of their-package 1.0 does not work", words)
    assert not list(tmp_path.glob("t.sqlite*"))


def test_names_that_are_nobodys_are_refused_with_those_there_are(site: Path, here: Here) -> None:
    ran = here("analyze", "any", "--format", "pdf", sites=[site])
    assert_refused(ran, USAGE, "'pdf' is not one of text, json, markdown, csv, oneline")
    ran = here("record", "--backend", "perf", "--", "true", sites=[site])
    assert_refused(ran, 125, "'perf' is not one of auto, cupti, nsys, nvprof, host, niced")


def test_without_plugins_nobody_asks_for_metadata(saxpy: Path) -> None:
    program = "import sys\nfrom gputrace.cli import run; run(['analyze', *sys.argv[1:]])\n"
    program += "print('importlib.metadata' in sys.modules, file=sys.stderr)"
    assert command.python("-c", program, str(saxpy)).err == "False\n"


def test_every_name_for_plugins_is_there_and_documented() -> None:
    text = (command.ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert [name for name in extend.__all__ if f"`{name}`" not in text] == []
    assert all(getattr(extend, name) is not None for name in extend.__all__)
    with pytest.raises(AttributeError):
        extend.Nothing  # noqa: B018
    assert sorted(extend.__all__) == sorted(n for names in extend._MODULES.values() for n in names)


def test_packages_in_an_archive_are_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "in", "packed", {"gputrace.views": {"packed": "packed:render"}})
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "in")
    monkeypatch.setattr(sys, "path", [archive, *sys.path])
    assert "packed" in plugins.names("views")
