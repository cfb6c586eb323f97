"""Loaders that belong to no framework: FFCV, Grain's DataLoader, DALI's iterators and the nodes of
torchdata (tried with Grain 0.2, DALI 2.4 and torchdata 0.11).

Waits for batches are recorded, at about 1 µs each, and once the settings of each stage, from which
the one that makes batches late follows. torchdata's StatefulDataLoader is in ``torch_data``.
"""

from typing import Any

from ..pipelines import callable_name, describes, ready
from ..recorder import note_ours
from ..wrappers import around, classes, iterator, iterators

_MOST_STAGES = 64


def grain(module: Any) -> None:
    """Time the iterator that programs see; others run within it, or in its workers."""
    iterator(module.DataLoaderIterator)
    describes(module.DataLoaderIterator, "Grain", _of_grain)


def _of_grain(iterator: Any) -> "list[tuple[str, str, int]]":
    processes = iterator._data_loader._multiprocessing_options
    reads = iterator._data_loader._read_options
    return [
        ("the loader", "worker_count", int(processes.num_workers)),
        ("the loader", "worker_buffer_size", int(processes.per_worker_buffer_size)),
        ("ReadOptions", "num_threads", int(reads.num_threads)),
        ("ReadOptions", "prefetch_buffer_size", int(reads.prefetch_buffer_size)),
    ]


def nodes(module: Any) -> None:
    """Time the last of a chain of nodes, and look how many items its queue has; earlier ones run
    within it, or in its threads.
    """
    cls = module.LoaderIterator
    describes(cls, "torchdata.nodes", _of_nodes)

    @around(cls, "next")
    def following(original: Any, self: Any) -> Any:
        _record_ready(self)
        return original(self)

    iterator(cls)


def _record_ready(iterator: Any) -> None:
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
                    ready(number, int(count()))
                    return
            node = held.get("_it")
    except Exception:
        note_ours("looking at a queue of torchdata.nodes")
        iterator.__dict__["_of_gputrace"] = 0


def _of_nodes(iterator: Any) -> "list[tuple[str, str, int]]":
    settings, node = [], iterator.root
    for _ in range(_MOST_STAGES):
        held, kind = getattr(node, "__dict__", {}), type(node).__name__
        if "num_workers" in held:
            stage = f"{kind} {callable_name(held.get('map_fn'))} ({held.get('method')})"
            settings.append((stage, "num_workers", int(held["num_workers"])))
        if "prefetch_factor" in held:
            settings.append((kind, "prefetch_factor", int(held["prefetch_factor"])))
        node = held.get("source")
    return settings


def dali(module: Any) -> None:
    """Time DALI's iterators for a framework; the pipelines behind them run in threads of C++."""
    iterators(module)
    for cls in classes(module):
        if "__next__" in vars(cls):
            describes(cls, "DALI", _of_dali)


def _of_dali(iterator: Any) -> "list[tuple[str, str, int]]":
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


PATCHES = [
    ("ffcv.loader.epoch_iterator", iterators),
    ("grain._src.python.data_loader", grain),
    ("nvidia.dali.plugin.jax.iterator", dali),
    ("nvidia.dali.plugin.mxnet", dali),
    ("nvidia.dali.plugin.paddle", dali),
    ("nvidia.dali.plugin.pytorch", dali),
    ("torchdata.nodes.loader", nodes),
]
