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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Final

from gputrace.trials.cures import Candidate, Setting
from gputrace.trials.runs import Change
from gputrace.trials.statements import Source, TextEdit, remove, run_every

_INSTALLED: Final = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Edit:
    """File of the program before and after."""

    path: Path
    before: str
    after: str

    @property
    def lines(self) -> list[str]:
        """Return the new lines as ``12: loader = DataLoader(data, num_workers=8)``, and what is
        taken out, by its number before, as ``12: without gc.collect()``.
        """
        before, after = (text.splitlines() for text in (self.before, self.after))
        changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        lines = []
        for kind, start, end, new_start, new_end in changes:
            if kind == "delete":
                gone = ((n, before[n]) for n in range(start, end))
                lines += [f"{n + 1}: without {text.strip()}" for n, text in gone if text.strip()]
            elif kind != "equal":
                new = ((n, after[n]) for n in range(new_start, new_end))
                lines += [f"{n + 1}: {text.strip()}" for n, text in new if text.strip()]
        return lines

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
    whole = {s.cure.id: s for s in candidate.settings if s.cure.edit}
    for change in (_handed_on(each) for each in changes if each.call or each.cure in whole):
        if not change.argument and change.cure not in whole:
            continue
        if _is_program(Path(change.file)):
            by_file[Path(change.file)].append(change)
        elif change.argument:
            by_hand.append(_elsewhere(change))
    lines = [s.cure.line.format(s.for_hook) for s in candidate.settings if s.cure.line]
    if not _is_program(Path(main)):
        by_hand += lines
    elif lines:
        by_file.setdefault(Path(main), [])
    edits = []
    edited: set[Change] = set()
    for path, calls in by_file.items():
        try:
            before = path.read_bytes().decode()
            after, missed = _edit_calls(before, calls, whole)
            after = _insert(after, lines) if path == Path(main) else after
        except (OSError, ValueError, SyntaxError) as error:
            missed = [change for change in calls if change.argument]
            by_hand += [f"{path} cannot be edited ({error})", *map(_elsewhere, missed)]
            by_hand += lines if path == Path(main) else []
            continue
        edited.update(change for change in calls if change not in missed)
        by_hand += [_elsewhere(change) for change in missed if change.argument]
        edits += [Edit(path, before, after)] * (after != before)
    for setting in candidate.settings:
        mine = {change for change in changes if change.cure == setting.cure.id}
        left = [change for change in changes if change in mine - edited]
        if left or not (setting.cure.edit and mine):
            by_hand += [line] if (line := _by_hand(setting, command, left)) else []
    return Patch(tuple(edits), tuple(dict.fromkeys(by_hand)))


def _handed_on(change: Change) -> Change:
    """Return a change of what the program's own class hands on as one of that class's call, where
    the call gives it by name.
    """
    if not change.outer:
        return change
    name, file, line = change.outer
    there = replace(change, call=name, position=-1, file=file, line=line)
    handed = [
        isinstance(value, ast.Name) or (value is None and any(k.arg is None for k in call.keywords))
        for call in _calls_at(change)
        if _is_named(call.func, change.call, {})
        for value in [_argument(call, change)]
    ]
    given = [call for call in _calls_at(there) if _argument(call, there) is not None]
    return there if handed == [True] and given else change


def _calls_at(change: Change) -> list[ast.Call]:
    """Return the calls at the line of a change that can have it; none in a file without any."""
    try:
        nodes = ast.walk(ast.parse(Path(change.file).read_bytes()))
    except (OSError, ValueError, SyntaxError):
        return []
    return [node for node in nodes if isinstance(node, ast.Call) and _fits(node, change)]


def _by_hand(setting: Setting, command: Sequence[str], changes: Sequence[Change]) -> str:
    """Describe how to apply a cure that is not a change to the program's source; else empty."""
    if not setting.cure.variables:
        places = dict.fromkeys(_place(change) for change in changes if change.file)
        see = f"; see {', '.join(places)}" if places else ""
        return f"{setting}: {setting.cure.advice}{see}" if setting.cure.advice else ""
    variables = Candidate((setting,)).environment(os.environ)
    words = " ".join(f"{name}={shlex.quote(text)}" for name, text in variables.items())
    if not command:
        return f"{setting}: start it with {words} in its environment"
    return f"{setting}: run it as {words} {shlex.join(command)}"


