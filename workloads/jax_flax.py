# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "grain==0.2.18", "numpy>=2", "pillow>=10",
# ]
# ///
"""Trains an image classifier with JAX, Flax (linen) and Optax.

    python jax_flax.py
    python jax_flax.py --model resnet50 --data DIR --gpus 4 --workers 8 --staging on

Several devices share a jitted step: its batch is cut in parts, one a device, and XLA puts the
all-reduce in (`allreduce`; batch statistics are then those of the whole batch). `independent`
trains a model of its own on each device. Batches come from grain or, where that is not installed,
from PyTorch's DataLoader. The last line of the output is the result, in JSON.
"""

import argparse
import csv
import json
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

MODELS = ("resnet20", "resnet44", "resnet110", "resnet50", "inception3", "densenet121", "alexnet")
UPDATES = ("single", "allreduce", "independent")
SIZES = {"resnet50": 224, "inception3": 299, "densenet121": 224, "alexnet": 224}
LABELS = 14


def read_options():
    """The command line; what this script cannot do ends here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet20")
    add("--batch", type=int, default=32, help="images a device and step")
    add("--steps", type=int, default=20, help="in all, warm-up included")
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--data", default="synthetic", help="synthetic, learnable, or a folder by images.py")
    add("--gpus", type=int, default=1, help="devices")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--workers", type=int, default=0, help="processes that load")
    add("--layout", choices=("NCHW", "NHWC"), default="NHWC")
    add("--update", choices=UPDATES, help="default: allreduce on several devices")
    add("--staging", choices=("on", "off"), default="off")
    add("--pinned", choices=("on", "off"), default="off")
    add("--validate", choices=("none", "one", "all"), default="none")
    add("--epoch", type=int, help="steps an epoch (default: all)")
    add("--learning-rate", type=float, default=0.1)
    add("--target", type=float, help="accuracy to stop at, with --data learnable")
    add("--seed", type=int, default=0)
    o = parser.parse_args()
    o.error, o.size, o.epoch = parser.error, SIZES.get(o.model, 32), o.epoch or o.steps
    o.update = o.update or ("allreduce" if o.gpus > 1 else "single")
    if o.target and o.validate == "none":
        o.validate = "one" if o.update == "independent" else "all"
    o.folder = None if o.data in ("synthetic", "learnable") else Path(o.data)
    o.classes = LABELS if o.folder else 10 if o.size == 32 else 1000
    for wrong, message in (
        (min(o.batch, o.steps, o.gpus, o.epoch) < 1, "a count is less than 1"),
        (min(o.workers, o.seed) < 0, "--workers and --seed cannot be negative"),
        (not 0 <= o.warmup < o.steps, "--warmup must be less than --steps"),
        (o.update == "single" and o.gpus > 1, "--update single is for --gpus 1"),
        (o.pinned == "on", "--pinned: JAX pins nothing that it is to copy from"),
        (o.update == "independent" and o.validate == "all", "--validate all is for one model"),
        (o.target and o.data != "learnable", "--target is for --data learnable"),
        (o.data == "learnable" and o.size != 32, "--data learnable is for resnet20, 44 and 110"),
        (o.folder and not (o.folder / "labels.csv").is_file(), f"{o.data} has no labels.csv"),
    ):
        if wrong:
            parser.error(message)
    return o


class InMemory:
    """Random images; those of a class are alike where they are to be learnable."""

    def __init__(self, options, part, length):
        self.length, size = length, options.size
        random = np.random.default_rng([options.seed, part == "train"])
        count = 2048 if options.data == "learnable" else 256
        self.labels = random.integers(options.classes, size=count).astype("int32")
        self.images = random.standard_normal((count, size, size, 3), "float32")
        if options.data == "learnable":
            random = np.random.default_rng(options.seed)
            prototypes = random.standard_normal((options.classes, size, size, 3), "float32")
            self.images += prototypes[self.labels]
        if options.layout == "NCHW":
            self.images = np.ascontiguousarray(self.images.transpose(0, 3, 1, 2))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.images[index % len(self.labels)], self.labels[index % len(self.labels)]


class Pictures:
    """The pictures in a folder, cropped: at random where they are to train on."""

    def __init__(self, options, part, length):
        self.length, self.size, self.seed = length, options.size, options.seed
        self.train, self.folder, self.layout = part == "train", options.folder, options.layout
        with (self.folder / "labels.csv").open(newline="") as file:
            self.rows = [row for row in csv.reader(file) if row[0].startswith(f"{part}/")]
        if not self.rows:
            options.error(f"{self.folder}/labels.csv names no pictures in {part}")
        with Image.open(self.folder / self.rows[0][0]) as image:
            if min(image.size) < self.size:
                options.error(f"{self.folder}: smaller pictures than {self.size}x{self.size}")

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        random = np.random.default_rng([self.seed, index])
        number = random.integers(len(self.rows)) if self.train else index % len(self.rows)
        name, *labels = self.rows[number]
        with Image.open(self.folder / name) as image:
            space = np.subtract(image.size, self.size)
            left, top = random.integers(space + 1) if self.train else space // 2
            crop = image.convert("RGB").crop((left, top, left + self.size, top + self.size))
        pixels = np.asarray(crop, "float32") / 127.5 - 1
        pixels = pixels[:, ::-1] if self.train and random.integers(2) else pixels
        pixels = pixels.transpose(2, 0, 1) if self.layout == "NCHW" else pixels
        return pixels, np.array(labels, "float32")


def stack(samples):
    """A batch as PyTorch's loader should make it."""
    images, labels = zip(*samples, strict=True)
    return np.stack(images), np.stack(labels)


