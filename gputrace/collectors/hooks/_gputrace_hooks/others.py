"""Keras, TensorFlow, JAX, MXNet, Chainer."""

from .recorder import word
from .steps import LOOP, OPTIMIZER, step_ended
from .wrappers import (
    after,
    classes,
    iterator,
    iterators,
    makes_way,
    marks_step,
    own,
    timed_generator,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def keras_callbacks(module: "ModuleType") -> None:
    """``fit`` of every backend calls these after each batch."""
    marks_step(module, "CallbackList", "on_train_batch_end", "keras.Model.fit", LOOP)


def keras_epoch_iterator(module: "Any") -> None:
    """Gets each batch of ``fit``, but with TensorFlow, which does so inside a graph."""
    iterators(module)
    function = own(module.EpochIterator, "enumerate_epoch")
    if function is not None and "__next__" not in vars(module.EpochIterator):
        name = f"{module.__name__}.EpochIterator"
        module.EpochIterator.enumerate_epoch = timed_generator(function, name)


def tensorflow_profiler(module: "ModuleType") -> None:
    """It uses CUPTI, as torch's does."""
    makes_way(module, "start", "stop", "TensorFlow's profiler")


def jax_profiler(module: "Any") -> None:
    """It uses CUPTI too; and its step annotations, where the program has some, are steps."""
    makes_way(module, "start_trace", "stop_trace", "JAX's profiler")
    annotation = getattr(module, "StepTraceAnnotation", None)
    if annotation is not None:
        what = word("jax.profiler.StepTraceAnnotation")
        leave = annotation.__exit__
        annotation.__exit__ = after(leave, lambda self: step_ended(what, LOOP, annotation))


def grain_data_loader(module: "Any") -> None:
    """The one that programs see; the others run within it, or in its workers."""
    iterator(module.DataLoaderIterator)


def mxnet_dataloader(module: "Any") -> None:
    """Its loader's iterator is a generator, or one of the classes."""
    iterators(module)
    for cls in classes(module):
        function = own(cls, "__iter__")
        if function is not None and cls.__name__.startswith("DataLoader"):
            cls.__iter__ = timed_generator(function, f"{module.__name__}.{cls.__name__}")


def mxnet_trainer(module: "ModuleType") -> None:
    """Gluon's."""
    marks_step(module, "Trainer", "step", "mxnet.gluon.Trainer.step", OPTIMIZER)


def mxnet_module(module: "ModuleType") -> None:
    """What ``Module.fit`` calls after each batch."""
    marks_step(module, "Module", "update", "mxnet.mod.Module.update", OPTIMIZER)


def chainer_optimizer(module: "ModuleType") -> None:
    """For loops of the user's own."""
    marks_step(module, "GradientMethod", "update", "chainer.GradientMethod.update", OPTIMIZER)


def chainer_updater(module: "ModuleType") -> None:
    """What Chainer's trainer calls."""
    marks_step(module, "StandardUpdater", "update", "chainer.training.StandardUpdater", LOOP)
