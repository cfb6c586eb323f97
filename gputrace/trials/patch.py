"""Cures as lines to change in the program: a unified diff of the calls that the hooks saw."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shlex
import shutil
import site
import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Final

from gputrace.trials.cures import Candidate, Setting
from gputrace.trials.runs import Change

_INSTALLED: Final = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Edit:
    """File of the program before and after."""

    path: Path
    before: str
    after: str

    @property
    def lines(self) -> list[str]:
        """Return the new lines as ``12: loader = DataLoader(data, num_workers=8)``."""
        before, after = (text.splitlines() for text in (self.before, self.after))
        changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        numbers = [n for kind, _, _, *new in changes if kind != "equal" for n in range(*new)]
        return [f"{n + 1}: {after[n].strip()}" for n in numbers if after[n].strip()]

    @property
    def diff(self) -> str:
        """Return the unified diff, as ``git apply`` and ``patch -p1`` take it."""
        name = os.path.relpath(self.path)
        # Python's splitlines has more ends of lines than diff.
        before, after = (list(StringIO(text, newline="\n")) for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )


@dataclass(frozen=True, slots=True)
class Patch:
    """All that is to be done to have the cures for good."""

    edits: tuple[Edit, ...]
    by_hand: tuple[str, ...]
    """Changes that are no argument of a call in the program, a line each."""

    @property
    def diff(self) -> str:
        """Return the diff of all files."""
        return "".join(edit.diff for edit in self.edits)


def make_patch(
    candidate: Candidate, changes: Sequence[Change], main: str, command: Sequence[str]
) -> Patch:
    """Return the lines to change.

    Args:
        candidate: cures to have for good.
        changes: calls that they changed, as the hooks saw them.
        main: path of the program, which gets the statements.
        command: command line, which gets the variables; empty where there is none.
    """
    by_file: dict[Path, list[Change]] = defaultdict(list)
    by_hand: list[str] = []
    for change in (change for change in changes if change.argument and change.call):
        if _is_program(Path(change.file)):
            by_file[Path(change.file)].append(change)
        else:
            by_hand.append(_elsewhere(change))
    lines = [line for setting in candidate.settings if (line := _statement(setting))]
    if not _is_program(Path(main)):
        by_hand += lines
    elif lines:
        by_file.setdefault(Path(main), [])
    edits = []
    for path, calls in by_file.items():
        try:
            before = path.read_bytes().decode()
            after, missed = _edit_calls(before, calls)
            after = _insert(after, lines) if path == Path(main) else after
        except (OSError, ValueError, SyntaxError) as error:
            by_hand += [f"{path} cannot be edited ({error})", *map(_elsewhere, calls)]
            by_hand += lines if path == Path(main) else []
            continue
        by_hand += map(_elsewhere, missed)
        edits += [Edit(path, before, after)] * (after != before)
    by_hand += [line for setting in candidate.settings if (line := _by_hand(setting, command))]
    return Patch(tuple(edits), tuple(dict.fromkeys(by_hand)))


def _by_hand(setting: Setting, command: Sequence[str]) -> str:
    """Return how to have a cure that is no line of the program; empty if it is."""
    if not setting.cure.variables:
        return f"{setting}: {setting.cure.advice}" if setting.cure.advice else ""
    variables = Candidate((setting,)).environment(os.environ)
    words = " ".join(f"{name}={shlex.quote(text)}" for name, text in variables.items())
    if not command:
        return f"{setting}: start it with {words} in its environment"
    return f"{setting}: run it as {words} {shlex.join(command)}"


def apply(patch: Patch) -> None:
    """Write the files; raises OSError. One that has changed since it was read is left alone."""
    for edit in patch.edits:
        if edit.path.read_bytes() != edit.before.encode():
            raise OSError(0, "has changed meanwhile, and is left as it is", str(edit.path))
        # Whole or not at all: a full disk must not cost the program.
        path = edit.path.resolve()
        new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            new.write_bytes(edit.after.encode())
            shutil.copymode(path, new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def _statement(setting: Setting) -> str:
    value = setting.for_hook
    return setting.cure.line.format(value)


def _is_program(path: Path) -> bool:
    """Return whether a file is the person's own, not that of an installed package."""
    installed = {sysconfig.get_path("stdlib"), *site.getsitepackages()}
    within = any(path.is_relative_to(folder) for folder in installed if folder)
    return path.suffix == ".py" and not within and not {*_INSTALLED} & {*path.parts}


