"""Cures of what computes: the model, its precision, its optimizer, its gradients' way to others."""

import sys
from functools import partial, wraps
from inspect import signature
from types import FunctionType

from ..wrappers import ours
from .data import each_tensor
from .trial import asked, between, change_call, cures, guarded, is_on, sees_gpu, switched, trial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def switches(torch: "Any") -> None:
    """Set torch's switches now, and again after the first step, should the program set them.

    By turns, they are as the program has them until then.
    """
    moments = (1,) if asked.get("stretch") else (0, 1)

    def apply(count: int) -> None:
        for cure, paths in _SWITCHES.items():
            if cure in cures and count in moments:
                guarded(cure, _switch, cure, torch, paths)

    for cure in _SWITCHES:
        switched.append((cure, partial(_switch_settings, cure)))
    apply(0)
    between.append(apply)


_SWITCHES = {
    "tf32": ("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"),
    "cudnn-benchmark": ("backends.cudnn.benchmark",),
}


def _switch(cure: str, torch: "Any", paths: "tuple[str, ...]") -> None:
    if not sees_gpu(cure):
        return
    for path in paths:
        *homes, name = path.split(".")
        holder = torch
        for home in homes:
            holder = getattr(holder, home)
        old, new = getattr(holder, name), bool(cures[cure])
        if old != new:
            if is_on(cure):
                setattr(holder, name, new)
            _set[path] = cure, holder, name, old, new
            trial.change(cure, "", f"torch.{path}", -1, old, new)
        elif not any(change["cure"] == cure for change in trial.changes):
            trial.skip(cure, f"torch.{path} is {new} already")


_set: "dict[str, tuple[str, Any, str, bool, bool]]" = {}
"""Switches to set: the cure, what holds them, their name, the value before and the other."""


def _switch_settings(cure: str, on: bool) -> None:
    for of, holder, name, old, new in _set.values():
        if of == cure:
            setattr(holder, name, new if on else old)


def optimizers(module: "Any") -> None:
    """Change how torch's optimizers are made, and how they forget gradients."""
    chosen = [cure for cure in ("fused", "foreach") if cure in cures]
    if chosen or "channels-last" in cures:
        _keep_optimizers(module.Optimizer)
    for cls in list(vars(module).values()):
        begin = vars(cls).get("__init__") if isinstance(cls, type) else None
        if not chosen or not isinstance(begin, FunctionType):
            continue
        code = begin.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for cure in chosen:
            if cure in names:
                later = bool(asked.get("stretch"))
                change_call(cls, "__init__", partial(_faster, cure), later=later)
    if "set-to-none" in cures:
        forget = {"set_to_none": ("set-to-none", True)}
        change_call(module.Optimizer, "zero_grad", lambda _: forget if is_on("set-to-none") else {})


def _faster(cure: str, present: "Callable[[str], Any]") -> "dict[str, tuple[str, Any]]":
    before = present(cure)
    if not before and cure not in _asked_before:
        _asked_before[cure] = before
        switched.append((cure, partial(_switch_optimizers, cure)))
    return {cure: (cure, True)}


_optimizers: "list[Any]" = []
_asked_before: "dict[str, Any]" = {}
"""Arguments of optimizers as the program gave them."""


def _keep_optimizers(base: "Any") -> None:
    begin = vars(base).get("__init__")
    if not isinstance(begin, FunctionType):
        return

    @wraps(begin)
    def begin_kept(self: "Any", *args: "Any", **keywords: "Any") -> None:
        begin(self, *args, **keywords)
        _optimizers.append(self)
        for cure in _asked_before if asked.get("stretch") else ():
            if is_on(cure):
                guarded(cure, _switch_optimizers, cure, True)

    base.__init__ = begin_kept


def _switch_optimizers(cure: str, on: bool) -> None:
    """Have optimizers work in one way or the other; fused ones count their steps on the GPU."""
    for group, optimizer in [(group, each) for each in _optimizers for group in each.param_groups]:
        if cure in group:
            group[cure] = on or _asked_before[cure]
        counted = cure == "fused" and not group.get("capturable")
        for parameter in group["params"] if counted else ():
            state = optimizer.state.get(parameter, {})
            if hasattr(state.get("step"), "to"):
                state["step"] = state["step"].to(parameter.device if on else "cpu")


def distributed(module: "Any") -> None:
    """Change how DistributedDataParallel is made."""
    names = {
        "bucket-cap": "bucket_cap_mb",
        "bucket-view": "gradient_as_bucket_view",
        "static-graph": "static_graph",
    }
    wanted = {names[cure]: (cure, cures[cure]) for cure in names if cure in cures}
    if wanted:
        change_call(module.DistributedDataParallel, "__init__", lambda _: wanted)
    if "graphs" in cures:
        _make_on_capture_stream(module.DistributedDataParallel)


