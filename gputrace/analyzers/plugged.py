"""What plugins' analyzers find: findings and tables beside our own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.findings.severities import SEVERITIES
from gputrace.analyzers.results import ExtraTable, Finding
from gputrace.errors import PluginError
from gputrace.plugins import Plugin, call, expect, load_function, plugins, tell

_PLAIN: Final = frozenset((bool, int, float, str, type(None)))
Found = tuple[tuple[Finding, ...], tuple[ExtraTable, ...]]


def find_plugged(facts: Facts) -> Found:
    """The findings and tables of all analyzers of plugins; none of one that does not work."""
    found: list[Finding | ExtraTable] = []
    for plugin in plugins("analyzers"):
        try:
            found += _run(plugin, facts)
        except PluginError as error:
            tell(error)
    findings = tuple(one for one in found if isinstance(one, Finding))
    return findings, tuple(one for one in found if isinstance(one, ExtraTable))


def _run(plugin: Plugin, facts: Facts) -> list[Finding | ExtraTable]:
    analyzer = load_function(plugin)

    def run() -> list[Any]:
        given = analyzer(facts)
        return list(given) if isinstance(given, Iterable) else [given]

    found = call(plugin, run)
    for one in found:
        expect(plugin, one, Finding, ExtraTable)
        if problem := _problem(plugin, one):
            raise PluginError(f"{plugin} does not work: {problem}")
    return found  # type: ignore[no-any-return]


def _problem(plugin: Plugin, found: Finding | ExtraTable) -> str:
    """What views and JSON could not show; nothing where all is well."""
    values: tuple[Any, ...]
    texts: tuple[Any, ...]
    if isinstance(found, ExtraTable):
        values = tuple(cell for row in found.rows for cell in row)
        texts = (found.title, *found.header)
        if any(len(row) != len(found.header) for row in found.rows):
            return f"a row of its table {found.title!r} has not as many cells as the header"
    else:
        if found.id != plugin.name:
            return f"its finding is called {found.id!r}; it must have the analyzer's name"
        if found.severity not in SEVERITIES:
            return f"its severity {found.severity!r} is none of {', '.join(SEVERITIES)}"
        values = (*found.evidence.values(), *found.gpus, *found.ranks)
        texts = (found.message, found.advice, *found.evidence)
    strange = [value for value in values if type(value) not in _PLAIN]
    strange += [text for text in texts if type(text) is not str]
    if isinstance(found, Finding) and type(found.impact_ns) is not int:
        strange.append(found.impact_ns)
    kinds = sorted({type(value).__name__ for value in strange})
    return f"{', '.join(kinds)} where Python's own text and numbers belong" if kinds else ""