def _elsewhere(change: Change) -> str:
    return (
        f"{change.cure}: {change.argument}={change.new} (now {change.old}) of the call of "
        f"{change.call} in {change.file}:{change.line}"
    )


_COMMENT: Final = re.compile(rb"#[^\r\n]*")


def _edit_calls(source: str, changes: Sequence[Change]) -> tuple[str, list[Change]]:
    """Return the source with the arguments changed, and the changes that fit no call."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    missed, starts, data = [], _line_starts(source), source.encode()
    replaced: set[tuple[int, int, str]] = set()
    appended: dict[tuple[int, str], list[str]] = defaultdict(list)
    for change in changes:
        fitting = [call for call in calls if _fits(call, change)]
        if len(fitting) != 1:
            missed.append(change)
        elif (value := _argument(fitting[0], change)) is not None:
            replaced.add((*_span(value, starts), change.new))
        else:
            call = fitting[0]
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            close = _span(call, starts)[1] - 1
            end = max((_span(arg, starts)[1] for arg in given), default=close)
            # What is between may be brackets around the argument, a comma and comments.
            end += _COMMENT.sub(lambda match: b" " * len(match[0]), data[end:close]).rfind(b")") + 1
            if end > close:  # A generator without brackets of its own.
                missed.append(change)
            else:
                appended[end, ", " if given else ""].append(f"{change.argument}={change.new}")
    for (end, before), arguments in appended.items():
        line = data[data.rfind(b"\n", 0, end) + 1 : end].decode()
        rest, new = data[end:].partition(b"\n")[0], dict.fromkeys(arguments)
        if rest.strip() == b",":
            # Arguments have a line each.
            indent = line[: len(line) - len(line.lstrip())]
            end, text = end + len(rest), "".join(f"\n{indent}{argument}," for argument in new)
        else:
            text = before + ", ".join(new)
        replaced.add((end, end, text))
    for start, end, text in sorted(replaced, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    changed = data.decode()
    ast.parse(changed)
    return changed, missed


def _fits(call: ast.Call, change: Change) -> bool:
    """Return whether a change is one of this call, all of whose arguments can be seen."""
    unpacks = any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(arg, ast.Starred) for arg in call.args
    )
    within = call.lineno <= change.line <= (call.end_lineno or call.lineno)
    return within and not unpacks and _name(call.func) == change.call


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _argument(call: ast.Call, change: Change) -> ast.expr | None:
    """Return the argument's expression, if the call gives it."""
    for keyword in call.keywords:
        if keyword.arg == change.argument:
            return keyword.value
    place = change.position
    return call.args[place] if 0 <= place < len(call.args) else None


def _line_starts(source: str) -> list[int]:
    """Return the offset in bytes at which each line begins."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _span(node: ast.expr, starts: Sequence[int]) -> tuple[int, int]:
    """Return the offsets in bytes of an expression."""
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    return starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end_column


def _insert(source: str, lines: Sequence[str]) -> str:
    """Put statements below the imports at the head of a program, which include torch's."""
    new = [line for line in lines if line not in source]
    if not new:
        return source
    tree = ast.parse(source)
    head = takewhile(lambda node: not isinstance(node, _WORK), tree.body)
    imports = [node for node in head if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [name for node in imports if isinstance(node, ast.Import) for name in node.names]
    if any(line.startswith("torch.") for line in new) and not any(
        (name.asname or name.name.partition(".")[0]) == "torch" for name in names
    ):
        new.insert(0, "import torch")
    text = [line.decode() for line in source.encode().splitlines(keepends=True)]
    comments = sum(1 for _ in takewhile(lambda line: line.startswith("#"), text))
    docstring = tree.body[:1] if ast.get_docstring(tree, clean=False) is not None else []
    at = max((node.end_lineno or 0 for node in [*docstring, *imports]), default=comments)
    end = "\r\n" if "\r\n" in source else "\n"
    return "".join([*text[:at], end, *(line + end for line in new), *text[at:]])


_WORK: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
"""Statements before which a setting has to be made."""
