"""Messages and progress on a terminal."""

from __future__ import annotations

import sys

from tests.helpers.on_terminal import OnTerminal

WORKS = """
import time
from gputrace.cli.console import reading
with reading("t.sqlite") as update:
    {does}
print("over")
"""


def run(does: str, until: str = "over") -> str:
    terminal = OnTerminal(program=(sys.executable, "-c", WORKS.format(does=does)))
    terminal.until(until)
    assert terminal.end() == 0
    return terminal.text


def test_long_work_shows_its_bar_although_it_reports_nothing() -> None:
    assert "over" not in run("time.sleep(4)", "reading t.sqlite").partition("reading")[0]


def test_a_bar_shows_what_was_reported_before_it_appeared() -> None:
    assert "analyzing t.sqlite" in run("update(7, 7); time.sleep(4)")


def test_short_work_shows_none() -> None:
    assert "t.sqlite" not in run("update(1, 2)")
