"""PyTorch: steps of its optimizers, phases of a step, modules, its memory, its profiler.

Its data loader is an iterator like others. Of phases, backward, the optimizer's step and what is
done to gradients between the two are timed; a forward pass calls nothing of torch's as a whole, but
one function of Lightning's, or of transformers' trainer.

What its allocator counts (``torch.cuda.memory_stats``) is read at the beginning and the end of some
steps and of their phases, as many as take 0.3 % of the time. Nothing is reset: the peak is the
program's, and rises in the phase that needs most.

In a few steps (GPUTRACE_MODULES, 3 at a time if not given, 0 for none), calls of modules are timed.
"""

import os
import sys
from bisect import bisect_right
from functools import wraps
from itertools import islice
from weakref import ref

from . import steps
from .host_file import is_handlers, time_ns
from .load import counter
from .recorder import (
    MODULE,
    PHASE,
    note,
    note_failure,
    on_fork,
    record,
    record_of,
    thread_id,
    too_deep,
    word,
)
from .steps import OPTIMIZER, step_ended
from .wrappers import after, classes, defined, makes_way, ours, phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_what = word("torch.optim.Optimizer.step")
_optimizer = word("optimizer")
_begun: "dict[int, int]" = {}
"""When optimizers began the steps that they are in, by id."""
_quiet: "list[None]" = []
"""Not empty while steps are made that train nothing."""


def optimizer(module: "Any") -> None:
    """Use torch's hook of all optimizers if there is one, else wrap ``step`` of each class."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(lambda optimizer, args, keywords: _own_step(optimizer))
        before = getattr(module, "register_optimizer_step_pre_hook", None)
        if before is not None:
            before(lambda optimizer, args, keywords: _own_begin(optimizer))
        return
    function = defined(module.Optimizer, "__init__")
    if function is not None:
        module.Optimizer.__init__ = after(function, lambda self: _wrap(type(self)))


class _Memory:
    """Counts of torch's allocator, on the current device."""

    def __init__(self) -> None:
        self.read: Callable[[], Any] | None = None
        self.due = self.took = 0
        self.is_watched = False
        # Peak so far, when it was read, and the counts at the last step's end with theirs.
        self.peak = self.at = self.counted = 0
        self.counts: dict[str, int] = {}
        self.history: Any = None
        self.requests = _Requests()

    def step_ended(self, rank: int, end: int) -> None:
        """Record the counts since the last such step, and plan the next one."""
        if not self.is_watched and self.counted <= end < self.due:
            return
        stats = self.look(True)
        if not stats:
            return
        counts = {name: _count(stats, *keys) for name, keys in _COUNTS.items()}
        if self.counts:
            for name, count in counts.items():
                self._record(name, self.counted, end, count - self.counts[name])
        for name, keys in _AMOUNTS.items():
            self._record(name, end, end, _count(stats, *keys))
        grew = bool(self.counts) and counts["segments"] > self.counts["segments"]
        self.counts, self.counted = counts, end
        self.is_watched = not self.is_watched
        if self.history is not None:
            self.requests.step_ended(self.history, self.is_watched, grew, end)
        if not self.is_watched:
            self.due, self.took = end + _PATIENCE * self.took, 0

    def look(self, asked: bool = False) -> "Any":
        """Read the counts at a bound of a phase, if they are watched; record the peak if it rose.

        It returns nothing where torch has not begun with CUDA.
        """
        if self.read is None or not (self.is_watched or asked):
            return None
        try:
            start = time_ns()
            stats = self.read()
            now = time_ns()
            self.took += max(now - start, 0)
            peak = _count(stats, *_PEAK)
            if peak > self.peak and self.at:
                self._record("memory peak", self.at, start, peak)
            self.peak, self.at = peak, start
            return stats
        except Exception as error:
            if is_handlers(error):
                raise
            self.read = None
            note_failure("reading what torch's allocator counts")
            return None

    def _record(self, name: str, start: int, end: int, value: int) -> None:
        if value > 0:
            record_of(thread_id(), min(start, end), end, word(name), counter(value))

    def forget(self) -> None:
        """Leave what is known to the parent: CUDA does not survive a fork."""
        self.due = self.took = self.peak = self.at = self.counted = 0
        self.is_watched, self.counts = False, {}
        self.requests = _Requests()


