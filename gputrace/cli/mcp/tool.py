"""Tools for agents: arguments, and answers as sentences with the rows that they rest on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final

from gputrace.errors import UsageError
from gputrace.sanitize import message, sentence

_KB: Final = 4
"""Size of an answer if no other is asked for."""
_NOTICE_BYTES: Final = 300
"""Room for the envelope of an answer, and for the sentence that says what it lacks."""
Schema = dict[str, Any]
_TRACE: Final[Schema] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
    "description": "Path of a trace, or of a folder of them; a list is the parts of one run.",
}


@dataclass(frozen=True, slots=True)
class Said:
    """Sentence of an answer, and the rows that it rests on."""

    text: str
    rows: list[dict[str, Any]]


def cite(address: str, value: object) -> dict[str, Any]:
    """Return a row under its address in the JSON, without what is unknown."""
    from gputrace.report import plain

    known = plain(value)
    assert isinstance(known, dict)
    return {"row": address, **{name: each for name, each in known.items() if each is not None}}


def said(text: str, *rows: dict[str, Any]) -> Said:
    """Return a sentence with its rows; names in it come from a trace."""
    return Said(sentence(text), list(rows))


def fit(answer: Sequence[Said], kilobytes: int = _KB) -> list[dict[str, Any]]:
    """Return sentences as JSON of at most so many kB, the first ones first.

    A row is whole where it is first named, if there is room once all sentences have theirs; else it
    is its address. The last sentence says that something was left out.
    """
    left, whole, fitted = kilobytes * 1024 - _NOTICE_BYTES, set[str](), list[dict[str, Any]]()
    for each in answer:
        outline = {"text": each.text, "rows": [{"row": one["row"]} for one in each.rows]}
        left -= len(json.dumps(outline)) + 2
        if left < 0:
            break
        fitted.append(outline)
    lacks = left < 0
    for shown, each in zip(fitted, answer, strict=False):
        for at, one in enumerate(each.rows):
            more = len(json.dumps(one)) - len(json.dumps(shown["rows"][at]))
            if one["row"] not in whole and more <= left:
                shown["rows"][at], left = one, left - more
                whole.add(one["row"])
            lacks |= one["row"] not in whole
    if lacks:
        over = f"Cut to {kilobytes} kB: more rows and sentences with a larger max_kb."
        fitted.append({"text": over, "rows": []})
    return fitted


def _schema(kind: str, description: str, **limits: int) -> Schema:
    return {"type": kind, "description": description, **limits}


_SCHEMAS: Final[dict[str, Schema]] = {
    "trace": _TRACE,
    "before": _TRACE,
    "after": _TRACE,
    "target": _schema("string", "Path of the trace to write, in the folder."),
    "folder": _schema("string", "Folder to look in; all if not given."),
    "steps": _schema(
        "string", "Steps to measure, e.g. 8:20 (8 to 19), instead of the steady ones."
    ),
    "time": _schema("string", "Only this part, e.g. 1.1s:1.2s."),
    "limit": _schema("integer", "How many at most.", minimum=1, maximum=50),
    "number": _schema("integer", "Number of the step, from 0.", minimum=0, maximum=1 << 53),
    "cause": _schema("string", "Id of one cause, of which all is said."),
    "measure": _schema("integer", "Steps to measure, else 40.", minimum=5, maximum=10_000),
    "cures": {
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "description": "Changes that the person agreed to, by name, as workers=8, or pinned+fused "
        "for two at once. No other is made.",
    },
    "budget": _schema("string", "Time to spend, as 5min, else 90s."),
    "copy": _schema("boolean", "Give each run a copy of the folder, so that outputs stay."),
    "trial": _schema("string", "Name that `try` gave."),
    "max_kb": _schema("integer", "Maximum size of the answer, else 4.", minimum=1, maximum=1000),
}
"""Arguments of all tools, by the names that their functions have for them."""
_ROWS: Final[Schema] = {
    "type": "object",
    "properties": {
        "sentences": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "rows": {"type": "array", "items": {"type": "object"}},
                },
                "required": ["text", "rows"],
            },
        }
    },
    "required": ["sentences"],
}
_KINDS: Final = {
    "string": (str, "a text"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list of texts"),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool that an agent may call."""

    function: Callable[..., Iterator[Said]]
    description: str
    arguments: dict[str, bool]
    """True for each argument that must be given."""
    runs: bool
    """True if it runs the program."""
    takes_call: bool
    """True if its function takes the call first."""

    def described(self, name: str) -> dict[str, Any]:
        """Return what ``tools/list`` says of it."""
        return {
            "name": name,
            "description": self.description,
            "inputSchema": {
                "type": "object",
                "properties": {each: _SCHEMAS[each] for each in self.arguments},
                "required": [each for each, needed in self.arguments.items() if needed],
                "additionalProperties": False,
            },
            "outputSchema": _ROWS,
            "annotations": {
                "readOnlyHint": not self.runs,
                "destructiveHint": self.runs,
                "idempotentHint": not self.runs,
                "openWorldHint": self.runs,
            },
        }

    def check(self, given: object, root: Path) -> dict[str, Any]:
        """Return the arguments, with traces as paths within the root; raises UsageError."""
        if not isinstance(given, dict) or (unknown := set(given) - set(self.arguments)):
            wrong = f": {message(str(sorted(unknown)))}" if isinstance(given, dict) else ""
            names = ", ".join(self.arguments)
            raise UsageError(f"the arguments are {names}, as an object{wrong}")
        checked: dict[str, Any] = {}
        for name, needed in self.arguments.items():
            schema = _SCHEMAS[name]
            value = given.get(name, "." if name == "folder" else None)
            if value is None and not needed:
                continue
            if schema is _TRACE:
                value = _traces(name, value, root)
            elif schema["type"] == "integer":
                least, most = schema["minimum"], schema["maximum"]
                if type(value) is not int or not least <= value <= most:
                    raise UsageError(f"{name}: give a number from {least} to {most}")
            else:
                kind, words = _KINDS[schema["type"]]
                texts = value if isinstance(value, list) else []
                if not isinstance(value, kind) or not all(isinstance(text, str) for text in texts):
                    raise UsageError(f"{name}: give {words}")
                if name in ("folder", "target"):
                    value = _resolved(name, str(value), root)
            checked[name] = value
        return checked


