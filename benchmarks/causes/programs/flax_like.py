"""A perceptron in JAX; the gradient is compiled and the update is not."""

import jax
import jax.numpy as jnp
from parts import CURED, SEED, Clock, size, turn


def init(key, width, depth):
    keys = jax.random.split(key, depth)
    return [{"w": jax.random.normal(k, (width, width)) * 0.02, "b": jnp.zeros(width)} for k in keys]


def forward(params, x):
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x


@jax.jit
def gradient(params, x):
    return jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)


def adam(params, grads, m, v, t):
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
    v = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, v, grads)

    def update(p, a, b):
        a, b = a / (1 - 0.9**t), b / (1 - 0.999**t)
        return p - 1e-3 * a / (jnp.sqrt(b) + 1e-8)

    return jax.tree.map(update, params, m, v), m, v


def main():
    turn()
    params = init(jax.random.key(SEED), size(512, 16), size(30, 3))
    m = jax.tree.map(jnp.zeros_like, params)
    v = jax.tree.map(jnp.zeros_like, params)
    apply = jax.jit(adam) if CURED else adam
    x = jax.random.normal(jax.random.key(1), (size(2048, 32), size(512, 16)))
    clock, t = Clock(), 0.0
    while True:
        t += 1
        loss, grads = gradient(params, x)
        params, m, v = apply(params, grads, m, v, t)
        if int(t) % 15 == 0:
            loss.block_until_ready()
        if clock.done():
            break


main()