def _make_on_capture_stream(cls: "Any") -> None:
    """Have what DistributedDataParallel keeps of autograd belong to the stream of captures.

    It keeps the nodes that accumulate gradients, which run on the stream on which they were made:
    on another one than the capture's they end it. What follows is on that stream too, or passes
    without graphs would wait for it at each parameter.
    """
    begin = cls.__init__

    @wraps(begin)
    def begin_on_stream(self: "Any", module: "Any", *args: "Any", **keywords: "Any") -> None:
        guarded("graphs", _go_on_capture_stream, module)
        begin(self, module, *args, **keywords)

    cls.__init__ = begin_on_stream


def _go_on_capture_stream(module: "Any") -> None:
    """Make torch's stream of captures the current one, for a module that has anything on a GPU."""
    cuda: Any = sys.modules["torch"].cuda
    if any(parameter.is_cuda for parameter in module.parameters()):
        if cuda.graph.default_capture_stream is None:
            cuda.graph.default_capture_stream = cuda.Stream()
        stream = cuda.graph.default_capture_stream
        stream.wait_stream(cuda.current_stream())
        cuda.set_stream(stream)


def modules(module: "Any") -> None:
    """Meet each model at its first call in training, and change it."""
    chosen = [cure for cure in _MODELS if cure in cures]
    if not chosen:
        return
    parts: set[int] = set()

    def meet(model: "Any", inputs: "Any") -> "Any":
        if id(model) in parts or not model.training:
            return None
        parts.update(id(part) for part in model.modules())
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return None
        for cure in chosen:
            guarded(cure, _MODELS[cure], cure, model, inputs)
        return None

    handle = module.register_module_forward_pre_hook(meet)
    between.append(lambda count: handle.remove() if count == 1 else None)


def _compile(cure: str, model: "Any", _: "Any") -> None:
    """Compile it in its place, from the next call on."""
    mode = cures[cure]
    model.compile(**{} if mode is True else {"mode": mode})
    call = model._compiled_call_impl
    switched.append((cure, lambda on: setattr(model, "_compiled_call_impl", call if on else None)))
    trial.change(cure, "forward", "", -1, "", "")


def _channels_last(cure: str, model: "Any", _: "Any") -> None:
    """Have weights and inputs of four dimensions in the memory format NHWC.

    Weights have a place for each format, which they keep: what was captured reads them there.
    """
    if not any(parameter.dim() == 4 for parameter in model.parameters()):
        trial.skip(cure, "the model has no convolution in two dimensions")
        return
    forward = model.forward
    places: dict[bool, Any] = {}

    def switch(on: bool) -> None:
        weights = [each for each in (*model.parameters(), *model.buffers()) if each.dim() == 4]
        places.setdefault(not on, [weight.data for weight in weights])
        places.setdefault(on, _laid_out(places[not on], on))
        for weight, place in zip(weights, places[on]):
            weight.data, weight.grad = place.copy_(weight.data), _laid_out(weight.grad, on)
        for optimizer in _optimizers:
            _laid_out(list(optimizer.state.values()), on)

    if is_on(cure):
        switch(True)
    switched.append((cure, switch))

    @wraps(forward)
    def laid(*args: "Any", **keywords: "Any") -> "Any":
        return forward(*(_laid_out(args, True) if is_on(cure) else args), **keywords)

    model.forward = laid
    trial.change(cure, "forward", "", -1, "", "")


def _laid_out(value: "Any", as_nhwc: bool) -> "Any":
    """Return tensors of four dimensions in the memory format NHWC, or NCHW; a dict is changed."""
    torch: Any = sys.modules["torch"]
    layout = torch.channels_last if as_nhwc else torch.contiguous_format

    def laid(tensor: "Any") -> "Any":
        return tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor

    return each_tensor(torch, value, laid)


def _autocast(cure: str, model: "Any", _: "Any") -> None:
    """Run it under autocast to bfloat16; results are float32 again."""
    torch: Any = sys.modules["torch"]
    forward = model.forward
    kind = next(model.parameters()).device.type

    def widen(tensor: "Any") -> "Any":
        return tensor.float() if tensor.dtype == torch.bfloat16 else None

    @wraps(forward)
    def cast(*args: "Any", **keywords: "Any") -> "Any":
        if not is_on(cure):
            return forward(*args, **keywords)
        with torch.autocast(kind, dtype=torch.bfloat16):
            result = forward(*args, **keywords)
        return each_tensor(torch, result, widen)

    model.forward = cast
    trial.change(cure, "forward", "", -1, "", "")