def tool(function: Callable[..., Iterator[Said]], runs: bool = False) -> tuple[str, Tool]:
    """Return a function as a tool, with its name: its docstring is the description.

    One that takes a ``report`` gets the analysis of a trace, or of a part of it.
    """
    needed = {
        name: parameter.default is parameter.empty
        for name, parameter in signature(function).parameters.items()
        if name not in ("report", "call")
    }
    first = next(iter(signature(function).parameters))
    if first == "report":
        needed = {"trace": True, "steps": False, "time": False} | needed
    description = " ".join(str(function.__doc__).split())
    called = _of_report(function) if first == "report" else function
    arguments = needed | {"max_kb": False}
    return function.__name__.strip("_"), Tool(called, description, arguments, runs, first == "call")


def _of_report(function: Callable[..., Iterator[Said]]) -> Callable[..., Iterator[Said]]:
    def analyzed(
        trace: list[str], steps: str | None = None, time: str | None = None, **more: Any
    ) -> Iterator[Said]:
        import gputrace

        with gputrace.open(*trace, windows=time is not None) as opened:
            report = opened.analyze(steps=steps, time=time)
        return function(report, **more)

    return analyzed


def _traces(name: str, value: object, root: Path) -> list[str]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not paths or not all(isinstance(p, str) for p in paths):
        raise UsageError(f"{name}: give the path of a trace, or a list of a run's")
    inside = [_resolved(name, path, root) for path in paths]
    if outside := next((link for path in inside if (link := _link_out(path, root))), None):
        raise _outside(outside, root)
    return [str(path) for path in inside]


def _resolved(name: str, path: str, root: Path) -> Path:
    try:
        resolved = Path(os.path.realpath(root / path))
    except (OSError, ValueError):
        raise UsageError(f"{name}: {path!r} is not a path") from None
    if "://" in path or not resolved.is_relative_to(root):
        raise _outside(path if "://" in path else resolved, root)
    return resolved


def _outside(path: object, root: Path) -> UsageError:
    return UsageError(f"{path}: lies outside of {root}; only what is in it can be read")


def _link_out(path: Path, root: Path) -> Path | None:
    """Return a link out of the root among the files that are read of a folder, and of folders of
    tables in it; None if there is none.
    """
    links = (each for depth in ("*", "*/*") for each in path.glob(depth) if each.is_symlink())
    ends = ((link, Path(os.path.realpath(link))) for link in links)
    return next((link for link, end in ends if not end.is_relative_to(root)), None)
