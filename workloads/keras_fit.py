# /// script
# requires-python = ">=3.11"
# dependencies = ["keras==3.15.1", "numpy>=1.26", "pillow>=10"]
# ///
"""Trains an image classifier with Keras 3's `fit`, on any of its backends.

    python keras_fit.py --backend jax                       # or torch, tensorflow
    python keras_fit.py --backend jax --model resnet50 --data DIR --gpus 4 --workers 8

The backend is to be installed besides what the header names. Several devices train data-parallel:
by keras.distribution with JAX, by MirroredStrategy with TensorFlow; with PyTorch Keras has nothing
of the kind. Batches come from a keras.utils.PyDataset. Its workers are threads (processes it would
fork, which JAX and CUDA do not survive), and Keras starts them from two on: with fewer, the thread
that trains loads. The last line of the output is the result, in JSON.
"""

import argparse
import csv
import json
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

MODELS = ("resnet20", "resnet44", "resnet110", "resnet50", "inception3", "densenet121", "alexnet")
LABELS = 14
SIZES = {"resnet50": 224, "inception3": 299, "densenet121": 224, "alexnet": 224}
UPDATES = {
    "torch": ["single"],
    "tensorflow": ["single", "replicated", "replicated-nccl"],
    "jax": ["single", "allreduce"],
}


