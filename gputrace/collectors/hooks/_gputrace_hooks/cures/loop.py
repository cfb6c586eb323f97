"""Cures of what a program calls in its loop besides the training: collections, caches, checkpoints.

What it calls before the first step has ended stays as it is.
"""

import sys
from collections.abc import Callable
from copy import copy
from functools import partial, wraps
from os import PathLike
from threading import Thread
from typing import Any

from ..wrappers import ours
from .data import each_tensor
from .trial import cures, guarded, is_on, trial


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


def _apart(value: Any) -> Any:
    """Return a dict of its own, as are those within, for the copies of tensors."""
    if not isinstance(value, dict):
        return value
    new = copy(value)
    for key in new:
        new[key] = _apart(new[key])
    return new
