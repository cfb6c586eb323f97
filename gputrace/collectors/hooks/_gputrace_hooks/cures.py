"""Changes that ``gputrace try`` makes in the program, and the steps that it measures with them.

GPUTRACE_TRY is JSON:

cures     values by id, as the table in gputrace/trials/cures.py has them
warmup    steps to pass
steps     steps to measure then; after them the process ends by SystemExit, with null by itself
turns     lists of ids of cures that are on together, by turns with the program as it is
orders    of each round, the order of its turns by their numbers, 0 for the program as it is
stretch   steps of a turn; 0 to leave all cures on
folder    folder for what the process leaves
hooks     files of plugins by id: Python that defines ``patches(value)``, functions by module
recorded  true under ``gputrace record``, which needs its hooks
keep      true to leave the folders of TensorBoard as they are

What it leaves, in ``HOST.PID.try``, is JSON: see `_Trial.write`. After each round of turns it
leaves the same without losses in ``HOST.PID.turns``, and ends where a file ``enough`` is there.
"""

import atexit
import json
import os
import sys
from functools import partial, wraps
from types import FunctionType

from . import recorder, steps
from .host_file import time_ns
from .wrappers import ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Choose = Callable[[Callable[[str], Any]], "dict[str, tuple[str, Any]]"]

asked: "dict[str, Any]" = {}
cures: "dict[str, Any]" = {}

_FRAMEWORKS = (
    *("torch", "lightning", "transformers", "tensorflow", "keras", "jax", "flax"),
    *("mxnet", "chainer", "cntk"),
)
_UNUSED = ("loader", "compilation")
"""Modules whose hooks only a recording needs: what they cost is left out."""
_MOST_CALLS = 20
_TWICE = 2
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SIGTERM = 15

MODULES = {
    "jax": "jitted",
    "tensorboard.summary.writer.event_file_writer": "event_files",
    "tensorboardX.event_file_writer": "event_files",
    "tensorflow.python.data.ops.dataset_ops": "tf_datasets",
    "tensorflow.python.ops.summary_ops_v2": "tf_summaries",
    "torch": "settings",
    "torch.nn.modules.module": "modules",
    "torch.nn.parallel.distributed": "distributed",
    "torch.optim": "optimizers",
    "torch.utils.data.dataloader": "loaders",
    "transformers.training_args": "trainer_arguments",
}
"""Functions of this module by the module that they change."""
LOSSES = {
    "keras.src.callbacks.callback_list": "keras_losses",
    "torch.autograd": "losses",
}
_ALONE = ("torch.autograd",)
"""Modules that another hook wraps too, which would hide ours."""


