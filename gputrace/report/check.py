"""Report of a check as text, Markdown, JSON, and JUnit XML for CI servers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Final
from xml.etree import ElementTree as ET

from rich.text import Text

from gputrace.analyzers.gates import Check
from gputrace.report.json import one_line, plain
from gputrace.report.text import open_console, said, without_blanks
from gputrace.sanitize import sentence

_NOT_IN_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text(check: Check, width: int = 80, color: bool = False) -> str:
    """Render the verdict, then a line per gate, failed ones first."""
    out = io.StringIO()
    console = open_console(out, width, color)
    console.print(said(verdict(check), "green" if check.passed else "bold red"))
    for gate in sorted(check.gates, key=lambda gate: gate.passed):
        word, style = ("ok     ", "green") if gate.passed else ("FAILED ", "bold red")
        console.print(Text.assemble((word, style), sentence(f"{gate.id}: {gate.message}.")))
    return without_blanks(out)


def markdown(check: Check) -> str:
    """Render the verdict, then a table with a row per gate, failed ones first."""
    rows = [
        f"| {'' if gate.passed else '**FAILED** '}{gate.id} | {_in_cell(gate.message)} |"
        for gate in sorted(check.gates, key=lambda gate: gate.passed)
    ]
    head = [verdict(check), "", "| gate | what came of it |", "| --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def _in_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def verdict(check: Check) -> str:
    """Say how many gates are met, or how many are not."""
    failed, count = sum(not gate.passed for gate in check.gates), len(check.gates)
    gates = "gate" if count == 1 else "gates"
    if not failed:
        return "The gate is met." if count == 1 else f"All {count} gates are met."
    return f"{failed} of {count} {gates} {'is' if failed == 1 else 'are'} not met."


def junit(check: Check) -> str:
    """Render a JUnit test suite, a test case per gate; unevaluated gates are errors."""
    failed = [gate for gate in check.gates if gate.evaluated and not gate.passed]
    errors = [gate for gate in check.gates if not gate.evaluated]
    counts = {"tests": check.gates, "failures": failed, "errors": errors}
    suite = ET.Element("testsuite", name="gputrace check")
    for name, gates in counts.items():
        suite.set(name, str(len(gates)))
    for gate in check.gates:
        case = ET.SubElement(suite, "testcase", classname="gputrace", name=gate.id)
        message = _NOT_IN_XML.sub("\ufffd", gate.message)
        if gate.passed:
            ET.SubElement(case, "system-out").text = message
        else:
            ET.SubElement(case, "failure" if gate.evaluated else "error", message=message)
    ET.indent(suite)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suite, encoding="unicode")}\n'


FORMATS: Final[dict[str, Callable[[Check], str]]] = {
    "text": text,
    "json": lambda check: one_line(plain(check)),
    "junit": junit,
    "markdown": markdown,
}