class _Requests:
    """Sizes of the tensors for which torch takes segments from the GPU in steady steps.

    In a few steps that are watched, if segments were new in the steps before, torch records what is
    asked of its allocator, without stacks: after a new segment, the next allocation is what it was
    taken for. A program that records that itself is left alone.
    """

    def __init__(self) -> None:
        self.left = 3
        self.grew = self.is_on = False

    def step_ended(self, module: "Any", begins: bool, grew: bool, end: int) -> None:
        """Begin with a step that is watched, or look what it asked for."""
        try:
            if self.is_on:
                self.is_on = False
                try:
                    if grew:
                        self._look(module, end)
                finally:
                    _record_history(module)(None)
            elif begins and self.grew and grew and self.left and steps.recorded()[0] >= _STEADY:
                enabled = getattr(sys.modules.get("torch._C"), "_cuda_isHistoryEnabled", None)
                self.left -= 1
                if enabled is None or enabled():
                    self.left = 0
                    return
                _record_history(module)("all", context=None, max_entries=_ENTRIES)
                self.is_on = True
            self.grew = grew
        except Exception as error:
            if is_handlers(error):
                raise
            self.left, self.is_on = 0, False
            note_failure("looking at what torch's allocator is asked for")

    def _look(self, module: "Any", end: int) -> None:
        is_new = False
        entries = module._snapshot()["device_traces"][sys.modules["torch.cuda"].current_device()]
        for entry in entries:
            action = entry["action"]
            if action in ("segment_alloc", "segment_map"):
                is_new = True
            elif action == "alloc" and is_new:
                is_new = False
                record_of(thread_id(), end, end, word("segment request"), counter(entry["size"]))


def _record_history(module: "Any") -> "Any":
    """Return torch's function, without the wrapper that notices calls of the program's."""
    function = module._record_memory_history
    return getattr(function, "__wrapped__", function)


_STEADY, _ENTRIES = 8, 4000
_PATIENCE = 300
_PEAK = "allocated_bytes", "all", "peak"
_COUNTS = {
    "allocation retries": ("num_alloc_retries",),
    "segments": ("segment", "all", "allocated"),
    "segment bytes": ("reserved_bytes", "all", "allocated"),
    "segments freed": ("segment", "all", "freed"),
}
_AMOUNTS = {
    "memory allocated": ("allocated_bytes", "all", "current"),
    "memory reserved": ("reserved_bytes", "all", "current"),
    "memory split": ("inactive_split_bytes", "all", "current"),
}


def _count(stats: "Any", *keys: str) -> int:
    for key in keys:
        stats = stats.get(key, {})
    return stats if isinstance(stats, int) else 0


