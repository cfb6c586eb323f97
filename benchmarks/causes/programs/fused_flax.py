"""Healthy: flax and optax, all in one jitted update with donated state; large batches in bf16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from parts import Clock, size, turn

WORDS, LENGTH, ROWS = size(16384, 64), size(512, 8), size(32, 2)


class Mixer(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(WORDS, self.width, dtype=jnp.bfloat16)(ids)
        for _ in range(self.depth):
            y = nn.LayerNorm(dtype=jnp.bfloat16)(x).swapaxes(1, 2)
            x = x + nn.Dense(LENGTH, dtype=jnp.bfloat16)(nn.gelu(y)).swapaxes(1, 2)
            y = nn.Dense(4 * self.width, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x))
            x = x + nn.Dense(self.width, dtype=jnp.bfloat16)(nn.gelu(y))
        return nn.Dense(WORDS, dtype=jnp.bfloat16)(x)


def main():
    turn()
    model = Mixer(size(1024, 16), size(8, 1))
    rng = np.random.default_rng(0)
    pool = rng.integers(0, WORDS, (64, ROWS, LENGTH)).astype(np.int32)
    params = model.init(jax.random.key(0), jnp.asarray(pool[0]))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))

    def loss_of(params, ids):
        logits = model.apply(params, ids).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    def update(params, state, ids):
        loss, grads = jax.value_and_grad(loss_of)(params, ids)
        steps, state = tx.update(grads, state, params)
        return optax.apply_updates(params, steps), state, loss

    fast = jax.jit(update, donate_argnums=(0, 1))
    state, clock, losses = tx.init(params), Clock(), []
    following = jax.device_put(pool[0])
    while True:
        ids, following = following, jax.device_put(pool[len(losses) % len(pool)])
        params, state, loss = fast(params, state, ids)
        losses.append(loss)
        if len(losses) > 2:
            float(losses[-3])  # stays at most two steps ahead
        if clock.done():
            loss.block_until_ready()
            break


main()
