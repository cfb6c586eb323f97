"""Cures of what a program does in its loop besides the training: collections, caches, checkpoints,
and statements that need not run as often.

What it calls before the first step has ended stays as it is. For `LESS_OFTEN`, the file that the
statement is in, of the program or of a module of its own, is compiled with a condition around the
statement, or within its own ``if step % 20 == 0``; its lines keep their numbers.
"""

import ast
import builtins
import os
import sys
from collections.abc import Callable
from copy import copy
from functools import partial, wraps
from importlib.machinery import ModuleSpec, SourceFileLoader
from threading import Thread
from types import CodeType
from typing import Any

from ..wrappers import ours
from .data import each_tensor
from .trial import asked, cures, guarded, is_on, trial


def in_place_of(cure: str, holder: Any, name: str, instead: "Callable[..., Any]") -> None:
    """Have the program's calls in its loop, not those of a framework, go to another function.

    That gets the function and its arguments.
    """
    function = getattr(holder, name, None)
    if function is None or not (cure in cures or not cures):
        return

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1)
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        if not trial.ends or package in ("torch", "_gputrace_hooks"):
            return function(*args, **keywords)
        trial.has.add(f"{cure}-calls")
        if not is_on(cure):
            return function(*args, **keywords)
        place = caller.f_code, caller.f_lineno
        if (cure, place) not in _changed:
            _changed.add((cure, place))
            trial.change(cure, name, "", -1, "", "")
        return instead(function, *args, **keywords)

    setattr(holder, name, ours(call))


_changed: "set[Any]" = set()
"""Cures and lines of the program whose change is known."""


def skip_collections() -> None:
    """Have the program's own collections do nothing."""
    import gc

    in_place_of("skip-gc-collect", gc, "collect", lambda *_, **__: 0)


def torch_calls(torch: Any) -> None:
    """Have torch's caches stay, the host not wait, and checkpoints written by a thread."""
    cuda = getattr(torch, "cuda", None)
    for holder in (cuda, getattr(cuda, "memory", None)):
        in_place_of("skip-empty-cache", holder, "empty_cache", lambda *_, **__: None)
    in_place_of("skip-synchronize", cuda, "synchronize", lambda *_, **__: None)
    in_place_of("async-checkpoint", torch, "save", partial(_save_aside, torch))


_saving: "list[Thread]" = []
"""Thread that writes the last checkpoint."""


def _save_aside(torch: Any, save: Any, value: Any, to: Any, *args: Any, **keywords: Any) -> None:
    """Copy a checkpoint, and have a thread write it; the one before is written by then.

    The copy is in memory of the host that a GPU reaches by itself.
    """
    copies: list[Any] = []

    def copied(tensor: Any) -> Any:
        on_gpu = tensor.is_cuda
        copies.append(torch.empty_like(tensor.detach(), device="cpu", pin_memory=on_gpu))
        return copies[-1].copy_(tensor.detach(), non_blocking=on_gpu)

    for thread in _saving:
        thread.join()
    is_path = isinstance(to, (str, os.PathLike))
    snapshot = each_tensor(torch, _apart(value), copied) if is_path else None
    if not copies:
        trial.skip("async-checkpoint", "failed: it saves whole objects, or into an open file")
        save(value, to, *args, **keywords)
        return
    done = torch.cuda.Event() if torch.cuda.is_initialized() else None
    if done is not None:
        done.record()

    def write() -> None:
        if done is not None:
            done.synchronize()
        guarded("async-checkpoint", partial(save, snapshot, to, *args, **keywords))

    _saving[:] = [Thread(target=write)]
    _saving[0].start()


def _apart(value: Any) -> Any:
    """Return a dict of its own, as are those within, for the copies of tensors."""
    if not isinstance(value, dict):
        return value
    new = copy(value)
    for key in new:
        new[key] = _apart(new[key])
    return new


LESS_OFTEN = "less-often"
EVERY = 50
"""Steps that come to the statement, of which it runs in one."""
_IS_DUE, _RUN = "_gputrace_is_due", "_gputrace_run"
_last, _passed = [-1], [-1]
"""Step that last came to the statement, and how many have passed it over since it ran."""
_file = [""]
"""File that the statement is in, which is named from the folder that the program starts in."""