_memory = _Memory()
on_fork.append(_memory.forget)
steps.on_step.append(_memory.step_ended)


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
        self.is_too_deep = False
        self.until = 0
        # The limit of the program, and ours.
        self.limits = 0, 0
        self.handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.walks: dict[int, _Walk] = {}
        self.texts: dict[int, str] = {}
        self.paths: dict[tuple[int, str], int] = {}
        # By id of a module while it lives: its name, numbered among those of its class, and its
        # first path. Modules that are made in each step take the numbers of those that died.
        self.known: dict[int, tuple[str, int, object]] = {}
        self.counts: dict[str, int] = {}
        self.free: dict[str, list[int]] = {}

    def step_ended(self, rank: int, end: int) -> None:
        """Begin with the step that follows, or end."""
        count, length = steps.recorded()
        if self.is_on:
            self.backward_ended()
            if not 0 <= count < self.until:
                self.end()
                self._put_back()
            return
        self._put_back()
        again = count // _AGAIN if count > 0 and count % _AGAIN == 0 else 0
        if count == min(_FIRST, (length or 2 * _FIRST) // 2) or (again and not again & (again - 1)):
            self.until = min(count + _steps_of_modules(), length or sys.maxsize)
            if self.until > count:
                self._begin()

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
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and not self.skip_compiled(dynamo):
            return
        limit = sys.getrecursionlimit()
        self.limits = limit, min(limit + _ROOM, 2**31 - 1)
        sys.setrecursionlimit(self.limits[1])
        self.is_on = True
        cls.__call__ = _call

    def forked(self) -> None:
        """Leave modules to the parent."""
        self.end()
        self._put_back()

    def _put_back(self) -> None:
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

    def skip_compiled(self, module: "Any") -> bool:
        """Have torch.compile compile nothing of ours; return False if it cannot say where it is.

        What is called within a function that it compiles, but not as a part of a graph, it looks at
        once more.
        """
        native = sys.modules.get("torch._C._dynamo.eval_frame")
        self.compiles = getattr(native, "get_eval_frame_callback", None)
        if self.compiles is None:
            return False
        for function in (_call, self._marker(0)):
            module.skip_code(function.__code__)
        return True

    def end(self) -> None:
        """Put everything back as it was."""
        if not self.is_on:
            return
        self.backward_ended()
        self.is_on = False
        cls: Any = sys.modules["torch.nn"].Module
        if vars(cls).get("__call__") is _call:
            cls.__call__ = self.original
        for name, kept in _KEPT:
            names = vars(sys.modules.get(name, sys))
            if names.get(kept) is _call:
                names[kept] = self.original
        self._forget()

    def enter(self, module: object, *values: object) -> int:
        """Begin a call of a module; return the number of modules around it."""
        try:
            walk = self._walk()
            depth = len(walk.around)
            if depth >= _DEEPEST:
                self.is_too_deep = True
                self.end()
                note(f"modules are timed no longer: over {_DEEPEST} lie within each other")
                return sys.maxsize
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
                self._watch(walk, result)
                before = walk.around[depth]
                del walk.around[depth:]
                self._move(walk, *before)
        except Exception as error:
            self._failed(error)

    def backward_ended(self) -> None:
        """Return threads to where they were before the backward pass; those of autograd wait."""
        for walk in list(self.walks.values()):
            if walk.is_backward:
                self._move(walk, walk.before, 0, walk.thread == thread_id())

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

    def _path(self, around: int, module: object) -> int:
        known = self.known.get(id(module))
        name, number = (known[0], 0) if known else self._new_name(type(module).__name__)
        path = self.paths.get((around, name))
        if path is None:
            text = f"{self.texts[around]}/{name}" if around in self.texts else name
            path = self.paths[around, name] = word(text)
            self.texts[path] = text
        if known is None:
            dies = self._forgets(id(module), type(module).__name__, number)
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
        def begins(gradients: "Any") -> None:
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


_FIRST, _AGAIN = 16, 84
"""Steps after which modules are recorded, the second of them also after twice, four times as many:
not while the cost of recording is measured, around powers of two."""
_MOST_PATHS = 4000
_DEEPEST = 64
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


modules = _Modules()
on_fork.append(modules.forked)
steps.on_step.append(modules.step_ended)


def _call(self: "Any", *args: "Any", **keywords: "Any") -> "Any":
    """Stand for ``Module.__call__`` while modules are recorded, but within compiled functions."""
    if not modules.is_on or (modules.compiles is not None and modules.compiles()):
        return modules.original(self, *args, **keywords)
    depth, result = modules.enter(self, args, keywords), None
    try:
        result = modules.original(self, *args, **keywords)
        return result
    finally:
        modules.leave(depth, result)


def cuda_memory(module: "Any") -> None:
    """Read the allocator's counts from here on, and time the calls that empty its cache."""
    _memory.read = getattr(module, "memory_stats_as_nested_dict", None)
    record_history = defined(module, "_record_memory_history")
    if record_history is not None and hasattr(module, "_snapshot"):
        _memory.history = module

        @wraps(record_history)
        def by_program(*args: "Any", **keywords: "Any") -> "Any":
            _memory.requests.left, _memory.requests.is_on = 0, False
            return record_history(*args, **keywords)

        module._record_memory_history = ours(by_program)
    function = defined(module, "empty_cache")
    if function is None:
        return

    @wraps(function)
    def empty_cache() -> None:
        start = time_ns()
        try:
            function()
        finally:
            record_of(thread_id(), start, time_ns(), word("cache emptied"), counter(1))

    module.empty_cache = ours(empty_cache)


def backward(module: "Any") -> None:
    """Time the function that ``Tensor.backward`` calls."""
    phase(module, "backward", "backward", _is_compiling, _around_backward)


def _around_backward() -> None:
    _memory.look()
    modules.backward_ended()


def pipeline_stage(module: "Any") -> None:
    """Time the passes of micro-batches through a stage, which waits for others between them."""
    passes = ("forward_one_chunk", "forward"), ("backward_one_chunk", "backward")
    for name, called in (*passes, ("backward_weight_one_chunk", "backward")):
        phase(module._PipelineStageBase, name, called, _is_compiling, _memory.look)


def lightning_strategy(module: "Any") -> None:
    """Time the forward passes that Lightning has its module make, and steps of optimizers."""
    phase(module.Strategy, "training_step", "forward", _is_compiling, _memory.look)
    phase(module.Strategy, "optimizer_step", "optimizer", _is_compiling, _memory.look)


def lightning_precision(module: "Any") -> None:
    """Time clipping, by norm or by value."""
    phase(module.Precision, "clip_gradients", "gradient clipping", _is_compiling, _memory.look)


def lightning_closure(module: "Any") -> None:
    """Time what Lightning has the optimizer call, which is none of its step."""
    phase(module.Closure, "closure", "other", _is_compiling, _memory.look)


def accelerate_optimizer(module: "Any") -> None:
    """Time steps with what Accelerate does around them: it looks for packages at each."""
    phase(module.AcceleratedOptimizer, "step", "optimizer", _is_compiling, _memory.look)


def accelerator(module: "Any") -> None:
    """Time clipping and backward passes with what Accelerate does around them."""
    clip = "clip_grad_norm_", "gradient clipping"
    for name, called in (clip, ("backward", "backward")):
        phase(module.Accelerator, name, called, _is_compiling, _memory.look)


def deepspeed_engine(module: "Any") -> None:
    """Time the phases that DeepSpeed's engine has methods for; those of its own optimizers are none
    of torch's.
    """
    for name, called in (
        ("forward", "forward"),
        ("backward", "backward"),
        ("clip_fp32_gradients", "gradient clipping"),
        ("step", "optimizer"),
    ):
        phase(module.DeepSpeedEngine, name, called, _is_compiling, _memory.look)


def keras_optimizer(module: "Any") -> None:
    """Time updates of Keras' optimizers with torch, which are none of torch's."""
    cls = module.TorchParallelOptimizer
    phase(cls, "_backend_update_step", "optimizer", _is_compiling, _memory.look)


def transformers_trainer(module: "Any") -> None:
    """Time clipping and forward passes of transformers' trainer, or those by which a subclass
    replaces them.
    """
    phase(module.Trainer, "_clip_grad_norm", "gradient clipping", _is_compiling, _memory.look)
    function = defined(module.Trainer, "__init__")
    if function is not None:
        module.Trainer.__init__ = after(function, lambda self: _time_loss(type(self)))


def _time_loss(cls: type) -> None:
    holder = next((base for base in cls.__mro__ if "compute_loss" in vars(base)), None)
    if holder is not None:
        phase(holder, "compute_loss", "forward", _is_compiling, _memory.look)


def clipping(module: "Any") -> None:
    """Time clipping in its module and in the package that imports it, whichever comes first."""
    phase(module, "clip_grad_norm_", "gradient clipping", _is_compiling, _memory.look)


def _own_begin(optimizer: object) -> None:
    if not hasattr(type(optimizer), "_step_of_gputrace"):
        _begin(optimizer)


def _begin(optimizer: object) -> None:
    if not _quiet and not _is_compiling():
        _memory.look()
        _begun[id(optimizer)] = time_ns()


def _own_step(optimizer: object) -> None:
    """Count a step of one of torch's classes, unless Horovod's is around it."""
    if not hasattr(type(optimizer), "_step_of_gputrace"):
        _step(optimizer)


def _step(optimizer: object) -> None:
    if not _quiet and not _is_compiling():
        start = _begun.pop(id(optimizer), 0)
        if start:
            _memory.look()
        step_ended(_what, OPTIMIZER, optimizer)
        if start:
            # With what recording took: the program waits for it in this call.
            record(start, time_ns(), _optimizer, PHASE)


def _is_compiling() -> bool:
    """Return whether torch.compile traces this: its graph must not contain the hooks."""
    is_compiling = getattr(getattr(sys.modules["torch"], "compiler", None), "is_compiling", None)
    return is_compiling is not None and is_compiling()


def _wrap(cls: "Any") -> None:
    if not hasattr(cls.step, "_of_gputrace"):
        cls.step = _between(_own_begin, cls.step, _own_step)


def _between(
    before: "Callable[[Any], None]", function: "Any", then: "Callable[[Any], None]"
) -> "Any":
    """Return a method that calls two others with its object before and after."""

    @wraps(function)
    def method(self: "Any", *args: "Any", **keywords: "Any") -> "Any":
        before(self)
        result = function(self, *args, **keywords)
        then(self)
        return result

    return ours(method)


def dynamo(module: "Any") -> None:
    """Up to 2.6, torch.compile takes the hooks off torch's optimizers; this puts ours back on.

    It would also compile what times a phase, called where its graph is broken, as if it were the
    program's. What that calls it may compile as before.
    """
    skip = getattr(module, "skip_code", None)
    timed: Any = getattr(sys.modules.get("torch.autograd"), "backward", None)
    if skip is not None and hasattr(timed, "_of_gputrace"):
        skip(timed.__code__)
    if modules.is_on and not modules.skip_compiled(module):
        modules.end()
    patcher = getattr(module, "TorchPatcher", None)
    if patcher is None:
        return
    original = patcher.patch

    @wraps(original)
    def patch() -> None:
        original()
        try:
            _wrap_stripped()
        except Exception:
            note_failure("putting hooks back after torch.compile")

    patcher.patch = staticmethod(ours(patch))


def _wrap_stripped() -> None:
    names = vars(sys.modules["torch.optim"])
    base: Any = names["Optimizer"]
    for cls in list(names.values()):
        if isinstance(cls, type) and issubclass(cls, base) and "step" in vars(cls):
            step: Any = vars(cls)["step"]
            if getattr(step, "hooked", False) and not _calls_hooks(step):
                _wrap(cls)


def _calls_hooks(step: "Any") -> bool:
    """Return whether torch's own wrapper, ``profile_hook_step``, which calls hooks, is there."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is not None and "profile_name" in code.co_varnames:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def grad_scaler(module: "Any") -> None:
    """Count steps whose gradients overflow, too, for which the optimizer is not called.

    The optimizer's phase begins where the scaler looks for infinities, which waits for the GPU.
    """
    phase(module.GradScaler, "unscale_", "gradient unscaling", _is_compiling, _memory.look)
    function = defined(module.GradScaler, "step")
    if function is None:
        return

    @wraps(function)
    def step(self: "Any", optimizer: "Any", *args: "Any", **keywords: "Any") -> "Any":
        before, start = steps.calls(OPTIMIZER), time_ns()
        result = function(self, optimizer, *args, **keywords)
        record(start, time_ns(), _optimizer, PHASE)
        if steps.calls(OPTIMIZER) == before:
            _step(optimizer)
        return result

    module.GradScaler.step = ours(step)


def profiler(module: "Any") -> None:
    """Wrap torch.profiler, which records the GPU through CUPTI itself."""
    begin = "_prepare_trace" if hasattr(module.profile, "_prepare_trace") else "__enter__"
    makes_way(module.profile, begin, "__exit__", "torch.profiler", _records_gpu)


def cupti_monitor(module: "Any") -> None:
    """Make way for torch's own monitor, which would take over CUPTI's buffers and clock."""
    monitor = getattr(module, "CuptiMonitor", None)
    if monitor is not None:
        makes_way(monitor, "start", "stop", "torch's CUPTI monitor")


def _records_gpu(profile: "Any") -> bool:
    activities = getattr(profile, "kineto_activities", None)
    if not getattr(profile, "enabled", True):
        return False
    return activities is None or any("CUDA" in str(activity) for activity in activities)


def horovod_optimizer(module: "ModuleType") -> None:
    """Count Horovod's steps, which call torch's ``step`` within, or once a parameter."""
    for cls in classes(module):
        function = defined(cls, "step")
        if function is not None:
            cls.step, cls._step_of_gputrace = _between(_begin, function, _step), True


def horovod_functions(module: "Any") -> None:
    """Ignore the step with gradients of 0 that an optimizer without state makes to broadcast it."""
    function = defined(module, "broadcast_optimizer_state")
    if function is None:
        return

    @wraps(function)
    def broadcast(*args: "Any", **keywords: "Any") -> "Any":
        _quiet.append(None)
        try:
            return function(*args, **keywords)
        finally:
            _quiet.pop()

    module.broadcast_optimizer_state = ours(broadcast)
