"""PyTorch: steps of its optimizers, phases of a step, its profiler.

Its data loader is an iterator like others. Of phases, backward, the optimizer's step and what is
done to gradients between the two are timed; a forward pass calls nothing of torch's as a whole, but
one function of Lightning's, or of transformers' trainer.
"""

import sys
from functools import wraps
from types import CodeType

from . import steps
from .host_file import time_ns
from .modules import modules
from .recorder import PHASE, note_failure, record, word
from .steps import OPTIMIZER, step_ended
from .wrappers import at_bounds, call_after, classes, defined, makes_way, ours, passed_over, phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_what = word("torch.optim.Optimizer.step")
_optimizer = word("optimizer")
_begun: "dict[int, int]" = {}
"""When optimizers began the steps that they are in, by id."""
_pre_hooks: "list[Any]" = []
_NEAR = 8
"""Calls around torch's among which a subclass's is looked for."""
_quiet: "list[None]" = []
"""Not empty while steps are made that train nothing."""


def optimizer(module: "Any") -> None:
    """Use torch's hook of all optimizers if there is one, else wrap ``step`` of each class."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(_own_step)
    # It may stand between a loss and its backward pass.
    _time(module.Optimizer, "zero_grad", "other")
    watch = _wrap if register is None else _time_all
    for method in ("__init__", "__setstate__"):
        call_after(module.Optimizer, method, lambda self: watch(type(self)))


def _time_all(cls: "Any") -> None:
    """Time ``step`` with what torch does around its hooks.

    Those of the main program are let be, and timed by hooks: cloudpickle would take what wraps them
    with their class.
    """
    if cls.__module__ != "__main__":
        _time(cls, "step", "optimizer")
    elif not _pre_hooks:
        register = getattr(
            sys.modules["torch.optim.optimizer"], "register_optimizer_step_pre_hook", None
        )
        if register is not None:
            _pre_hooks.append(register(_own_begin))


def backward(module: "Any") -> None:
    """Time the function that ``Tensor.backward`` calls."""
    _time(module, "backward", "backward")


_PHASES = {
    "accelerate.accelerator": (
        "Accelerator",
        {"backward": "backward", "clip_grad_norm_": "gradient clipping"},
    ),
    # It looks for packages at each step.
    "accelerate.optimizer": ("AcceleratedOptimizer", {"step": "optimizer"}),
    "deepspeed.runtime.engine": (
        "DeepSpeedEngine",
        {
            "forward": "forward",
            "backward": "backward",
            "clip_fp32_gradients": "gradient clipping",
            "step": "optimizer",
        },
    ),
    "keras.src.backend.torch.optimizers.torch_parallel_optimizer": (
        "TorchParallelOptimizer",
        {"_backend_update_step": "optimizer"},
    ),
    # What Lightning has the optimizer call, which is none of its step.
    "pytorch_lightning.loops.optimization.automatic": ("Closure", {"closure": "other"}),
    "pytorch_lightning.plugins.precision.precision": (
        "Precision",
        {"clip_gradients": "gradient clipping"},
    ),
    "pytorch_lightning.strategies.strategy": (
        "Strategy",
        {"training_step": "forward", "backward": "backward", "optimizer_step": "optimizer"},
    ),
    # Passes of micro-batches through a stage, which waits for others between them.
    "torch.distributed.pipelining.stage": (
        "_PipelineStageBase",
        {
            "forward_one_chunk": "forward",
            "backward_one_chunk": "backward",
            "backward_weight_one_chunk": "backward",
        },
    ),
    "transformers.trainer": ("Trainer", {"_clip_grad_norm": "gradient clipping"}),
}
"""Class of a module, and its methods by the phase of a step that they are, with what the framework
does around torch's own calls."""


def phases(module: "Any") -> None:
    """Time the methods that `_PHASES` has for the module."""
    name = module.__name__.replace("lightning.pytorch", "pytorch_lightning")
    cls, methods = _PHASES[name]
    for method, called in methods.items():
        _time(getattr(module, cls), method, called)


def _time(holder: "Any", name: str, called: str) -> None:
    phase(holder, name, called, _is_compiling)


def transformers_trainer(module: "Any") -> None:
    """Time clipping and forward passes of transformers' trainer, or those by which a subclass
    replaces them.
    """
    phases(module)
    call_after(module.Trainer, "__init__", lambda self: _time_loss(type(self)))


