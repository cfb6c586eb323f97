"""Wrappers around functions of the program's framework.

Each calls what it wraps with the same arguments, returns what that returned, and lets through what
it raised; a traceback shows one line more.
"""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

from . import control, steps
from .host_file import Suppress, time_ns
from .recorder import (
    COMPILATION,
    DATA_WAIT,
    PHASE,
    note,
    note_ours,
    record,
    record_for_good,
    thread_id,
    word,
)
from .steps import OPTIMIZER, step_ended

_RAISED = DATA_WAIT | 1 << 32
"""A wait that ended with an exception, StopIteration mostly: there was no more data."""

_UNSEEN = DATA_WAIT | 2 << 32
_hidden: "list[str]" = []

at_bounds: "list[Callable[[], object]]" = []
"""Called where a phase of a step begins or ends, outside of its time."""


_passed_over: "dict[CodeType, CodeType]" = {}


def passed_over(code: "CodeType") -> "CodeType":
    """Return the code as one whose frames ``stacklevel`` of warnings does not count.

    It counts none of importlib's, which Python knows by the names of their files.
    """
    # New in Python 3.8.
    if code not in _passed_over and hasattr(code, "replace"):
        name = f"{code.co_filename} (as importlib's _bootstrap)"
        _passed_over[code] = code.replace(co_filename=name)
    return _passed_over.get(code, code)


def ours(function: Any) -> Any:
    """Mark a wrapper, so that it is not wrapped again, and warnings name what calls it."""
    function._of_gputrace = True
    function.__code__ = passed_over(function.__code__)
    return function


def defined(holder: Any, name: str) -> Any:
    """Return a function that a class or module defines itself, unless it is wrapped already."""
    function = vars(holder).get(name)
    if isinstance(function, FunctionType) and not hasattr(function, "_of_gputrace"):
        return function
    return None


def classes(module: "ModuleType") -> "list[Any]":
    """Return the classes that the module defines itself."""
    values = list(vars(module).values())
    return [v for v in values if isinstance(v, type) and v.__module__ == module.__name__]


def timed(function: "Callable[..., Any]", name: str) -> "Callable[..., Any]":
    """Wrap a function that gets the next item, to record the wait for it."""
    what = word(name)

    @wraps(function)
    def get(*args: Any, **keywords: Any) -> Any:
        start = time_ns()
        try:
            item = function(*args, **keywords)
        except BaseException:
            record(start, time_ns(), what, _RAISED)
            raise
        record(start, time_ns(), what, DATA_WAIT)
        return item

    return ours(get)  # type: ignore[no-any-return]


def hides_waits(name: str, why: str) -> None:
    """Note that the waits on which steps depend are not seen, even if others are."""
    if not _hidden:
        _hidden.append(name)
        record_for_good(time_ns(), word(name), _UNSEEN)
        note(f"{why}: waits for them are not recorded")


def timed_generator(function: "Callable[..., Any]", name: str) -> "Callable[..., Any]":
    """Wrap a function that returns a generator, to record the waits for its items."""
    advance = timed(next, name)

    def each(items: Any) -> "Iterator[Any]":
        try:
            while True:
                try:
                    item = advance(items)
                except StopIteration:
                    return
                yield item
        finally:
            items.close()

    @wraps(function)
    def generate(*args: Any, **keywords: Any) -> Any:
        items = function(*args, **keywords)
        return each(items) if isinstance(items, GeneratorType) else items

    ours(each)

    return ours(generate)  # type: ignore[no-any-return]


def after(function: "Callable[..., Any]", then: "Callable[[Any], None]") -> "Callable[..., Any]":
    """Wrap a method so that another function is then called with its object."""

    @wraps(function)
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        result = function(self, *args, **keywords)
        then(self)
        return result

    return ours(method)  # type: ignore[no-any-return]


def wrap(holder: Any, name: str, wrapped: "Callable[[Any], Any]") -> None:
    """Wrap a function that a class or module, if it is there, defines itself."""
    function = defined(holder, name) if holder is not None else None
    if function is not None:
        setattr(holder, name, wrapped(function))


def call_after(holder: Any, name: str, then: "Callable[[Any], None]") -> None:
    """Have a method that a class, if it is there, defines itself then call another function."""
    wrap(holder, name, lambda function: after(function, then))


