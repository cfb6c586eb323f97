"""TensorFlow (tried with 2.15 and 2.21): steps of its functions, waits and settings of tf.data.

What a tf.function does is seen once, when its graph is made. A graph in which an optimizer works
makes each call of its function a step; one that takes its batch itself hides the wait for it. A
step or a wait costs about 1 µs. Compilations are timed in steps; the collector makes way for
TensorFlow's profiler. ``fit`` and the optimizers are Keras' (``keras``).
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import Any

from ..pipelines import AUTOMATIC, callable_name, describe
from ..recorder import note_failure, word
from ..steps import OPTIMIZER, step_ended, weak
from ..wrappers import (
    after,
    call_after,
    classes,
    hides_waits,
    makes_way,
    ours,
    timed,
    times_compilations,
    wrap,
)

_called = word("tf.function")
_applied = word("tf.keras.optimizers.Optimizer")


def iterators(module: ModuleType) -> None:
    """Time the methods that programs call to get a batch."""
    for cls in classes(module):
        wrapped = partial(_outside_graphs, name=f"{module.__name__}.{cls.__name__}")
        for method in ("__next__", "get_next", "get_next_as_optional"):
            wrap(cls, method, wrapped)

    def begins(iterator: Any) -> None:
        # In a graph, settings have no values yet.
        if _is_eager():
            describe(iterator, "tf.data", _settings)

    call_after(getattr(module, "OwnedIterator", None), "_create_iterator", begins)


_MOST_STAGES = 64


def _settings(iterator: Any) -> "list[tuple[str, str, int]]":
    """Return what runs how often at a time, the last first.

    TensorFlow parallelizes maps without state by itself, and prefetches the last, unless told not
    to (``tf.data.Options``).
    """
    options = iterator._dataset.options()
    changes = options.experimental_optimization
    is_tuned = getattr(getattr(options, "autotune", None), "enabled", None) is not False
    tunes = is_tuned and getattr(changes, "map_parallelization", False) is not False
    prefetches = is_tuned and getattr(changes, "inject_prefetch", False) is not False
    settings: list[tuple[str, str, int]] = []
    stages = [iterator._dataset]
    is_last = True
    for _ in range(_MOST_STAGES):
        if not stages:
            break
        stage = stages.pop()
        stages.extend(stage._inputs())
        kind = type(stage).__name__.strip("_").replace("Dataset", "")
        if kind == "Prefetch":
            settings.append(("prefetch", "buffer_size", _value(stage._buffer_size)))
            is_last = False
        elif kind in ("Map", "ParallelMap", "Interleave", "ParallelInterleave", "Batch"):
            if is_last:
                depth = AUTOMATIC if prefetches else 0
                settings.append(("prefetch", "buffer_size", depth))
            is_last = False
        if kind in ("Map", "ParallelMap", "Interleave", "ParallelInterleave"):
            calls = getattr(stage, "_num_parallel_calls", None)
            if calls is not None:
                count = _value(calls)
            else:
                operations = stage._map_func.function.graph.get_operations()
                definitions = [each.op_def for each in operations if each.op_def is not None]
                has_state = any(definition.is_stateful for definition in definitions)
                count = AUTOMATIC if tunes and kind == "Map" and not has_state else 1
            name = f"{kind.replace('Parallel', '').lower()} {callable_name(stage._map_func._func)}"
            settings.append((name, "num_parallel_calls", count))
    return settings


def _value(tensor: Any) -> int:
    value = int(tensor.numpy())
    return AUTOMATIC if value < 0 else value


def _outside_graphs(function: "Callable[..., Any]", name: str) -> "Callable[..., Any]":
    wait = timed(function, name)

    @wraps(function)
    def get(*args: Any, **keywords: Any) -> Any:
        if _is_eager():
            return wait(*args, **keywords)
        _mark("_gputrace_takes", True)
        return function(*args, **keywords)

    return ours(get)  # type: ignore[no-any-return]


def optimizers(module: ModuleType) -> None:
    """Hook the optimizers of Keras 3, Keras 2, and the one before."""
    for name, method in (
        ("TFOptimizer", "apply"),
        ("_BaseOptimizer", "apply_gradients"),
        ("OptimizerV2", "apply_gradients"),
    ):
        cls = getattr(module, name, None)
        # Keras 3 inherits it.
        function = getattr(cls, method, None)
        if isinstance(function, FunctionType) and not hasattr(function, "_of_gputrace"):
            setattr(cls, method, after(function, _optimized))


def _optimized(optimizer: object) -> None:
    if _is_eager():
        step_ended(_applied, OPTIMIZER, optimizer)
    else:
        _mark("_gputrace_trains", weak(optimizer))


def functions(module: ModuleType) -> None:
    """Count calls of graphs, from a tf.function or directly."""
    call_after(getattr(module, "ConcreteFunction", None), "_call_flat", _ran)


def _ran(function: Any) -> None:
    graph = getattr(function, "graph", None)
    trains = getattr(graph, "_gputrace_trains", None)
    # Within another graph being made, it only becomes a part of that.
    if trains is None or not _is_eager():
        return
    if getattr(graph, "_gputrace_takes", False):
        hides_waits("tf.function", "TensorFlow takes the batches inside its graph")
    step_ended(_called, OPTIMIZER, trains() or _ran)


def _is_eager() -> bool:
    return sys.modules["tensorflow.python.eager.context"].executing_eagerly()  # type: ignore[no-any-return]


def _mark(name: str, value: object) -> None:
    """Mark the graph being made and those it becomes a part of.

    None on one that has it in a loop: how often that comes round is not known.
    """
    try:
        graph: Any = sys.modules["tensorflow.python.framework.ops"].get_default_graph()
        while getattr(graph, "building_function", False):
            if type(graph).__name__ == "WhileBodyFuncGraph":
                return
            if not hasattr(graph, name):
                setattr(graph, name, value)
            graph = getattr(graph, "outer_graph", None)
    except Exception:
        note_failure("looking at TensorFlow's graph")


def profiler(module: ModuleType) -> None:
    """Make way for TensorFlow's profiler, which uses CUPTI."""
    makes_way(module, "start", "stop", "TensorFlow's profiler", lets_go=True)


def compilations(module: Any) -> None:
    """Time the making of a graph of a tf.function, in steps: one for each shape, type and number of
    Python's.
    """
    times_compilations(
        module,
        "_create_concrete_function",
        lambda *given: f"tf.function {getattr(given[-1], 'name', '')}".strip(),
    )


PATCHES = [
    ("tensorflow.python.data.ops.iterator_ops", iterators),
    ("tensorflow.python.distribute.input_lib", iterators),
    ("tensorflow.python.eager.polymorphic_function.concrete_function", functions),
    ("tensorflow.python.eager.polymorphic_function.tracing_compilation", compilations),
    ("tensorflow.python.profiler.profiler_v2", profiler),
]
