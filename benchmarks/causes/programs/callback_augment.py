"""JAX: the update is one jitted function; pictures are augmented within it, by numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from parts import CURED, Clock, size, turn

SIDE, N = size(64, 8), size(128, 4)


def cut_out(images, seed):
    """Flip, shift and cut a square out of each picture."""
    rng = np.random.default_rng(int(np.asarray(seed)))
    out = np.array(images)
    for k, image in enumerate(out):
        if rng.random() < 0.5:
            image = image[:, ::-1]
        image = np.roll(image, rng.integers(-4, 5, 2), (0, 1))
        top, left = rng.integers(0, SIDE // 2, 2)
        image[top : top + SIDE // 4, left : left + SIDE // 4] = 0
        out[k] = image * rng.uniform(0.8, 1.2)
    return out


def cut_out_on_gpu(images, seed):
    key = jax.random.key(seed)
    n = len(images)
    flip = jax.random.bernoulli(key, 0.5, (n, 1, 1, 1))
    images = jnp.where(flip, images[:, :, ::-1], images)
    corner = jax.random.randint(key, (n, 2, 1, 1), 0, SIDE // 2)
    rows, columns = jnp.arange(SIDE)[None, :, None], jnp.arange(SIDE)[None, None, :]
    inside = (rows >= corner[:, 0]) & (rows < corner[:, 0] + SIDE // 4)
    inside &= (columns >= corner[:, 1]) & (columns < corner[:, 1] + SIDE // 4)
    return jnp.where(inside[..., None], 0, images) * jax.random.uniform(
        key, (n, 1, 1, 1), minval=0.8, maxval=1.2
    )


def augment(images, seed):
    if CURED:
        return cut_out_on_gpu(images, seed)
    return jax.pure_callback(
        cut_out, jax.ShapeDtypeStruct(images.shape, images.dtype), images, seed
    )


def init(key, widths):
    keys = jax.random.split(key, len(widths))
    layers = [
        jax.random.normal(k, (3, 3, i, o)) * (2 / (9 * i)) ** 0.5
        for k, i, o in zip(keys, widths, widths[1:])
    ]
    return {"layers": layers, "head": jnp.zeros((widths[-1], 10))}


def loss_of(params, images, labels):
    x = images
    for weight in params["layers"]:
        x = jax.lax.conv_general_dilated(
            x, weight, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    logits = x.mean((1, 2)) @ params["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


@jax.jit
def update(params, images, labels, seed):
    loss, grads = jax.value_and_grad(loss_of)(params, augment(images, seed), labels)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


def main():
    turn()
    w = size(96, 4)
    params = init(jax.random.key(0), (3, w, 2 * w, 4 * w, 4 * w))
    images = jax.random.normal(jax.random.key(1), (N, SIDE, SIDE, 3))
    labels = jnp.arange(N) % 10
    clock = Clock()
    for seed in range(10**6):
        params, loss = update(params, images, labels, seed)
        if seed % 10 == 9:
            loss.block_until_ready()
        if clock.done():
            break
    loss.block_until_ready()


main()
