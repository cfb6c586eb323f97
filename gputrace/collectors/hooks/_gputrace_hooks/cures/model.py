"""Cures of what computes: the model, its precision, its optimizer, its gradients' way to others."""

import sys
from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from types import FunctionType
from typing import Any

from ..wrappers import is_compiling, ours
from .data import each_tensor
from .trial import asked, between, change_call, cures, guarded, is_on, sees_gpu, switched, trial


def torch_calls(torch: Any) -> None:
    """Set torch's switches, and change how it compiles."""
    _set_switches(torch)
    change_call(torch, "compile", _compile_arguments)


def _compile_arguments(_: Any) -> "dict[str, tuple[str, Any]]":
    """Have torch.compile make code for all shapes, instead of one for each that comes."""
    trial.has.add("compiled")
    return {"dynamic": ("dynamic", True)} if "dynamic" in cures else {}


def _set_switches(torch: Any) -> None:
    """Set torch's switches now, and again after the first step, should the program set them.

    By turns, they are as the program has them until then.
    """
    moments = (1,) if asked.get("stretch") else (0, 1)

    def apply(count: int) -> None:
        for cure, paths in _SWITCHES.items():
            if cure in cures and count in moments:
                guarded(cure, _switch, cure, torch, paths)
            if count == 1:
                guarded("", _tell_switch, cure, torch, paths)

    for cure in _SWITCHES:
        switched.append((cure, partial(_switch_settings, cure)))
    apply(0)
    between.append(apply)


_SWITCHES = {
    "tf32": ("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"),
    "cudnn-benchmark": ("backends.cudnn.benchmark",),
}


def _switch(cure: str, torch: Any, paths: "tuple[str, ...]") -> None:
    if not sees_gpu(cure):
        return
    for path in paths:
        holder, name = _held(torch, path)
        old, new = getattr(holder, name), bool(cures[cure])
        if old != new:
            if is_on(cure):
                setattr(holder, name, new)
            _set[path] = cure, holder, name, old, new
            trial.change(cure, "", f"torch.{path}", -1, old, new)
        elif not any(change["cure"] == cure for change in trial.changes):
            trial.skip(cure, f"torch.{path} is {new} already")


def _tell_switch(cure: str, torch: Any, paths: "tuple[str, ...]") -> None:
    if not all(getattr(*_held(torch, path)) for path in paths):
        trial.has.add(f"{cure}-off")


def _held(torch: Any, path: str) -> "tuple[Any, str]":
    """Return what holds a switch, and its name there."""
    *homes, name = path.split(".")
    for home in homes:
        torch = getattr(torch, home)
    return torch, name


_set: "dict[str, tuple[str, Any, str, bool, bool]]" = {}
"""Switches to set: the cure, what holds them, their name, the value before and the other."""


def _switch_settings(cure: str, on: bool) -> None:
    for of, holder, name, old, new in _set.values():
        if of == cure:
            setattr(holder, name, new if on else old)


def optimizers(module: Any) -> None:
    """Change how torch's optimizers are made, and how they forget gradients."""
    chosen = [cure for cure in ("fused", "foreach") if cure in cures]
    _meet_optimizers(module.Optimizer, bool(chosen) or "channels-last" in cures)
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
    if "set-to-none" in cures or not cures:
        change_call(module.Optimizer, "zero_grad", _forget)


def _forget(present: "Callable[[str], Any]") -> "dict[str, tuple[str, Any]]":
    if not present("set_to_none"):
        trial.has.add("keeps-gradients")
    return {"set_to_none": ("set-to-none", True)} if is_on("set-to-none") else {}


def _tell_optimizer(optimizer: Any) -> None:
    """Say if it is neither fused nor takes several tensors at a time, as it does on a GPU unless
    the program says otherwise.
    """
    for group in optimizer.param_groups:
        if "fused" in group and not group["fused"]:
            trial.has.add("unfused")
            at_once = group.get("foreach")
            if not (any(each.is_cuda for each in group["params"]) if at_once is None else at_once):
                trial.has.add("one-by-one")


