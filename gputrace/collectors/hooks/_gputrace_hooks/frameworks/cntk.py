"""CNTK (tried with 2.7): steps of loops of the user's own, and waits for its sources.

Steps of its ``TrainingSession`` run in C++ and are not seen. Each step and wait costs about 1 µs.
"""

from typing import Any

from ..steps import OPTIMIZER
from ..wrappers import call_after, marks_steps, timed, wrap


def sources(module: Any) -> None:
    """Time CNTK's own source, and each class of those that are written in Python."""

    def time_source(cls: Any) -> None:
        wrap(cls, "next_minibatch", lambda get: timed(get, f"{cls.__module__}.{cls.__name__}"))

    time_source(module.MinibatchSource)
    call_after(module.UserMinibatchSource, "__init__", lambda self: time_source(type(self)))


PATCHES = [
    ("cntk.io", sources),
    (
        "cntk.train.trainer",
        marks_steps("Trainer", "train_minibatch", "cntk.Trainer.train_minibatch", OPTIMIZER),
    ),
]
