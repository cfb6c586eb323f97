"""Modules of a torch network that threads are in, forwards and backwards, in a few steps, and while
they capture CUDA graphs whose nodes are recorded; and the lines that call them.

GPUTRACE_MODULES says in how many steps at a time: 3 if it is not given, 0 for none.

Calls of the whole model are timed in all steps: of the modules that no other module calls, a loss
among them. Which classes these are of is seen in one early step. Each such class is given a
``__call__`` of its own then, so that no module has a hook, which would be pickled, copied, compiled
or scripted with it, and the calls of all others cost what they did.
"""

import os
import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import wraps
from itertools import islice
from types import FunctionType
from typing import Any
from weakref import ref

from .. import steps
from ..host_file import is_handlers, time_ns
from ..recorder import (
    MODULE,
    PHASE,
    note,
    note_failure,
    note_ours,
    note_source,
    on_fork,
    record,
    record_of,
    thread_id,
    too_deep,
    word,
)
from ..wrappers import at_bounds, passed_over


class _Walk:
    """Way of one thread through the modules of a network.

    A path is a ``word``; 0, which is no module's, stands for outside of modules.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.path = self.since = self.is_backward = self.before = 0
        self.around: list[tuple[int, int]] = []
        # The path in which the thread made nodes of autograd's graph, from each number on.
        self.first: list[int] = []
        self.made: list[int] = []
        self.watched: set[int] = set()


class _Modules:
    """Recorder of the modules that threads are in, in a few steps.

    In these, ``Module.__call__`` is replaced, so that no module carries a hook which would be
    pickled, compiled or scripted with it. In a backward pass, a node of autograd's graph belongs to
    the module in whose call it was made, as its number in the sequence of its thread says. Autograd
    calls us before the nodes that made modules' inputs and outputs: there one module ends and
    another one begins. At the end such calls are taken off.

    A call of ours takes a frame of Python's stack: as many as may be there at a time are added to
    the interpreter's limit until the step's end, so that the program has as much room as without.
    """

    def __init__(self) -> None:
        self.original: Any = None
        self.sequence: Any = None
        self.compiles: Any = None
        self.is_on = False
        # Only to see which are the outermost.
        self.is_brief = False
        # Only until a capture ends.
        self.is_capture = False
        self.is_too_deep = False
        self.until = 0
        # The limit of the program, and ours.
        self.limits = 0, 0
        self.handles: list[Any] = []
        # By id of a module while it lives: its name, numbered among those of its class, and its
        # first path. Modules that are made in each step take the numbers of those that died.
        self.known: dict[int, tuple[str, int, object]] = {}
        self._forget()

    def _forget(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.walks: dict[int, _Walk] = {}
        self.texts: dict[int, str] = {}
        self.paths: dict[tuple[int, str], int] = {}
        # In place: what is called when a module dies holds the table that holds it.
        self.known.clear()
        self.counts: dict[str, int] = {}
        self.outermost: set[type] = set()
        self.free: dict[str, list[int]] = {}

    def step_ended(self, rank: int, end: int) -> None:
        """Begin with the step that follows, or end."""
        count, length = steps.recorded()
        # Of nearly all steps this is all: a step calls much else, so each line costs.
        if count > _FIRST and count % _AGAIN and not self.walks and not self.limits[1]:
            return
        if self.is_on:
            self.backward_ended()
            if 0 <= count < self.until:
                return
            self.end()
        elif self.walks:
            self._forget()
        self.put_back()
        if count == 1 and _ASKED != "0":
            self.until, self.is_brief = 2, True
            self._begin()
            return
        again = count // _AGAIN if count > 0 and count % _AGAIN == 0 else 0
        if count == min(_FIRST, (length or 2 * _FIRST) // 2) or (again and not again & (again - 1)):
            self.until = min(count + _steps_of_modules(), length or sys.maxsize)
            self.is_brief = False
            if self.until > count:
                self._begin()

    def capture(self, begins: bool) -> None:
        """Begin or end with a capture, unless a step is recorded anyway.

        What was seen is kept until the step's end: the next capture may be of the backward pass.
        """
        try:
            if begins and _NODES and _steps_of_modules():
                self.is_brief = False
                if not self.is_on:
                    self.is_capture, self.until = True, 0
                    self._begin()
            elif self.is_capture:
                self.outermost.clear()
                self.end(forgets=False)
                self.put_back()
        except Exception as error:
            self._failed(error)

    def _begin(self) -> None:
        cls: Any = getattr(sys.modules.get("torch.nn"), "Module", None)
        call: Any = vars(cls).get("__call__") if cls is not None else None
        self.sequence = getattr(sys.modules.get("torch.autograd"), "_get_sequence_nr", None)
        # A wrapper that the program has put there may hold ours, which would then call itself.
        if call is None or self.sequence is None or (self.original or call) is not call:
            return
        if self.is_too_deep or self.limits[1]:
            return
        if self.original is None:
            self.original = call
            wraps(call)(_call)
        if "torch._dynamo.eval_frame" in sys.modules and not self.can_tell():
            return
        limit = sys.getrecursionlimit()
        self.limits = limit, min(limit + _ROOM, 2**31 - 1)
        sys.setrecursionlimit(self.limits[1])
        self.is_on = True
        at_bounds.append(self.at_bound)
        cls.__call__ = _call

    def forked(self) -> None:
        """Leave modules to the parent."""
        self.end()
        self.put_back()

    def put_back(self) -> None:
        """Undo what ``end`` cannot, or what the program has saved and put there after it."""
        if self.original is None:
            return
        cls: Any = sys.modules["torch.nn"].Module
        if vars(cls).get("__call__") is _call:
            cls.__call__ = self.original
        before, raised = self.limits
        if raised and sys.getrecursionlimit() == raised:
            try:
                sys.setrecursionlimit(before)
            except RecursionError:
                return
        self.limits = 0, 0

    def can_tell(self) -> bool:
        """Return whether torch.compile says when it is at work.

        What is called within a function that it compiles, but not as a part of a graph, it looks at
        once more; of ours it compiles nothing (`torch.dynamo`).
        """
        native = sys.modules.get("torch._C._dynamo.eval_frame")
        self.compiles = getattr(native, "get_eval_frame_callback", None)
        return self.compiles is not None

    def end(self, forgets: bool = True) -> None:
        """Put everything back as it was; what ``forgets`` not is to go on with the step."""
        if not self.is_on:
            return
        self.backward_ended()
        self.is_on = self.is_capture = False
        at_bounds.remove(self.at_bound)
        cls: Any = sys.modules["torch.nn"].Module
        if vars(cls).get("__call__") is _call:
            cls.__call__ = self.original
        for name, kept in _KEPT:
            names = vars(sys.modules.get(name, sys))
            if names.get(kept) is _call:
                names[kept] = self.original
        for outermost in self.outermost:
            time_calls(outermost)
        if forgets:
            self._forget()

    def enter(self, module: object, *values: object) -> int:
        """Begin a call of a module; return the number of modules around it."""
        try:
            walk = self._walk()
            depth = len(walk.around)
            if depth >= _DEEPEST:
                self.is_too_deep = not self.is_brief
                self.end()
                if self.is_too_deep:
                    note(f"modules are timed no longer: over {_DEEPEST} lie within each other")
                return sys.maxsize
            if not walk.is_backward:
                if depth == 0 and not is_backward(sys.modules["torch"]):
                    self.outermost.add(type(module))
                elif depth == _DEEP:
                    # Modules within others of their class would each take a frame of the stack.
                    self.outermost.discard(type(module))
            if self.is_brief:
                walk.around.append((0, 0))
                return depth
            self._watch(walk, values)
            known = self.known.get(id(module)) if walk.is_backward else None
            walk.around.append((walk.path, walk.is_backward))
            path = known[1] if known else self._path(walk.path, module)
            self._move(walk, path, walk.is_backward)
            return depth
        except Exception as error:
            self._failed(error)
            return sys.maxsize

    def leave(self, depth: int, result: object) -> None:
        """End a call of a module that has so many around it."""
        try:
            walk = self._walk()
            if depth < len(walk.around):
                if not self.is_brief:
                    self._watch(walk, result)
                before = walk.around[depth]
                del walk.around[depth:]
                if not self.is_brief:
                    self._move(walk, *before)
        except Exception as error:
            self._failed(error)

    def backward_ended(self) -> None:
        """Return threads to where they were before the backward pass; those of autograd wait."""
        for walk in list(self.walks.values()):
            if walk.is_backward:
                self._move(walk, walk.before, 0, walk.thread == thread_id())

    def at_bound(self) -> None:
        """Have a backward pass end by the bound of a phase, unless the phase lies within it."""
        if not is_backward(sys.modules["torch"], unknown=False):
            self.backward_ended()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, RecursionError):
            too_deep[:] = [True]
            return
        if is_handlers(error):
            raise error
        note_failure("recording modules")
        self.end()

    def _walk(self) -> _Walk:
        thread = thread_id()
        walk = self.walks.get(thread)
        if walk is None:
            walk = self.walks[thread] = _Walk(thread)
        return walk

    def _path(self, around: int, module: Any) -> int:
        # What torch.compile returns is called as the module that it has compiled.
        kind = type(vars(module).get("_modules", {}).get("_orig_mod", module)).__name__
        known = self.known.get(id(module))
        name, number = (known[0], 0) if known else self._new_name(kind)
        path = self.paths.get((around, name))
        if path is None:
            text = f"{self.texts[around]}/{name}" if around in self.texts else name
            path = self.paths[around, name] = word(text)
            self.texts[path] = text
            note_source(text, *_calling_line())
        if known is None:
            dies = self._forgets(id(module), kind, number)
            self.known[id(module)] = name, path, ref(module, dies)
        return path

    def _new_name(self, kind: str) -> "tuple[str, int]":
        try:
            number = self.free[kind].pop()
        except LookupError:
            number = self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{kind}_{number}" if len(self.texts) < _MOST_PATHS else kind, number

    def _forgets(self, key: int, kind: str, number: int) -> "Callable[[Any], None]":
        known, free = self.known, self.free.setdefault(kind, [])

        def dies(_: object) -> None:
            known.pop(key, None)
            free.append(number)

        return dies

    def _move(self, walk: _Walk, path: int, is_backward: int, is_here: bool = True) -> None:
        now = time_ns()
        if walk.path and now > walk.since:
            kind = MODULE | walk.is_backward << 16
            record_of(walk.thread, walk.since, now, walk.path, kind)
        walk.path, walk.since, walk.is_backward = path, now, is_backward
        if is_here:
            walk.first.append(self.sequence())
            walk.made.append(path)

    def _watch(self, walk: _Walk, values: object) -> None:
        """Have autograd call us before the nodes that made some tensors, unless it does already."""
        # Compiled backward passes would compile such calls.
        if getattr(sys.modules.get(_COMPILED_AUTOGRAD), "compiled_autograd_enabled", False):
            return
        torch: Any = sys.modules["torch"]
        # A program may count what is asked of tensors.
        with torch._C.DisableTorchFunction():
            for tensor in _tensors(values, torch.Tensor, []):
                try:
                    node = tensor.grad_fn
                except RuntimeError as error:
                    # Autograd no longer follows a view whose base was changed.
                    if is_handlers(error):
                        raise
                    continue
                number = -1 if node is None else node._sequence_nr()
                if number in walk.watched or number < 0:
                    continue
                walk.watched.add(number)
                index = bisect_right(walk.first, number) - 1
                if index >= 0:
                    self.handles.append(node.register_prehook(self._marker(walk.made[index])))

    def _marker(self, path: int) -> "Callable[[Any], None]":
        def begins(gradients: Any) -> None:
            if not self.is_on or (self.compiles is not None and self.compiles()):
                return
            try:
                walk = self._walk()
                if not walk.is_backward:
                    walk.before = walk.path
                if path != walk.path or not walk.is_backward:
                    self._move(walk, path, 1)
            except Exception as error:
                self._failed(error)

        return begins


_NODES = os.environ.get("GPUTRACE_GRAPH_NODES")
_FIRST, _AGAIN = 24 if _NODES else 16, 84
"""Steps after which modules are recorded, the second of them also after twice, four times as many:
not while the cost of recording is measured, nor nodes of CUDA graphs, around powers of two."""
_MOST_PATHS = 4000
_DEEP, _DEEPEST = 8, 64
"""Modules within each other: where there are more, they are timed no longer."""
_ROOM = 4 * _DEEPEST
"""Frames of ours, each counted twice by some versions of Python, and of what they call."""
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_KEPT = (
    ("torch._dynamo.utils", "unpatched_nn_module_call"),
    ("torch._dynamo.variables.nn_module", "unpatched_nn_module_call"),
    ("torch.fx._symbolic_trace", "_orig_module_call"),
)
"""Modules of torch that keep ``Module.__call__`` as they find it when they are imported."""
_ASKED = os.environ.get("GPUTRACE_MODULES", "")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _steps_of_modules() -> int:
    """Return in how many steps at a time; without being asked, only where there is a GPU."""
    if _ASKED:
        return int(_ASKED) if _ASKED.isdigit() else 0
    cuda = sys.modules.get("torch.cuda")
    return 3 if cuda is not None and getattr(cuda, "is_initialized", bool)() else 0


def _tensors(values: object, cls: type, tensors: "list[Any]", depth: int = 4) -> "list[Any]":
    """Add the tensors in nested tuples, lists and dictionaries, of each the first few."""
    kind = type(values)
    if issubclass(kind, cls):
        tensors.append(values)
    elif depth and issubclass(kind, (tuple, list, dict)):
        items: Any = dict.values if issubclass(kind, dict) else None
        if items is None:
            items = tuple.__iter__ if issubclass(kind, tuple) else list.__iter__
        for item in islice(items(values), 64):
            _tensors(item, cls, tensors, depth - 1)
    return tensors


def _calling_line() -> "tuple[str, int, str]":
    """Return the file, line and function that call a module, but for ours and torch's own."""
    torch = os.path.dirname(sys.modules["torch"].__file__ or _OURS) + os.sep
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, torch)):
        frame = frame.f_back
    code = frame.f_code
    return code.co_filename, frame.f_lineno or 0, getattr(code, "co_qualname", code.co_name)