def _faster(cure: str, present: "Callable[[str], Any]") -> "dict[str, tuple[str, Any]]":
    before = present(cure)
    if not before and cure not in _asked_before:
        _asked_before[cure] = before
        switched.append((cure, partial(_switch_optimizers, cure)))
    return {cure: (cure, True)}


_optimizers: "list[Any]" = []
_asked_before: "dict[str, Any]" = {}
"""Arguments of optimizers as the program gave them."""


def _meet_optimizers(base: Any, keeps: bool) -> None:
    """Say what optimizers are, and keep them where a cure changes them later."""
    begin = vars(base).get("__init__")
    if not isinstance(begin, FunctionType):
        return

    @wraps(begin)
    def begin_kept(self: Any, *args: Any, **keywords: Any) -> None:
        begin(self, *args, **keywords)
        guarded("", _tell_optimizer, self)
        if not keeps:
            return
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


def distributed(module: Any) -> None:
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
    if "no-sync" in cures or not cures:
        _accumulate(module.DistributedDataParallel)


def _accumulate(cls: Any) -> None:
    """Have gradients sent with the last backward pass of a step alone, as ``no_sync`` does.

    The last is known by the passes of the step before. Where a step turns out to have fewer, its
    gradients are averaged before the optimizer uses them; where it has more, those are sent too.
    """
    forward = cls.forward
    passes: dict[int, int] = {}
    usual: dict[int, int] = {}
    unsent: dict[int, Any] = {}
    optimizers: list[Any] = []

    @wraps(forward)
    def forward_kept(self: Any, *args: Any, **keywords: Any) -> Any:
        if not (self.training and self.require_backward_grad_sync and _differentiates()):
            return forward(self, *args, **keywords)
        number = passes[id(self)] = passes.get(id(self), 0) + 1
        if not is_on("no-sync") or number >= usual.get(id(self), 1):
            unsent.pop(id(self), None)
            return forward(self, *args, **keywords)
        unsent[id(self)] = self
        if not optimizers:
            optimizers.append(sys.modules["torch.optim.optimizer"])
            optimizers[0].register_optimizer_step_pre_hook(send)
            trial.change("no-sync", "forward", "", -1, "", "")
        self.require_backward_grad_sync = False
        try:
            return forward(self, *args, **keywords)
        finally:
            self.require_backward_grad_sync = True

    def send(*_: Any) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        for model in [unsent.pop(key) for key in list(unsent)]:
            group = model.process_group
            for gradient in (each.grad for each in model.parameters() if each.grad is not None):
                distributed.all_reduce(gradient, group=group)
                gradient.div_(distributed.get_world_size(group))

    def end_step(count: int) -> None:
        if max(passes.values(), default=0) > 1:
            trial.has.add("accumulates")
        elif passes and count > 1:
            trial.skip("no-sync", "a step has one backward pass")
        usual.clear()
        usual.update(passes)
        passes.clear()

    cls.forward = ours(forward_kept)
    between.append(end_step)


def _differentiates() -> bool:
    return sys.modules["torch"].is_grad_enabled()  # type: ignore[no-any-return]


def _make_on_capture_stream(cls: Any) -> None:
    """Have what DistributedDataParallel keeps of autograd belong to the stream of captures.

    It keeps the nodes that accumulate gradients, which run on the stream on which they were made:
    on another one than the capture's they end it. What follows is on that stream too, or passes
    without graphs would wait for it at each parameter.
    """
    begin = cls.__init__

    @wraps(begin)
    def begin_on_stream(self: Any, module: Any, *args: Any, **keywords: Any) -> None:
        guarded("graphs", _go_on_capture_stream, module)
        begin(self, module, *args, **keywords)

    cls.__init__ = begin_on_stream