def _graph(cure: str, model: "Any", inputs: "Any") -> None:
    """Capture its passes before its first call; a call with other shapes goes without the graphs.

    Later, what autograd keeps of an earlier pass would tie the capture to that pass's stream. Of
    DistributedDataParallel it is the module within: what it does itself, before and after, no graph
    can hold (PyTorch documentation, 'CUDA semantics', partial-network capture). Calls of other
    threads, as those that watch NCCL, do not end a capture where PyTorch can be told so (2.13).
    """
    torch: Any = sys.modules["torch"]
    if type(model).__name__ == "DistributedDataParallel":
        model = model.module
    forward = model.forward

    def shapes(args: "Any") -> "list[Any]":
        return [isinstance(arg, torch.Tensor) and arg.is_cuda and arg.shape for arg in args]

    sample = shapes(inputs)
    if not sample or not all(sample):
        trial.skip(cure, "the model takes other arguments than tensors on a GPU, by position")
        return
    kept: list[Any] = []

    @wraps(forward)
    def apart(*args: "Any", **keywords: "Any") -> "Any":
        kept[:] = [each_tensor(torch, forward(*args, **keywords), _detachable(torch))]
        return kept[0]

    model.forward = apart
    capture = torch.cuda.make_graphed_callables
    alone = {"capture_error_mode": "thread_local"}
    try:
        capture(
            model, inputs, **(alone if set(alone) <= set(signature(capture).parameters) else {})
        )
    except BaseException:
        model.forward = forward
        raise
    captured = model.forward
    model.forward = lambda *now, **more: (
        captured(*now)
        if is_on(cure) and not more and shapes(now) == sample
        else forward(*now, **more)
    )
    each_tensor(torch, kept[0], lambda output: output.detach_())
    trial.change(cure, "forward", "", -1, "", "")


def _detachable(torch: "Any") -> "Callable[[Any], Any]":
    """Return the identity, as a function of autograd whose results can leave its graph.

    The outputs of a capture are kept, and with them the nodes that accumulate gradients, on the
    stream of the capture: passes without graphs would wait for it at each parameter.
    """

    class Identity(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: "Any", tensor: "Any") -> "Any":
            return tensor.detach()

        @staticmethod
        def backward(ctx: "Any", gradient: "Any") -> "Any":
            return gradient

    return Identity.apply  # type: ignore[no-any-return]


_MODELS = {
    "channels-last": _channels_last,
    "bf16": _autocast,
    "graphs": _graph,
    "compile": _compile,
}


def jitted(jax: "Any") -> None:
    """Have compiled functions of JAX give up what they return anew."""
    jit = jax.jit
    if "donate" not in cures:
        return

    @wraps(jit)
    def donating(*args: "Any", **keywords: "Any") -> "Any":
        if not args:
            return lambda function: donating(function, **keywords)
        function = jit(*args, **keywords)
        if any(name.startswith(("donate", "static")) for name in keywords):
            trial.skip("donate", "its functions say which arguments are donated, or static")
            return function
        return _Donating(jax, function, lambda numbers: jit(*args, donate_argnums=numbers))

    jax.jit = ours(donating)


class _Donating:
    """Compiled function that donates each argument of which it returns all arrays anew."""

    def __init__(self, jax: "Any", function: "Any", donate: "Callable[[Any], Any]") -> None:
        self.jax, self.function, self.donate = jax, function, donate
        self.chosen: Any = None
        self.__wrapped__ = function

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.function, name)

    def __get__(self, instance: "Any", owner: "Any" = None) -> "Any":
        return self if instance is None else self.function.__get__(instance, owner)

    def __call__(self, *args: "Any", **keywords: "Any") -> "Any":
        if self.chosen is None:
            numbers = guarded("donate", self.renewed, args, keywords)
            self.chosen = self.donate(numbers) if numbers else self.function
            if numbers:
                trial.change("donate", "jit", "donate_argnums", -1, "", numbers, ("jax", "flax"))
        return self.chosen(*args, **keywords)

    def renewed(self, args: "Any", keywords: "Any") -> "tuple[int, ...]":
        """Return the numbers of arguments whose shapes the results have, as a state's have."""
        leaves = self.jax.tree_util.tree_leaves

        def arrays(value: "Any") -> "list[Any]":
            return [(leaf.shape, leaf.dtype) for leaf in leaves(value)]

        left, numbers = arrays(self.function.eval_shape(*args, **keywords)), []
        for number, arg in enumerate(args):
            if leaves(arg) and all(isinstance(leaf, self.jax.Array) for leaf in leaves(arg)):
                needed = arrays(arg)
                if all(needed.count(each) <= left.count(each) for each in needed):
                    numbers.append(number)
                    for each in needed:
                        left.remove(each)
        return tuple(numbers)