def load(options, part, batches):
    """An iterator over so many batches, each for all the devices."""
    batch = options.batch * options.gpus
    source = (Pictures if options.folder else InMemory)(options, part, batches * batch)
    try:
        import grain

        if options.workers:
            from absl import flags

            flags.FLAGS(sys.argv[:1])  # which grain's processes read
        return iter(
            grain.DataLoader(
                data_source=source,
                sampler=grain.samplers.IndexSampler(len(source), num_epochs=1, shuffle=False),
                operations=[grain.transforms.Batch(batch)],
                worker_count=options.workers,
                # Without workers the thread that trains loads.
                read_options=None if options.workers else grain.ReadOptions(0, 0),
            )
        )
    except ImportError:
        from torch.utils.data import DataLoader

        # A fork of a process that runs JAX may hang.
        how = {"multiprocessing_context": "spawn"} if options.workers else {}
        return iter(DataLoader(source, batch, num_workers=options.workers, collate_fn=stack, **how))


class Conv(nn.Module):
    """A convolution in either layout: Flax's own knows NHWC alone."""

    layout: str
    features: int
    kernel: tuple
    stride: int
    padding: str

    @nn.compact
    def __call__(self, x):
        shape = (*self.kernel, x.shape[self.layout.index("C")], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        layouts, strides = (self.layout, "HWIO", self.layout), (self.stride, self.stride)
        return lax.conv_general_dilated(x, kernel, strides, self.padding, dimension_numbers=layouts)


class Parts:
    """Layers of the models, in a layout, for training or not."""

    def __init__(self, layout, train):
        self.layout, self.train, self.axis = layout, train, layout.index("C")

    def conv(self, x, features, kernel=3, stride=1, padding="SAME"):
        kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        return Conv(self.layout, features, kernel, stride, padding)(x)

    def norm(self, x):
        return nn.BatchNorm(not self.train, momentum=0.9, axis=self.axis)(x)

    def unit(self, x, *how):
        """Convolution, normalisation, ReLU."""
        return nn.relu(self.norm(self.conv(x, *how)))

    def units(self, x, *hows):
        for how in hows:
            x = self.unit(x, *how)
        return x

    def pool(self, x, kind, size, stride, padding="SAME"):
        """Pools by maximum, or by mean (zeros at the edges count)."""
        sizes, strides = ([1 if c in "NC" else n for c in self.layout] for n in (size, stride))
        if kind == "max":
            return lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, padding)
        return lax.reduce_window(x, 0.0, lax.add, sizes, strides, padding) / size**2

    def flat(self, x):
        """The mean of each channel."""
        return x.mean([self.layout.index("H"), self.layout.index("W")])

    def join(self, *parts):
        return jnp.concatenate(parts, self.axis)


def cifar_resnet(p, x, blocks):
    """He et al., 2015, section 4.2."""
    x = p.unit(x, 16)
    for features in (16, 32, 64):
        for block in range(blocks):
            stride = 2 if features > 16 and block == 0 else 1
            short = p.norm(p.conv(x, features, 1, 2)) if stride == 2 else x
            x = p.norm(p.conv(p.unit(x, features, 3, stride), features))
            x = nn.relu(x + short)
    return p.flat(x)


def resnet50(p, x):
    """He et al., 2015; the stride is that of the 3x3 convolutions."""
    x = p.pool(p.unit(x, 64, 7, 2), "max", 3, 2)
    for features, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            stride = 2 if features > 64 and block == 0 else 1
            short = x if block else p.norm(p.conv(x, 4 * features, 1, stride))
            x = p.units(x, (features, 1), (features, 3, stride))
            x = nn.relu(p.norm(p.conv(x, 4 * features, 1)) + short)
    return p.flat(x)


