"""The limits of docs/security.md are those of the code."""

from __future__ import annotations

import re
from typing import Final

import pytest

from gputrace import sanitize
from gputrace.analyzers import operations
from gputrace.model import names, trace
from gputrace.readers import chrome_json, compressed, memory_snapshot, plain_pickle, xplane
from gputrace.store import cache, redact, sqlite_reader, sqlite_security
from tests.helpers.command import ROOT

MODULES: Final = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(sanitize, cache, names, trace, sqlite_security, compressed, operations),
        *(redact, sqlite_reader, chrome_json, xplane, plain_pickle, memory_snapshot),
    )
}
UNITS: Final = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30}
TEXT: Final = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ROWS: Final = re.findall(r"^\| [^|]+ \| ([\d,]+) ?(MiB|GiB|) \| `(\w+)\.(\w+)` \|$", TEXT, re.M)


@pytest.mark.parametrize(("number", "unit", "module", "name"), ROWS)
def test_a_limit_is_that_of_the_code(number: str, unit: str, module: str, name: str) -> None:
    assert getattr(MODULES[module], name) == int(number.replace(",", "")) * UNITS[unit]


def test_all_rows_of_the_table_are_compared() -> None:
    table = TEXT.partition("## Limits")[2].partition("\n## ")[0]
    assert len(ROWS) == len(re.findall(r"^\|", table, re.M)) - 2
    assert {module for _, _, module, _ in ROWS} == MODULES.keys()


def test_reports_are_asked_for_where_the_code_is_hosted() -> None:
    text = (ROOT / ".github" / "SECURITY.md").read_text(encoding="utf-8")
    assert "security advisory" in text
    assert "@" not in text
