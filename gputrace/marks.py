"""Markers that a program can set for ``gputrace record``: steps and named code ranges.

for batch in loader:
    with gputrace.annotate("forward"):
        loss = model(batch)
    ...
    gputrace.step()  # or the whole body in ``with gputrace.step():``

They are no-ops of under 0.1 µs each unless the program is being recorded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

__all__ = ["annotate", "step"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Annotation:
    """No-op annotation, returned by ``annotate`` when nothing is recorded."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def __call__(self, function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        return function


class _Recorded(Annotation):
    """Annotation that records each range under its name; re-entrant."""

    __slots__ = ("_recorder", "_starts", "_what")

    def __init__(self, recorder: Any, name: str) -> None:
        self._recorder = recorder
        self._what = recorder.word(name)
        self._starts: list[int] = []

    def __enter__(self) -> None:
        self._starts.append(self._recorder.time_ns())

    def __exit__(self, *error: object) -> None:
        recorder = self._recorder
        end = recorder.time_ns()
        recorder.record(self._starts.pop(), end, self._what, recorder.ANNOTATION)

    def __call__(self, function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        recorder, what = self._recorder, self._what

        @wraps(function)
        def annotated(*args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
            start = recorder.time_ns()
            try:
                return function(*args, **keywords)
            finally:
                recorder.record(start, recorder.time_ns(), what, recorder.ANNOTATION)

        return annotated


def recording_folder() -> Path | None:
    """Return the folder that this process is recorded into; None if it is not recorded."""
    # A program may have cleared its environment since it started.
    started = getattr(sys.modules.get("_gputrace_hooks"), "FOLDER", "")
    folder = os.environ.get("GPUTRACE_DIR") or started
    return Path(folder) if folder and Path(folder).is_dir() else None


def _hooks(module: str) -> Any:
    """Import a module of the hooks in this process; return None if nothing is recorded."""
    if recording_folder() is None:
        return None
    try:
        return importlib.import_module(f"_gputrace_hooks.{module}")
    except ImportError:
        # E.g. started with -S, so that no other hook is installed.
        return _hooks_from_here(module)


def _hooks_from_here(module: str) -> Any:
    here = str(Path(__file__).parent / "collectors" / "hooks")
    sys.path.append(here)
    try:
        return importlib.import_module(f"_gputrace_hooks.{module}")
    except ImportError:
        return None
    finally:
        sys.path.remove(here)


_NOTHING: Final = Annotation()
_steps: Any = None
_recorder: Any = None


def reload_hooks() -> None:
    """Import the hooks, again in a notebook, which installs them while it runs."""
    global _steps, _recorder
    _steps, _recorder = _hooks("steps"), _hooks("recorder")
    # Without a framework, whose import does this, the program's own marks say that it has steps.
    if _steps is not None and "GPUTRACE_LINES" in os.environ:
        _hooks("sampler").install_for_steps(os.environ["GPUTRACE_LINES"])


reload_hooks()


class _Step(Annotation):
    """Result of ``step`` until it is known whether ``with`` enters it, which ends the step later.

    A bare call drops it at once.
    """

    __slots__ = ("_is_bare", "_work")

    def __init__(self, samples: int, tokens: int, flop: float) -> None:
        self._is_bare = True
        self._work = samples, tokens, flop

    def __enter__(self) -> None:
        self._is_bare = False

    def __exit__(self, *error: object) -> None:
        if _steps is not None and error[0] is None:
            _steps.step_by_user(*self._work)

    def __del__(self) -> None:
        global _bare_calls
        if self._is_bare and _steps is not None:
            _bare_calls = True
            _steps.step_by_user(*self._work)


_bare_calls = False
"""True once a call was no ``with`` statement: each call ends a step then."""


def step(*, samples: int = 0, tokens: int = 0, flop: float = 0) -> Annotation:
    """Mark the end of a training step; from the first call on, only these calls delimit steps.

    Args:
        samples: number of samples that this rank has trained on in the step.
        tokens: number of tokens, likewise.
        flop: floating-point operations of the model in the step, on this rank.

    In ``with gputrace.step():`` the step ends with the block, unless by an exception. Between two
    steps there is nothing: the next one begins where the last has ended, and has the wait for its
    batch.

    Never raises; a no-op in a program that is not recorded.
    """
    if _steps is None:
        return _NOTHING
    if not _bare_calls:
        return _Step(samples, tokens, flop)
    _steps.step_by_user(samples, tokens, flop)
    return _NOTHING


def annotate(name: str) -> Annotation:
    """Name a code range, in a ``with`` statement or as the decorator of a function.

    Args:
        name: the name in reports; ``data``, ``load batch``, ``next batch`` and the like count as
            waiting for data.

    Never raises; a no-op in a program that is not recorded.
    Use ``with`` inside a coroutine or generator; the decorator would time only its creation.
    """
    return _NOTHING if _recorder is None else _Recorded(_recorder, name)
