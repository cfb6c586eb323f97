"""A jitted update gets batches as long as their longest sentence: another shape in each step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from parts import CURED, Clock, size, turn

W, L, V, T = size(512, 32), size(4, 1), size(8192, 64), size(200, 40)


def init(key):
    keys = iter(jax.random.split(key, 4 * L + 1))
    draw = lambda *s: jax.random.normal(next(keys), s) * 0.02
    return {
        "words": draw(V, W),
        "layers": [
            {"qkv": draw(W, 3 * W), "o": draw(W, W), "up": draw(W, 4 * W), "down": draw(4 * W, W)}
            for _ in range(L)
        ],
    }


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


def loss_of(params, ids, mask):
    x = params["words"][ids]
    t = ids.shape[1]
    causal = jnp.tril(jnp.ones((t, t), bool))
    for p in params["layers"]:
        q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
        a = jnp.where(causal, q @ k.swapaxes(1, 2) / W**0.5, -1e9)
        x = x + jax.nn.softmax(a) @ v @ p["o"]
        x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    logits = jax.nn.log_softmax(norm(x) @ params["words"].T)
    picked = jnp.take_along_axis(logits[:, :-1], ids[:, 1:, None], -1)[..., 0]
    return -(picked * mask[:, 1:]).sum() / mask[:, 1:].sum()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(params, speed, ids, mask):
    loss, grads = jax.value_and_grad(loss_of)(params, ids, mask)
    speed = jax.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
    return jax.tree.map(lambda p, s: p - 0.01 * s, params, speed), speed, loss


def main():
    turn()
    rng = np.random.default_rng(0)
    params = init(jax.random.key(0))
    speed = jax.tree.map(jnp.zeros_like, params)
    clock = Clock()
    lengths = rng.permutation(np.arange(T // 4, T))
    step = 0
    while True:
        longest = int(lengths[step % len(lengths)])
        t = T if CURED else longest
        ids = rng.integers(0, V, (16, t)).astype(np.int32)
        mask = np.broadcast_to(np.arange(t) < longest, (16, t)).astype(np.float32)
        params, speed, loss = update(params, speed, ids, mask)
        step += 1
        if len(clock.laps) % 10 == 9:
            loss.block_until_ready()
        if clock.done():
            loss.block_until_ready()
            break


main()