class _Trial:
    """Steps of this process, and the changes made in it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.rank = 0
        self.ends: list[int] = []
        self.losses: list[Any] = []
        self.loss: Any = None
        self.changes: list[dict[str, Any]] = []
        self.reasons: dict[str, str] = {}
        self.stops = self.buffered = 0

    def write(self, kind: str = "try") -> None:
        """Leave who the process is, ``ends`` (of steps, nanoseconds), ``losses``, whether it was
        ``stopped``, the ``changes``, ``reasons`` for which cures change nothing where they do not,
        and how many batches loaders may have had ready before the first step (``buffered``).
        """
        host = os.uname().nodename
        path = os.path.join(asked["folder"], f"{host}.{self.pid}.{kind}")
        content = {
            "pid": self.pid,
            "host": host,
            "rank": _number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
            "world_size": _number(
                "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"
            ),
            "ends": self.ends,
            "losses": [_value(loss) for loss in self.losses if kind == "try"],
            "stopped": bool(self.stops),
            "changes": self.changes,
            "reasons": self.reasons,
            "main": os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else "",
            "versions": _versions(),
            "gpu": _gpu(),
            "buffered": self.buffered,
        }
        with open(path + ".new", "w") as file:
            json.dump(content, file)
        os.rename(path + ".new", path)

    def change(
        self,
        cure: str,
        call: str,
        name: str,
        place: int,
        old: "Any",
        new: "Any",
        beyond: "tuple[str, ...]" = (),
    ) -> None:
        """Keep what was changed in a call, and the line that made it.

        ``place`` is the argument's, -1 where it was given by name or not at all; lines of the
        packages ``beyond`` which the call comes from are passed over.
        """
        file, line = _caller(beyond)
        entry = {
            "cure": cure,
            "call": call,
            "argument": name,
            "position": place,
            "old": repr(old)[:80],
            "new": repr(new)[:80],
            "file": file,
            "line": line,
        }
        if entry not in self.changes and len(self.changes) < _MOST_CALLS * len(cures):
            self.changes.append(entry)

    def skip(self, cure: str, why: str) -> None:
        """Keep why a cure changes nothing, if it does; the first reason counts."""
        self.reasons.setdefault(cure, why)


_trial = _Trial()
_between: "list[Callable[[int], None]]" = []
"""Called between steps, with their number so far."""
_switched: "list[tuple[str, Callable[[bool], None]]]" = []
"""Cures, and what is called where they are switched off or on within the run."""
_active: "set[str]" = set()
"""Ids of the cures that are on."""


def install(patches: "dict[str, str]") -> None:
    """Take what is asked for into the table of modules to patch."""
    asked.update(json.loads(os.environ["GPUTRACE_TRY"]))
    cures.update(asked["cures"])
    _active.update(asked["turns"][0] if asked.get("stretch") else cures)
    steps.on_step.append(_step_ended)
    recorder.on_fork.append(_in_forked_child)
    recorder.on_worker.append(_in_worker)
    atexit.register(_finish)
    if not asked.get("recorded"):
        _leave_out(patches)
    for module, name in MODULES.items():
        patches[module] = f"{patches.get(module, '')} cures.{name}"
    for cure, path in asked.get("hooks", {}).items():
        for module in _guarded(cure, _load, cure, path) or ():
            patches[module] = f"{patches.get(module, '')} cures.plugged"
    if "pin-cores" in cures:
        _guarded("pin-cores", _pin_cores)
    if "gc" in cures:
        _between.append(_collect_between)


def _leave_out(patches: "dict[str, str]") -> None:
    """Leave out what only a recording needs, and put in what keeps losses."""
    for module, names in list(patches.items()):
        left = [name for name in names.split() if name.partition(".")[0] not in _UNUSED]
        patches[module] = " ".join(left)
    for module in _ALONE:
        patches.pop(module, None)
    # First: a loss is there when the step ends.
    for module, name in LOSSES.items():
        patches[module] = f"cures.{name} {patches.get(module, '')}"


def _in_forked_child() -> None:
    """Begin anew, with the changes that were made before."""
    global _trial
    before, _trial = _trial, _Trial()
    _trial.changes, _trial.reasons = before.changes, before.reasons
    _trial.buffered = before.buffered


def _in_worker() -> None:
    util: Any = sys.modules["multiprocessing.util"]
    util.Finalize(None, _finish, exitpriority=-100)


def _finish() -> None:
    trial = _trial
    if trial.pid == os.getpid() and not trial.stops and (trial.ends or asked["steps"] is None):
        trial.write()


def _step_ended(rank: int, end: int) -> None:
    trial = _trial
    if rank > trial.rank:
        # A source that knows better: what counted before were parts of its steps.
        trial.rank, trial.ends, trial.losses = rank, [], []
    trial.ends.append(end)
    trial.losses.append(trial.loss)
    trial.loss = None
    count = len(trial.ends)
    if trial.stops or (asked["steps"] is not None and count >= asked["warmup"] + asked["steps"]):
        _stop(trial)
    for call in _between:
        call(count)
    past, stretch = count - asked["warmup"], asked.get("stretch", 0)
    # The first step of a stretch is passed over.
    if past == 0 or (stretch and past > 0 and past % stretch in (0, 1)):
        _synchronize()
        trial.ends[-1] = time_ns()
    if stretch and (past < 0 or past % stretch == 0):
        _switch_cures(set(_turn_at(past, stretch)))
    if stretch and past > 0 and past % (stretch * (len(asked["turns"]) + 1)) == 0:
        trial.write("turns")
        if os.path.exists(os.path.join(asked["folder"], "enough")):
            _stop(trial)


def _turn_at(past: int, stretch: int) -> "list[str]":
    """Return the cures that are on after a step, by its number past the warm-up.

    Turns share the warm-up, in which each does what it does but once. Then each round has the
    program as it is and all turns.
    """
    turns: list[list[str]] = asked["turns"]
    orders: list[list[int]] = asked["orders"]
    if past < 0:
        return turns[(past + asked["warmup"]) * len(turns) // asked["warmup"]]
    times, at = divmod(past // stretch, len(turns) + 1)
    return ([], *turns)[orders[times % len(orders)][at]]


def _is_on(cure: str) -> bool:
    return cure in _active


def _switch_cures(active: "set[str]") -> None:
    changed = active ^ _active
    _active.symmetric_difference_update(changed)
    for cure, call in _switched:
        if cure in changed:
            _guarded(cure, call, cure in active)


def _stop(trial: "_Trial") -> None:
    """End the process as ``sys.exit()`` would, and by SIGTERM where that is caught or no use."""
    trial.stops += 1
    if trial.stops == 1:
        _synchronize()
        trial.ends[-1] = time_ns()
        trial.write()
    import threading

    if trial.stops <= _TWICE and threading.current_thread() is threading.main_thread():
        raise SystemExit(0)
    os.kill(os.getpid(), _SIGTERM)


def _synchronize() -> None:
    """Wait for torch's GPU: what was launched in a step belongs to it."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and getattr(cuda, "is_initialized", bool)():
        cuda.synchronize()


