"""TensorFlow, Keras, tensorpack, JAX, MXNet, Chainer, ChainerMN, CNTK, and loaders that are no
framework's: DALI, Grain, torchdata's nodes.

What a tf.function does is seen once, when its graph is made. A graph in which an optimizer works
makes each call of its function a step; one that takes its batch itself hides the wait for it.
"""

import sys
from functools import partial, wraps
from types import FunctionType

from . import loader
from .recorder import note_failure, note_ours, word
from .steps import LOOP, OPTIMIZER, step_ended, weak
from .wrappers import (
    after,
    call_after,
    classes,
    defined,
    hides_waits,
    iterator,
    iterators,
    makes_way,
    marks_step,
    ours,
    timed,
    timed_generator,
    wrap,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


_STEPS = {
    # For loops of the user's own.
    "chainer.optimizer": [("GradientMethod", "update", "chainer.GradientMethod.update", OPTIMIZER)],
    "chainer.training.updaters.standard_updater": [
        ("StandardUpdater", "update", "chainer.training.StandardUpdater", LOOP)
    ],
    # Each leads one of Chainer's, which it leaves alone when it sends the first parameters.
    "chainermn.optimizers": [
        (cls, "update", "chainermn.MultiNodeOptimizer.update", OPTIMIZER)
        for cls in ("_MultiNodeOptimizer", "_DoubleBufferingOptimizer")
    ],
    # For loops of the user's own; those of ``TrainingSession`` run in C++.
    "cntk.train.trainer": [
        ("Trainer", "train_minibatch", "cntk.Trainer.train_minibatch", OPTIMIZER)
    ],
    # DeepSpeed may step its optimizer several times for one step of the model.
    "deepspeed.runtime.engine": [
        ("DeepSpeedEngine", "_take_model_step", "deepspeed.DeepSpeedEngine.step", LOOP)
    ],
    # Who changes gradients that are summed calls the second instead of the first.
    "mxnet.gluon.trainer": [
        ("Trainer", method, "mxnet.gluon.Trainer." + method, OPTIMIZER)
        for method in ("step", "update")
    ],
    # ``Module.fit`` calls it after each batch.
    "mxnet.module.module": [("Module", "update", "mxnet.mod.Module.update", OPTIMIZER)],
}
"""Class, method, name and rank of calls that are steps, by module."""


def keras_callbacks(module: "ModuleType") -> None:
    """``fit`` of every backend calls these after each batch."""
    marks_step(module, "CallbackList", "on_train_batch_end", "keras.Model.fit", LOOP)


def keras_epoch_iterator(module: "Any") -> None:
    """Time each batch of ``fit``, except with TensorFlow, which gets it inside a graph."""
    iterators(module)
    function = defined(module.EpochIterator, "enumerate_epoch")
    if function is not None and "__next__" not in vars(module.EpochIterator):
        name = f"{module.__name__}.EpochIterator"
        module.EpochIterator.enumerate_epoch = timed_generator(function, name)


def keras_jax_trainer(module: "Any") -> None:
    """``fit`` with JAX gets a batch within each step, from what this returns."""
    name = f"{module.__name__}.JAXEpochIterator"
    wrap(module.JAXEpochIterator, "_get_iterator", lambda get: timed_generator(get, name))


def tensorflow_profiler(module: "ModuleType") -> None:
    """Make way for TensorFlow's profiler, which uses CUPTI."""
    makes_way(module, "start", "stop", "TensorFlow's profiler", lets_go=True)


def tensorpack_callbacks(module: "Any") -> None:
    """Count calls of callbacks, after each step, as steps; one may raise to end the training."""
    function = defined(module.Callbacks, "trigger_step")
    if function is None:
        return
    what = word("tensorpack.Trainer.run_step")

    @wraps(function)
    def trigger_step(self: "Any") -> "Any":
        step_ended(what, LOOP, trigger_step)
        return function(self)

    module.Callbacks.trigger_step = ours(trigger_step)


def tensorpack_input(module: "Any") -> None:
    """Time feeds of a step; one may come from a queue inside the graph, which a thread fills."""
    cls = module.FeedInput._FeedCallback
    feeds, fills = defined(cls, "_before_run"), defined(module.EnqueueThread, "run")
    if feeds is None or fills is None:
        return
    cls._before_run = timed(feeds, f"{module.__name__}.FeedInput")

    @wraps(fills)
    def run(self: "Any") -> "Any":
        hides_waits(module.__name__, "tensorpack takes the batches inside TensorFlow's graph")
        return fills(self)

    module.EnqueueThread.run = ours(run)


def jax_profiler(module: "Any") -> None:
    """Make way for JAX's profiler, which uses CUPTI; its step annotations are steps."""
    makes_way(module, "start_trace", "stop_trace", "JAX's profiler", lets_go=True)
    annotation = getattr(module, "StepTraceAnnotation", None)
    if annotation is not None:
        what = word("jax.profiler.StepTraceAnnotation")
        leave = annotation.__exit__
        annotation.__exit__ = after(leave, lambda self: step_ended(what, LOOP, annotation))


def _describes(cls: "Any", settings_of: "Callable[[Any], list[tuple[str, str, int]]]") -> None:
    """Record the settings of a pipeline when an iterator of a class begins."""
    library = _LIBRARIES[cls.__module__.partition(".")[0]]
    call_after(cls, "__init__", lambda self: _describe(self, library, settings_of))


_LIBRARIES = {
    "grain": "Grain",
    "nvidia": "DALI",
    "tensorflow": "tf.data",
    "torchdata": "torchdata.nodes",
}


def _describe(
    iterator: "Any", library: str, settings_of: "Callable[[Any], list[tuple[str, str, int]]]"
) -> None:
    try:
        vars(iterator)["_of_gputrace"] = loader.describe(library, settings_of(iterator))
    except Exception:
        note_ours(f"looking at the settings of {library}")


def grain_data_loader(module: "Any") -> None:
    """Time the iterator that programs see; others run within it, or in its workers."""
    iterator(module.DataLoaderIterator)
    _describes(module.DataLoaderIterator, _of_grain)


def _of_grain(iterator: "Any") -> "list[tuple[str, str, int]]":
    processes = iterator._data_loader._multiprocessing_options
    reads = iterator._data_loader._read_options
    return [
        ("the loader", "worker_count", int(processes.num_workers)),
        ("the loader", "worker_buffer_size", int(processes.per_worker_buffer_size)),
        ("ReadOptions", "num_threads", int(reads.num_threads)),
        ("ReadOptions", "prefetch_buffer_size", int(reads.prefetch_buffer_size)),
    ]


def torchdata_loader(module: "Any") -> None:
    """Time the last of a chain of nodes, and look how many items its queue has; earlier ones run
    within it, or in its threads.
    """
    cls = module.LoaderIterator
    _describes(cls, _of_nodes)
    function = defined(cls, "next")
    if function is not None:

        @wraps(function)
        def following(self: "Any") -> "Any":
            _tell_ready(self)
            return function(self)

        cls.next = ours(following)
    iterator(cls)


def _tell_ready(iterator: "Any") -> None:
    """Record how many items the queue has from which a chain's last node takes them.

    Without threads there is none; a node of the program's may call anything so.
    """
    number = iterator.__dict__.get("_of_gputrace")
    node = iterator.__dict__.get("root") if number else None
    try:
        for _ in range(4):
            held = getattr(node, "__dict__", {})
            for name in ("_q", "_out_q"):
                count = getattr(held.get(name), "qsize", None)
                if count is not None:
                    loader.ready(number, int(count()))
                    return
            node = held.get("_it")
    except Exception:
        note_ours("looking at a queue of torchdata.nodes")
        iterator.__dict__["_of_gputrace"] = 0


def _of_nodes(iterator: "Any") -> "list[tuple[str, str, int]]":
    settings, node = [], iterator.root
    for _ in range(_MOST_STAGES):
        held, kind = getattr(node, "__dict__", {}), type(node).__name__
        if "num_workers" in held:
            stage = f"{kind} {_name_of(held.get('map_fn'))} ({held.get('method')})"
            settings.append((stage, "num_workers", int(held["num_workers"])))
        if "prefetch_factor" in held:
            settings.append((kind, "prefetch_factor", int(held["prefetch_factor"])))
        node = held.get("source")
    return settings


def _name_of(function: "Any") -> str:
    function = getattr(function, "map_fn", function)
    return str(getattr(function, "__name__", type(function).__name__))


def dali_iterators(module: "Any") -> None:
    """Time DALI's iterators for a framework; the pipelines behind them run in threads of C++."""
    iterators(module)
    for cls in classes(module):
        if "__next__" in vars(cls):
            _describes(cls, _of_dali)


def _of_dali(iterator: "Any") -> "list[tuple[str, str, int]]":
    pipeline = iterator._pipes[0]
    depth = pipeline.prefetch_queue_depth
    depth = min(depth.values()) if isinstance(depth, dict) else depth
    settings = [
        ("the pipeline", "num_threads", int(pipeline.num_threads)),
        ("the pipeline", "prefetch_queue_depth", int(depth)),
    ]
    sources = pipeline._py_callback_pool if hasattr(pipeline, "_py_callback_pool") else None
    if sources is not None or getattr(pipeline, "_parallel_input_callbacks", None):
        settings.append(("external_source", "py_num_workers", int(pipeline.py_num_workers)))
    return settings


def mxnet_dataloader(module: "Any") -> None:
    """Time the loader's iterator, which is a generator or one of the classes."""
    iterators(module)
    for cls in classes(module):
        function = defined(cls, "__iter__")
        if function is not None and cls.__name__.startswith("DataLoader"):
            cls.__iter__ = timed_generator(function, f"{module.__name__}.{cls.__name__}")


def chainer_nccl_worker(module: "Any") -> None:
    """Count steps of the processes of MultiprocessParallelUpdater that have no updater."""
    what = word("chainer.training.MultiprocessParallelUpdater")
    call_after(module, "scatter_params", lambda link: step_ended(what, LOOP, module))


def marked_steps(module: "ModuleType") -> None:
    """Mark the steps that `_STEPS` has for the module."""
    for step in _STEPS[module.__name__]:
        marks_step(module, *step)


def cntk_sources(module: "Any") -> None:
    """Time CNTK's own source, and each class of those that are written in Python."""
    _times_source(module.MinibatchSource)
    call_after(module.UserMinibatchSource, "__init__", lambda self: _times_source(type(self)))


def _times_source(cls: "Any") -> None:
    wrap(cls, "next_minibatch", lambda get: timed(get, f"{cls.__module__}.{cls.__name__}"))


_called = word("tf.function")
_applied = word("tf.keras.optimizers.Optimizer")


def tensorflow_iterators(module: "ModuleType") -> None:
    """Time the methods that programs call to get a batch."""
    for cls in classes(module):
        wrapped = partial(_outside_graphs, name=f"{module.__name__}.{cls.__name__}")
        for method in ("__next__", "get_next", "get_next_as_optional"):
            wrap(cls, method, wrapped)
    call_after(getattr(module, "OwnedIterator", None), "_create_iterator", _describe_if_eager)


def _describe_if_eager(iterator: "Any") -> None:
    # In a graph, settings have no values yet.
    if _is_eager():
        _describe(iterator, "tf.data", _of_tensorflow)


_MOST_STAGES = 64


def _of_tensorflow(iterator: "Any") -> "list[tuple[str, str, int]]":
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
                depth = loader.AUTOMATIC if prefetches else 0
                settings.append(("prefetch", "buffer_size", depth))
            is_last = False
        if kind in ("Map", "ParallelMap", "Interleave", "ParallelInterleave"):
            calls = getattr(stage, "_num_parallel_calls", None)
            if calls is not None:
                count = _value(calls)
            else:
                finds = tunes and kind == "Map" and not _has_state(stage._map_func.function)
                count = loader.AUTOMATIC if finds else 1
            name = f"{kind.replace('Parallel', '').lower()} {_name_of(stage._map_func._func)}"
            settings.append((name, "num_parallel_calls", count))
    return settings


def _value(tensor: "Any") -> int:
    value = int(tensor.numpy())
    return loader.AUTOMATIC if value < 0 else value


def _has_state(function: "Any") -> bool:
    definitions = (operation.op_def for operation in function.graph.get_operations())
    return any(definition is not None and definition.is_stateful for definition in definitions)


def _outside_graphs(function: "Callable[..., Any]", name: str) -> "Callable[..., Any]":
    wait = timed(function, name)

    @wraps(function)
    def get(*args: "Any", **keywords: "Any") -> "Any":
        if _is_eager():
            return wait(*args, **keywords)
        _mark("_gputrace_takes", True)
        return function(*args, **keywords)

    return ours(get)  # type: ignore[no-any-return]


def tensorflow_optimizers(module: "ModuleType") -> None:
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


def tensorflow_functions(module: "ModuleType") -> None:
    """Count calls of graphs, from a tf.function or directly."""
    call_after(getattr(module, "ConcreteFunction", None), "_call_flat", _ran)


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
