"""torch.compile (from PyTorch 2.0 on): compilations, with the reasons for compiling again.

Each costs some µs, and nothing is recorded where nothing is compiled. What Inductor has Triton
compile is a part of it, and said where it is; ``triton`` has the rest.
"""

from typing import Any

from ..host_file import time_ns
from ..recorder import note_ours, note_source, thread_id
from ..wrappers import around, call_after, compiling, keep_compilation
from .torch_modules import modules

_begun: "dict[int, int]" = {}
"""When threads began to compile something else, such as a backward pass at its first run."""


def frames(module: Any) -> None:
    """Time the compiling of functions, and of the rest of one after a graph break."""

    @around(module, "_compile")
    def compiled(original: Any, code: Any, *args: Any, **keywords: Any) -> Any:
        # Compiled code would hold what times the calls of modules.
        modules.end()
        thread, start = thread_id(), time_ns()
        if thread in compiling:
            return original(code, *args, **keywords)
        reasons = compiling[thread] = []
        try:
            return original(code, *args, **keywords)
        finally:
            compiling.pop(thread, None)
            keep_compilation(start, _name_of(code), reasons)

    # Up to 2.5 it gave one reason.
    for name in (
        "get_and_maybe_log_recompilation_reasons",
        "get_and_maybe_log_recompilation_reason",
    ):

        @around(module, name)
        def collected(original: Any, *args: Any, **keywords: Any) -> Any:
            reasons = original(*args, **keywords)
            said = compiling.get(thread_id())
            if said is not None and reasons:
                said.extend([reasons] if isinstance(reasons, str) else reasons)
            return reasons


def _name_of(code: Any) -> str:
    _, packaged, path = code.co_filename.rpartition("/site-packages/")
    if packaged and path == "torch/_dynamo/external_utils.py":
        return "a module"
    return f"{code.co_name} ({path or code.co_filename}:{code.co_firstlineno})"


def callbacks(module: Any) -> None:
    """Time what torch.compile leaves for later: backward passes, graphs that it captures."""
    cls = module.CompilationCallbackHandler

    @around(cls, "run_start_callbacks")
    def begin(original: Any, self: Any, *args: Any) -> Any:
        if thread_id() not in compiling:
            _begun[thread_id()] = time_ns()
        return original(self, *args)

    @around(cls, "run_end_callbacks")
    def end(original: Any, self: Any, *args: Any) -> Any:
        start = _begun.pop(thread_id(), 0)
        if start:
            trigger = getattr(args[0], "callback_trigger", None) if args else None
            name = getattr(trigger, "name", "")
            keep_compilation(start, name.lower().replace("_", " ") or "a graph", [])
        return original(self, *args)


def inductor_kernels(module: Any) -> None:
    """Record where Inductor has written the Triton kernels that this process launches."""
    call_after(module.CachingAutotuner, "precompile", _is_loaded)


def _is_loaded(kernel: Any) -> None:
    try:
        # In processes that only compile there are none.
        if kernel.launchers and kernel.filename:
            name = kernel.fn.__name__
            line = getattr(kernel.fn, "starting_line_number", 0)
            note_source(name, kernel.filename, line, name)
    except Exception:
        note_ours("naming a kernel's source")


PATCHES = [
    ("torch._dynamo.callback", callbacks),
    ("torch._dynamo.convert_frame", frames),
    ("torch._inductor.runtime.triton_heuristics", inductor_kernels),
]