def apply(patch: Patch) -> None:
    """Write all files; raises OSError where one is read-only, or has changed since it was read."""
    for edit in patch.edits:
        if edit.path.read_bytes() != edit.before.encode():
            raise OSError(0, "has changed meanwhile and is left alone", str(edit.path))
        if not edit.path.stat().st_mode & 0o222:
            raise OSError(0, "is read-only and is left alone", str(edit.path))
    for edit in patch.edits:
        # Whole or not at all: a full disk must not cost the program.
        path = edit.path.resolve()
        new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            new.write_bytes(edit.after.encode())
            shutil.copymode(path, new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def _is_program(path: Path) -> bool:
    """Return whether a file is the person's own, not that of an installed package."""
    installed = {sysconfig.get_path("stdlib"), *site.getsitepackages()}
    within = any(path.is_relative_to(folder) for folder in installed if folder)
    return path.suffix == ".py" and not within and not {*_INSTALLED} & {*path.parts}


def _elsewhere(change: Change) -> str:
    return (
        f"{change.cure}: give {change.call} {change.argument}={change.new} (now {change.old}), "
        f"at {_place(change)}"
    )


def _place(change: Change) -> str:
    """Return where the program makes a call."""
    return f"{os.path.relpath(change.file)}:{change.line}" if change.file else "an unknown line"


_COMMENT: Final = re.compile(rb"#[^\r\n]*")


def _edit_calls(
    source: str, changes: Sequence[Change], whole: Mapping[str, Setting]
) -> tuple[str, list[Change]]:
    """Return the source with the arguments changed, and the changes that fit no call.

    ``whole`` are the cures, by id, that change the statements which make the calls.
    """
    text = Source(source)
    nodes = list(ast.walk(text.tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    aliases = [node for node in nodes if isinstance(node, ast.alias)]
    names = {node.asname: node.name for node in aliases}
    for module in [node.asname or node.name for node in aliases if node.name == "tensorflow"][:1]:
        # The hooks see the number that it is.
        auto = f"{module}.data.AUTOTUNE"
        changes = [replace(c, new=auto) if c.cure == "tf-parallel" else c for c in changes]
    missed: list[Change] = []
    edits: set[TextEdit] = set()
    lacking: dict[ast.Call, list[Change]] = defaultdict(list)
    for change in changes:
        if not change.argument:
            is_left_out = whole[change.cure].cure.edit == "remove"
            edited = remove if is_left_out else run_every
            new = edited(text, change.line, change.call)
            edits |= new
            missed += [] if new else [change]
            continue
        there = [call for call in calls if _fits(call, change)]
        fitting = [call for call in there if _is_named(call.func, change.call, names)]
        # Of getattr(torch.optim, name)(...) no name is known.
        fitting = fitting or [c for c in there if isinstance(c.func, ast.Call | ast.Subscript)]
        if len(fitting) != 1:
            missed.append(change)
        elif (value := _argument(fitting[0], change)) is not None:
            edits.add((*text.span(value), change.new))
        else:
            lacking[fitting[0]].append(change)
    for call, added in lacking.items():
        new = _add(call, {change.argument: change.new for change in added}, text)
        edits |= new
        missed += [] if new else added
    return text.edited(edits), missed


def _add(call: ast.Call, arguments: Mapping[str, str], source: Source) -> set[TextEdit]:
    """Return what gives a call more arguments: offsets in bytes, and the text in their place.

    It is empty for a generator without brackets of its own.
    """
    unpacked = [keyword.value for keyword in call.keywords if keyword.arg is None]
    if unpacked:
        # It may have the argument, which must not come twice.
        start, end = source.span(unpacked[0])
        new = "".join(f', "{name}": {value}' for name, value in arguments.items())
        return {(start, start, "{**"), (end, end, f"{new}}}")}
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    data = source.data
    close = source.span(call)[1] - 1
    end = max((source.span(arg)[1] for arg in given), default=close)
    # What is between may be brackets around the argument, a comma and comments.
    end += _COMMENT.sub(lambda match: b" " * len(match[0]), data[end:close]).rfind(b")") + 1
    if end > close:
        return set()
    words = [f"{name}={value}" for name, value in arguments.items()]
    line = data[data.rfind(b"\n", 0, end) + 1 : end].decode()
    rest = data[end:].partition(b"\n")[0]
    if rest.strip() == b",":
        # Arguments have a line each.
        indent = line[: len(line) - len(line.lstrip())]
        end += len(rest)
        return {(end, end, "".join(f"\n{indent}{word}," for word in words))}
    return {(end, end, (", " if given else "") + ", ".join(words))}


def _fits(call: ast.Call, change: Change) -> bool:
    """Return whether a call is at the line of a change, and can have it."""
    starred = any(isinstance(arg, ast.Starred) for arg in call.args)
    unpacked = sum(keyword.arg is None for keyword in call.keywords)
    within = call.lineno <= change.line <= (call.end_lineno or call.lineno)
    return within and unpacked <= 1 and not (starred and change.position >= 0)


def _is_named(function: ast.expr, name: str, imported: Mapping[str | None, str]) -> bool:
    """Return whether what is called has a name, as it is imported, or is of a class with that base.

    Args:
        function: expression that is called.
        name: class or function that was.
        imported: what the program imports, by the names that it has there.
    """
    match function:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
            return True
        case ast.Name(id=known) | ast.Attribute(attr=known):
            return imported.get(known, known) == name
    return False


def _argument(call: ast.Call, change: Change) -> ast.expr | None:
    """Return the argument's expression, if the call gives it."""
    for keyword in call.keywords:
        if keyword.arg == change.argument:
            return keyword.value
    place = change.position
    return call.args[place] if 0 <= place < len(call.args) else None


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