def read_options():
    """The command line; what the script or Keras cannot do ends here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=UPDATES, default=os.environ.get("KERAS_BACKEND", "tensorflow"))
    add("--model", choices=MODELS, default="resnet20")
    add("--batch", type=int, default=32, help="images a device and step")
    add("--steps", type=int, default=20, help="in all, warm-up included")
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--data", default="synthetic", help="synthetic, learnable, or a folder by images.py")
    add("--gpus", type=int, default=1, help="devices")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--workers", type=int, default=0, help="threads that load")
    add("--layout", choices=("NCHW", "NHWC"), default="NHWC")
    add("--update", help="; ".join(f"{k}: {', '.join(v)}" for k, v in UPDATES.items()))
    add("--staging", choices=("on", "off"), default="off")
    add("--pinned", choices=("on", "off"), default="off")
    add("--validate", choices=("none", "one", "all"), default="none")
    add("--epoch", type=int, help="steps an epoch (default: all)")
    add("--learning-rate", type=float, default=0.1)
    add("--target", type=float, help="accuracy to stop at, with --data learnable")
    add("--seed", type=int, default=0)
    o = parser.parse_args()
    o.error, o.size, o.epoch = parser.error, SIZES.get(o.model, 32), o.epoch or o.steps
    known = UPDATES[o.backend]
    o.validate = "all" if o.target and o.validate == "none" else o.validate
    o.folder = None if o.data in ("synthetic", "learnable") else Path(o.data)
    for wrong, message in (
        (min(o.batch, o.steps, o.gpus, o.epoch) < 1, "a count is less than 1"),
        (min(o.workers, o.seed) < 0, "--workers and --seed cannot be negative"),
        (not 0 <= o.warmup < o.steps, "--warmup must be less than --steps"),
        (o.backend == "torch" and o.gpus > 1, "--gpus: Keras uses one device with PyTorch"),
        (o.update and o.update not in known, f"--update {o.update}: here are {', '.join(known)}"),
        (o.update == "single" and o.gpus > 1, "--update single is for --gpus 1"),
        (o.staging == "on", "--staging: Keras stages by rules of its own"),
        (o.pinned == "on", "--pinned: Keras does not pin memory"),
        (o.validate == "one" and o.gpus > 1, "--validate one: fit validates on all devices"),
        (o.target and o.data != "learnable", "--target is for --data learnable"),
        (o.target and not 0 < o.target < 1, "--target lies between 0 and 1"),
        (o.data == "learnable" and o.size != 32, "--data learnable is for resnet20, 44 and 110"),
        (o.folder and not (o.folder / "labels.csv").is_file(), f"{o.data} has no labels.csv"),
    ):
        if wrong:
            parser.error(message)
    return o


# Keras and its backends look at the environment when they are imported.
options = read_options()
os.environ["KERAS_BACKEND"] = options.backend
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if options.device == "cpu":
    os.environ |= {"KERAS_TORCH_DEVICE": "cpu", "JAX_PLATFORMS": "cpu"}

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

try:
    import keras
    from keras import layers
except ModuleNotFoundError as problem:
    options.error(f"--backend {options.backend}: {problem}")


def find_devices():
    """The devices to train on, as the backend names them, the kind, and what the first one is."""
    if options.backend == "torch":
        import torch

        gpus = list(range(torch.cuda.device_count()))
        name = torch.cuda.get_device_name() if gpus else "CPU"
    elif options.backend == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", options.gpus)
        gpus = [f"gpu:{d.id}" for d in jax.devices() if d.platform == "gpu"]
        name = jax.devices()[0].device_kind
    else:
        import tensorflow as tf

        found = tf.config.list_physical_devices("GPU")
        gpus = [f"GPU:{n}" for n in range(len(found))]
        name = tf.config.experimental.get_device_details(found[0])["device_name"] if gpus else "CPU"
        cpu, one = tf.config.list_physical_devices("CPU")[0], tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * options.gpus)
        if options.device == "cpu":
            tf.config.set_visible_devices([], "GPU")
    if options.device == "cpu" or (options.device == "auto" and not gpus):
        return [f"cpu:{n}" for n in range(options.gpus)], "cpu", "CPU"
    if len(gpus) < options.gpus:
        options.error(f"--gpus {options.gpus}: {options.backend} sees {len(gpus)} here")
    return gpus[: options.gpus], "cuda", name


def distribute(devices, kind):
    """Has Keras train on all the devices; a context to make the model in."""
    default = {"jax": "allreduce", "tensorflow": "replicated"}.get(options.backend)
    if default == "replicated" and kind == "cuda":
        default = "replicated-nccl"
    options.update = options.update or (default if options.gpus > 1 else "single")
    if options.update == "allreduce":
        parallel = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
        keras.distribution.set_distribution(parallel)
    elif options.update != "single":
        import tensorflow as tf

        if kind == "cpu" and options.update == "replicated-nccl":
            options.error("--update replicated-nccl is for GPUs")
        ways = {
            "replicated": tf.distribute.HierarchicalCopyAllReduce,
            "replicated-nccl": tf.distribute.NcclAllReduce,
        }
        return tf.distribute.MirroredStrategy(devices, ways[options.update]()).scope()
    return keras.device(devices[0]) if options.backend == "tensorflow" else nullcontext()


def cifar_resnet(shape, classes, depth):
    """The residual network for images of 32x32 by He et al., 2015, of 6n + 2 layers."""
    axis = 1 if keras.config.image_data_format() == "channels_first" else -1

    def convolve(x, filters, stride=1, kernel=3):
        x = layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(axis=axis, momentum=0.9)(x)

    images = keras.Input(shape)
    x = layers.ReLU()(convolve(images, 16))
    for filters in (16, 32, 64):
        for block in range((depth - 2) // 6):
            stride = 2 if filters > 16 and block == 0 else 1
            short = convolve(x, filters, stride, kernel=1) if stride == 2 else x
            x = convolve(layers.ReLU()(convolve(x, filters, stride)), filters)
            x = layers.ReLU()(layers.Add()([x, short]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(classes)(x))


def alexnet(shape, classes):
    """AlexNet on one device (Krizhevsky, 2014)."""
    net = [keras.Input(shape), layers.ZeroPadding2D(2)]
    for filters, kernel, stride, pool in (
        (64, 11, 4, True),
        (192, 5, 1, True),
        (384, 3, 1, False),
        (256, 3, 1, False),
        (256, 3, 1, True),
    ):
        padding = "valid" if kernel == 11 else "same"
        net.append(layers.Conv2D(filters, kernel, stride, padding=padding, activation="relu"))
        net += [layers.MaxPooling2D(3, 2)] if pool else []
    net.append(layers.Flatten())
    for _ in range(2):
        net += [layers.Dropout(0.5), layers.Dense(4096, activation="relu")]
    return keras.Sequential([*net, layers.Dense(classes)])


def make_model(classes):
    """The model, ready to fit."""
    square = (options.size, options.size)
    shape = (3, *square) if options.layout == "NCHW" else (*square, 3)
    applications = {
        "resnet50": keras.applications.ResNet50,
        "inception3": keras.applications.InceptionV3,
        "densenet121": keras.applications.DenseNet121,
    }
    if options.model in applications:
        model = applications[options.model](
            weights=None, input_shape=shape, classes=classes, classifier_activation=None
        )
    elif options.model == "alexnet":
        model = alexnet(shape, classes)
    else:
        model = cifar_resnet(shape, classes, int(options.model.removeprefix("resnet")))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if options.folder:
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    sgd = keras.optimizers.SGD(options.learning_rate, momentum=0.9)
    model.compile(sgd, loss, metrics=["accuracy"] if options.data == "learnable" else None)
    # What fit would draw a batch for, before the first step.
    scores = keras.ops.zeros((1, classes))
    labels = scores if options.folder else keras.ops.zeros((1,), "int32")
    model.compute_loss(y=labels, y_pred=scores)
    model.compute_metrics(None, labels, scores)
    return model


class Batches(keras.utils.PyDataset):
    """Batches of what a source gives: a function of a number and a random generator."""

    def __init__(self, source, count, **keywords):
        super().__init__(**keywords)
        self.source, self.count, self.epochs = source, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        batch = options.batch * options.gpus
        random = np.random.default_rng([options.seed, self.epochs, index])
        numbers = range(index * batch, (index + 1) * batch)
        images, labels = zip(*(self.source(number, random) for number in numbers), strict=True)
        images = np.stack(images)
        if options.layout == "NCHW":
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        return images, np.stack(labels)

    def on_epoch_end(self):
        self.epochs += 1


def in_memory(classes, part):
    """A source of random images; those of a class are alike where they are to be learnable."""
    random, size = np.random.default_rng([options.seed, part == "train"]), options.size
    count = 2048 if options.data == "learnable" else 256
    labels = random.integers(classes, size=count).astype("int32")
    images = random.standard_normal((count, size, size, 3), "float32")
    if options.data == "learnable":
        prototypes = np.random.default_rng(options.seed).standard_normal((classes, size, size, 3))
        images += prototypes.astype("float32")[labels]
    return lambda number, _: (images[number % count], labels[number % count])


def pictures(part):
    """A source of the pictures in a folder, cropped: at random where they are to train on."""
    with (options.folder / "labels.csv").open(newline="") as file:
        rows = [row for row in csv.reader(file) if row[0].startswith(f"{part}/")]
    if not rows:
        options.error(f"{options.folder}/labels.csv names no pictures in {part}")
    labels, size, train = (
        np.array([row[1:] for row in rows], "float32"),
        options.size,
        part == "train",
    )
    with Image.open(options.folder / rows[0][0]) as image:
        if min(image.size) < size:
            options.error(f"the pictures in {options.folder} are smaller than {size}x{size}")

    def load(number, random):
        number = random.integers(len(rows)) if train else number % len(rows)
        with Image.open(options.folder / rows[number][0]) as image:
            space = np.subtract(image.size, size)
            left, top = random.integers(space + 1) if train else space // 2
            crop = image.convert("RGB").crop((left, top, left + size, top + size))
        pixels = np.asarray(crop, "float32") / 127.5 - 1
        return (pixels[:, ::-1] if train and random.integers(2) else pixels), labels[number]

    return load


class Meter(keras.callbacks.Callback):
    """Times the steps and their waits for data, and ends the training after the last step.

    It wraps the model's train_function: a callback after each batch would have Keras fetch the
    loss from the device each time.
    """

    def on_train_begin(self, logs=None):
        self.waits, self.seconds, self.losses = [], [], []
        self.validation, self.validating, self.accuracy, self.target_s = None, 0, None, None
        # Within a step, asking for self.model would have JAX's model look at its state.
        self.learner = self.model
        self.train, self.learner.train_function = self.learner.train_function, self.step
        self.begin = self.steady = time.perf_counter()

    def on_epoch_begin(self, epoch, logs=None):
        self.in_epoch, self.ready = 0, time.perf_counter()

    def step(self, *inputs):
        # With PyTorch the batch has come by now; TensorFlow gets it within its graph.
        begin, got = self.ready, time.perf_counter()
        if options.backend == "jax":
            state, iterator = inputs
            inputs = state, iter([next(iterator)])
            begin, got = got, time.perf_counter()
        self.waits.append(got - begin)
        result = self.train(*inputs)
        if options.backend == "jax" and self.losses:
            # Else the host would run any number of steps ahead, and its times would tell nothing.
            self.losses[-1][1].block_until_ready()
        self.in_epoch += 1
        # Of the epoch so far: Keras tells no step's own loss.
        mean = (result[0] if options.backend == "jax" else result)["loss"]
        self.losses = [*self.losses[-1:], (self.in_epoch, mean)]
        count = len(self.waits)
        if count in (1, options.warmup, options.steps):
            # Waits for the device.
            self.first = float(mean) if count == 1 else self.first
            float(mean)
        if count == options.steps:
            self.learner.stop_training = True
        now = time.perf_counter()
        if count == options.warmup:
            self.steady, self.validating = now, 0
        self.seconds.append(now - self.ready)
        self.end = self.ready = now
        return result

    def on_test_begin(self, logs=None):
        float(self.losses[-1][1])
        self.validation = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        now = time.perf_counter()
        if self.validation and len(self.waits) < options.steps:
            self.validating += now - self.validation
        self.accuracy = logs.get("val_accuracy", logs.get("accuracy"))
        if options.target and self.accuracy >= options.target:
            self.target_s, self.model.stop_training = now - self.begin, True

    def figures(self):
        """Describe the training for the result."""
        (before, mean_before), (count, mean) = (
            self.losses[-2:]
            if len(self.losses) > 1
            else (
                (0, 0),
                self.losses[0],
            )
        )
        last = float(mean) * count - (float(mean_before) * before if before < count else 0)
        steady = self.seconds[options.warmup :]
        images = options.batch * options.gpus
        # TensorFlow draws batches in the graph; with PyTorch much of Keras lies in between.
        clocked = options.backend == "jax"
        return {
            "steps": len(self.waits),
            "samples_per_second": images * len(steady) / (self.end - self.steady - self.validating),
            "samples_per_second_median": images / statistics.median(steady),
            "loss_first": self.first,
            "loss_last": last,
            "data_wait_s": sum(self.waits) if clocked else None,
            "data_waits": len(self.waits) if clocked else None,
            "accuracy": self.accuracy if options.target else None,
            "target_s": self.target_s,
        }


def main():
    """Trains, and prints the result."""
    devices, kind, name = find_devices()
    keras.utils.set_random_seed(options.seed)
    keras.config.set_image_data_format(
        "channels_first" if options.layout == "NCHW" else "channels_last"
    )
    classes = LABELS if options.folder else 10 if options.size == 32 else 1000

    def batches(part, count):
        source = pictures(part) if options.folder else in_memory(classes, part)
        return Batches(source, count, workers=options.workers, max_queue_size=10)

    meter, epochs = Meter(), -(-options.steps // options.epoch)
    validation = batches("validation", 4) if options.validate != "none" else None
    with distribute(devices, kind):
        model = make_model(classes)
        model.fit(
            batches("train", options.epoch),
            epochs=epochs,
            validation_data=validation,
            callbacks=[meter],
            shuffle=False,
            verbose=0,
        )
    names = ("model", "update", "gpus", "batch", "data", "layout", "workers", "warmup")
    result = {
        "framework": f"keras-{options.backend}",
        "version": keras.__version__,
        **{name: getattr(options, name) for name in names},
        "device": kind,
        "device_name": name,
        "staging": False,
        "pinned": False,
        **meter.figures(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
