"""MXNet (tried with 1.9 and 2.0b1): steps of Gluon's Trainer and of Module, and waits for batches.

Each step and each wait costs about 1 µs.
"""

from typing import Any

from ..steps import OPTIMIZER
from ..wrappers import classes, defined, iterators, marks_steps, timed_generator


def data_loaders(module: Any) -> None:
    """Time the loader's iterator, which is a generator or one of the classes."""
    iterators(module)
    for cls in classes(module):
        function = defined(cls, "__iter__")
        if function is not None and cls.__name__.startswith("DataLoader"):
            cls.__iter__ = timed_generator(function, f"{module.__name__}.{cls.__name__}")


PATCHES = [
    ("mxnet.gluon.data.dataloader", data_loaders),
    # A program that changes summed gradients calls the second instead of the first.
    *(
        (
            "mxnet.gluon.trainer",
            marks_steps("Trainer", method, f"mxnet.gluon.Trainer.{method}", OPTIMIZER),
        )
        for method in ("step", "update")
    ),
    ("mxnet.io.io", iterators),
    # ``Module.fit`` calls it after each batch.
    ("mxnet.module.module", marks_steps("Module", "update", "mxnet.mod.Module.update", OPTIMIZER)),
]