def densenet121(p, x):
    """Huang et al., 2016."""
    x = p.pool(p.unit(x, 64, 7, 2), "max", 3, 2)
    for layers in (6, 12, 24, 16):
        for _ in range(layers):
            new = p.unit(nn.relu(p.norm(x)), 128, 1)
            x = p.join(x, p.conv(new, 32))
        x = nn.relu(p.norm(x))
        if layers != 16:  # not after the last block
            x = p.pool(p.conv(x, x.shape[p.axis] // 2, 1), "mean", 2, 2)
    return p.flat(x)


def alexnet(p, x):
    """Krizhevsky, 2014."""
    for features, kernel, stride, pool in (
        (64, 11, 4, True),
        (192, 5, 1, True),
        (384, 3, 1, False),
        (256, 3, 1, False),
        (256, 3, 1, True),
    ):
        x = nn.relu(p.conv(x, features, kernel, stride))
        x = p.pool(x, "max", 3, 2, "VALID") if pool else x
    x = x.reshape(len(x), -1)
    for _ in range(2):
        x = nn.relu(nn.Dense(4096)(nn.Dropout(0.5, deterministic=not p.train)(x)))
    return x


def inception3(p, x):
    """Szegedy et al., 2015, without the auxiliary classifier."""
    v = "VALID"
    x = p.units(x, (32, 3, 2, v), (32, 3, 1, v), (64,))
    x = p.units(p.pool(x, "max", 3, 2, v), (80, 1), (192, 3, 1, v))
    x = p.pool(x, "max", 3, 2, v)
    for pooled in (32, 64, 64):
        mean = p.unit(p.pool(x, "mean", 3, 1), pooled, 1)
        five, three = p.units(x, (48, 1), (64, 5)), p.units(x, (64, 1), (96,), (96,))
        x = p.join(p.unit(x, 64, 1), five, three, mean)
    three = p.units(x, (64, 1), (96,), (96, 3, 2, v))
    x = p.join(p.unit(x, 384, 3, 2, v), three, p.pool(x, "max", 3, 2, v))
    row, column = (1, 7), (7, 1)
    for c in (128, 160, 160, 192):
        once = p.units(x, (c, 1), (c, row), (192, column))
        twice = p.units(x, (c, 1), (c, column), (c, row), (c, column), (192, row))
        mean = p.unit(p.pool(x, "mean", 3, 1), 192, 1)
        x = p.join(p.unit(x, 192, 1), once, twice, mean)
    three = p.units(x, (192, 1), (320, 3, 2, v))
    seven = p.units(x, (192, 1), (192, row), (192, column), (192, 3, 2, v))
    x = p.join(three, seven, p.pool(x, "max", 3, 2, v))
    for _ in range(2):
        short, long = p.unit(x, 384, 1), p.units(x, (448, 1), (384,))
        forks = [p.unit(y, 384, kernel) for y in (short, long) for kernel in ((1, 3), (3, 1))]
        mean = p.unit(p.pool(x, "mean", 3, 1), 192, 1)
        x = p.join(p.unit(x, 320, 1), *forks, mean)
    return nn.Dropout(0.5, deterministic=not p.train)(p.flat(x))


class Net(nn.Module):
    """One of the models, by its name."""

    model: str
    classes: int
    layout: str

    @nn.compact
    def __call__(self, images, train):
        parts = Parts(self.layout, train)
        if self.model in SIZES:
            features = globals()[self.model](parts, images)
        else:
            features = cifar_resnet(parts, images, (int(self.model[6:]) - 2) // 6)
        return nn.Dense(self.classes)(features)


class State(train_state.TrainState):
    """Parameters, the optimizer's state, and the batch statistics."""

    batch_stats: Any


def make_state(options):
    """The state to begin with."""
    net = Net(options.model, options.classes, options.layout)
    square = (options.size, options.size)
    shape = (1, 3, *square) if options.layout == "NCHW" else (1, *square, 3)
    # One compiled program, where init by itself runs each layer.
    init = jax.jit(lambda key: net.init(key, jnp.zeros(shape), train=False))
    variables = init(jax.random.key(options.seed))
    return State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.sgd(options.learning_rate, momentum=0.9),
        batch_stats=variables.get("batch_stats", {}),
    )


def train_step(state, batch):
    """The state after a step, and the loss before it."""
    images, labels = batch

    def loss_of(params):
        scores, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.fold_in(jax.random.key(0), state.step)},
        )
        if labels.ndim == 2:
            losses = optax.sigmoid_binary_cross_entropy(scores, labels)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return losses.mean(), new.get("batch_stats", {})

    (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=stats), loss