def _go_on_capture_stream(module: Any) -> None:
    """Make torch's stream of captures the current one, for a module that has anything on a GPU."""
    cuda: Any = sys.modules["torch"].cuda
    if any(parameter.is_cuda for parameter in module.parameters()):
        if cuda.graph.default_capture_stream is None:
            cuda.graph.default_capture_stream = cuda.Stream()
        stream = cuda.graph.default_capture_stream
        stream.wait_stream(cuda.current_stream())
        cuda.set_stream(stream)


def modules(module: Any) -> None:
    """Meet each model at its first call in training, say what it has, and change it.

    It is met in the first step, by what is called in place of ``Module.__call__``.
    """
    chosen = [cure for cure in _MODELS if cure in cures]
    cls, parts, over = module.Module, set(), []  # type: ignore[var-annotated]
    call = cls.__call__

    def meet(model: Any, args: Any, keywords: Any) -> None:
        parameters = [each for each in model.parameters() if each.requires_grad]
        if not parameters or not _differentiates():
            return
        parts.update(id(part) for part in model.modules())
        torch: Any = sys.modules["torch"]
        kind = parameters[0].device.type
        has = {
            "convolutions": any(each.dim() == 4 for each in parameters),
            "cudnn": any(each.dim() > 2 for each in parameters),
            "blocks": bool(_blocks(model)),
            "full-precision": parameters[0].dtype == torch.float32 and not _cast_to(torch, kind),
            "eager": not hasattr(model, "_orig_mod") and not model._compiled_call_impl,
        }
        trial.has.update(word for word in has if has[word])
        for cure in chosen:
            guarded(cure, _MODELS[cure], cure, model, args, keywords)

    def call_met(self: Any, *args: Any, **keywords: Any) -> Any:
        if not over and not is_compiling() and self.training and id(self) not in parts:
            guarded("", meet, self, args, keywords)
        return call(self, *args, **keywords)

    def end(count: int) -> None:
        over.append(count)
        if cls.__call__ is call_met:
            cls.__call__ = call

    cls.__call__ = call_met
    between.append(end)


def _cast_to(torch: Any, kind: str) -> Any:
    """Return the type to which autocast casts on a kind of device now; None where it is off."""
    if not hasattr(torch, "get_autocast_dtype"):
        # New in PyTorch 2.4.
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _blocks(model: Any) -> "list[Any]":
    """Return the blocks that a model repeats: several of one class, with parts of their own."""
    blocks: list[Any] = []
    within: set[int] = set()
    for holder in model.modules():
        each = list(holder.children())
        alike = len(each) > 1 and len({type(part) for part in each}) == 1
        if alike and id(holder) not in within and list(each[0].children()):
            blocks += each
            within.update(id(inner) for block in each for inner in block.modules())
    return blocks


def _compile(cure: str, model: Any, *_: Any) -> None:
    """Compile it, or each of its repeated blocks, in place, from the next call on."""
    mode = cures[cure]
    parts = _blocks(model) if mode == "regional" else [model]
    if not parts:
        trial.skip(cure, "the model repeats no block")
        return
    for part in parts:
        part.compile(**{} if mode in (True, "regional") else {"mode": mode})
    calls = [part._compiled_call_impl for part in parts]

    def switch(on: bool) -> None:
        for part, call in zip(parts, calls):
            part._compiled_call_impl = call if on else None

    switched.append((cure, switch))
    trial.change(cure, "forward", "", -1, "", "")


def _channels_last(cure: str, model: Any, *_: Any) -> None:
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
    def laid(*args: Any, **keywords: Any) -> Any:
        return forward(*(_laid_out(args, True) if is_on(cure) else args), **keywords)

    model.forward = laid
    trial.change(cure, "forward", "", -1, "", "")


