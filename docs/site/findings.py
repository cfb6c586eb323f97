"""The table of findings, from what the rules say of themselves."""

from __future__ import annotations

import inspect

from gputrace.analyzers.findings import ALL_RULES


def markdown() -> str:
    """A row for each finding: its id, condition and cost, and what would prove it wrong."""
    said: dict[str, str] = {}
    for rule in ALL_RULES:
        said.setdefault(rule.__name__.replace("_", "-"), inspect.getdoc(rule) or "")
    rows = [f"| `{id}` | {' | '.join(_parts(text))} |" for id, text in said.items()]
    head = [
        "| id | when | what it costs | what would prove it wrong |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows])


def _parts(text: str) -> tuple[str, str, str]:
    text, _, wrong = " ".join(text.split()).partition(" Wrong if: ")
    when, _, cost = text.partition(" Cost: ")
    return when.removesuffix("."), cost.removesuffix(".") or "–", wrong.removesuffix(".") or "–"