def _number(*names: str) -> "int | None":
    for name in names:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None


def _value(loss: "Any") -> "float | None":
    try:
        return None if loss is None else float(loss)
    except Exception:
        return None


def _versions() -> "dict[str, str]":
    loaded = ((name, getattr(sys.modules.get(name), "__version__", None)) for name in _FRAMEWORKS)
    return {name: str(version) for name, version in loaded if version}


def _gpu() -> str:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return ""
    return str(cuda.get_device_name())


def _has_gpu() -> bool:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_available())


def _guarded(cure: str, function: "Callable[..., Any]", *arguments: "Any") -> "Any":
    """Call a function; an error of it, or of what it calls, is the cure's, and goes no further."""
    try:
        return function(*arguments)
    except Exception as error:
        _trial.skip(cure, f"failed: {error!r}"[:200])
        return None


def _caller(beyond: "tuple[str, ...]" = ()) -> "tuple[str, int]":
    """Find the innermost line that is neither ours nor a framework's."""
    homes = [_FOLDER]
    for name in ("torch", "tensorflow", "keras", *beyond):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            homes.append(os.path.dirname(os.path.abspath(file)))
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        made = frame.f_code.co_filename == "<string>"  # the constructor of a dataclass
        if not made and not file.startswith(tuple(home + os.sep for home in homes)):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def change_call(holder: "Any", name: str, choose: "Choose", later: bool = False) -> None:
    """Have calls of a function, or of a class's method, take other arguments.

    ``choose`` gets what gives the present value of an argument by its name; it returns for each
    argument to change the cure, which may be empty, and the new value. Of what is changed
    ``later``, by other means, only the call is kept.
    """
    function = vars(holder).get(name)
    if not isinstance(function, FunctionType):
        return
    call = holder.__name__ if name == "__init__" else name
    changed = _Arguments(function, call, int(isinstance(holder, type)), choose)

    @wraps(function)
    def changed_call(*args: "Any", **keywords: "Any") -> "Any":
        try:
            new = changed(list(args), dict(keywords))
            args, keywords = (args, keywords) if later else new
        except Exception:
            recorder.note_failure(f"changing {call}")
        return function(*args, **keywords)

    setattr(holder, name, ours(changed_call))


class _Arguments:
    """Arguments of a call as a cure has them."""

    def __init__(self, function: "Any", call: str, first: int, choose: "Choose") -> None:
        """``first`` is the place of the first argument that a program gives, 1 after ``self``."""
        from inspect import signature

        self.parameters = signature(function).parameters
        self.names = list(self.parameters)
        self.call, self.first, self.choose = call, first, choose

    def __call__(self, args: "list[Any]", keywords: "dict[str, Any]") -> "Any":
        given = list(args), dict(keywords)
        for name, (cure, value) in self.choose(lambda name: self.present(name, *given)).items():
            if name not in self.parameters:
                _trial.skip(cure, f"{self.call} takes no {name} here")
                continue
            old, place = self.present(name, *given), self.names.index(name)
            if type(old) is type(value) and old == value:
                _trial.skip(cure, f"{name} is {value!r} already")
                continue
            if place < len(args):
                args[place] = value
            else:
                keywords[name], place = value, self.first - 1
            if cure:
                _trial.change(cure, self.call, name, place - self.first, old, value)
        return tuple(args), keywords

    def present(self, name: str, args: "list[Any]", keywords: "dict[str, Any]") -> "Any":
        """Return the value of an argument before any change; None of one that is unknown here."""
        if name not in self.parameters:
            return None
        place = self.names.index(name)
        default = self.parameters[name].default
        return args[place] if place < len(args) else keywords.get(name, default)


