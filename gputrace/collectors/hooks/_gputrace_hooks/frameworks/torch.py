"""PyTorch (from 1.0 to 2.14): steps of its optimizers, phases of a step, its profilers.

Backward passes, the optimizer's step, what is done to gradients between the two, and the loading of
weights are timed; a forward pass calls nothing of torch's as a whole, but a stage of its pipelines
does. A step costs 2 µs, a phase 0.8 µs. ``torch_data`` has its data loader, ``torch_compile`` its
compiler, ``torch_memory`` its allocator, ``torch_modules`` the parts of a network.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from types import CodeType, ModuleType
from typing import Any

from .. import control, sampler, steps
from ..host_file import time_ns
from ..load import counter
from ..recorder import PHASE, record, record_for_good, word
from ..steps import OPTIMIZER, step_ended
from ..wrappers import (
    around,
    at_bounds,
    call_after,
    classes,
    defined,
    is_compiling,
    makes_way,
    ours,
    passed_over,
    phase,
    phases,
)
from .torch_modules import modules

_what = word("torch.optim.Optimizer.step")
_optimizer = word("optimizer")
_begun: "dict[int, int]" = {}
"""When optimizers began the steps that they are in, by id."""
_pre_hooks: "list[Any]" = []
_NEAR = 8
"""Calls around torch's among which a subclass's is looked for."""
untimed_steps: "list[None]" = []
"""Not empty while steps are made that train nothing."""


def optimizer(module: Any) -> None:
    """Use torch's hook of all optimizers if there is one, else wrap ``step`` of each class."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(_own_step)
    # It may stand between a loss and its backward pass.
    phase(module.Optimizer, "zero_grad", "other")
    watch = _wrap if register is None else _time_all
    for method in ("__init__", "__setstate__"):
        call_after(module.Optimizer, method, lambda self: watch(type(self)))


def _time_all(cls: Any) -> None:
    """Time ``step`` with what torch does around its hooks.

    Classes of the main program are let be, and timed by hooks: cloudpickle would take what wraps
    them with their class.
    """
    if cls.__module__ != "__main__":
        phase(cls, "step", "optimizer")
    elif not _pre_hooks:
        register = getattr(
            sys.modules["torch.optim.optimizer"], "register_optimizer_step_pre_hook", None
        )
        if register is not None:
            _pre_hooks.append(register(_own_begin))


def _own_begin(optimizer: object, *_: object) -> None:
    if not hasattr(type(optimizer), "_step_of_gputrace"):
        _begin(optimizer)


def _begin(optimizer: object) -> None:
    if not untimed_steps and not is_compiling():
        for look in at_bounds:
            look()
        _begun[id(optimizer)] = time_ns()


def _own_step(optimizer: object, *_: object) -> None:
    """Count a step of one of torch's classes, unless Horovod's or a subclass's is around it."""
    if hasattr(type(optimizer), "_step_of_gputrace") or is_compiling():
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
    if not untimed_steps and not is_compiling():
        start = _begun.pop(id(optimizer), 0)
        if start:
            for look in at_bounds:
                look()
        step_ended(getattr(type(optimizer), "_step_of_gputrace", _what), OPTIMIZER, optimizer)
        if start:
            # With what recording took: the program waits for it in this call.
            record(start, time_ns(), _optimizer, PHASE)


def _wrap(cls: Any) -> None:
    if not hasattr(cls.step, "_of_gputrace"):
        cls.step = _between(_own_begin, cls.step, _own_step)


def _between(before: "Callable[[Any], None]", function: Any, then: "Callable[[Any], None]") -> Any:
    """Return a method that calls two others with its object before and after."""

    @wraps(function)
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        before(self)
        result = function(self, *args, **keywords)
        then(self)
        return result

    return ours(method)


def dynamo(module: Any) -> None:
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
        for cls, step in _hooked_steps():
            if hasattr(step, "_of_gputrace") and _calls_hooks(step):
                cls.step = step.__wrapped__
        original()
        for cls, step in _hooked_steps():
            watch = _time_all if _calls_hooks(step) else _wrap
            watch(cls)

    patcher.patch = staticmethod(ours(patch))


def _our_codes() -> "list[Any]":
    """Return the code of all functions of the hooks, those within others too, and as wrappers."""
    found: set[Any] = set()
    package = __package__.rpartition(".")[0]
    names = [name for name in sys.modules if name.startswith(f"{package}.")]
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


def _hooked_steps() -> "list[tuple[Any, Any]]":
    """Return torch's optimizers that say that their ``step`` calls hooks, each with that."""
    names = dict(vars(sys.modules["torch.optim"]))
    base = names.get("Optimizer", ())
    found = [cls for cls in names.values() if isinstance(cls, type) and issubclass(cls, base)]
    return [
        (cls, vars(cls)["step"]) for cls in found if getattr(vars(cls).get("step"), "hooked", False)
    ]


