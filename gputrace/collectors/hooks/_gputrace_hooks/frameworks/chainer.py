"""Chainer and ChainerMN (tried with 7.8): steps, and waits for batches of its iterators.

Each step and each wait costs about 1 µs.
"""

from typing import Any

from ..recorder import word
from ..steps import LOOP, OPTIMIZER, step_ended
from ..wrappers import call_after, iterators, marks_steps


def parallel_workers(module: Any) -> None:
    """Count steps of the processes of MultiprocessParallelUpdater that have no updater."""
    what = word("chainer.training.MultiprocessParallelUpdater")
    call_after(module, "scatter_params", lambda link: step_ended(what, LOOP, module))


PATCHES = [
    ("chainer.iterators.dali_iterator", iterators),
    ("chainer.iterators.multiprocess_iterator", iterators),
    ("chainer.iterators.multithread_iterator", iterators),
    ("chainer.iterators.serial_iterator", iterators),
    # For loops of the user's own.
    (
        "chainer.optimizer",
        marks_steps("GradientMethod", "update", "chainer.GradientMethod.update", OPTIMIZER),
    ),
    (
        "chainer.training.updaters.standard_updater",
        marks_steps("StandardUpdater", "update", "chainer.training.StandardUpdater", LOOP),
    ),
    ("chainer.training.updaters.multiprocess_parallel_updater", parallel_workers),
    # Each leads one of Chainer's, which it leaves alone when it sends the first parameters.
    *(
        (
            "chainermn.optimizers",
            marks_steps(cls, "update", "chainermn.MultiNodeOptimizer.update", OPTIMIZER),
        )
        for cls in ("_MultiNodeOptimizer", "_DoubleBufferingOptimizer")
    ),
]
