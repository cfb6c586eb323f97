"""What is wrapped in each framework. Each public function gets a module that has just been run.

A wrapper calls what it wraps with the same arguments, returns what that returned, and lets through
what it raised; a traceback shows one line more.
"""

import sys
from functools import wraps
from types import FunctionType, GeneratorType

from . import control, steps
from .recorder import DATA_WAIT, finish, note, record, time_ns, word
from .steps import LOOP, OPTIMIZER, step_ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

_RAISED = DATA_WAIT | 1 << 32
"""A wait that ended with an exception, StopIteration mostly: there was no more data."""


def _timed(function: "Callable[[Any], Any]", name: str) -> "Callable[[Any], Any]":
    what = word(name)

    @wraps(function)
    def __next__(self: "Any") -> "Any":
        start = time_ns()
        try:
            item = function(self)
        except BaseException:
            record(start, time_ns(), what, _RAISED)
            raise
        record(start, time_ns(), what, DATA_WAIT)
        return item

    return _ours(__next__)


def _timed_generator(function: "Callable[..., Any]", name: str) -> "Callable[..., Any]":
    @wraps(function)
    def generate(*args: "Any", **keywords: "Any") -> "Any":
        items = function(*args, **keywords)
        return _each(items) if isinstance(items, GeneratorType) else items

    advance = _timed(next, name)

    def _each(items: "Any") -> "Iterator[Any]":
        try:
            while True:
                try:
                    item = advance(items)
                except StopIteration:
                    return
                yield item
        finally:
            items.close()

    return _ours(generate)


def _after(function: "Callable[..., Any]", then: "Callable[[Any], None]") -> "Callable[..., Any]":
    """The method, and then the other with the object it is of."""

    @wraps(function)
    def method(self: "Any", *args: "Any", **keywords: "Any") -> "Any":
        result = function(self, *args, **keywords)
        then(self)
        return result

    return _ours(method)


def _ours(function: "Any") -> "Any":
    function._of_gputrace = True
    return function


def _own(holder: "Any", name: str) -> "Any":
    """A function that the class or module defines itself, unless it is wrapped already."""
    function = vars(holder).get(name)
    if isinstance(function, FunctionType) and not hasattr(function, "_of_gputrace"):
        return function
    return None


def _classes(module: "ModuleType") -> "list[Any]":
    values = list(vars(module).values())
    return [v for v in values if isinstance(v, type) and v.__module__ == module.__name__]


def _marks_step(module: "ModuleType", cls: str, method: str, name: str, rank: int) -> None:
    """One call is one step; of optimizers, that of the leader."""
    holder = getattr(module, cls, None)
    function = _own(holder, method) if holder else None
    if function is None:
        return
    what = word(name)

    def then(self: "Any") -> None:
        step_ended(what, rank, self if rank == OPTIMIZER else then)

    setattr(holder, method, _after(function, then))


def iterators(module: "ModuleType") -> None:
    """Every class that says how to get the next item."""
    for cls in _classes(module):
        function = _own(cls, "__next__")
        if function is None:
            continue
        timed = _timed(function, "{}.{}".format(module.__name__, cls.__name__))
        if vars(cls).get("next") is function:
            cls.next = timed
        cls.__next__ = timed


def multiprocessing_exit(module: "ModuleType") -> None:
    """A process made by multiprocessing leaves by ``os._exit``, after its finalizers."""
    util: "Any" = module

    def register(_: object) -> None:
        util.Finalize(None, finish, exitpriority=-100)

    # A child forgets finalizers and then calls this.
    util.register_after_fork(finish, register)


# ---- PyTorch ----


def torch_optimizer(module: "Any") -> None:
    """Hooks of all optimizers where torch has them, else a wrapped ``step`` of each class."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(lambda optimizer, args, keywords: _torch_step(optimizer))
        return
    function = _own(module.Optimizer, "__init__")
    if function is not None:
        module.Optimizer.__init__ = _after(function, lambda self: _wrap_step(type(self)))


_torch_what = word("torch.optim.Optimizer.step")


def _torch_step(optimizer: object) -> None:
    if not _is_compiling():
        step_ended(_torch_what, OPTIMIZER, optimizer)


def _is_compiling() -> bool:
    """Whether torch.compile is tracing, to make a graph in which we should have no part."""
    compiler = getattr(sys.modules["torch"], "compiler", None)
    return compiler is not None and hasattr(compiler, "is_compiling") and compiler.is_compiling()


def _wrap_step(cls: "Any") -> None:
    if not hasattr(cls.step, "_of_gputrace"):
        cls.step = _after(cls.step, _torch_step)


def torch_dynamo(module: "Any") -> None:
    """Until 2.6, torch.compile takes the hooks off torch's optimizers: puts ours back on."""
    patcher = getattr(module, "TorchPatcher", None)
    if patcher is None:
        return
    original = patcher.patch

    @wraps(original)
    def patch() -> None:
        original()
        try:
            _wrap_stripped_optimizers()
        except Exception as error:
            note("the hooks failed after torch.compile: {!r}".format(error))

    patcher.patch = staticmethod(_ours(patch))


def _wrap_stripped_optimizers() -> None:
    optim = sys.modules["torch.optim"]
    base: "Any" = vars(optim)["Optimizer"]
    for cls in list(vars(optim).values()):
        if isinstance(cls, type) and issubclass(cls, base) and "step" in vars(cls):
            step: "Any" = vars(cls)["step"]
            if getattr(step, "hooked", False) and not _calls_hooks(step):
                _wrap_step(cls)


