# /// script
# requires-python = ">=3.10,<3.14"
# # The CPU's build is small; for NVIDIA GPUs take "tensorflow[and-cuda]==2.21.0" in its place.
# dependencies = ["tensorflow-cpu==2.21.0"]
# ///
"""Trains a picture classifier with TensorFlow: a tf.data pipeline and Keras's `fit`.

    python tensorflow_fit.py --model resnet50 --data DIR --gpus 2 --workers 8

DIR is a folder that images.py makes. Several GPUs are one process under a tf.distribute strategy.
`fit` takes its batches inside TensorFlow's graph, where no clock of this script reaches: how long
it waits for data is not in the result. tensorflow_loop.py, with a loop of its own, tells that.
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
        "--validate one: fit does so on all": options.validate == "one" and options.gpus > 1,
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


def finite(loss):
    """JSON has no word for what a loss becomes that grows beyond bounds."""
    return float(loss) if math.isfinite(loss) else None


class Meter(tf.keras.callbacks.Callback):
    """When each step was done and its loss: Keras calls it once that is known, in a thread."""

    async_safe = True  # so that `fit` runs ahead, as it does without callbacks

    def __init__(self, options):
        super().__init__()
        self.options, self.begun, self.epochs, self.ends, self.losses = options, 0, [], {}, {}
        self.accuracy, self.target_s = None, None

    def on_train_begin(self, logs=None):
        self.start = time.perf_counter()

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append((self.begun, time.perf_counter()))

    def on_train_batch_begin(self, batch, logs=None):
        self.begun += 1
        # `fit` looks at this after each step: the last epoch may be shorter.
        self.model.stop_training = self.begun == self.options.steps

    def on_train_batch_end(self, batch, logs=None):
        first = self.epochs[-1][0]
        self.ends[first + batch] = time.perf_counter()
        # The mean since the epoch's start.
        self.losses[first + batch] = (batch + 1) * logs["loss"]

    def on_epoch_end(self, epoch, logs=None):
        self.accuracy = logs.get("val_accuracy")
        if self.options.target and self.accuracy >= self.options.target:
            self.target_s = time.perf_counter() - self.start
            self.model.stop_training = True

    def result(self):
        starts = {**{n + 1: end for n, end in self.ends.items()}, **dict(self.epochs)}
        seconds = [self.ends[n] - starts[n] for n in range(self.begun)][self.options.warmup :]
        last = self.begun - 1
        before = 0 if last == self.epochs[-1][0] else self.losses[last - 1]
        pictures = self.options.batch * self.options.gpus
        return {
            "steps": self.begun,
            "warmup": self.options.warmup,
            "samples_per_second": pictures * len(seconds) / sum(seconds) if seconds else None,
            "samples_per_second_median": pictures / statistics.median(seconds) if seconds else None,
            "loss_first": finite(self.losses[0]),
            "loss_last": finite(self.losses[last] - before),
            "data_wait_s": None,
            "data_waits": None,
            "accuracy": self.accuracy,
            "target_s": self.target_s,
        }


def main():
    options = parse_options()
    tf.keras.utils.set_random_seed(options.seed)
    strategy = make_strategy(options)
    folder = options.data not in ("synthetic", "learnable")
    losses, meter = tf.keras.losses, Meter(options)
    loss = losses.BinaryCrossentropy if folder else losses.SparseCategoricalCrossentropy
    with strategy.scope():
        model = make_model(options.model, 14 if folder else 10, options.layout)
        model.compile(
            tf.keras.optimizers.SGD(options.learning_rate, momentum=0.9),
            loss(from_logits=True),
            metrics=["accuracy"] if options.target else None,
        )
    checked = options.validate != "none" or options.target
    model.fit(
        make_data(options, strategy),
        validation_data=make_data(options, strategy, "validation") if checked else None,
        steps_per_epoch=options.epoch,
        epochs=math.ceil(options.steps / options.epoch),
        shuffle=False,  # the data are shuffled
        callbacks=[meter],
        verbose=0,
    )
    print(json.dumps({**describe(options), **meter.result()}))


if __name__ == "__main__":
    main()