def is_compiling() -> bool:
    """Return whether torch.compile traces this: its graph must not contain the hooks."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    asked = getattr(compiler, "is_compiling", None)
    return asked is not None and asked()


def around(holder: Any, name: str) -> "Callable[[Any], Any]":
    """Return a decorator of what is called in place of a function that a class or module, if it is
    there, defines itself, with that function before its arguments; it costs a call more.
    """
    original = defined(holder, name) if holder is not None else None

    def decorate(call: Any) -> Any:
        if original is None:
            return call
        call.__code__ = passed_over(call.__code__)

        @wraps(original)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            return call(original, *args, **keywords)

        setattr(holder, name, ours(wrapper))
        return call

    return decorate


def phase(holder: Any, name: str, called: str) -> None:
    """Time each call of a function as a part of a step, unless torch.compile traces it."""
    function = defined(holder, name)
    if function is None:
        return
    what = word(called)

    @wraps(function)
    def inside(*args: Any, **keywords: Any) -> Any:
        if is_compiling():
            return function(*args, **keywords)
        for look in at_bounds:
            look()
        start = time_ns()
        try:
            return function(*args, **keywords)
        finally:
            record(start, time_ns(), what, PHASE)
            for look in at_bounds:
                look()

    setattr(holder, name, ours(inside))


def phases(cls: str, **methods: str) -> "Callable[[Any], None]":
    """Return a hook that times methods of a class, or functions where its name is empty.

    ``methods`` has the phase of a step that each is: `model.host.PHASES` names them.
    """

    def hook(module: "ModuleType") -> None:
        for method, called in methods.items():
            phase(getattr(module, cls) if cls else module, method, called)

    return hook


def marks_steps(cls: str, method: str, name: str, rank: int) -> "Callable[[Any], None]":
    """Return a hook that counts calls as steps; of optimizers, those of the leading one."""

    def hook(module: "ModuleType") -> None:
        holder, what = getattr(module, cls, None), word(name)

        def then(self: Any) -> None:
            step_ended(what, rank, self if rank == OPTIMIZER else then)

        call_after(holder, method, then)

    return hook


def iterator(cls: Any) -> None:
    """Time a class that may inherit ``__next__``."""
    function = cls.__next__
    if isinstance(function, FunctionType) and not hasattr(function, "_of_gputrace"):
        cls.__next__ = timed(function, f"{cls.__module__}.{cls.__name__}")


def iterators(module: "ModuleType") -> None:
    """Time every class that defines ``__next__``."""
    for cls in classes(module):
        function = defined(cls, "__next__")
        if function is None:
            continue
        wrapper = timed(function, f"{module.__name__}.{cls.__name__}")
        if vars(cls).get("next") is function:
            cls.next = wrapper
        cls.__next__ = wrapper


_LONGEST_REASON = 160
compiling: "dict[int, list[str]]" = {}
"""By thread that compiles a function, the reasons that were found for it."""


def times_compilations(holder: Any, name: str, name_of: "Callable[..., str]") -> None:
    """Record calls in steps as compilations, with a name from their first arguments, unless they
    are a part of another one.
    """

    @around(holder, name)
    def compiled(original: Any, *args: Any, **keywords: Any) -> Any:
        thread, start = thread_id(), time_ns()
        if thread in compiling or steps.recorded()[0] <= 0:
            return original(*args, **keywords)
        compiling[thread] = []
        try:
            return original(*args, **keywords)
        finally:
            compiling.pop(thread, None)
            called = "a kernel"
            with Suppress(Exception):
                called = str(name_of(*args))
            keep_compilation(start, called, [])


def keep_compilation(start: int, name: str, reasons: "list[str]") -> None:
    """Record a compilation that ends now, with the first of its reasons.

    Left out of a reason are the number before it, the code behind it, and the stack below.
    """
    try:
        if reasons:
            reason = reasons[0].splitlines()[0].partition("  #")[0]
            number, colon, rest = reason.partition(": ")
            rest = rest if colon and "/" in number else reason
            name += ": " + rest.strip()[:_LONGEST_REASON]
        record(start, time_ns(), word(name), COMPILATION)
    except Exception:
        note_ours("naming a compilation")


_at_work: "set[object]" = set()
_FOR_GOOD = object()


def makes_way(
    holder: Any,
    begin: str,
    end: str,
    name: str,
    uses_gpu: "Callable[..., bool]" = lambda *args: True,
    lets_go: bool = False,
) -> None:
    """Pause the collector between two functions, while another tool uses CUPTI.

    A profiler of XLA ``lets_go`` of CUPTI as it ends. CUDA graphs that were made while they were
    recorded do not survive that (CUDA_ERROR_ILLEGAL_ADDRESS), nor did a program of JAX 0.11 that
    recording went on (SIGSEGV; both with CUPTI 13.0.1). So where there are such graphs it gets
    nothing of the GPU, and else nothing is recorded after it.
    """
    start, stop = defined(holder, begin), defined(holder, end)
    if start is None or stop is None:
        return

    @wraps(start)
    def begins(*args: Any, **keywords: Any) -> Any:
        if not uses_gpu(*args) or (lets_go and _is_kept_from(name)):
            return start(*args, **keywords)
        key = _key(holder, name, args)
        if not _at_work:
            control.pause(True)
            note(f"GPU activity is not recorded from here: {name} records it")
        _at_work.add(key)
        try:
            result = start(*args, **keywords)
        except BaseException:
            _come_back(key, name)
            raise
        if lets_go and _FOR_GOOD not in _at_work:
            _at_work.add(_FOR_GOOD)
            note(f"GPU activity is not recorded after {name} either: CUPTI may crash the program")
        return result

    @wraps(stop)
    def ends(*args: Any, **keywords: Any) -> Any:
        try:
            return stop(*args, **keywords)
        finally:
            _come_back(_key(holder, name, args), name)

    setattr(holder, begin, ours(begins))
    setattr(holder, end, ours(ends))


def _is_kept_from(name: str) -> bool:
    """Return True if the collector goes on with CUPTI while a profiler runs, and note it."""
    if _at_work or not control.keeps_cupti():
        return False
    note(
        f"{name} sees nothing of the GPU: gputrace records it, and CUPTI would crash the program's"
        " CUDA graphs at its end; with record --backend host it sees all"
    )
    return True


def _key(holder: Any, name: str, args: "tuple[Any, ...]") -> object:
    return id(args[0]) if isinstance(holder, type) else name


def _come_back(key: object, name: str) -> None:
    if key not in _at_work:
        return
    _at_work.discard(key)
    if not _at_work:
        control.pause(False)
        note(f"{name} has ended: GPU activity is recorded again")
