"""Keras, tensorpack, JAX, MXNet, Chainer, ChainerMN, CNTK."""

from functools import wraps

from .recorder import word
from .steps import LOOP, OPTIMIZER, step_ended
from .wrappers import (
    after,
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
)

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    cls = module.JAXEpochIterator
    function = defined(cls, "_get_iterator")
    if function is not None:
        cls._get_iterator = timed_generator(function, f"{module.__name__}.{cls.__name__}")


def tensorflow_profiler(module: "ModuleType") -> None:
    """Make way for TensorFlow's profiler, which uses CUPTI."""
    makes_way(module, "start", "stop", "TensorFlow's profiler")


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
    makes_way(module, "start_trace", "stop_trace", "JAX's profiler")
    annotation = getattr(module, "StepTraceAnnotation", None)
    if annotation is not None:
        what = word("jax.profiler.StepTraceAnnotation")
        leave = annotation.__exit__
        annotation.__exit__ = after(leave, lambda self: step_ended(what, LOOP, annotation))


def grain_data_loader(module: "Any") -> None:
    """Time the iterator that programs see; others run within it, or in its workers."""
    iterator(module.DataLoaderIterator)


def mxnet_dataloader(module: "Any") -> None:
    """Time the loader's iterator, which is a generator or one of the classes."""
    iterators(module)
    for cls in classes(module):
        function = defined(cls, "__iter__")
        if function is not None and cls.__name__.startswith("DataLoader"):
            cls.__iter__ = timed_generator(function, f"{module.__name__}.{cls.__name__}")


def chainer_nccl_worker(module: "Any") -> None:
    """Count steps of the processes of MultiprocessParallelUpdater that have no updater."""
    function = defined(module, "scatter_params")
    if function is not None:
        what = word("chainer.training.MultiprocessParallelUpdater")
        module.scatter_params = after(function, lambda link: step_ended(what, LOOP, module))


def marked_steps(module: "ModuleType") -> None:
    """Mark the steps that `_STEPS` has for the module."""
    for step in _STEPS[module.__name__]:
        marks_step(module, *step)


def cntk_sources(module: "Any") -> None:
    """Time CNTK's own source, and each class of those that are written in Python."""
    _times_source(module.MinibatchSource)
    function = defined(module.UserMinibatchSource, "__init__")
    if function is not None:
        begin = after(function, lambda self: _times_source(type(self)))
        module.UserMinibatchSource.__init__ = begin


def _times_source(cls: "Any") -> None:
    function = defined(cls, "next_minibatch")
    if function is not None:
        cls.next_minibatch = timed(function, f"{cls.__module__}.{cls.__name__}")
