"""Keras: steps of fit and of its optimizers, and waits for batches, on each backend."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import Program, check_generator, check_steps, check_waits, event_names


@pytest.mark.parametrize(
    "module",
    [
        "keras.callbacks",
        "keras.src.callbacks",
        "keras.src.callbacks.callback_list",
        "tensorflow.python.keras.callbacks",
        "tf_keras.src.callbacks",
    ],
)
def test_each_batch_of_fit_is_a_step(program: Program, module: str) -> None:
    check_steps(program, module, "CallbackList", "on_train_batch_end", "keras.Model.fit")


OPTIMIZERS: Final = {
    "keras/src/backend/tensorflow/optimizer.py": """
class BaseOptimizer:
    def apply(self, grads): return grads
class TFOptimizer(BaseOptimizer): pass
""",
    "keras/src/optimizers/optimizer.py": """
class _BaseOptimizer:
    def apply_gradients(self, grads): return grads
class Optimizer(_BaseOptimizer):
    def apply_gradients(self, grads): return super().apply_gradients(grads)
""",
    "tensorflow/python/eager/context.py": "def executing_eagerly(): return True",
}


@pytest.mark.parametrize(
    ("module", "cls", "method"),
    [
        ("keras.src.backend.tensorflow.optimizer", "TFOptimizer", "apply"),
        ("keras.src.optimizers.optimizer", "Optimizer", "apply_gradients"),
    ],
)
def test_an_optimizer_outside_of_tensorflows_graphs_makes_a_step(
    program: Program, module: str, cls: str, method: str
) -> None:
    program.write(OPTIMIZERS)
    out = program.quietly(
        f"import tensorflow.python.eager.context\nfrom {module} import {cls}\nother = {cls}()\n"
        f"for _ in range(2): print(other.{method}('grads'))\n"
    )
    assert out == "grads\n" * 2
    assert event_names(program.events(), "step") == ["tf.keras.optimizers.Optimizer"] * 2


def test_waits_for_the_batches_of_fit_are_recorded(program: Program) -> None:
    check_waits(program, "keras.src.trainers.epoch_iterator", "EpochIterator")


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [
        ("keras.src.trainers.epoch_iterator", "EpochIterator", "enumerate_epoch"),
        ("keras.src.backend.jax.trainer", "JAXEpochIterator", "_get_iterator"),
    ],
)
def test_waits_for_batches_of_generators_are_recorded(
    program: Program, module: str, name: str, method: str
) -> None:
    check_generator(program, module, name, method)


def test_an_update_of_kerass_own_optimizer_on_torch_is_a_phase(program: Program) -> None:
    name = "keras.src.backend.torch.optimizers.torch_parallel_optimizer"
    body = "class TorchParallelOptimizer:\n"
    body += "    def _backend_update_step(self, grads, variables, rate): return rate\n"
    program.write({name.replace(".", "/") + ".py": body})
    update = "TorchParallelOptimizer()._backend_update_step([], [], 0.5)"
    assert program.quietly(f"from {name} import *\nprint({update})\n") == "0.5\n"
    assert event_names(program.events(), "phase") == ["optimizer"]
