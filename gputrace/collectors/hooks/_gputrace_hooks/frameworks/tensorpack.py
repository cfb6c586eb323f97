"""tensorpack (tried with 0.11): steps of its trainers, and the waits of those that are fed.

Each step and each wait costs about 1 µs. A batch that comes from a queue inside TensorFlow's graph
is waited for where no hook sees it; that is noted.
"""

from functools import wraps
from typing import Any

from ..recorder import word
from ..steps import LOOP, step_ended
from ..wrappers import defined, hides_waits, ours, timed, wrap


def callbacks(module: Any) -> None:
    """Count calls of callbacks, after each step, as steps; one may raise to end the training."""
    what = word("tensorpack.Trainer.run_step")

    def counted(function: Any) -> Any:
        @wraps(function)
        def trigger_step(self: Any) -> Any:
            step_ended(what, LOOP, trigger_step)
            return function(self)

        return ours(trigger_step)

    wrap(module.Callbacks, "trigger_step", counted)


def inputs(module: Any) -> None:
    """Time feeds of a step; one may come from a queue inside the graph, which a thread fills."""
    cls = module.FeedInput._FeedCallback
    feeds, fills = defined(cls, "_before_run"), defined(module.EnqueueThread, "run")
    if feeds is None or fills is None:
        return
    cls._before_run = timed(feeds, f"{module.__name__}.FeedInput")

    @wraps(fills)
    def run(self: Any) -> Any:
        hides_waits(module.__name__, "tensorpack takes the batches inside TensorFlow's graph")
        return fills(self)

    module.EnqueueThread.run = ours(run)


PATCHES = [
    ("tensorpack.callbacks.group", callbacks),
    ("tensorpack.input_source.input_source", inputs),
]