def run_less_often() -> None:
    """Have the program's files compiled by us."""
    _file[0] = os.path.abspath(cures[LESS_OFTEN].rpartition(":")[0])
    setattr(builtins, _IS_DUE, _is_due)
    get_code = SourceFileLoader.get_code

    @wraps(get_code)
    def get_changed(self: Any, name: str) -> "CodeType | None":
        changed: CodeType | None = guarded(LESS_OFTEN, _conditional, self.path)
        return changed or get_code(self, name)

    SourceFileLoader.get_code = get_changed  # type: ignore[assignment,method-assign]
    # The interpreter opens the script itself, unless an importer takes its path.
    words = getattr(sys, "orig_argv", [])
    scripts = [word for word in words[1:] if word.endswith(".py") and os.path.isfile(word)]
    if scripts and _is_asked(scripts[0]):
        sys.path_hooks.insert(0, lambda path: _Script(path, scripts[0]))


def _is_due() -> bool:
    """Return whether the statement is to run now, which it does in all of the loop's first step.

    By turns it runs in none of the others: whether one of the few falls into a turn is chance.
    """
    step = len(trial.ends)
    if step != _last[0]:
        _last[0] = step
        is_next = _passed[0] >= EVERY - 1 and not asked.get("stretch")
        runs = not step or not is_on(LESS_OFTEN) or _passed[0] < 0 or is_next
        _passed[0] = 0 if runs else _passed[0] + 1
    if _passed[0]:
        trial.change(LESS_OFTEN, "", "", -1, "", "")
    return not _passed[0]


def _is_asked(path: str) -> bool:
    """Return whether the statement is in a file."""
    return os.path.abspath(path) == _file[0]


def _conditional(path: str) -> "CodeType | None":
    """Return the code of a file with the condition; None if it is another file."""
    if not _is_asked(path):
        return None
    with open(path, "rb") as file:
        tree = ast.parse(file.read(), path)
    first, _, last = cures[LESS_OFTEN].rpartition(":")[2].partition("-")
    line, end = int(first), int(last or first)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block: Any = getattr(node, field, None)
            for at, statement in enumerate(block if isinstance(block, list) else ()):
                if isinstance(statement, ast.stmt) and statement.lineno == line:
                    due: ast.expr = ast.Call(ast.Name(_IS_DUE, ast.Load()), [], [])
                    if isinstance(statement, ast.If) and _counts(statement.test):
                        statement.test = ast.BoolOp(ast.And(), [statement.test, due])
                    else:
                        count = sum(line <= each.lineno <= end for each in block)
                        block[at : at + count] = [ast.If(due, block[at : at + count], [])]
                    ast.fix_missing_locations(ast.copy_location(block[at], statement))
                    return compile(tree, path, "exec", dont_inherit=True)
    trial.skip(LESS_OFTEN, f"no statement begins at {cures[LESS_OFTEN]}")
    return None


def _counts(test: ast.expr) -> bool:
    """Return whether a condition is one of the step's number alone."""
    kinds = {type(node) for node in ast.walk(test)}
    return ast.Mod in kinds and ast.Call not in kinds


class _Script:
    """Importer of the script that the interpreter is about to run."""

    def __init__(self, path: str, script: str) -> None:
        self.path = os.path.abspath(script)
        if os.path.abspath(path) != self.path:
            raise ImportError

    def find_spec(self, name: str, target: Any = None) -> "ModuleSpec | None":
        """Return where the script is."""
        if name != "__main__":
            return None
        spec = ModuleSpec(name, self, origin=self.path)  # type: ignore[arg-type]
        spec.has_location = True
        return spec

    def get_code(self, name: str) -> "CodeType":
        """Return code that runs the script as the interpreter would."""
        sys.path[0] = os.path.dirname(self.path)
        setattr(builtins, _RUN, self._run)
        return compile(f"{_RUN}()", "<gputrace>", "exec")

    def _run(self) -> None:
        code = guarded(LESS_OFTEN, _conditional, self.path)
        if code is None:
            with open(self.path, "rb") as file:
                code = compile(file.read(), self.path, "exec", dont_inherit=True)
        main = vars(sys.modules["__main__"])
        main.update(__spec__=None, __cached__=None, __package__=None)
        main["__loader__"] = SourceFileLoader("__main__", main["__file__"])
        exec(code, main)
