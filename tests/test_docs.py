"""The documentation names everything that a person or program may meet."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Final

import pytest

from gputrace.analyzers import findings, results
from gputrace.analyzers.check import results as check
from gputrace.analyzers.compare import results as compare
from gputrace.analyzers.results import cards, kernels
from gputrace.analyzers.results.balance import Load
from gputrace.analyzers.results.collectives import CollectiveTotals
from gputrace.analyzers.results.links import GpuLink
from tests import command

DOCS: Final = Path(__file__).parents[1] / "docs"
ROWS: Final = (
    results.Analysis,
    results.GpuTotals,
    results.Steps,
    results.Step,
    results.Phase,
    results.Breakdown,
    results.Gaps,
    results.Gap,
    results.Finding,
    cards.CardUse,
    cards.Utilization,
    cards.GpuCurves,
    cards.Curve,
    kernels.Kernels,
    kernels.KernelUse,
    kernels.KernelOnGpu,
    kernels.Family,
    kernels.Product,
    kernels.LaunchCost,
    *(compare.Comparison, compare.RunSummary, compare.Pair, compare.ClassChange),
    *(compare.KernelChange, compare.GpuPair, compare.FindingChange, compare.Worst),
    *(compare.Scaling, compare.ScalingRow, compare.Loss, check.Check, check.Gate),
    CollectiveTotals,
    Load,
    GpuLink,
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.__name__))
def test_every_name_of_the_json_is_documented(row: type) -> None:
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    names = [field.name.rstrip("_") for field in fields(row)]
    missing = [name for name in names if f"`{name}`" not in text]
    assert missing == []


def test_every_finding_is_documented_and_no_other() -> None:
    written = set(re.findall(r"^\| `([a-z0-9-]+)` \|", (DOCS / "findings.md").read_text(), re.M))
    rules = (*findings.RULES, *findings.HOST_RULES)
    made = {rule.__name__.replace("_", "-") for rule in rules}
    assert written == made


def test_the_readme_shows_what_the_demo_prints() -> None:
    shown = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert command.gputrace("demo", "--no-record").out.strip() in shown


def test_every_key_of_the_browser_is_documented() -> None:
    from gputrace.views.browse.keys import KEYS

    text = (DOCS / "browse.md").read_text(encoding="utf-8")
    rows = [f"| `{key.written.replace(' ', '` `')}` | {key.does} |" for key in KEYS]
    assert [row for row in rows if row not in text] == []


def test_pictures_of_the_documentation_fetch_nothing() -> None:
    pictures = list((DOCS / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        addresses = set(re.findall(r"https?://[^\s\"')]+", picture.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg"}


def test_pictures_are_small() -> None:
    for picture in (DOCS / "pictures").glob("*.png"):
        assert picture.stat().st_size <= 200_000, picture


def test_every_option_of_the_page_is_documented() -> None:
    from gputrace.cli.report import command as report

    text = (DOCS / "report.md").read_text(encoding="utf-8")
    options = {name for one in report.params for name in one.opts if name.startswith("--")}
    assert {name for name in options if name not in text} <= {"--keep-going", "--output"}
