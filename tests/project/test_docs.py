"""The documentation names everything that a person or program may meet."""

from __future__ import annotations

import csv
import inspect
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Final

import pytest

import gputrace
from docs.site import architecture, names
from docs.site import findings as made_findings
from gputrace import errors
from gputrace.analyzers import whatif
from gputrace.analyzers.findings import ALL_RULES
from gputrace.analyzers.findings.facts import Rule
from gputrace.analyzers.whatif.optimizations import CURES
from gputrace.api import ComparisonReport, OpenTrace, Report
from gputrace.cli import COMMANDS, json_schema
from gputrace.studies.framework_environments import read_frameworks, read_needs
from tests.helpers import command
from tests.helpers.drawings import DRAWINGS, draw

OF_EVERY_COMMAND: Final = {"--quiet", "--verbose"}
"""Options on the page of the command line alone."""
DOCS: Final = Path(__file__).parents[2] / "docs"
ROOTS: Final = json_schema.ROOTS
ROWS: Final = tuple({row: None for root in ROOTS.values() for row in json_schema.rows(root)})


def test_columns_show_fields_that_are_there() -> None:
    declared = [(row, column.of) for row in ROWS for column in getattr(row, "COLUMNS", ())]
    named = [(row, of) for row, of in declared if isinstance(of, str)]
    assert len(named) > 50
    assert [(row, of) for row, of in named if not hasattr(row, of)] == []


@pytest.mark.parametrize("name", ROOTS)
def test_a_schema_has_every_name_of_its_result_and_what_is_said_of_it(name: str) -> None:
    found = json_schema.schema(name)["$defs"]
    for row in json_schema.rows(ROOTS[name]):
        properties = found[row.__name__]["properties"]
        assert list(properties) == [field.name.rstrip("_") for field in fields(row)]
        for field, text in json_schema.meanings(row).items():
            assert properties[field.rstrip("_")]["description"] == text
    printed = json.loads(command.gputrace("schema", name).out)
    assert printed == json.loads(json.dumps(json_schema.schema(name)))


