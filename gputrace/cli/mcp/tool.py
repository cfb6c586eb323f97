"""Tools for agents: arguments, calls, and answers as sentences with the rows that they rest on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from gputrace.errors import UsageError
from gputrace.sanitize import message, sentence
from gputrace.units import format_count

if TYPE_CHECKING:
    from gputrace.trials.cures import Candidate
    from gputrace.trials.outcome import Outcome

_KB: Final = 4
"""Size of an answer if no other is asked for."""
_MOST_KB: Final = 1000
_MOST_STEPS: Final = 1 << 53
_NOTICE_BYTES: Final = 300
"""Room for the envelope of an answer, and for the sentence that says what it lacks."""
Schema = dict[str, Any]
_TRACES: Final = ("trace", "before", "after")
"""Arguments that are paths of traces."""


@dataclass(frozen=True, slots=True)
class Said:
    """Sentence of an answer, and the rows that it rests on."""

    text: str
    rows: list[dict[str, Any]]


def cite(address: str, value: object, *told: str) -> dict[str, Any]:
    """Return a row under its address in the JSON, without what is unknown, and without the fields
    that its sentence tells in full.
    """
    from gputrace.report import plain

    known = _known(plain(value))
    assert isinstance(known, dict)
    return {"row": address, **{name: each for name, each in known.items() if name not in told}}


def _known(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_known(each) for each in value]
    if isinstance(value, dict):
        return {name: _known(each) for name, each in value.items() if each is not None}
    return value


def said(text: str, *rows: dict[str, Any]) -> Said:
    """Return a sentence with its rows; names in it come from a trace."""
    return Said(sentence(text), list(rows))


def fit(answer: Sequence[Said], kilobytes: int = _KB) -> list[dict[str, Any]]:
    """Return sentences as JSON of at most so many kB, the first ones first.

    A row is whole where it is first named, if there is room once all sentences have theirs; else it
    is its address. The last sentence says what size has all that was left out.
    """
    left, whole, fitted = kilobytes * 1024 - _NOTICE_BYTES, set[str](), list[dict[str, Any]]()
    for each in answer:
        outline = {"text": each.text, "rows": [{"row": one["row"]} for one in each.rows]}
        size = len(json.dumps(outline)) + 2
        if size > left:
            break
        fitted.append(outline)
        left -= size
    missing = len(answer) - len(fitted)
    lacks = missing > 0
    for shown, each in zip(fitted, answer, strict=False):
        for at, one in enumerate(each.rows):
            more = len(json.dumps(one)) - len(json.dumps(shown["rows"][at]))
            if one["row"] not in whole and more <= left:
                shown["rows"][at], left = one, left - more
                whole.add(one["row"])
            lacks |= one["row"] not in whole
    if lacks:
        every = sum(len(json.dumps([each.text, *each.rows])) + 40 for each in answer)
        enough = min((every + _NOTICE_BYTES) // 1024 + 1, _MOST_KB)
        sentences = f", and {format_count(missing, 'more sentence')}" if missing else ""
        over = f"Cut to {kilobytes} kB: max_kb={enough} has the rows only named here{sentences}."
        fitted.append({"text": over, "rows": []})
    return fitted


def _schema(kind: str, description: str, **limits: int) -> Schema:
    return {"type": kind, "description": description, **limits}


_SCHEMAS: Final[dict[str, Schema]] = {
    "trace": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Path of a trace, or of a folder of them; a list is the parts of one run.",
    },
    "before": _schema("string", "Path of a trace, or of the folder of a run's."),
    "after": _schema("string", "Path of a trace, or of the folder of a run's."),
    "target": _schema("string", "Path of the trace to write, in the folder."),
    "folder": _schema("string", "Folder to look in, else that of the server."),
    "steps": _schema(
        "string", "Steps to measure, e.g. 8:20 (8 to 19), instead of the steady ones."
    ),
    "time": _schema("string", "Only this part, e.g. 1.1s:1.2s."),
    "limit": _schema("integer", "Most to list.", minimum=1, maximum=50),
    "number": _schema("integer", "Number of the step, from 0.", minimum=0, maximum=_MOST_STEPS),
    "cause": _schema("string", "Id of a cause or finding, as in brackets."),
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
    "max_kb": _schema("integer", "Size of the answer, else 4.", minimum=1, maximum=_MOST_KB),
}
"""Arguments of all tools, by the names that their functions have for them."""
_ROWS: Final[Schema] = {
    "type": "object",
    "properties": {
        "sentences": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "rows": {"type": "array"}},
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


_BETWEEN_S: Final = 1.0
"""Minimum seconds between two messages of progress."""


@dataclass(slots=True)
class Program:
    """Program that the person named, and the trials of it so far."""

    words: tuple[str, ...]
    folder: Path
    """Folder that it runs in."""
    trials: dict[str, Outcome] = field(default_factory=dict)
    """Trials by the name that the agent has for them."""


class InputRequired(Exception):
    """Input that a call needs from the person, as the protocol's ``inputRequests``."""


