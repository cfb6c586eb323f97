"""Names of strangers reach no terminal, page, spreadsheet or Markdown as anything but text."""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from pathlib import Path
from typing import Final

import pytest
from rich.text import Text

import gputrace
from gputrace.cli import console
from gputrace.cli.console import log
from gputrace.report import Table, markdown_html
from gputrace.sanitize import LONGEST_EXPORTED, bounded, cell, clean, json_text, message
from gputrace.store.redact import Redaction
from tests.helpers import command
from tests.helpers.exports import Export

TITLE: Final = "\x1b]0;owned\x07"
NAMES: Final = {
    "script": "</script><script>alert(1)</script>",
    "image": '"><img src=x onerror=alert(1)>',
    "rich": "[red]kernel[/red][link=http://evil.example]x[/link]",
    "title": f"kernel{TITLE}",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "c1": "kernel\x9b31mred\x9d0;owned\x9c",
    "formula": "=cmd|' /C calc'!A0",
    "plus": "+1+cmd|' /C calc'!A0",
    "at": "@SUM(1+1)*cmd|' /C calc'!A0",
    "lines": "kernel\r\n# heading\n| a | b |\n\tx",
    "bidi": "kernel\u202egnp.exe\u2066x\u2069",
    "separators": "a\u2028b\u2029c\u0085d",
    "hidden": "k\u200be\u200dr\ufeffn\U000e0041el",
    "markdown": "**x** [y](javascript:alert(1)) @everyone http://evil.example $a$ ~~b~~ <b>",
    "braces": "{{ 7 * 191 }} {% raw %} ${jndi:ldap://x}",
    "long": "x" * 1_000_000,
}
"""By what each attacks; NUL and halves of letters are in traces of text."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of which each kernel and the card have such a name; the file's is one too."""
    made = Export()
    for index, name in enumerate(NAMES.values()):
        for step in range(3):
            start = 40_000_000 * step + 2_000_000 * index
            made.kernel(start, start + 1_000_000 + 1000 * index, name)
    made.add("TARGET_INFO_GPU", id=0, name=NAMES["script"], cuDevice=0)
    folder = tmp_path_factory.mktemp("hostile")
    return made.write(folder / f"[red]{NAMES['title']}\u202e.sqlite")


def acts(text: str) -> set[str]:
    """The letters in a text that a terminal obeys, or that hide; line ends are its own."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {letter for letter in text if letter != "\n" and unicodedata.category(letter) in kinds}


@pytest.mark.parametrize("form", ["text", "markdown", "json"])
def test_nothing_that_a_terminal_obeys_is_printed(form: str, hostile: Path) -> None:
    ran = command.gputrace("analyze", hostile, "--format", form)
    assert (ran.code, ran.err) == (0, "")
    assert acts(ran.out) == set()
    assert len(ran.out) < (50_000 if form != "json" else 2_000_000)


def test_a_comparison_prints_nothing_of_it_either(hostile: Path) -> None:
    ran = command.gputrace("compare", hostile, hostile, "--label", NAMES["rich"], "--label", "b")
    assert ran.code == 0
    assert acts(ran.out) == set()


def test_json_has_the_names_as_they_are(hostile: Path) -> None:
    told = json.loads(command.gputrace("analyze", hostile, "--json").out)
    names = {kernel["name"] for kernel in told["kernels"]["top"]}
    assert names <= {bounded(name) for name in NAMES.values()}
    assert {NAMES["c1"], NAMES["hidden"]} <= names


@pytest.mark.parametrize("text", [*list(NAMES.values())[:-1], "\ud800x", "ok", "é\x7f"])
def test_json_is_escaped_without_loss(text: str) -> None:
    written = json_text(json.dumps(text, ensure_ascii=False))
    assert json.loads(written) == text
    assert acts(written) == set()


@pytest.mark.parametrize("problem", ["no such file", "not a trace"])
def test_errors_name_files_without_obeying_them(problem: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{TITLE}\n\u202e[bold]b.sqlite"
    if problem == "not a trace":
        path.write_text(f"text {TITLE}")
    ran = command.gputrace("analyze", path)
    assert ran.code == 3
    assert ran.err.count("\n") == 1
    assert acts(ran.err) == set()
    assert problem in ran.err
    assert "[bold]b.sqlite" in ran.err


def test_tables_of_a_stranger_s_file_are_named_without_obeying_them(tmp_path: Path) -> None:
    made = Export().give(NAMES["title"], "x").add(NAMES["title"], x=1)
    ran = command.gputrace("analyze", made.write(tmp_path / "trace.sqlite"))
    assert ran.code == 3
    assert "tables: kernel" in ran.err
    assert acts(ran.err) == set()


def test_a_line_on_stderr_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log(f"wrote a\nb{TITLE} {'x' * 10_000_000}")
    shown = capsys.readouterr().err
    assert shown.startswith("gputrace: wrote a b")
    assert (shown.count("\n"), acts(shown)) == (1, set())
    assert len(shown) < 10_000


def test_a_progress_bar_takes_no_markup_of_a_file_s_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    bar = console._LateBar(f"reading {NAMES['rich']}{TITLE}")
    bar.update(1, 2)
    bar._timer.join()
    try:
        assert bar._bar is not None
        shown = Text.from_markup(bar._bar.tasks[0].description).plain
    finally:
        bar.stop()
    assert shown.startswith("reading [red]kernel[/red][link=http://evil.example]x[/link]")
    assert acts(shown) == set()


def test_the_bar_goes_on_when_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The analysis of a large trace takes as long as reading it."""
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    bar = console._LateBar("reading a", "analyzing a")
    shown = []
    for done in (1, 4, 2):
        bar.update(done, 4)
        assert bar._bar is not None
        shown.append((bar._bar.tasks[0].description, bar._bar.tasks[0].total))
    bar.stop()
    assert shown == [("reading a", 4), ("analyzing a", None), ("reading a", 4)]


