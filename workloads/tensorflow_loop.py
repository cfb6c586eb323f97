# /// script
# requires-python = ">=3.10,<3.14"
# # The CPU's build is small; for NVIDIA GPUs take "tensorflow[and-cuda]==2.21.0" in its place.
# dependencies = ["tensorflow-cpu==2.21.0"]
# ///
"""Trains a picture classifier with TensorFlow: a tf.data pipeline and a training loop of its own.

    python tensorflow_loop.py --model resnet50 --data DIR --gpus 2 --workers 8

DIR is a folder that images.py makes. Several GPUs are one process under a tf.distribute strategy.
The step is a tf.function; its batches are taken outside, where the wait for them can be timed.
"""

import argparse
import csv
import json
import math
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

layers = tf.keras.layers
SIZES = {"resnet50": 224, "inception3": 299, "densenet121": 224, "alexnet": 224}
APPLICATIONS = {"resnet50": "ResNet50", "inception3": "InceptionV3", "densenet121": "DenseNet121"}
UPDATES = ["single", "replicated", "replicated-nccl"]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=["resnet20", "resnet44", "resnet110", *SIZES], default="resnet20")
    add("--batch", type=int, default=32, help="pictures a step and device")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--data", default="synthetic", help="synthetic, learnable or a folder of images.py")
    add("--gpus", type=int, default=1)
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--workers", type=int, default=0, help="pictures decoded at a time, ahead; 0: none")
    add("--layout", choices=["NHWC", "NCHW"], default="NHWC")
    add("--update", choices=UPDATES)
    add("--staging", choices=["on", "off"], default="off")
    add("--pinned", choices=["on", "off"], default="off")
    add("--validate", choices=["none", "one", "all"], default="none")
    add("--epoch", type=int, help="steps an epoch")
    add("--learning-rate", type=float, default=0.1)
    add("--target", type=float, help="accuracy to stop at")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    cards = len(tf.config.list_physical_devices("GPU"))
    if options.device == "auto":
        options.device = "cuda" if cards else "cpu"
    best = "replicated-nccl" if options.device == "cuda" else "replicated"
    options.update = options.update or ("single" if options.gpus == 1 else best)
    options.epoch = options.steps if options.epoch is None else min(options.epoch, options.steps)
    problem = find_problem(options, cards)
    if problem:
        parser.error(problem)
    return options


def find_problem(options, cards):
    """Return in one line why these options cannot be run; nothing if they can."""
    cpu, update, data = options.device == "cpu", options.update, options.data
    labels = Path(data, "labels.csv")
    if min(options.batch, options.steps, options.epoch, options.gpus) < 1:
        return "--batch, --steps, --epoch and --gpus must be 1 or more"
    if min(options.workers, options.seed) < 0:
        return "--workers and --seed must be 0 or more"
    wrong = {
        "--warmup must be less than --steps": not 0 <= options.warmup < options.steps,
        f"--gpus {options.gpus}: TensorFlow sees {cards} here": not cpu and options.gpus > cards,
        "--update single takes one device": update == "single" and options.gpus > 1,
        "--update replicated-nccl needs GPUs": cpu and update == "replicated-nccl",
        "--layout NCHW needs a GPU": cpu and options.layout == "NCHW",
        "--pinned on: TensorFlow pins its buffers unasked": options.pinned == "on",
        "--target needs --data learnable": options.target is not None and data != "learnable",
        "--target lies between 0 and 1": not 0 < (options.target or 0.5) < 1,
        "--data learnable is for the ResNets of 32x32": data == "learnable"
        and options.model in SIZES,
        f"--data: no {labels}; images.py makes such a folder": data
        not in ("synthetic", "learnable")
        and not labels.is_file(),
    }
    return next((problem for problem, found in wrong.items() if found), None)


def find_devices(options):
    """The GPUs, or parts of the CPU that stand for them."""
    if options.device == "cuda":
        return [f"GPU:{number}" for number in range(options.gpus)]
    tf.config.set_visible_devices([], "GPU")
    [cpu] = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(options.gpus)]
    tf.config.set_logical_device_configuration(cpu, parts)
    return [f"CPU:{number}" for number in range(options.gpus)]