modules = _Modules()
on_fork.append(modules.forked)
steps.on_step.append(modules.step_ended)


def _call(self: Any, *args: Any, **keywords: Any) -> Any:
    """Stand for ``Module.__call__`` while modules are recorded, but within compiled functions."""
    if modules.compiles is not None and modules.compiles():
        return modules.original(self, *args, **keywords)
    if not modules.is_on:
        modules.put_back()
        return modules.original(self, *args, **keywords)
    depth, result = modules.enter(self, args, keywords), None
    try:
        result = modules.original(self, *args, **keywords)
        return result
    finally:
        modules.leave(depth, result)


_call.__code__ = passed_over(_call.__code__)


_MOST_TIMED = 8
_MODEL = word("model")
_timed: "set[type]" = set()
_within: "list[None]" = []
"""Not empty while a module is called that is timed."""


def is_backward(torch: Any, unknown: bool = True) -> bool:
    """Return whether this thread is in a backward pass, which may call modules once more.

    Before torch 2.1 that is ``unknown``.
    """
    number = getattr(torch._C, "_current_graph_task_id", None)
    return unknown if number is None else number() != -1


def time_calls(cls: Any) -> None:
    """Time calls of modules of a class from now on."""
    own = vars(cls).get("__call__")
    # Before torch 2.3, nobody can tell whether a call is traced.
    compiler = getattr(sys.modules["torch"], "compiler", None)
    if not hasattr(compiler, "is_compiling") or not isinstance(own, (type(None), FunctionType)):
        return
    if cls in _timed or len(_timed) >= _MOST_TIMED:
        return
    _timed.add(cls)

    # It needs nothing of ours: cloudpickle takes a class of the main program as it is.
    @wraps(cls.__call__)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        around = super(cls, self).__call__ if own is None else own.__get__(self)
        timer = sys.modules.get("_gputrace_hooks.frameworks.torch_modules")
        if timer is None or timer.is_untimed():
            return around(*args, **keywords)
        return timer.timed(around, args, keywords)

    try:
        cls.__call__ = call
        cls.__call__.__code__ = passed_over(cls.__call__.__code__)
    except Exception:
        note_ours("timing calls of a model")


def is_untimed() -> bool:
    """Return whether a call is one of another's, or is traced: no graph may contain the clock."""
    torch: Any = sys.modules["torch"]
    return torch.compiler.is_compiling() or bool(_within) or is_backward(torch)


def timed(call: Any, args: Any, keywords: Any) -> Any:
    """Make the call, and record it."""
    start = time_ns()
    # Within: what a signal handler raises may end the call that it comes after.
    try:
        _within.append(None)
        return call(*args, **keywords)
    finally:
        del _within[:]
        record(start, time_ns(), _MODEL, PHASE)


timed.__code__ = passed_over(timed.__code__)


# A thread that was in such a call is not in the child.
on_fork.append(_within.clear)