def independent_step(state, batch):
    """A step of the model of this device, one of a stack."""
    state, loss = train_step(jax.tree.map(lambda stack: stack[0], state), batch)
    return jax.tree.map(lambda one: one[None], (state, loss))


@jax.jit
def count_right(state, batch):
    """How many of the labels are told right."""
    images, labels = batch
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    scores = state.apply_fn(variables, images, train=False)
    return (
        ((scores > 0) == labels).sum() if labels.ndim == 2 else (scores.argmax(1) == labels).sum()
    )


class Clock:
    """An iterator that times the wait for each item of another."""

    def __init__(self, items):
        self.items, self.seconds, self.count = items, 0.0, 0

    def __iter__(self):
        return self

    def __next__(self):
        begin = time.perf_counter()
        item = next(self.items)
        self.seconds += time.perf_counter() - begin
        self.count += 1
        return item


def ahead(batches):
    """Yield the batches, each fetched (and sent to its device) while the one before is used."""
    waiting = next(batches)
    for batch in batches:
        yield waiting
        waiting = batch
    yield waiting


def find_devices(options):
    """The devices to train on."""
    jax.config.update("jax_num_cpu_devices", options.gpus)
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if options.device == "cuda" and devices[0].platform != "gpu":
        options.error("--device cuda: JAX sees no GPU")
    if len(devices) < options.gpus:
        options.error(f"--gpus {options.gpus}: JAX sees {len(devices)} here")
    return devices[: options.gpus]


def validate(options, state, put, first):
    """The share of labels that are told right, on all devices or on the first."""
    right = seen = 0
    if options.validate == "one":
        state = jax.tree.map(lambda array: array.addressable_shards[0].data, state)
        if options.update == "independent":
            state = jax.tree.map(lambda stack: stack[0], state)
    for batch in load(options, "validation", 4):
        batch = jax.device_put(batch, first) if options.validate == "one" else put(batch)
        right, seen = right + count_right(state, batch), seen + batch[1].size
    return float(right) / seen


def train(options, devices):
    """Trains; what the result tells of it."""
    mesh = Mesh(np.array(devices), ("gpu",))
    shared, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("gpu",)))
    state, step = make_state(options), train_step
    if options.update == "independent":
        state = jax.tree.map(lambda a: jnp.stack([a] * len(devices)), state)
        one = PartitionSpec("gpu")
        step = jax.shard_map(independent_step, mesh=mesh, in_specs=(one, one), out_specs=one)
    state = jax.device_put(state, split if options.update == "independent" else shared)
    step = jax.jit(step, donate_argnums=0)

    def put(batch):
        return jax.device_put(batch, split)

    clock = Clock(load(options, "train", options.steps))
    # No loader is asked for more than is trained on.
    batches = islice(map(put, clock), options.steps)
    batches = ahead(batches) if options.staging == "on" else batches
    losses, seconds, validating, accuracy, target_s = [], [], 0.0, None, None
    begin = steady = before = time.perf_counter()
    for number in range(1, options.steps + 1):
        with jax.profiler.StepTraceAnnotation("train", step_num=number - 1):
            state, loss = step(state, next(batches))
        losses.append(loss)
        # One step behind, or the host would run on for many and its times tell nothing.
        of_epoch = number % options.epoch == 0 or number == options.steps
        at_end = of_epoch or number == options.warmup
        jax.block_until_ready(loss if at_end else losses[-2:][0])
        now = time.perf_counter()
        seconds.append(now - before)
        if number == options.warmup:
            steady, validating = now, 0.0
        if of_epoch and options.validate != "none":
            accuracy = validate(options, state, put, devices[0])
            validating += time.perf_counter() - now
            if options.target and accuracy >= options.target:
                target_s = time.perf_counter() - begin
                break
        before = time.perf_counter()
    total = time.perf_counter() - steady - validating
    images = options.batch * options.gpus
    return {
        "steps": len(losses),
        "samples_per_second": images * len(seconds[options.warmup :]) / total,
        "samples_per_second_median": images / statistics.median(seconds[options.warmup :]),
        "loss_first": float(losses[0].mean()),
        "loss_last": float(losses[-1].mean()),
        "data_wait_s": clock.seconds,
        "data_waits": clock.count,
        "accuracy": accuracy,
        "target_s": target_s,
    }


def main():
    """Trains, and prints the result."""
    options = read_options()
    devices = find_devices(options)
    names = ("model", "update", "gpus", "batch", "data", "layout", "workers", "warmup")
    result = {
        "framework": "jax",
        "version": jax.__version__,
        **{name: getattr(options, name) for name in names},
        "device": "cpu" if devices[0].platform == "cpu" else "cuda",
        "device_name": devices[0].device_kind,
        "staging": options.staging == "on",
        "pinned": False,
        **train(options, devices),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
