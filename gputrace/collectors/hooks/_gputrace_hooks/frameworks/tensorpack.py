"""tensorpack (tried with 0.11): steps of its trainers, and the waits of those that are fed.

Each step and each wait costs about 1 µs. A batch that comes from a queue inside TensorFlow's graph
is waited for where no hook sees it; that is noted.
"""

from typing import Any

from ..recorder import word
from ..steps import LOOP, step_ended
from ..wrappers import around, hides_waits, timed, wrap


def callbacks(module: Any) -> None:
    """Count calls of callbacks, after each step, as steps; one may raise to end the training."""
    what = word("tensorpack.Trainer.run_step")

    @around(module.Callbacks, "trigger_step")
    def trigger_step(original: Any, self: Any) -> Any:
        step_ended(what, LOOP, callbacks)
        return original(self)


def inputs(module: Any) -> None:
    """Time feeds of a step; one may come from a queue inside the graph, which a thread fills."""
    name = f"{module.__name__}.FeedInput"
    wrap(module.FeedInput._FeedCallback, "_before_run", lambda feed: timed(feed, name))

    @around(module.EnqueueThread, "run")
    def run(original: Any, self: Any) -> Any:
        hides_waits(module.__name__, "tensorpack takes the batches inside TensorFlow's graph")
        return original(self)


PATCHES = [
    ("tensorpack.callbacks.group", callbacks),
    ("tensorpack.input_source.input_source", inputs),
]