def _time_loss(cls: type) -> None:
    holder = next((base for base in cls.__mro__ if "compute_loss" in vars(base)), None)
    if holder is not None:
        _time(holder, "compute_loss", "forward")


def clipping(module: "Any") -> None:
    """Time clipping in its module and in the package that imports it, whichever comes first."""
    _time(module, "clip_grad_norm_", "gradient clipping")


def _own_begin(optimizer: object, *_: object) -> None:
    if not hasattr(type(optimizer), "_step_of_gputrace"):
        _begin(optimizer)


def _begin(optimizer: object) -> None:
    if not _quiet and not _is_compiling():
        for look in at_bounds:
            look()
        _begun[id(optimizer)] = time_ns()


def _own_step(optimizer: object, *_: object) -> None:
    """Count a step of one of torch's classes, unless Horovod's or a subclass's is around it."""
    if hasattr(type(optimizer), "_step_of_gputrace") or _is_compiling():
        return
    if not _is_inherited(optimizer):
        _step(optimizer)


def _is_inherited(optimizer: object) -> bool:
    """Return whether a subclass's ``step`` makes this call, after which torch calls hooks too."""
    frame = sys._getframe(2)
    code, around = frame.f_code, frame.f_back
    for _ in range(_NEAR):
        if around is None:
            break
        if around.f_code is code and around.f_locals.get("self") is optimizer:
            return True
        around = around.f_back
    return False


def _step(optimizer: object) -> None:
    if not _quiet and not _is_compiling():
        start = _begun.pop(id(optimizer), 0)
        if start:
            for look in at_bounds:
                look()
        step_ended(getattr(type(optimizer), "_step_of_gputrace", _what), OPTIMIZER, optimizer)
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

    Where its graph is broken, it would also compile what we are called in, as if it were the
    program's. What that calls it may compile as before.
    """
    skip = getattr(module, "skip_code", None)
    if skip is not None:
        for code in _our_codes():
            skip(code)
    if modules.is_on and not modules.can_tell():
        modules.end()
    patcher = getattr(module, "TorchPatcher", None)
    if patcher is None:
        return
    original = patcher.patch

    @wraps(original)
    def patch() -> None:
        # It takes off the outermost wrapper, which must not be ours.
        _each_hooked(_uncover)
        original()
        _each_hooked(_cover)

    patcher.patch = staticmethod(ours(patch))


def _our_codes() -> "list[Any]":
    """Return the code of all functions of the hooks, those within others too, and as wrappers."""
    found: set[Any] = set()
    names = [name for name in sys.modules if name.startswith(f"{__package__}.")]
    holders: list[Any] = [vars(sys.modules[name]) for name in names]
    holders += [
        vars(held) for names in holders for held in names.values() if isinstance(held, type)
    ]
    codes = [getattr(held, "__code__", None) for names in holders for held in names.values()]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType) and code not in found:
            found.add(code)
            codes += code.co_consts
    # Not a set: the two are equal.
    return [*found, *map(passed_over, found)]


def _each_hooked(change: "Callable[[Any, Any], None]") -> None:
    """Change each of torch's optimizers that says that its ``step`` calls hooks."""
    try:
        names = vars(sys.modules["torch.optim"])
        base: Any = names["Optimizer"]
        for cls in list(names.values()):
            if isinstance(cls, type) and issubclass(cls, base):
                step: Any = vars(cls).get("step")
                if getattr(step, "hooked", False):
                    change(cls, step)
    except Exception:
        note_failure("keeping hooks through torch.compile")


def _uncover(cls: "Any", step: "Any") -> None:
    if hasattr(step, "_of_gputrace") and _calls_hooks(step):
        cls.step = step.__wrapped__


def _cover(cls: "Any", step: "Any") -> None:
    if _calls_hooks(step):
        _time_all(cls)
    else:
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
    _time(module.GradScaler, "unscale_", "gradient unscaling")
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


def other_optimizers(module: "ModuleType") -> None:
    """Count steps of fastai's, which are none of torch's, and of Horovod's, which call torch's
    ``step`` within, or once a parameter.
    """
    for cls in classes(module):
        function = defined(cls, "step")
        if function is not None:
            cls.step = _between(_begin, function, _step)
            cls._step_of_gputrace = word(f"{module.__name__}.{cls.__name__}.step")


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
