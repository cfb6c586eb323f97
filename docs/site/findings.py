"""The table of findings, from what the rules say of themselves."""

from __future__ import annotations

import inspect

from gputrace.analyzers.findings import HOST_RULES, RULES


def markdown() -> str:
    """A row for each finding: its id, when it is made, what it costs."""
    said: dict[str, str] = {}
    for rule in (*RULES, *HOST_RULES):
        said.setdefault(rule.__name__.replace("_", "-"), inspect.getdoc(rule) or "")
    rows = [f"| `{id}` | {' | '.join(_when_and_cost(text))} |" for id, text in said.items()]
    return "\n".join(["| id | when | what it costs |", "| --- | --- | --- |", *rows])


def _when_and_cost(text: str) -> tuple[str, str]:
    when, _, cost = " ".join(text.split()).partition(" Cost: ")
    return when.removesuffix("."), cost.removesuffix(".") or "–"
