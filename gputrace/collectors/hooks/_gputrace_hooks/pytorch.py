"""PyTorch: steps of its optimizers, its profiler. Its data loader is an iterator like others."""

import sys
from functools import wraps

from . import steps
from .recorder import note_failure, word
from .steps import OPTIMIZER, step_ended
from .wrappers import after, classes, iterator, makes_way, ours, own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_what = word("torch.optim.Optimizer.step")
_quiet: "list[None]" = []
"""Not empty while steps are made that train nothing."""


def optimizer(module: "Any") -> None:
    """Uses the hook of all optimizers where torch has it, else wraps ``step`` of each class."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(lambda optimizer, args, keywords: _own_step(optimizer))
        return
    function = own(module.Optimizer, "__init__")
    if function is not None:
        module.Optimizer.__init__ = after(function, lambda self: _wrap(type(self)))


def torchdata_loader(module: "Any") -> None:
    """The last of a chain of nodes; those before run within it, or in its threads."""
    iterator(module.LoaderIterator)


def _own_step(optimizer: object) -> None:
    """A step as torch's classes make it, unless Horovod's is around it."""
    if not hasattr(type(optimizer), "_step_of_gputrace"):
        _step(optimizer)


def _step(optimizer: object) -> None:
    # The graph that torch.compile traces must not contain the hooks.
    is_compiling = getattr(getattr(sys.modules["torch"], "compiler", None), "is_compiling", None)
    if not _quiet and not (is_compiling is not None and is_compiling()):
        step_ended(_what, OPTIMIZER, optimizer)


def _wrap(cls: "Any") -> None:
    if not hasattr(cls.step, "_of_gputrace"):
        cls.step = after(cls.step, _own_step)


def dynamo(module: "Any") -> None:
    """Up to 2.6, torch.compile takes the hooks off torch's optimizers; this puts ours back on."""
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
    """A step whose gradients overflowed is one too, though its optimizer is not called."""
    function = own(module.GradScaler, "step")
    if function is None:
        return

    @wraps(function)
    def step(self: "Any", optimizer: "Any", *args: "Any", **keywords: "Any") -> "Any":
        before = steps.calls(OPTIMIZER)
        result = function(self, optimizer, *args, **keywords)
        if steps.calls(OPTIMIZER) == before:
            _step(optimizer)
        return result

    module.GradScaler.step = ours(step)


def profiler(module: "Any") -> None:
    """Wrap torch.profiler, which records the GPU through CUPTI itself."""
    begin = "_prepare_trace" if hasattr(module.profile, "_prepare_trace") else "__enter__"
    makes_way(module.profile, begin, "__exit__", "torch.profiler", _records_gpu)


def _records_gpu(profile: "Any") -> bool:
    activities = getattr(profile, "kineto_activities", None)
    if not getattr(profile, "enabled", True):
        return False
    return activities is None or any("CUDA" in str(activity) for activity in activities)


def horovod_optimizer(module: "ModuleType") -> None:
    """Its classes call torch's ``step`` within theirs, or once a parameter; theirs counts."""
    for cls in classes(module):
        function = own(cls, "step")
        if function is not None:
            cls.step, cls._step_of_gputrace = after(function, _step), True


def horovod_functions(module: "Any") -> None:
    """An optimizer that has no state yet to broadcast makes a step with gradients of 0."""
    function = own(module, "broadcast_optimizer_state")
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
