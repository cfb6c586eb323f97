"""CI fails on a known weakness of what the locks name, and goes on where nobody can be asked."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest

from tests.command import ROOT

JUDGE = runpy.run_path(str(ROOT / ".ci" / "audit.py"))["judge"]


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": list(packages), "fixes": []})


def package(name: str, *advisories: str) -> dict[str, Any]:
    found = [{"id": id, "fix_versions": ["2.0"], "aliases": [f"CVE-{id}"]} for id in advisories]
    return {"name": name, "version": "1.0", "vulns": found}


UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


def test_without_advisories_it_passes_and_says_how_many_were_asked_for() -> None:
    assert JUDGE(answer(package("a"), package("b"), UNKNOWN), "", {}) == (
        0,
        ["audited 2 packages, 1 more are not known there: 0 advisories"],
    )


def test_a_known_weakness_fails_and_says_what_mends_it() -> None:
    code, lines = JUDGE(answer(package("a", "GHSA-1"), package("b")), "", {})
    assert code == 1
    assert lines[0] == "a 1.0: GHSA-1; mended in 2.0"


def test_what_is_ignored_passes_by_any_of_its_names() -> None:
    for id in ("GHSA-1", "CVE-GHSA-1"):
        assert JUDGE(answer(package("a", "GHSA-1")), "", {id: "not reached"})[0] == 0


def test_what_is_ignored_in_vain_fails() -> None:
    code, lines = JUDGE(answer(package("a")), "", {"GHSA-9": "old"})
    assert code == 1
    assert lines[0].startswith("GHSA-9: is ignored")


@pytest.mark.parametrize(
    ("said", "complaint"),
    [("", "Traceback\nConnectionError: no route to host\n"), (answer(UNKNOWN), ""), ("[]", "")],
)
def test_where_nobody_can_be_asked_one_line_says_so_and_ci_goes_on(
    said: str, complaint: str
) -> None:
    code, lines = JUDGE(said, complaint, {})
    assert (code, len(lines)) == (0, 1)
    assert lines[0].startswith("not audited: ")