def make_strategy(options):
    """How the devices share the model."""
    devices = find_devices(options)
    if options.update == "single":
        return tf.distribute.OneDeviceStrategy(devices[0])
    nccl = options.update == "replicated-nccl"
    reduce = tf.distribute.NcclAllReduce if nccl else tf.distribute.HierarchicalCopyAllReduce
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce())


def make_data(options, strategy, part="train"):
    """Batches for all devices together, without end for training."""
    size, batch, read = SIZES.get(options.model, 32), options.batch * options.gpus, None
    if options.data in ("synthetic", "learnable"):
        data = make_arrays(options, 4 * batch, size, part)
    else:
        data, read = read_labels(Path(options.data), part), make_reader(size, part)
    pictures = tf.data.Dataset.from_tensor_slices(data)
    if part == "train":
        pictures = pictures.shuffle(pictures.cardinality(), options.seed).repeat()
    if read is not None:
        pictures = pictures.map(read, num_parallel_calls=options.workers or None)
    if options.layout == "NCHW":
        pictures = pictures.map(lambda image, label: (tf.transpose(image, (2, 0, 1)), label))
    # The devices take the same number each: of the last batch's pictures, none.
    batches = pictures.batch(min(batch, len(data[1])), drop_remainder=True)
    if options.workers:
        batches = batches.prefetch(2)
    staging = options.staging == "on"
    if part != "train" and options.validate == "one":
        return batches
    if options.update == "single":
        to_device = tf.data.experimental.prefetch_to_device(strategy.extended.worker_devices[0])
        return batches.apply(to_device) if staging else batches
    fetch = tf.distribute.InputOptions(experimental_fetch_to_device=staging)
    return strategy.experimental_distribute_dataset(batches, fetch)


def make_arrays(options, count, size, part):
    """Random pictures and classes, or such as can be learnt: its class's picture, and noise."""
    random = np.random.default_rng((options.seed, part == "train"))
    if options.data == "learnable":
        count = 2048 if part == "train" else 512
    labels = random.integers(10, size=count)
    images = random.standard_normal((count, size, size, 3), np.float32)
    if options.data == "learnable":
        images += np.random.default_rng(0).standard_normal((10, size, size, 3))[labels]
    return images, labels


def read_labels(folder, part):
    with (folder / "labels.csv").open(newline="") as file:
        rows = [row for row in csv.reader(file) if row[0].startswith(f"{part}/")]
    return [str(folder / row[0]) for row in rows], np.array([r[1:] for r in rows], np.float32)


def make_reader(size, part):
    def read(name, label):
        image = tf.io.decode_image(tf.io.read_file(name), 3, tf.float32, expand_animations=False)
        if tf.reduce_min(tf.shape(image)[:2]) < size:
            image = tf.image.resize(image, (size, size))
        if part == "train":
            image = tf.image.random_crop(image, (size, size, 3))
            return tf.image.random_flip_left_right(image), label
        return tf.image.resize_with_crop_or_pad(image, size, size), label

    return read


def make_model(name, classes, layout):
    tf.keras.config.set_image_data_format("channels_first" if layout == "NCHW" else "channels_last")
    size = SIZES.get(name, 32)
    shape = (3, size, size) if layout == "NCHW" else (size, size, 3)
    if name in APPLICATIONS:
        application = getattr(tf.keras.applications, APPLICATIONS[name])
        return application(
            weights=None, input_shape=shape, classes=classes, classifier_activation=None
        )
    inputs = tf.keras.Input(shape)
    body = alexnet(inputs) if name == "alexnet" else cifar_resnet(inputs, int(name[6:]), layout)
    return tf.keras.Model(inputs, layers.Dense(classes)(body))


def alexnet(x):
    for filters, width, stride in ((64, 11, 4), (192, 5, 1), (384, 3, 1), (256, 3, 1), (256, 3, 1)):
        x = layers.Conv2D(filters, width, stride, "same", activation="relu")(x)
        if width > 3:
            x = layers.MaxPooling2D(3, 2)(x)
    x = layers.MaxPooling2D(3, 2)(x)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dense(4096, activation="relu")(layers.Dropout(0.5)(x))
    return x