def _calls_hooks(step: "Any") -> bool:
    """Whether ``Optimizer.profile_hook_step``, which calls the hooks, is among the wrappers."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is not None and code.co_name == "wrapper" and "profile_name" in code.co_varnames:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def torch_grad_scaler(module: "Any") -> None:
    """A step whose gradients overflowed is one too, though the optimizer was left out."""
    function = _own(module.GradScaler, "step")
    if function is None:
        return

    @wraps(function)
    def step(self: "Any", optimizer: "Any", *args: "Any", **keywords: "Any") -> "Any":
        before = steps.calls(OPTIMIZER)
        result = function(self, optimizer, *args, **keywords)
        if steps.calls(OPTIMIZER) == before:
            _torch_step(optimizer)
        return result

    module.GradScaler.step = _ours(step)


def torch_profiler(module: "Any") -> None:
    """The collector makes way while Kineto, torch's own user of CUPTI, records the GPU."""
    profile = module.profile
    begin = "_prepare_trace" if hasattr(profile, "_prepare_trace") else "__enter__"
    start, stop = _own(profile, begin), _own(profile, "__exit__")
    if start is None or stop is None:
        return

    @wraps(start)
    def prepare(self: "Any", *args: "Any", **keywords: "Any") -> "Any":
        if _records_gpu(self):
            _make_way(id(self), "torch.profiler")
        return start(self, *args, **keywords)

    setattr(profile, begin, _ours(prepare))
    profile.__exit__ = _after(stop, lambda self: _come_back(id(self), "torch.profiler"))


def _records_gpu(profile: "Any") -> bool:
    activities = getattr(profile, "kineto_activities", None)
    if not getattr(profile, "enabled", True):
        return False
    return activities is None or any("CUDA" in str(activity) for activity in activities)


_others_at_work: "set[object]" = set()


def _make_way(key: object, name: str) -> None:
    if not _others_at_work:
        control.pause(True)
        note("GPU activity is not recorded from here: {} records it".format(name))
    _others_at_work.add(key)


def _come_back(key: object, name: str) -> None:
    if key in _others_at_work:
        _others_at_work.discard(key)
        if not _others_at_work:
            control.pause(False)
            note("{} has ended: GPU activity is recorded again".format(name))


def deepspeed_engine(module: "ModuleType") -> None:
    """It may step its optimizer several times for one step of the model."""
    name = "deepspeed.DeepSpeedEngine.step"
    _marks_step(module, "DeepSpeedEngine", "_take_model_step", name, LOOP)


# ---- TensorFlow, Keras, JAX ----


def keras_callbacks(module: "ModuleType") -> None:
    """``fit`` of every backend calls these after each batch."""
    _marks_step(module, "CallbackList", "on_train_batch_end", "keras.Model.fit", LOOP)


def keras_epoch_iterator(module: "Any") -> None:
    """Gets each batch of ``fit``, but with TensorFlow, which does so inside a graph."""
    iterators(module)
    function = _own(module.EpochIterator, "enumerate_epoch")
    if function is not None and "__next__" not in vars(module.EpochIterator):
        name = module.__name__ + ".EpochIterator"
        module.EpochIterator.enumerate_epoch = _timed_generator(function, name)


def tensorflow_profiler(module: "ModuleType") -> None:
    """It uses CUPTI as torch's does."""
    _pauses(module, "start", "stop", "TensorFlow's profiler")


def jax_profiler(module: "Any") -> None:
    """It uses CUPTI too; and its step annotations, where the program has some, are steps."""
    _pauses(module, "start_trace", "stop_trace", "JAX's profiler")
    annotation = getattr(module, "StepTraceAnnotation", None)
    if annotation is not None:
        what = word("jax.profiler.StepTraceAnnotation")
        leave = annotation.__exit__
        annotation.__exit__ = _after(leave, lambda self: step_ended(what, LOOP, annotation))


def _pauses(module: "ModuleType", begin: str, end: str, name: str) -> None:
    start, stop = _own(module, begin), _own(module, end)
    if start is None or stop is None:
        return

    @wraps(start)
    def begins(*args: "Any", **keywords: "Any") -> "Any":
        _make_way(name, name)
        try:
            return start(*args, **keywords)
        except BaseException:
            _come_back(name, name)
            raise

    @wraps(stop)
    def ends(*args: "Any", **keywords: "Any") -> "Any":
        try:
            return stop(*args, **keywords)
        finally:
            _come_back(name, name)

    setattr(module, begin, _ours(begins))
    setattr(module, end, _ours(ends))


# ---- MXNet, Chainer ----


def mxnet_dataloader(module: "Any") -> None:
    """Without workers its iterator is a generator."""
    iterators(module)
    for cls in _classes(module):
        function = _own(cls, "__iter__")
        if function is not None and "__getitem__" not in vars(cls) and "__next__" not in vars(cls):
            name = "{}.{}".format(module.__name__, cls.__name__)
            cls.__iter__ = _timed_generator(function, name)


def mxnet_trainer(module: "ModuleType") -> None:
    """Gluon's."""
    _marks_step(module, "Trainer", "step", "mxnet.gluon.Trainer.step", OPTIMIZER)


def mxnet_module(module: "ModuleType") -> None:
    """What ``Module.fit`` calls after each batch."""
    _marks_step(module, "Module", "update", "mxnet.mod.Module.update", OPTIMIZER)


def chainer_optimizer(module: "ModuleType") -> None:
    """For loops of the user's own."""
    _marks_step(module, "GradientMethod", "update", "chainer.GradientMethod.update", OPTIMIZER)


def chainer_updater(module: "ModuleType") -> None:
    """What Chainer's trainer calls."""
    _marks_step(module, "StandardUpdater", "update", "chainer.training.StandardUpdater", LOOP)
