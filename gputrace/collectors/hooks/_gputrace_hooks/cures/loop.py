"""Cures of what a program calls in its loop beside the training: collections, caches, logging,
checkpoints.

What it calls before the first step has ended stays as it is.
"""

import ast
import sys
from copy import copy
from functools import partial, wraps
from os import PathLike
from threading import Thread

from ..wrappers import ours
from .data import each_tensor
from .trial import cures, file_of, guarded, is_on, trial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def in_place_of(cure: str, holder: "Any", name: str, instead: "Callable[..., Any]") -> None:
    """Have the program's calls in its loop, not those of a framework, go to another function.

    That gets the function and its arguments.
    """
    function = getattr(holder, name, None)
    if function is None or not (cure in cures or not cures):
        return

    @wraps(function)
    def call(*args: "Any", **keywords: "Any") -> "Any":
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


def torch_calls(torch: "Any") -> None:
    """Have torch's caches stay, checkpoints written by a thread, and numbers read now and then."""
    cuda = getattr(torch, "cuda", None)
    for holder in (cuda, getattr(cuda, "memory", None)):
        in_place_of("skip-empty-cache", holder, "empty_cache", lambda *_, **__: None)
    in_place_of("async-checkpoint", torch, "save", partial(_save_aside, torch))
    if "log-every" in cures:
        guarded("log-every", _read_at_times, torch)


_saving: "list[Thread]" = []
"""Thread that writes the last checkpoint."""


def _save_aside(
    torch: "Any", save: "Any", value: "Any", to: "Any", *args: "Any", **keywords: "Any"
) -> None:
    """Copy a checkpoint, and have a thread write it; the one before is written by then.

    The copy is in memory of the host that a GPU reaches by itself.
    """
    copies: list[Any] = []

    def copied(tensor: "Any") -> "Any":
        on_gpu = tensor.is_cuda
        copies.append(torch.empty_like(tensor.detach(), device="cpu", pin_memory=on_gpu))
        return copies[-1].copy_(tensor.detach(), non_blocking=on_gpu)

    for thread in _saving:
        thread.join()
    is_path = isinstance(to, (str, PathLike))
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


def _apart(value: "Any") -> "Any":
    """Return a dict of its own, as are those within, for the copies of tensors."""
    if not isinstance(value, dict):
        return value
    new = copy(value)
    for key in new:
        new[key] = _apart(new[key])
    return new


def _logs(name: str) -> bool:
    """Return whether a method of a writer or tracker logs, by its name."""
    return name == "log" or name.startswith(("add_", "log_metric", "log_scalar", "log_image"))


def writer(cls: str) -> "Callable[[Any], None]":
    """Return a hook that has the program log by a writer's class, or module, every few steps."""

    def hook(module: "Any") -> None:
        holder = getattr(module, cls) if cls else module
        for name in filter(_logs, list(vars(holder))):
            in_place_of("log-every", holder, name, _log_at_times)

    return hook


tensorboard, wandb, mlflow = writer("SummaryWriter"), writer("Run"), writer("")
_logged: "dict[Any, int]" = {}
"""Step in which each line that logs last did."""


def _is_due(line: "Any") -> bool:
    step, last = len(trial.ends), _logged.get(line)
    if last is None or step >= last + cures["log-every"]:
        last = _logged[line] = step
    return step == last


def _log_at_times(function: "Any", *args: "Any", **keywords: "Any") -> "Any":
    caller = sys._getframe(2)
    if _is_due((caller.f_code, caller.f_lineno)):
        return function(*args, **keywords)
    return None


def _read_at_times(torch: "Any") -> None:
    """Have ``.item()`` return what the line read last, where that is only logged."""
    item = torch.Tensor.item
    last: dict[Any, Any] = {}
    only: dict[Any, bool] = {}
    counts: dict[Any, tuple[int, int]] = {}

    @wraps(item)
    def item_at_times(self: "Any") -> "Any":
        caller = sys._getframe(1)
        line, step = (caller.f_code, caller.f_lineno), len(trial.ends)
        if not step or not is_on("log-every"):
            return item(self)
        if line not in only:
            only[line] = bool(guarded("log-every", only_logged, file_of(caller), line[1]))
            if only[line]:
                trial.change("log-every", "item", "", -1, "", "")
        if not only[line]:
            return item(self)
        before, count = counts.get(line, (-1, 0))
        # Reads of one line in a step are known by their number.
        count = count + 1 if before == step else 0
        counts[line] = step, count
        if _is_due((*line, "item")) or (line, count) not in last:
            last[line, count] = item(self)
        return last[line, count]

    torch.Tensor.item = item_at_times


_SINKS = ("print", "info", "debug", "warning", "write", "set_postfix")
_PASSING = ("float", "int", "round", "str", "format", "abs", "max", "min", "sum", "len", "join")
_GATHERING = ("append", "update", "extend", "add")
"""Names of functions that log, of those that return what can be logged, and of those that keep it
in a variable.
"""
_parsed: "dict[str, tuple[Any, dict[Any, Any]]]" = {}


def only_logged(path: str, line: int) -> bool:
    """Return whether what a line of a program reads by ``.item()`` goes nowhere but into logs."""
    if path not in _parsed:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
        above = {below: node for node in ast.walk(tree) for below in ast.iter_child_nodes(node)}
        _parsed[path] = tree, above
    tree, above = _parsed[path]
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "item"
        and node.lineno <= line <= getattr(node, "end_lineno", node.lineno)
    ]
    return bool(calls) and all(_is_logged(call, above, ()) for call in calls)


def _is_logged(node: "Any", above: "dict[Any, Any]", seen: "tuple[str, ...]") -> bool:
    """Follow a value up its expression: into a call that logs, or a name whose uses all do."""
    parent = above[node]
    if isinstance(parent, ast.Call) and parent.func is not node:
        name = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
        if name in _PASSING:
            return _is_logged(parent, above, seen)
        if name in _GATHERING:
            return _is_name_logged(getattr(parent.func, "value", parent.func), above, seen)
        return name in _SINKS or _logs(name)
    if isinstance(parent, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        return all(_is_name_logged(target, above, seen) for target in targets)
    if isinstance(parent, (ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Dict, ast.JoinedStr)):
        return _is_logged(parent, above, seen)
    if isinstance(parent, (ast.FormattedValue, ast.keyword, ast.Starred, ast.IfExp)):
        is_test = isinstance(parent, ast.IfExp) and parent.test is node
        return not is_test and _is_logged(parent, above, seen)
    return isinstance(parent, ast.Expr)


def _is_name_logged(target: "Any", above: "dict[Any, Any]", seen: "tuple[str, ...]") -> bool:
    """Return whether all that the function does with a variable is to log it."""
    while isinstance(target, ast.Subscript):
        target = target.value
    if not isinstance(target, ast.Name):
        return False
    if target.id in seen:
        return True
    scope = target
    while not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        scope = above[scope]
    uses = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load)
    ]
    return all(_is_use_logged(use, above, (*seen, target.id)) for use in uses)


def _is_use_logged(use: "Any", above: "dict[Any, Any]", seen: "tuple[str, ...]") -> bool:
    parent = above[use]
    if isinstance(parent, ast.Subscript) and parent.value is use:
        return isinstance(parent.ctx, ast.Store) or _is_logged(parent, above, seen)
    if isinstance(parent, ast.Attribute):
        # The receiver of append, or another of its methods.
        return parent.attr in (*_GATHERING, "clear")
    return _is_logged(use, above, seen)