def _laid_out(value: Any, as_nhwc: bool) -> Any:
    """Return tensors of four dimensions in the memory format NHWC, or NCHW; a dict is changed."""
    torch: Any = sys.modules["torch"]
    layout = torch.channels_last if as_nhwc else torch.contiguous_format

    def laid(tensor: Any) -> Any:
        return tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor

    return each_tensor(torch, value, laid)


def _autocast(cure: str, model: Any, *_: Any) -> None:
    """Run it under autocast to bfloat16; results are float32 again."""
    torch: Any = sys.modules["torch"]
    forward = model.forward
    kind = next(model.parameters()).device.type

    def widen(tensor: Any) -> Any:
        return tensor.float() if tensor.dtype == torch.bfloat16 else None

    @wraps(forward)
    def cast(*args: Any, **keywords: Any) -> Any:
        if not is_on(cure):
            return forward(*args, **keywords)
        with torch.autocast(kind, dtype=torch.bfloat16):
            result = forward(*args, **keywords)
        return each_tensor(torch, result, widen)

    model.forward = cast
    trial.change(cure, "forward", "", -1, "", "")


def _graph(cure: str, model: Any, args: Any, keywords: Any) -> None:
    """Capture its passes before its first call.

    Later, what autograd keeps of an earlier pass would tie the capture to that pass's stream. Of
    DistributedDataParallel it is the module within: what it does itself, before and after, no graph
    can hold (PyTorch documentation, 'CUDA semantics', partial-network capture). Calls of other
    threads, as those that watch NCCL, do not end a capture where PyTorch can be told so (2.13).
    """
    torch: Any = sys.modules["torch"]
    if type(model).__name__ == "DistributedDataParallel":
        model = model.module
    inputs = _tensors(torch, (*args, *keywords.values()))
    sample = _described(torch, args, keywords)
    if sample is None or not inputs or not all(each.is_cuda for each in inputs):
        trial.skip(cure, "the model takes other arguments than tensors on a GPU and constants")
        return
    model.forward = _Graphed(model, inputs, sample, list(keywords))
    model.forward.capture(torch, args, keywords)
    trial.change(cure, "forward", "", -1, "", "")


class _Graphed:
    """Forward pass of a model as a CUDA graph, with that of its backward pass.

    Calls with other shapes or constants, under another autocast, or before the backward pass of the
    last one, go without the graphs.
    """

    def __init__(self, model: Any, inputs: Any, sample: Any, names: "list[str]") -> None:
        self.model, self.forward, self.sample, self.names = model, model.forward, sample, names
        # Graphs read and write where these are: the program may use its own batch again.
        self.inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        self.cast: Any = None
        self.captured: Any = None
        # Where the graph of the backward pass writes gradients.
        self.written: set[int] = set()
        self.waits = False

    def capture(self, torch: Any, args: Any, keywords: Any) -> None:
        """Capture both passes; autocast is entered within, as its cache cannot be captured."""
        self.cast, kept = _cast_to(torch, "cuda"), []  # type: ignore[var-annotated]
        derive, gradients = torch.autograd.grad, []  # type: ignore[var-annotated]

        def apart(*tensors: Any) -> Any:
            left = iter(tensors)

            def now(value: Any) -> Any:
                return next(left) if isinstance(value, torch.Tensor) else value

            given = [now(value) for value in args]
            more = {name: now(value) for name, value in keywords.items()}
            on = self.cast is not None
            with torch.autocast("cuda", dtype=self.cast, enabled=on, cache_enabled=False):
                result = self.forward(*given, **more)
            kept[:] = [each_tensor(torch, result, _detachable(torch))]
            return kept[0]

        def derived(*now: Any, **more: Any) -> Any:
            gradients[:] = derive(*now, **more)
            return tuple(gradients)

        options = {"capture_error_mode": "thread_local", "allow_unused_input": True}
        capture = torch.cuda.make_graphed_callables
        known = set(options) & set(signature(capture).parameters)
        self.model.forward, torch.autograd.grad = apart, derived
        try:
            with torch.autocast("cuda", enabled=False):
                capture(self.model, tuple(self.inputs), **{name: options[name] for name in known})
            self.captured = self.model.forward
        finally:
            torch.autograd.grad = derive
            self.model.forward = self.forward if self.captured is None else self
        self.written = {each.data_ptr() for each in gradients if each is not None}
        each_tensor(torch, kept[0], lambda output: output.detach_())
        between.append(self.end_step)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        torch: Any = sys.modules["torch"]
        alike = is_on("graphs") and not self.waits and _cast_to(torch, "cuda") == self.cast
        if not alike or _described(torch, args, keywords) != self.sample:
            return self.forward(*args, **keywords)
        if _differentiates():
            self.keep_gradients(torch)
        given = _tensors(torch, (*args, *(keywords[name] for name in self.names)))
        return each_tensor(torch, self.captured(*given), self.await_backward)

    def keep_gradients(self, torch: Any) -> None:
        """Move gradients that are to be added to from where the graph writes the next ones."""
        held = [each for each in self.model.parameters() if each.grad is not None]
        held = [each for each in held if each.grad.data_ptr() in self.written]
        if held:
            moved = torch._foreach_mul([each.grad for each in held], 1.0)
            for parameter, gradient in zip(held, moved):
                parameter.grad = gradient

    def await_backward(self, output: Any) -> None:
        """Use no graph before the backward pass from an output: it would overwrite that."""
        if output.requires_grad:
            self.waits = True
            output.register_hook(self.end_step)

    def end_step(self, _: Any) -> None:
        """Use graphs again."""
        self.waits = False