# ---- data ----


def loaders(module: "Any") -> None:
    """Change how torch's DataLoader is made, and take its batches to the GPU ahead of time."""
    iterable = getattr(module, "IterableDataset", ())
    change_call(module.DataLoader, "__init__", lambda get: _loader_arguments(get, iterable))
    if "staging" in cures:
        _guarded("staging", _stage, module)


def _loader_arguments(
    present: "Callable[[str], Any]", iterable: "Any"
) -> "dict[str, tuple[str, Any]]":
    wanted: dict[str, tuple[str, Any]] = {}
    workers = before = present("num_workers")
    if "workers" in cures:
        if isinstance(present("dataset"), iterable):
            _trial.skip("workers", "the dataset is iterable: each worker may read all of it")
        else:
            workers = cures["workers"]
            wanted["num_workers"] = ("workers", workers)
    factor = cures.get("prefetch") or present("prefetch_factor") or 2
    _trial.buffered = max(_trial.buffered, workers * factor)
    wanted.update(_of_workers(workers, before))
    if "pinned" in cures:
        if _has_gpu():
            wanted["pin_memory"] = ("pinned", True)
        else:
            _trial.skip("pinned", "torch sees no GPU")
    return wanted


def _of_workers(workers: int, before: int) -> "dict[str, tuple[str, Any]]":
    """Return arguments that only a loader with workers takes, or what takes them away."""
    wanted: dict[str, tuple[str, Any]] = {}
    for cure, name in (("prefetch", "prefetch_factor"), ("persistent", "persistent_workers")):
        if workers and cure in cures:
            wanted[name] = (cure, cures[cure])
        elif not workers:
            _trial.skip(cure, "the loader has no workers")
            if before:
                wanted[name] = ("", None if cure == "prefetch" else False)
    return wanted


_OF_TRAINER = {
    "workers": "dataloader_num_workers",
    "prefetch": "dataloader_prefetch_factor",
    "persistent": "dataloader_persistent_workers",
    "pinned": "dataloader_pin_memory",
    "bucket-cap": "ddp_bucket_cap_mb",
    "static-graph": "ddp_static_graph",
}
"""Arguments by which Hugging Face's Trainer makes loaders and DistributedDataParallel, by cure:
they are in the program, where the calls that they lead to are not."""


def trainer_arguments(module: "Any") -> None:
    """Change the arguments of Hugging Face's Trainer, of whichever class they are."""
    cls = module.TrainingArguments
    begin = vars(cls).get("__post_init__")
    wanted = {cure: name for cure, name in _OF_TRAINER.items() if cure in cures}
    if not wanted or not isinstance(begin, FunctionType):
        return

    @wraps(begin)
    def begin_changed(self: "Any") -> None:
        for cure, name in wanted.items():
            old, new = getattr(self, name, None), cures[cure]
            needs_workers = cure in ("prefetch", "persistent")
            if old == new or (needs_workers and not self.dataloader_num_workers):
                continue
            if hasattr(self, name) and (cure != "pinned" or _has_gpu()):
                setattr(self, name, new)
                call = type(self).__name__
                _trial.change(cure, call, name, -1, old, new, ("transformers",))
        begin(self)

    cls.__post_init__ = ours(begin_changed)


def _stage(module: "Any") -> None:
    """Copy each next batch to the GPU on a stream of its own while the program trains."""
    if not _has_gpu():
        _trial.skip("staging", "torch sees no GPU")
        return
    base, torch = module._BaseDataLoaderIter, sys.modules["torch"]
    following = base.__next__

    @wraps(following)
    def next_batch(self: "Any") -> "Any":
        held = self.__dict__
        if "_gputrace_ahead" not in held:
            if not _is_on("staging"):
                return following(self)
            stream = held.setdefault("_gputrace_stream", torch.cuda.Stream())
            held["_gputrace_ahead"] = _ahead(torch, stream, following, self)
            _trial.change("staging", "next", "", -1, "", "")
        stream, (batch, error) = held["_gputrace_stream"], held.pop("_gputrace_ahead")
        if error is not None:
            raise error
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        _each_tensor(torch, batch, lambda tensor: tensor.record_stream(current))
        if _is_on("staging"):
            held["_gputrace_ahead"] = _ahead(torch, stream, following, self)
        return batch

    base.__next__ = ours(next_batch)


