"""A small training of JAX that prints the same each time.

    python jax_steps.py [--buffers] [--profiler] [--steps 24]
    python jax_steps.py --times --width 1024 --layers 24 --steps 300

With --buffers, XLA makes each program a command buffer, as CUDA graphs are called there. With
--times, the last line is JSON: milliseconds of the steps after the first twenty, and the most
memory that the process had resident.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--buffers", action="store_true")
parser.add_argument("--profiler", action="store_true", help="under jax.profiler from step 8 to 16")
parser.add_argument("--times", action="store_true")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
options = parser.parse_args()
# Several may run at once on one card.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if options.buffers:
    more = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUDNN"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

try:
    from gputrace import step as step_ended
except ImportError:

    def step_ended():
        """No hook sees the steps of a plain loop of JAX; without gputrace nobody marks them."""


def loss_of(weights, inputs, wanted):
    for weight in weights:
        inputs = jax.nn.gelu(inputs @ weight)
    return jnp.mean((inputs - wanted) ** 2)


@jax.jit
def train(weights, inputs, wanted):
    loss, gradients = jax.value_and_grad(loss_of)(weights, inputs, wanted)
    return [w - 0.01 * g for w, g in zip(weights, gradients)], loss


key = jax.random.PRNGKey(0)
shape = options.width, options.width
weights = [1.6 / options.width**0.5 * jax.random.normal(key, shape) for _ in range(options.layers)]
inputs = jax.random.normal(key, (64, options.width))
times = []
with tempfile.TemporaryDirectory() as folder:
    for number in range(options.steps):
        if options.profiler and number == 8:
            jax.profiler.start_trace(folder)
        began = time.perf_counter()
        weights, loss = train(weights, inputs, 0.5 * inputs)
        loss.block_until_ready()
        times.append(1e3 * (time.perf_counter() - began))
        step_ended()
        if number % 8 == 7 and not options.times:
            print(f"step {number + 1}: loss {float(loss):.3f}")
        if options.profiler and number == 15:
            jax.profiler.stop_trace()
if options.times:
    steady = times[20:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = {"mean_ms": statistics.mean(steady), "median_ms": statistics.median(steady)}
    print(json.dumps(told | {"peak_mib": peak, "steps": len(steady)}))
else:
    print(f"{options.steps} steps of {'buffers' if options.buffers else 'jit'}")