def _tensors(torch: Any, values: Any) -> "list[Any]":
    return [value for value in values if isinstance(value, torch.Tensor)]


def _described(torch: Any, args: Any, keywords: Any) -> Any:
    """Return what two calls must have in common to share a graph; None if that is not known."""
    described = []
    for name, value in (*enumerate(args), *keywords.items()):
        if isinstance(value, torch.Tensor):
            described.append((name, value.shape, value.dtype))
        elif value is None or isinstance(value, (bool, int, float, str)):
            described.append((name, type(value), value))
        else:
            return None
    return sorted(described, key=str)


def _detachable(torch: Any) -> "Callable[[Any], Any]":
    """Return the identity, as a function of autograd whose results can leave its graph.

    The outputs of a capture are kept, and with them the nodes that accumulate gradients, on the
    stream of the capture: passes without graphs would wait for it at each parameter.
    """

    class Identity(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return tensor.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient

    return Identity.apply  # type: ignore[no-any-return]


_MODELS = {
    "channels-last": _channels_last,
    "bf16": _autocast,
    "graphs": _graph,
    "compile": _compile,
}


def jitted(jax: Any) -> None:
    """Have compiled functions of JAX give up what they return anew."""
    jit = jax.jit
    if "donate" not in cures:
        return

    @wraps(jit)
    def donating(*args: Any, **keywords: Any) -> Any:
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

    def __init__(self, jax: Any, function: Any, donate: "Callable[[Any], Any]") -> None:
        self.jax, self.function, self.donate = jax, function, donate
        self.chosen: Any = None
        self.__wrapped__ = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.function.__get__(instance, owner)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self.chosen is None:
            numbers = guarded("donate", self.renewed, args, keywords)
            self.chosen = self.donate(numbers) if numbers else self.function
            if numbers:
                trial.change("donate", "jit", "donate_argnums", -1, "", numbers, ("jax", "flax"))
        return self.chosen(*args, **keywords)

    def renewed(self, args: Any, keywords: Any) -> "tuple[int, ...]":
        """Return the numbers of arguments whose shapes the results have, as a state's have."""
        leaves = self.jax.tree_util.tree_leaves

        def arrays(value: Any) -> "list[Any]":
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