def _ahead(torch: "Any", stream: "Any", following: "Any", loader: "Any") -> "tuple[Any, Any]":
    try:
        batch = following(loader)
    except StopIteration as error:
        return None, error
    with torch.cuda.stream(stream):
        return _each_tensor(torch, batch, lambda tensor: tensor.cuda(non_blocking=True)), None


def _each_tensor(torch: "Any", value: "Any", function: "Callable[[Any], Any]") -> "Any":
    """Return a batch with the function's values in place of its tensors, where it returns any."""
    if isinstance(value, torch.Tensor):
        made = function(value)
        return value if made is None else made
    if isinstance(value, dict):
        for key in value:
            value[key] = _each_tensor(torch, value[key], function)
        return value
    if isinstance(value, (list, tuple)):
        items = [_each_tensor(torch, item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tf_datasets(module: "Any") -> None:
    """Have TensorFlow choose how many calls of a map run at once, and how far to read ahead."""
    cls, autotune = module.DatasetV2, -1
    if "tf-parallel" in cures:
        for name in ("map", "interleave", "batch"):
            parallel = {"num_parallel_calls": ("tf-parallel", autotune)}
            change_call(cls, name, lambda _, parallel=parallel: parallel)  # type: ignore[misc]
    iterate = vars(cls).get("__iter__")
    if "tf-prefetch" in cures and iterate is not None:

        @wraps(iterate)
        def ahead(self: "Any") -> "Any":
            if type(self).__name__ == "_PrefetchDataset":
                _trial.skip("tf-prefetch", "the dataset ends with a prefetch already")
                return iterate(self)
            _trial.change("tf-prefetch", "prefetch", "buffer_size", -1, None, autotune)
            return iterate(self.prefetch(autotune))

        cls.__iter__ = ours(ahead)


# ---- the model and its optimizer ----


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
        change_call(
            module.Optimizer, "zero_grad", lambda _: forget if _is_on("set-to-none") else {}
        )


def _faster(cure: str, present: "Callable[[str], Any]") -> "dict[str, tuple[str, Any]]":
    before = present(cure)
    if not before and cure not in _asked_before:
        _asked_before[cure] = before
        _switched.append((cure, partial(_switch_optimizers, cure)))
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
        for cure in _active.intersection(_asked_before if asked.get("stretch") else ()):
            _guarded(cure, _switch_optimizers, cure, True)

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
            _guarded(cure, _MODELS[cure], cure, model, inputs)
        return None

    handle = module.register_module_forward_pre_hook(meet)
    _between.append(lambda count: handle.remove() if count == 1 else None)


def _compile(cure: str, model: "Any", _: "Any") -> None:
    """Compile it in its place, from the next call on."""
    mode = cures[cure]
    model.compile(**{} if mode is True else {"mode": mode})
    call = model._compiled_call_impl
    _switched.append((cure, lambda on: setattr(model, "_compiled_call_impl", call if on else None)))
    _trial.change(cure, "forward", "", -1, "", "")


def _channels_last(cure: str, model: "Any", _: "Any") -> None:
    """Have weights and inputs of four dimensions in the memory format NHWC."""
    torch: Any = sys.modules["torch"]
    if not any(parameter.dim() == 4 for parameter in model.parameters()):
        _trial.skip(cure, "the model has no convolution in two dimensions")
        return

    formats = {True: torch.channels_last, False: torch.contiguous_format}

    def laid_out(value: "Any", on: bool) -> "Any":
        def laid(tensor: "Any") -> "Any":
            return tensor.contiguous(memory_format=formats[on]) if tensor.dim() == 4 else tensor

        return _each_tensor(torch, value, laid)

    def switch(on: bool) -> None:
        model.to(memory_format=formats[on])
        for state in [state for each in _optimizers for state in each.state.values()]:
            laid_out(state, on)
        for parameter in model.parameters():
            parameter.grad = laid_out(parameter.grad, on)

    if _is_on(cure):
        switch(True)
    _switched.append((cure, switch))
    model.register_forward_pre_hook(lambda _, args: laid_out(args, True) if _is_on(cure) else None)
    _trial.change(cure, "forward", "", -1, "", "")


def _autocast(cure: str, model: "Any", _: "Any") -> None:
    """Run it under autocast to bfloat16; results are float32 again."""
    torch: Any = sys.modules["torch"]
    forward = model.forward
    kind = next(model.parameters()).device.type

    def widen(tensor: "Any") -> "Any":
        return tensor.float() if tensor.dtype == torch.bfloat16 else None

    @wraps(forward)
    def cast(*args: "Any", **keywords: "Any") -> "Any":
        if not _is_on(cure):
            return forward(*args, **keywords)
        with torch.autocast(kind, dtype=torch.bfloat16):
            result = forward(*args, **keywords)
        return _each_tensor(torch, result, widen)

    model.forward = cast
    _trial.change(cure, "forward", "", -1, "", "")


def _graph(cure: str, model: "Any", inputs: "Any") -> None:
    """Capture its passes before its first call; a call with other shapes goes without the graphs.

    Later, what autograd keeps of an earlier pass would tie the capture to that pass's stream.
    """
    torch: Any = sys.modules["torch"]
    forward = model.forward

    def shapes(args: "Any") -> "list[Any]":
        return [isinstance(arg, torch.Tensor) and arg.is_cuda and arg.shape for arg in args]

    sample = shapes(inputs)
    if not sample or not all(sample):
        _trial.skip(cure, "the model takes other arguments than tensors on a GPU, by position")
        return
    torch.cuda.make_graphed_callables(model, inputs)
    captured = model.forward
    model.forward = lambda *now, **more: (
        captured(*now)
        if _is_on(cure) and not more and shapes(now) == sample
        else forward(*now, **more)
    )
    _trial.change(cure, "forward", "", -1, "", "")


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
            _trial.skip("donate", "its functions say which arguments are donated, or static")
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
            numbers = _guarded("donate", self.renewed, args, keywords)
            self.chosen = self.donate(numbers) if numbers else self.function
            if numbers:
                _trial.change("donate", "jit", "donate_argnums", -1, "", numbers, ("jax", "flax"))
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


# ---- settings ----


def settings(torch: "Any") -> None:
    """Set torch's switches now, and again after the first step, should the program set them.

    By turns, they are as the program has them until then.
    """
    changes = {"non-blocking": _non_blocking, "defer-item": _defer_item, "threads": _set_threads}
    for cure, change in changes.items():
        if cure in cures:
            _guarded(cure, change, torch)

    moments = (1,) if asked.get("stretch") else (0, 1)

    def apply(count: int) -> None:
        if count not in moments:
            return
        for cure, path in _SWITCHES.items():
            if cure in cures:
                _guarded(cure, _switch, cure, torch, path)

    for cure in _SWITCHES:
        _switched.append((cure, partial(_switch_settings, cure)))
    apply(0)
    _between.append(apply)


_SWITCHES = {
    "tf32": ("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"),
    "cudnn-benchmark": ("backends.cudnn.benchmark",),
}


def _switch(cure: str, torch: "Any", paths: "tuple[str, ...]") -> None:
    if not _has_gpu():
        _trial.skip(cure, "torch sees no GPU")
        return
    for path in paths:
        *homes, name = path.split(".")
        holder = torch
        for home in homes:
            holder = getattr(holder, home)
        old, new = getattr(holder, name), bool(cures[cure])
        if old != new:
            if _is_on(cure):
                setattr(holder, name, new)
            _set[path] = cure, holder, name, old, new
            _trial.change(cure, "", f"torch.{path}", -1, old, new)
        elif not any(change["cure"] == cure for change in _trial.changes):
            _trial.skip(cure, f"torch.{path} is {new} already")


_set: "dict[str, tuple[str, Any, str, bool, bool]]" = {}
"""Switches to set: the cure, what holds them, their name, the value before and the other."""


def _switch_settings(cure: str, on: bool) -> None:
    for of, holder, name, old, new in _set.values():
        if of == cure:
            setattr(holder, name, new if on else old)


def _set_threads(torch: "Any") -> None:
    """Set them again after the first step, should the program have said otherwise."""
    threads = cures["threads"]
    _between.append(lambda count: torch.set_num_threads(threads) if count == 1 else None)


def _non_blocking(torch: "Any") -> None:
    """Have copies to a GPU return at once; those from pageable memory wait as before."""
    if not _has_gpu():
        _trial.skip("non-blocking", "torch sees no GPU")
        return
    for name in ("to", "cuda"):
        _without_waiting(torch.Tensor, name)


def _without_waiting(tensor: "Any", name: str) -> None:
    copy = getattr(tensor, name)

    @wraps(copy)
    def copied(self: "Any", *args: "Any", **keywords: "Any") -> "Any":
        said = "non_blocking" in keywords or any(isinstance(arg, bool) for arg in args)
        if _is_on("non-blocking") and not said and not self.is_cuda:
            result = copy(self, *args, **dict(keywords, non_blocking=True))
            if result.is_cuda and len(_trial.changes) < _MOST_CALLS:
                _trial.change("non-blocking", name, "non_blocking", -1, False, True)
            return result
        return copy(self, *args, **keywords)

    setattr(tensor, name, copied)


def _defer_item(torch: "Any") -> None:
    """Have each line of the program that reads a number from a GPU get that of the step before.

    It was copied meanwhile. The first step of all reads, and torch itself, read what they ask for.
    """
    if not _has_gpu():
        _trial.skip("defer-item", "torch sees no GPU")
        return
    _trial.skip("defer-item", "no line of the program reads from a GPU by .item()")
    item, home = torch.Tensor.item, os.path.dirname(torch.__file__) + os.sep
    copies: dict[tuple[str, int, int], tuple[Any, Any]] = {}
    counts: dict[tuple[str, int], tuple[int, int]] = {}

    @wraps(item)
    def item_before(self: "Any") -> "Any":
        code = sys._getframe(1)
        line = code.f_code.co_filename, code.f_lineno
        if not _is_on("defer-item") or not self.is_cuda or line[0].startswith(home):
            return item(self)
        step, count = counts.get(line, (-1, 0))
        # Reads of one line in a step are told apart by their number.
        count = count + 1 if step == len(_trial.ends) else 0
        counts[line] = len(_trial.ends), count
        copy = torch.empty_like(self, device="cpu", pin_memory=True)
        copy.copy_(self.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        before = copies.get((*line, count))
        copies[(*line, count)] = copy, event
        if before is None:
            return item(self)
        _trial.change("defer-item", "item", "", -1, "", "")
        before[1].synchronize()
        return item(before[0])

    torch.Tensor.item = item_before


def _collect_between(count: int) -> None:
    """Keep what is there out of all collections, and collect what is new between steps alone."""
    import gc

    switch = "gc", _switch_collector
    if count == 1 and not gc.isenabled():
        _trial.skip("gc", "the program has the collector off already")
    elif count == 1:
        _switched.append(switch)
        if _is_on("gc"):
            _switch_collector(True)
        _trial.change("gc", "", "gc", -1, "", "")
    elif switch in _switched and _is_on("gc") and count % 10 == 0:
        gc.collect(0)


def _switch_collector(on: bool) -> None:
    import gc

    if on:
        gc.collect()
        gc.freeze()
        gc.disable()
    else:
        gc.unfreeze()
        gc.enable()


def _pin_cores() -> None:
    """Give each rank of this machine cores of its own, of the NUMA node of its GPU."""
    rank = _number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    ranks = _number("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    cores = os.sched_getaffinity(0)
    if rank is None or ranks is None or ranks < _TWICE or len(cores) < ranks:
        _trial.skip("pin-cores", "there is one rank, or more ranks than cores")
        return
    share = _cores_of(rank, _gpu_nodes(ranks), sorted(_layout(core) for core in cores))
    os.sched_setaffinity(0, share)
    _trial.change("pin-cores", "", "cores", -1, len(cores), len(share))


_SYSTEM = "/sys"


def _cores_of(rank: int, gpus: "list[int]", layout: "list[tuple[int, int, int]]") -> "list[int]":
    """Return the cores of a rank: its part of those of its GPU's node, or of all of them.

    ``gpus`` are the nodes of the ranks' GPUs, -1 where one is unknown. Neighbours in the layout
    share a node, and threads of one core.
    """
    beside = [other for other, node in enumerate(gpus) if node == gpus[rank]]
    near = [core for node, _, core in layout if node == gpus[rank]]
    if -1 in gpus or len(near) < len(beside):
        beside, near = list(range(len(gpus))), [core for _, _, core in layout]
    share, at = len(near) // len(beside), beside.index(rank)
    return near[at * share : (at + 1) * share]


def _layout(core: int) -> "tuple[int, int, int]":
    """Return the NUMA node of a core, the first of the threads that share it, and its number."""
    folder = f"{_SYSTEM}/devices/system/cpu/cpu{core}"
    try:
        nodes = [int(name[4:]) for name in os.listdir(folder) if name[:4] == "node"]
        with open(f"{folder}/topology/thread_siblings_list") as file:
            first = int(file.read().replace("-", ",").partition(",")[0])
    except (OSError, ValueError):
        return 0, core, core
    return min(nodes, default=0), first, core


def _gpu_nodes(ranks: int) -> "list[int]":
    """Return the NUMA nodes of the GPUs that ranks see, in the order of the bus; -1 if unknown."""
    try:
        buses = sorted(os.listdir("/proc/driver/nvidia/gpus"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        order = list(map(int, visible.split(","))) if visible else list(range(len(buses)))
        nodes = []
        for gpu in order[:ranks]:
            with open(f"{_SYSTEM}/bus/pci/devices/{buses[gpu].lower()}/numa_node") as file:
                nodes.append(int(file.read()))
    except (OSError, ValueError, IndexError):
        nodes = []
    return nodes if len(nodes) == ranks else [-1] * ranks


# ---- plugins ----

_plugged: "dict[str, list[tuple[str, Callable[[Any], None]]]]" = {}


def _load(cure: str, path: str) -> "list[str]":
    """Run a plugin's file; return the modules that it wants to change."""
    import runpy

    names = runpy.run_path(path, run_name="gputrace_cure")
    for module, function in names["patches"](cures[cure]).items():
        _plugged.setdefault(module, []).append((cure, function))
    return [module for module, entries in _plugged.items() if entries[-1][0] == cure]


def plugged(module: "ModuleType") -> None:
    """Call the functions of plugins for a module; one that returns counts as a change."""
    for cure, function in _plugged[module.__name__]:

        def call(cure: str = cure, function: "Callable[[Any], None]" = function) -> None:
            function(module)
            _trial.change(cure, "", module.__name__, -1, "", "")

        _guarded(cure, call)


# ---- losses, and folders of trackers ----


def losses(module: "Any") -> None:
    """Keep what the program differentiates, a number a step: it is read when all is over."""
    function = vars(module).get("backward")
    if not isinstance(function, FunctionType):
        return

    @wraps(function)
    def backward(tensors: "Any", *args: "Any", **keywords: "Any") -> "Any":
        if hasattr(tensors, "detach") and tensors.numel() == 1:
            try:
                _trial.loss = tensors.detach().clone()
            except Exception:
                _trial.loss = None
        return function(tensors, *args, **keywords)

    module.backward = ours(backward)


def keras_losses(module: "Any") -> None:
    """Keep the running mean that ``fit`` shows after each batch."""
    cls = module.CallbackList
    function = vars(cls).get("on_train_batch_end")
    if not isinstance(function, FunctionType):
        return

    @wraps(function)
    def on_train_batch_end(
        self: "Any", batch: "Any", logs: "Any" = None, *args: "Any", **keywords: "Any"
    ) -> "Any":
        if isinstance(logs, dict):
            _trial.loss = logs.get("loss")
        return function(self, batch, logs, *args, **keywords)

    # Not marked as ours, or the hook that marks steps would leave it alone.
    cls.on_train_batch_end = on_train_batch_end


def event_files(module: "Any") -> None:
    """Have TensorBoard's files written into the folder of the trial, which is removed."""
    if not asked.get("keep"):
        change_call(module.EventFileWriter, "__init__", _elsewhere)


def tf_summaries(module: "Any") -> None:
    """Do so with the files that TensorFlow writes."""
    if not asked.get("keep"):
        change_call(module, "create_file_writer_v2", _elsewhere)


def _elsewhere(present: "Callable[[str], Any]") -> "dict[str, tuple[str, Any]]":
    return {"logdir": ("", os.path.join(asked["folder"], "tensorboard"))}