@dataclass(slots=True)
class Call:
    """Call of a tool that runs the program."""

    program: Program
    parameters: Mapping[str, Any]
    """Parameters of the request."""
    stopped: Callable[[], bool]
    """True once the agent has cancelled it, or is gone."""
    write: Callable[[object], None]
    shown_s: float = -_BETWEEN_S
    began: float = field(default_factory=monotonic)

    def show(self, total_s: float, what: str) -> None:
        """Say how far the call is, if that is asked for; raises KeyboardInterrupt once it is to
        end.
        """
        if self.stopped():
            raise KeyboardInterrupt
        spent_s, token = monotonic() - self.began, self._meta.get("progressToken")
        if token is not None and spent_s >= self.shown_s + _BETWEEN_S:
            self.shown_s = spent_s
            state = {"progressToken": token, "progress": spent_s, "total": total_s, "message": what}
            self.write({"jsonrpc": "2.0", "method": "notifications/progress", "params": state})

    @property
    def _meta(self) -> Mapping[str, Any]:
        meta = self.parameters.get("_meta")
        return meta if isinstance(meta, dict) else {}

    def agreed(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the changes that the person agrees to: of an agent that can show a form, those
        ticked in it, else all that it named.

        Raises InputRequired where the form is to be shown first.
        """
        match self._meta:
            case {"io.modelcontextprotocol/clientCapabilities": {"elicitation": dict(modes)}}:
                if modes and "form" not in modes:
                    return candidates
            case _:
                return candidates
        match self.parameters.get("inputResponses"):
            case {"consent": {"action": "accept", "content": dict(ticks)}}:
                return [each for each in candidates if ticks.get(str(each)) is True]
            case {"consent": _}:
                return []
        form = {
            "message": "Run the program several times to try these changes in it? Its files stay.",
            "requestedSchema": {"type": "object", "properties": dict(map(_box, candidates))},
        }
        raise InputRequired({"consent": {"method": "elicitation/create", "params": form}})


def _box(candidate: Candidate) -> tuple[str, dict[str, str]]:
    about = [
        f"{each.cure.what}{', which changes numerics' * each.cure.numerics}"
        for each in candidate.settings
    ]
    return str(candidate), {"type": "boolean", "description": "; ".join(about)}


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
        names = ", ".join(self.arguments)
        if not isinstance(given, dict):
            raise UsageError(f"give the arguments as an object: {names}")
        if unknown := sorted(set(given) - set(self.arguments)):
            raise UsageError(f"{message(', '.join(unknown))}: no such argument; it takes {names}")
        checked: dict[str, Any] = {}
        for name, needed in self.arguments.items():
            schema = _SCHEMAS[name]
            value = given.get(name, "." if name == "folder" else None)
            if value is None and not needed:
                continue
            if name in _TRACES:
                value = _traces(name, value, root)
            elif schema["type"] == "integer":
                least, most = schema["minimum"], schema["maximum"]
                if type(value) is not int or not least <= value <= most:
                    below = f" to {most}" if most < _MOST_STEPS else ""
                    raise UsageError(f"{name}: give a number from {least}{below}")
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
    if missing := next((path for path in inside if not path.exists()), None):
        raise UsageError(f"{missing}: no such file; `recordings` lists those of {root}")
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