def test_no_cell_of_any_view_holds_what_would_be_obeyed() -> None:
    table = Table(TITLE, ("a", TITLE), tuple((name, name) for name in NAMES.values()))
    cells = [table.title, *table.header, *(text for row in table.rows for text in row)]
    assert set().union(*map(acts, cells)) == set()
    assert max(map(len, cells)) <= 4_000


def test_markdown_shows_names_and_does_not_follow_them() -> None:
    shown = markdown_html.escape(NAMES["markdown"])
    assert "@everyone" not in shown
    assert "http://" not in shown
    bare = re.sub(r"\\.", "", shown.replace("<!-- -->", ""))
    assert set("*[]<>$~|`_#&") & set(bare) == set()
    lines = markdown_html.render_table(Table("t", ("a",), ((NAMES["lines"],),))).splitlines()
    assert len(lines) == 5  # the title, nothing, the header, the sides, one row


def test_a_notebook_gets_text(hostile: Path) -> None:
    with gputrace.open(hostile) as trace:
        shown = trace.analyze()._repr_html_()
    tags = set(re.findall(r"<\s*/?\s*(\w+)", shown))
    assert tags <= {
        "div",
        "p",
        "ul",
        "li",
        "b",
        "small",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert re.findall(r"<\w+ [^>]*>", shown) == []
    assert acts(shown) == set()


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"])
def test_no_cell_of_csv_is_computed(start: str) -> None:
    assert cell(f"{start}cmd") == f"'{start}cmd"
    assert cell("cmd=1") == "cmd=1"
    assert cell(-5) == -5


def test_exported_csv_is_not_computed_and_parquet_is_whole(hostile: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    with gputrace.open(hostile) as trace:
        trace.export("csv", tmp_path / "csv")
        trace.export("parquet", tmp_path / "parquet")
    with (tmp_path / "csv" / "events.csv").open(newline="", encoding="utf-8") as file:
        names = {row["name"] for row in csv.DictReader(file)}
    assert not [name for name in names if name[:1] in ("=", "+", "-", "@")]
    assert f"'{NAMES['formula']}" in names
    kept = set(parquet.read_table(tmp_path / "parquet" / "events.parquet")["name"].to_pylist())
    assert {NAMES["formula"], NAMES["bidi"]} <= kept
    assert max(map(len, kept)) == LONGEST_EXPORTED


def test_perfetto_gets_json_whatever_the_names(hostile: Path, tmp_path: Path) -> None:
    target = tmp_path / "p.json"
    with gputrace.open(hostile) as trace:
        trace.export("perfetto", target)
    text = target.read_text(encoding="utf-8")
    assert acts(text) == set()
    assert target.stat().st_size < 1_000_000
    names = {event.get("name") for event in json.loads(text)["traceEvents"]}
    assert {NAMES["script"], NAMES["lines"], NAMES["c1"]} <= names


def test_what_is_redacted_takes_time_in_proportion_to_its_length() -> None:
    redaction = Redaction()
    redaction.learn("host", ["node17"])
    for text in ("a" * 10_000_000, "a." * 5_000_000, "a@" * 5_000_000, "0" * 10_000_000):
        assert len(redaction.text(text)) < 100


@pytest.mark.parametrize("name", NAMES)
def test_what_is_cleaned_has_the_words_still(name: str) -> None:
    shown = clean(NAMES[name])
    assert acts(shown) == set()
    if name in ("rich", "script", "formula", "markdown"):
        assert shown == NAMES[name]
    assert message(shown) == " ".join(shown.split())


def test_help_and_usage_errors_are_cleaned_too() -> None:
    ran = command.gputrace("analyze", f"--{TITLE}x")
    assert ran.code == 2
    assert acts(ran.err) == set()