def test_every_time_of_the_documentation_is_one_of_the_json() -> None:
    known = {field.name for row in ROWS for field in fields(row)}
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    written = set(re.findall(r"`(\w+_ns)`", text))
    assert len(written) > 50
    assert written <= known


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("findings", made_findings.markdown),
        *((name, partial(names.markdown, name)) for name in ROOTS),
    ],
)
def test_a_table_that_is_made_from_the_code_is_what_the_code_says(
    name: str, make: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    page = DOCS / ("findings.md" if name == "findings" else "json.md")
    text = page.read_text(encoding="utf-8")
    before, begin, rest = re.split(rf"(<!-- {name}: .*? -->\n\n)", text)
    table, end, after = rest.partition("\n\n<!-- end -->")
    assert end
    made = make()
    if request.config.getoption("--update-golden"):
        page.write_text(f"{before}{begin}{made}{end}{after}", encoding="utf-8")
        table = made
    assert table == made, "pytest --update-golden writes the table anew"


def figures(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of measured figures, by the names of their columns."""
    text = (DOCS / "measurements" / "data" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def total(name: str, column: str) -> int:
    return sum(int(row[column].replace(",", "")) for row in figures(name))


def test_every_table_of_figures_is_on_a_page() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "measurements").glob("*.md"))
    shown = re.findall(r"^:file: data/(\S+)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in DOCS.rglob("*.csv"))


def test_figures_of_the_benchmarks_follow_from_their_tables() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    diagnosis = figures("diagnosis")
    planted = [row for row in diagnosis if row["none"] != row["runs"]]
    right = sum(int(row["right"]) for row in planted)
    runs = sum(int(row["runs"]) for row in planted)
    first = figures("first-lines")
    known = [pair for pair in whatif.pairs() if pair.counts and pair.within is not None]
    held = sum(bool(pair.within) for pair in known)
    said = [
        f"| {runs} generated runs of up to 16 ranks | {right}; "
        f"an imbalance is reported in none of {total('diagnosis', 'runs') - runs} runs",
        f"| {total('comparisons', 'pairs')} pairs of generated runs, half equal but for chance | "
        f"{total('comparisons', 'right')} right |",
        f"| {total('missing-rows', 'runs')} generated runs that lack 2 to 20 % of some rows | "
        f"{total('missing-rows', 'reported')};",
        f"| {len(first)} recordings with known truth, most made by others | "
        f"{sum(row['right'] == 'yes' for row in first)}, ",
        f"| {total('bounds', 'predictions'):,} predictions for generated runs | none ",
        f"| {len(known)} measured pairs | the measured step is in the range of {held}, ",
    ]
    assert {text.count(words) for words in said} == {1}, [w for w in said if w not in text]
    assert total("bounds", "violations") == 0


def test_every_command_is_on_the_page_that_helps_to_choose_one() -> None:
    text = (DOCS / "which-command.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `gputrace {name}" not in text] == []


def test_every_entry_of_the_root_is_explained() -> None:
    root = DOCS.parent
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout")
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add a")[0]
    entries = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert [entry for entry in sorted(entries) if f"`{entry}`" not in text] == []


def test_every_link_and_picture_of_the_documentation_is_there() -> None:
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    assert any(page.parent.name == "studies" for page, _ in links)
    assert [link for page, link in links if not (page.parent / link).exists()] == []


def test_every_target_of_make_that_is_named_exists() -> None:
    root = DOCS.parent
    made = set(re.findall(r"^([a-z]+):.*## ", (root / "Makefile").read_text(), re.MULTILINE))
    pages = [*DOCS.rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?:`|^)make ([a-z]+)\b", text, re.MULTILINE))
    assert named
    assert named <= made


def test_every_key_of_the_browser_is_documented() -> None:
    from gputrace.report.tui.screen import KEYS

    text = (DOCS / "browse.md").read_text(encoding="utf-8")
    rows = [f"| `{key.written.replace(' ', '` `')}` | {key.does} |" for key in KEYS]
    assert [row for row in rows if row not in text] == []


def test_pictures_of_the_documentation_fetch_nothing() -> None:
    pictures = list((DOCS / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        addresses = set(re.findall(r"https?://[^\s\"')]+", picture.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("name", [*DRAWINGS, "architecture.svg"])
def test_drawings_show_what_the_code_does(name: str, request: pytest.FixtureRequest) -> None:
    path = DOCS / "pictures" / name
    drawn = architecture.svg() if name == "architecture.svg" else draw(name)
    if request.config.getoption("--update-golden"):
        path.write_text(drawn, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == drawn, "pytest --update-golden draws them anew"


def test_every_option_of_the_page_is_documented() -> None:
    from gputrace.cli.analyze import report

    text = (DOCS / "report.md").read_text(encoding="utf-8")
    options = {name for one in report.params for name in one.opts if name.startswith("--")}
    options -= OF_EVERY_COMMAND
    assert {name for name in options if name not in text} <= {"--keep-going", "--output"}


def test_every_workload_is_in_their_table_with_its_versions_and_placements() -> None:
    workloads = DOCS.parent / "workloads"
    row = re.compile(r"^\| `(\w+\.py.*?)` \| (.*?) \| (.*?) \| (`.*`) \|$", re.M)
    shown = row.findall((workloads / "README.md").read_text(encoding="utf-8"))
    entries = list(read_frameworks(workloads / "frameworks.toml").values())
    assert [(start, title, updates) for start, title, _, updates in shown] == [
        (
            " ".join([entry.script.name, *entry.arguments]),
            entry.title,
            ", ".join(f"`{update}`" for update in entry.updates),
        )
        for entry in entries
    ]
    for entry, (_, _, versions, _) in zip(entries, shown, strict=True):
        pins = {*read_needs(entry.script).dependencies, *entry.requires}
        assert {one.replace(" ", "==") for one in versions.split(", ")} <= pins


def test_the_json_of_predictions_names_every_cure() -> None:
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    ids = text.partition("`what_if`: a row for each cure")[2].partition("It is empty")[0]
    assert set(re.findall(r"`([\w-]+)`", ids)) == {cure.id for cure in CURES}


def test_every_option_for_slurm_is_documented() -> None:
    from gputrace.cli.bench import command as study

    text = (DOCS / "bench.md").read_text(encoding="utf-8")
    shown = [one for one in study.params if not getattr(one, "hidden", False)]
    options = {name for one in shown for name in one.opts if name.startswith("--")}
    options -= OF_EVERY_COMMAND
    assert {name for name in options if name not in text} <= {"--output", "--backend", "--json"}


PUBLIC: Final = (
    *(gputrace.open, gputrace.compare, gputrace.step, gputrace.annotate, gputrace.arm),
    *(gputrace.environment, gputrace.try_cures),
    *(
        OpenTrace.analyze,
        OpenTrace.explain_step,
        OpenTrace.report,
        OpenTrace.page,
        OpenTrace.material,
        OpenTrace.launches,
    ),
    *(OpenTrace.export, OpenTrace.close),
    *(Report.render, Report.to_pandas, Report.to_polars, Report.to_arrow),
    *(ComparisonReport.render, ComparisonReport.save),
)


def test_no_public_function_is_forgotten_here() -> None:
    named = {name for name in gputrace.__all__ if name.islower() and name[0] != "_"}
    shown = [OpenTrace, Report, ComparisonReport]
    named |= {name for one in shown for name in vars(one) if inspect.isfunction(vars(one)[name])}
    assert {name for name in named if name[0] != "_"} == {one.__name__ for one in PUBLIC}


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: str(function.__qualname__))
def test_every_public_function_says_what_it_takes_and_what_it_raises(
    function: Callable[..., object],
) -> None:
    said = inspect.getdoc(function) or ""
    taken = [name for name in inspect.signature(function).parameters if name != "self"]
    assert [name for name in taken if not re.search(rf"\b{name}\b", said)] == []
    assert re.search(r"\b[Rr]aises\b", said)
    named = set(re.findall(r"\b(\w+Error)\b", said))
    assert named <= {"OSError", *(name for name in vars(errors) if name.endswith("Error"))}


def test_what_takes_or_gives_times_says_their_unit() -> None:
    for function in (OpenTrace.analyze, Report.render, Report.to_pandas, gputrace.compare):
        assert "nanosecond" in (inspect.getdoc(function) or ""), function.__qualname__


def test_every_extra_is_documented() -> None:
    text = (DOCS / "install.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    with (DOCS.parent / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert [name for name in extras if f"`{name}`" not in rows] == []


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: str(rule.__name__))
def test_every_rule_says_what_would_prove_it_wrong(rule: Rule) -> None:
    assert "Wrong if: " in (rule.__doc__ or "")
