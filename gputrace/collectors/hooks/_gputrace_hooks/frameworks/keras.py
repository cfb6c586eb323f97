"""Keras 2 and 3 (tried with 2.15 and 3.15), on TensorFlow, JAX and torch, and within TensorFlow.

Recorded are the steps of ``fit`` on every backend, and those of a loop of the user's own by its
optimizer; waits for the batches of ``fit``, except on TensorFlow, which takes them inside a graph;
on torch, the phase of an optimizer of Keras' own. A step or wait costs about 1 µs.
"""

from functools import wraps
from typing import Any

from ..steps import LOOP
from ..wrappers import defined, iterators, marks_steps, phases, timed_generator, wrap
from .tensorflow import optimizers


def epoch_iterator(module: Any) -> None:
    """Time each batch of ``fit``, except with TensorFlow, which gets it inside a graph."""
    iterators(module)
    if "__next__" not in vars(module.EpochIterator):
        name = f"{module.__name__}.EpochIterator"
        wrap(module.EpochIterator, "enumerate_epoch", lambda get: timed_generator(get, name))


def jax_trainer(module: Any) -> None:
    """``fit`` with JAX gets a batch within each step, from what this returns."""
    name = f"{module.__name__}.JAXEpochIterator"
    wrap(module.JAXEpochIterator, "_get_iterator", lambda get: timed_generator(get, name))


def losses(module: Any) -> None:
    """Keep the running mean that ``fit`` shows after each batch, for `gputrace try`."""
    from ..cures.trial import trial

    cls = module.CallbackList
    function = defined(cls, "on_train_batch_end")
    if function is None:
        return

    @wraps(function)
    def on_train_batch_end(
        self: Any, batch: Any, logs: Any = None, *args: Any, **keywords: Any
    ) -> Any:
        if isinstance(logs, dict):
            trial.loss = logs.get("loss")
        return function(self, batch, logs, *args, **keywords)

    # Not marked as ours, or the hook that marks steps would leave it alone.
    cls.on_train_batch_end = on_train_batch_end


# ``fit`` of every backend calls these after each batch.
_fit = marks_steps("CallbackList", "on_train_batch_end", "keras.Model.fit", LOOP)

PATCHES = [
    ("keras.callbacks", _fit),
    ("keras.src.backend.jax.trainer", jax_trainer),
    ("keras.src.backend.tensorflow.optimizer", optimizers),
    (
        "keras.src.backend.torch.optimizers.torch_parallel_optimizer",
        phases("TorchParallelOptimizer", _backend_update_step="optimizer"),
    ),
    ("keras.src.callbacks", _fit),
    ("keras.src.callbacks.callback_list", _fit),
    ("keras.src.optimizers.legacy.optimizer_v2", optimizers),
    ("keras.src.optimizers.optimizer", optimizers),
    ("keras.src.trainers.epoch_iterator", epoch_iterator),
    ("tensorflow.python.keras.callbacks", _fit),
    ("tf_keras.src.callbacks", _fit),
    ("tf_keras.src.optimizers.legacy.optimizer_v2", optimizers),
    ("tf_keras.src.optimizers.optimizer", optimizers),
]