def cifar_resnet(x, depth, layout):
    def convolve(x, filters, width=3, stride=1):
        x = layers.Conv2D(filters, width, stride, "same", use_bias=False)(x)
        return layers.BatchNormalization(1 if layout == "NCHW" else 3, momentum=0.9)(x)

    x = layers.ReLU()(convolve(x, 16))
    for filters in (16, 32, 64):
        for block in range((depth - 2) // 6):
            stride = 2 if filters > 16 and block == 0 else 1
            short = convolve(x, filters, 1, stride) if stride == 2 else x
            y = layers.ReLU()(convolve(x, filters, 3, stride))
            x = layers.ReLU()(layers.add([short, convolve(y, filters)]))
    return layers.GlobalAveragePooling2D()(x)


def describe(options):
    """Describe the run for the result."""
    names = ("model", "update", "device", "gpus", "batch", "data", "layout", "workers")
    cards = tf.config.list_physical_devices("GPU" if options.device == "cuda" else "CPU")
    details = tf.config.experimental.get_device_details(cards[0])
    return {
        "framework": "tensorflow",
        "version": tf.__version__,
        **{name: getattr(options, name) for name in names},
        "device_name": details.get("device_name") or "CPU",
        "staging": options.staging == "on",
        "pinned": False,
    }


class Trainer:
    """A model, and how all devices train and check it."""

    def __init__(self, options, strategy):
        self.strategy, self.on_first = strategy, options.validate == "one"
        self.folder = options.data not in ("synthetic", "learnable")
        with strategy.scope():
            self.model = make_model(options.model, 14 if self.folder else 10, options.layout)
            self.optimizer = tf.keras.optimizers.SGD(options.learning_rate, momentum=0.9)

    @tf.function
    def train(self, batch):
        losses = self.strategy.run(self.train_replica, batch)
        return self.strategy.reduce("MEAN", losses, axis=None)

    def train_replica(self, images, labels):
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            if self.folder:
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            else:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
            # The optimizer adds up the devices' gradients.
            share = loss / self.strategy.num_replicas_in_sync
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(share, variables), variables))
        return loss

    def check(self, batches):
        """The part of the answers that are right."""
        right, answers = sum(self.check_batch(batch).numpy() for batch in batches)
        return float(right / answers)

    @tf.function
    def check_batch(self, batch):
        if self.on_first:
            return self.count(*batch)
        return self.strategy.reduce("SUM", self.strategy.run(self.count, batch), axis=None)

    def count(self, images, labels):
        logits = self.model(images, training=False)
        if self.folder:
            right = tf.equal(logits > 0, labels > 0.5)
        else:
            right = tf.equal(tf.argmax(logits, 1), labels)
        return tf.stack([tf.reduce_sum(tf.cast(right, tf.int32)), tf.size(right)])


def finite(loss):
    """JSON has no word for what a loss becomes that grows beyond bounds."""
    return float(loss) if math.isfinite(loss) else None


def train(options, trainer, batches, validation):
    """Trains to the last step or to the target; the figures of the result."""
    losses, waits, seconds = [], [], []
    accuracy = target_s = None
    batches, start = iter(batches), time.perf_counter()
    begin = start
    for step in range(1, options.steps + 1):
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        losses.append(trainer.train(batch))
        last = step == options.steps or step % options.epoch == 0
        if step == options.warmup or last:
            losses[-1].numpy()  # waits for the devices
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        if last and validation is not None:
            accuracy = trainer.check(validation)
            print(f"step {step}: accuracy {accuracy:.3f}")
            begin = time.perf_counter()
        if last and options.target and accuracy >= options.target:
            target_s = begin - start
            break
    steady, pictures = seconds[options.warmup :], options.batch * options.gpus
    return {
        "steps": len(losses),
        "warmup": options.warmup,
        "samples_per_second": pictures * len(steady) / sum(steady) if steady else None,
        "samples_per_second_median": pictures / statistics.median(steady) if steady else None,
        "loss_first": finite(losses[0]),
        "loss_last": finite(losses[-1]),
        "data_wait_s": sum(waits),
        "data_waits": len(waits),
        "accuracy": accuracy if options.target else None,
        "target_s": target_s,
    }


def main():
    options = parse_options()
    tf.keras.utils.set_random_seed(options.seed)
    strategy = make_strategy(options)
    trainer = Trainer(options, strategy)
    checked = options.validate != "none" or options.target
    validation = make_data(options, strategy, "validation") if checked else None
    figures = train(options, trainer, make_data(options, strategy), validation)
    print(json.dumps({**describe(options), **figures}))


if __name__ == "__main__":
    main()
