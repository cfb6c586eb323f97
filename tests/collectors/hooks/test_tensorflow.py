"""TensorFlow: steps of its functions, waits outside of its graphs, and its profiler."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.helpers.programs import Program, check_profiler, event_names, numbers

TENSORFLOW: Final = {
    "tensorflow/python/framework/ops.py": """
class Graph: pass
class FuncGraph(Graph):
    building_function = True
    def __init__(self): self.outer_graph = stack[-1]
class WhileBodyFuncGraph(FuncGraph): pass
stack = [Graph()]
def get_default_graph(): return stack[-1]
""",
    "tensorflow/python/eager/context.py": """
from tensorflow.python.framework import ops
def executing_eagerly(): return len(ops.stack) == 1
""",
    "tensorflow/python/eager/polymorphic_function/concrete_function.py": """
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
class ConcreteFunction:
    def __init__(self, body, graph=ops.FuncGraph):
        self.graph = graph()
        ops.stack.append(self.graph)
        body()
        ops.stack.pop()
    def _call_flat(self, *args): return args
    def __call__(self, *args): return self._call_flat(*args)
""",
    "tensorflow/python/data/ops/iterator_ops.py": """
class OwnedIterator:
    def __init__(self): self.left = 2
    def __iter__(self): return self
    def __next__(self):
        if not self.left: raise StopIteration
        return self.get_next()
    def get_next(self, name=None):
        self.left -= 1
        return self.left
""",
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
}

FUNCTIONS: Final = """
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework.ops import WhileBodyFuncGraph
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from keras.src.backend.tensorflow.optimizer import TFOptimizer
optimizer, data = TFOptimizer(), OwnedIterator()
def update(): optimizer.apply([])
"""


@pytest.fixture
def tensorflow(program: Program) -> Program:
    """With modules that have the names of TensorFlow's, and graphs that nest as its do."""
    program.write(TENSORFLOW)
    return program


def test_a_call_of_a_function_is_a_step_if_an_optimizer_works_in_it(
    tensorflow: Program,
) -> None:
    out = tensorflow.quietly(
        FUNCTIONS + "train, check = ConcreteFunction(update), ConcreteFunction(lambda: None)\n"
        "for _ in range(3): print(train('batch'), check()); check()\n"
    )
    assert out == "('batch',) ()\n" * 3
    assert event_names(tensorflow.events(), "step") == ["tf.function"] * 3


def test_of_functions_within_functions_the_one_that_is_called_counts(
    tensorflow: Program,
) -> None:
    tensorflow.quietly(
        FUNCTIONS + "parts = []\n"
        "def body():\n    parts.append(ConcreteFunction(update)); parts[0]()\n"
        "outer = ConcreteFunction(body)\n"
        "outer(); outer(); parts[0]()\n"
    )
    assert numbers(tensorflow.events(), "step") == [0, 1, 2]


def test_a_function_that_trains_in_a_loop_has_no_known_steps(tensorflow: Program) -> None:
    tensorflow.quietly(
        FUNCTIONS
        + "loop = ConcreteFunction(lambda: ConcreteFunction(update, WhileBodyFuncGraph))\n"
        "loop(); loop(); next(data)\n"
    )
    assert numbers(tensorflow.events(), "step") == []


def test_waits_outside_of_graphs_are_recorded(tensorflow: Program) -> None:
    out = tensorflow.quietly(
        FUNCTIONS + "read, train = ConcreteFunction(data.get_next), ConcreteFunction(update)\n"
        "data.left += 1\n"
        "for item in data: print(item); train()\n"
        "data.left = 1; print(data.get_next(name='n')); read()\n"
    )
    assert out == "1\n0\n0\n"
    name = "tensorflow.python.data.ops.iterator_ops.OwnedIterator"
    assert event_names(tensorflow.events(), "data_wait") == [name] * 4
    assert numbers(tensorflow.events(), "data_wait") == [0, 0, 1, 0]
    assert event_names(tensorflow.events(), "note") == []


def test_no_waits_are_recorded_where_steps_take_their_batches_inside_the_graph(
    tensorflow: Program,
) -> None:
    tensorflow.quietly(
        FUNCTIONS + "next(data)\n"
        "train = ConcreteFunction(lambda: (data.get_next(), update()))\n"
        "for _ in range(3): train()\n"
    )
    events = tensorflow.events()
    assert numbers(events, "step") == [0, 1, 2]
    assert numbers(events, "data_wait") == []
    assert event_names(events, "note") == [
        "TensorFlow takes the batches inside its graph: waits for them are not recorded"
    ]


def test_the_collector_makes_way_for_tensorflows_profiler(
    program: Program, library: dict[str, str]
) -> None:
    check_profiler(program, library, "tensorflow.python.profiler.profiler_v2", "start", "stop")


def test_making_a_graph_of_a_function_in_a_step_is_a_compilation(program: Program) -> None:
    name = "tensorflow.python.eager.polymorphic_function.tracing_compilation"
    body = "class Options: name = 'train'\n"
    body += "def _create_concrete_function(function_type, options): return options.name\n"
    program.write({name.replace(".", "/") + ".py": body})
    out = program.quietly(
        f"import gputrace\nfrom {name} import _create_concrete_function, Options\n"
        "for _ in range(2): print(_create_concrete_function(0, Options())); gputrace.step()\n"
    )
    assert out == "train\n" * 2
    assert event_names(program.events(), "compilation") == ["tf.function train"]


REAL_TENSORFLOW: Final = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((tf.zeros((44, 4)), tf.zeros((44, 1)))).batch(8)
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD()
@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
if sys.argv[1] == "loop":
    for x, y in data: step(x, y)
else:
    next(iter(data))
    model.compile(optimizer, "mse")
    model.fit(data, epochs=2, verbose=0)
print("trained")
"""


@pytest.mark.parametrize(
    ("way", "steps", "waits"), [("loop", 6, [0, 0, 0, 0, 0, 0, 1]), ("fit", 12, [])]
)
def test_real_tensorflow_is_recorded_inside_and_outside_of_its_graph(
    program: Program, way: str, steps: int, waits: list[int]
) -> None:
    """GPUTRACE_TENSORFLOW_PYTHON names a Python that has TensorFlow; the last batch is smaller."""
    python = os.environ.get("GPUTRACE_TENSORFLOW_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import tensorflow"], capture_output=True).returncode:
        pytest.skip("no TensorFlow; GPUTRACE_TENSORFLOW_PYTHON may name a Python that has it")
    ran = program.run(REAL_TENSORFLOW.replace("sys.argv[1]", repr(way)), python=python)
    assert (ran.code, ran.out) == (0, "trained\n")
    assert numbers(program.events(), "step") == list(range(steps))
    assert numbers(program.events(), "data_wait") == waits