def _calls_hooks(step: Any) -> bool:
    """Return whether torch's own wrapper, ``profile_hook_step``, which calls hooks, is there."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is not None and "profile_name" in code.co_varnames:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def grad_scaler(module: Any) -> None:
    """Count steps whose gradients overflow, too, for which the optimizer is not called.

    The optimizer's phase begins where the scaler looks for infinities, which waits for the GPU.
    """
    phase(module.GradScaler, "unscale_", "gradient unscaling")

    @around(module.GradScaler, "step")
    def step(original: Any, self: Any, optimizer: Any, *args: Any, **keywords: Any) -> Any:
        before, start = steps.calls(OPTIMIZER), time_ns()
        result = original(self, optimizer, *args, **keywords)
        record(start, time_ns(), _optimizer, PHASE)
        if steps.calls(OPTIMIZER) == before:
            _step(optimizer)
        return result


def count_optimizer_steps(module: ModuleType) -> None:
    """Count steps of optimizers of another library, whose classes are not torch's or call torch's
    ``step`` within.
    """
    for cls in classes(module):
        function = defined(cls, "step")
        if function is not None:
            cls.step = _between(_begin, function, _step)
            cls._step_of_gputrace = word(f"{module.__name__}.{cls.__name__}.step")


def anomaly_mode(module: Any) -> None:
    """Record that autograd looks for anomalies, once."""
    enabled: list[int] = []

    def entered(_: object) -> None:
        if not enabled and sys.modules["torch"].is_anomaly_enabled():
            enabled.append(1)
            record_for_good(time_ns(), word("anomaly mode"), counter(1))

    call_after(module.detect_anomaly, "__enter__", entered)
    call_after(module.set_detect_anomaly, "__init__", entered)


def collectives(module: ModuleType) -> None:
    """Follow the functions of torch.distributed where hangs are looked for, at some 5 µs each."""
    if os.environ.get("GPUTRACE_HANG"):
        from .. import hangs

        hangs.follow_collectives(module)


def profiler(module: Any) -> None:
    """Wrap torch.profiler, which records the GPU through CUPTI itself."""
    begin = "_prepare_trace" if hasattr(module.profile, "_prepare_trace") else "__enter__"
    makes_way(module.profile, begin, "__exit__", "torch.profiler", _records_gpu)


def _records_gpu(profile: Any) -> bool:
    activities = getattr(profile, "kineto_activities", None)
    if not getattr(profile, "enabled", True):
        return False
    return activities is None or any("CUDA" in str(activity) for activity in activities)


def captures(module: Any) -> None:
    """Record the modules of what is captured into CUDA graphs."""

    @around(module.CUDAGraph, "capture_begin")
    def begin(original: Any, *args: Any, **keywords: Any) -> Any:
        control.graphs_made[:] = [None]
        modules.capture(True)
        return original(*args, **keywords)

    @around(module.CUDAGraph, "capture_end")
    def end(original: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return original(*args, **keywords)
        finally:
            modules.capture(False)


def cupti_monitor(module: Any) -> None:
    """Make way for torch's own monitor, which would take over CUPTI's buffers and clock."""
    monitor = getattr(module, "CuptiMonitor", None)
    if monitor is not None:
        makes_way(monitor, "start", "stop", "torch's CUPTI monitor")


def cuda(module: Any) -> None:
    """Sample lines from when torch first uses CUDA: a program that only infers records nothing
    else. An armed program samples in its windows alone.
    """
    call_later = getattr(module, "_lazy_call", None)
    if call_later is not None and "GPUTRACE_ARM" not in os.environ:
        call_later(sampler.wake_up)


# In the package that imports it too, whichever comes first.
_clipping = phases("", clip_grad_norm_="gradient clipping")

PATCHES = [
    ("torch._dynamo.eval_frame", dynamo),
    ("torch.amp.grad_scaler", grad_scaler),
    # ``Tensor.backward`` calls it.
    ("torch.autograd", phases("", backward="backward")),
    ("torch.autograd.anomaly_mode", anomaly_mode),
    ("torch.autograd.profiler", profiler),
    ("torch.cuda", cuda),
    ("torch.cuda.amp.grad_scaler", grad_scaler),
    ("torch.cuda.graphs", captures),
    ("torch.distributed.distributed_c10d", collectives),
    (
        "torch.distributed.checkpoint.state_dict_saver",
        phases("", save="checkpoint", async_save="checkpoint"),
    ),
    # Passes of micro-batches through a stage, which waits for others between them.
    (
        "torch.distributed.pipelining.stage",
        phases(
            "_PipelineStageBase",
            forward_one_chunk="forward",
            backward_one_chunk="backward",
            backward_weight_one_chunk="backward",
        ),
    ),
    # A network that generates what another one learns from gets its weights again and again.
    ("torch.nn.modules.module", phases("Module", load_state_dict="weight sync")),
    ("torch.nn.utils", _clipping),
    ("torch.nn.utils.clip_grad", _clipping),
    ("torch.optim.optimizer", optimizer),
    ("torch.serialization", phases("", save="checkpoint")),
    ("torch.profiler._cupti.monitor", cupti_monitor),
    ("torch.profiler._cupti_monitor", cupti_monitor),
]
