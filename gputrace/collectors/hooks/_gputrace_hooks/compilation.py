"""Compilations: torch.compile's, with the reasons that it has for compiling again; and those of
JAX, Triton and tf.function.
"""

from functools import wraps

from . import steps
from .host_file import is_handlers, time_ns
from .recorder import COMPILATION, note_ours, record, thread_id, word
from .wrappers import defined, ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LONGEST = 160
_JAX = "/jax/core/compile/"
_running: "dict[int, list[str]]" = {}
"""By thread that compiles a function, the reasons that were found for it."""
_begun: "dict[int, int]" = {}
"""When threads began to compile something else, such as a backward pass at its first run."""


def dynamo_frames(module: "Any") -> None:
    """Time the compiling of functions, and of the rest of one after a graph break."""
    from .modules import modules

    compile_frame = defined(module, "_compile")
    if compile_frame is None:
        return

    @wraps(compile_frame)
    def frame(code: "Any", *args: "Any", **keywords: "Any") -> "Any":
        # Compiled code would hold what times the calls of modules.
        modules.end()
        thread, start = thread_id(), time_ns()
        if thread in _running:
            return compile_frame(code, *args, **keywords)
        reasons = _running[thread] = []
        try:
            return compile_frame(code, *args, **keywords)
        finally:
            _running.pop(thread, None)
            _keep(start, _name_of(code), reasons)

    module._compile = ours(frame)
    # Up to 2.5 it gave one reason.
    for name in (
        "get_and_maybe_log_recompilation_reasons",
        "get_and_maybe_log_recompilation_reason",
    ):
        find_reasons = vars(module).get(name)
        if find_reasons is not None:
            setattr(module, name, _listened(find_reasons))


def _listened(find_reasons: "Any") -> "Any":
    @wraps(find_reasons)
    def collected(*args: "Any", **keywords: "Any") -> "Any":
        reasons = find_reasons(*args, **keywords)
        said = _running.get(thread_id())
        if said is not None and reasons:
            said.extend([reasons] if isinstance(reasons, str) else reasons)
        return reasons

    return ours(collected)


def dynamo_callbacks(module: "Any") -> None:
    """Time what torch.compile leaves for later: backward passes, graphs that it captures."""
    cls = module.CompilationCallbackHandler
    begin, end = defined(cls, "run_start_callbacks"), defined(cls, "run_end_callbacks")
    if begin is None or end is None:
        return

    @wraps(begin)
    def run_start_callbacks(self: "Any", *args: "Any") -> "Any":
        if thread_id() not in _running:
            _begun[thread_id()] = time_ns()
        return begin(self, *args)

    @wraps(end)
    def run_end_callbacks(self: "Any", *args: "Any") -> "Any":
        start = _begun.pop(thread_id(), 0)
        if start:
            trigger = (
                getattr(getattr(args[0], "callback_trigger", None), "name", "") if args else ""
            )
            _keep(start, trigger.lower().replace("_", " ") or "a graph", [])
        return end(self, *args)

    cls.run_start_callbacks, cls.run_end_callbacks = (
        ours(run_start_callbacks),
        ours(run_end_callbacks),
    )


def jax_events(module: "Any") -> None:
    """JAX says how long each part of a compilation took: tracing, lowering, XLA."""
    said = defined(module, "record_event_duration_secs")
    if said is None:
        return

    @wraps(said)
    def record_event_duration_secs(event: str, duration: float, **more: "Any") -> "Any":
        if event.startswith(_JAX):
            now = time_ns()
            record(now - int(duration * 1e9), now, word(str(more.get("fun_name", ""))), COMPILATION)
        return said(event, duration, **more)

    module.record_event_duration_secs = ours(record_event_duration_secs)


def triton_compiler(module: "Any") -> None:
    """Time the compiling of kernels, in steps: Inductor has processes that do nothing else."""
    function = defined(module, "compile")
    if function is not None:
        module.compile = _timed(function, lambda source, *_: "Triton " + _name_of_kernel(source))


def _name_of_kernel(source: "Any") -> str:
    function = getattr(source, "fn", source)
    return str(getattr(function, "__name__", None) or getattr(source, "name", "kernel"))


def triton_autotuner(module: "Any") -> None:
    """Time the trial of each configuration of a kernel, with its compiling."""
    function = defined(module.Autotuner, "_bench")
    if function is not None:
        module.Autotuner._bench = _timed(
            function, lambda tuner, *_: "Triton's search for " + _name_of_kernel(tuner)
        )


def tf_tracing(module: "Any") -> None:
    """Time the making of a graph of a tf.function, in steps: one for each shape, type and number of
    Python's.
    """
    function = defined(module, "_create_concrete_function")
    if function is not None:
        module._create_concrete_function = _timed(
            function, lambda *given: f"tf.function {getattr(given[-1], 'name', '')}".strip()
        )


def _timed(function: "Any", name_of: "Any") -> "Any":
    """Record calls in steps, with a name from their first arguments, unless they are a part of
    another compilation.
    """

    @wraps(function)
    def compiled(*args: "Any", **keywords: "Any") -> "Any":
        thread, start = thread_id(), time_ns()
        if thread in _running or steps.recorded()[0] <= 0:
            return function(*args, **keywords)
        _running[thread] = []
        try:
            return function(*args, **keywords)
        finally:
            _running.pop(thread, None)
            _keep(start, _named(name_of, args), [])

    return ours(compiled)


def _named(name_of: "Any", args: "Any") -> str:
    try:
        return str(name_of(*args))
    except Exception as error:
        if is_handlers(error):
            raise
        return "a kernel"


def _name_of(code: "Any") -> str:
    _, packaged, path = code.co_filename.rpartition("/site-packages/")
    if packaged and path == "torch/_dynamo/external_utils.py":
        return "a module"
    return f"{code.co_name} ({path or code.co_filename}:{code.co_firstlineno})"


def _keep(start: int, name: str, reasons: "list[str]") -> None:
    """Keep a reason without the number before it, the code behind it, and the stack below."""
    try:
        if reasons:
            reason = reasons[0].splitlines()[0].partition("  #")[0]
            number, colon, rest = reason.partition(": ")
            name += ": " + (rest if colon and "/" in number else reason).strip()[:_LONGEST]
        record(start, time_ns(), word(name), COMPILATION)
    except Exception:
        note_ours("naming a compilation")
