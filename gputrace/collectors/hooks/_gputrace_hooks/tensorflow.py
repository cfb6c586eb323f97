"""TensorFlow: calls of functions that train, and waits for batches outside of graphs.

What a tf.function does is seen once, when its graph is made. A graph in which an optimizer works
makes each call of its function a step; one that takes its batch itself hides the wait for it.
"""

import sys
from functools import wraps
from types import FunctionType

from .recorder import note_failure, word
from .steps import OPTIMIZER, step_ended, weak
from .wrappers import after, classes, defined, hides_waits, ours, timed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_called = word("tf.function")
_applied = word("tf.keras.optimizers.Optimizer")


def iterators(module: "ModuleType") -> None:
    """Time the methods that programs call to get a batch."""
    for cls in classes(module):
        for method in ("__next__", "get_next", "get_next_as_optional"):
            function = defined(cls, method)
            if function is not None:
                name = f"{module.__name__}.{cls.__name__}"
                setattr(cls, method, _outside_graphs(function, name))


def _outside_graphs(function: "Callable[..., Any]", name: str) -> "Callable[..., Any]":
    wait = timed(function, name)

    @wraps(function)
    def get(*args: "Any", **keywords: "Any") -> "Any":
        if _is_eager():
            return wait(*args, **keywords)
        _mark("_gputrace_takes", True)
        return function(*args, **keywords)

    return ours(get)  # type: ignore[no-any-return]


def optimizers(module: "ModuleType") -> None:
    """Hook the optimizers of Keras 3, Keras 2, and the one before."""
    for name, method in (
        ("TFOptimizer", "apply"),
        ("_BaseOptimizer", "apply_gradients"),
        ("OptimizerV2", "apply_gradients"),
    ):
        cls = getattr(module, name, None)
        function = getattr(cls, method, None)
        if isinstance(function, FunctionType) and not hasattr(function, "_of_gputrace"):
            setattr(cls, method, after(function, _optimized))


def _optimized(optimizer: object) -> None:
    if _is_eager():
        step_ended(_applied, OPTIMIZER, optimizer)
    else:
        _mark("_gputrace_trains", weak(optimizer))


def functions(module: "ModuleType") -> None:
    """Count calls of graphs, from a tf.function or directly."""
    cls: Any = getattr(module, "ConcreteFunction", None)
    function = defined(cls, "_call_flat") if cls else None
    if function is not None:
        cls._call_flat = after(function, _ran)


def _ran(function: "Any") -> None:
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
