# /// script
# requires-python = ">=3.9,<3.12"
# # The CPU's build is small; for NVIDIA GPUs take "tensorflow[and-cuda]==2.15.1" in its place.
# dependencies = ["tensorflow-cpu==2.15.1", "tensorpack==0.11", "pillow>=10", "setuptools<81"]
# ///
"""Trains a picture classifier with tensorpack: its trainers, layers and dataflow.

    python tensorpack_train.py --model resnet50 --data DIR --gpus 4 --update ps-cpu --workers 8

DIR is a folder that images.py makes. On one device without workers each step is fed by the thread
that trains, and the result tells how long that took. In all other cases a thread fills a queue:
what is waited for it happens inside TensorFlow's graph, and is not known. With --device cpu all
the towers of --gpus N share the CPU.
"""

import argparse
import csv
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
import tensorpack
from PIL import Image
from tensorpack import callbacks, dataflow, input_source, models, train
from tensorpack.tfutils import argscope
from tensorpack.train import model_desc

tfv1 = tf.compat.v1
SIZES = {"resnet50": 224, "densenet121": 224, "alexnet": 224}
MODELS = ["resnet20", "resnet44", "resnet110", *SIZES]
UPDATES = ["single", "ps-cpu", "ps-gpu", "replicated", "replicated-nccl"]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet20")
    add("--batch", type=int, default=32, help="pictures a step and device")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--data", default="synthetic", help="synthetic, learnable or a folder of images.py")
    add("--gpus", type=int, default=1)
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--workers", type=int, default=0, help="processes that load, ahead; 0: none")
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
    options.update = options.update or ("single" if options.gpus == 1 else "replicated")
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
        f"--update {update} needs GPUs": cpu and update in ("ps-gpu", "replicated-nccl"),
        "--staging on needs GPUs": cpu and options.staging == "on",
        "--validate all needs GPUs": cpu and options.validate == "all" and options.gpus > 1,
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


def make_flow(options, part="train"):
    """Batches for one device."""
    size = SIZES.get(options.model, 32)
    if options.data in ("synthetic", "learnable"):
        pictures = list(zip(*make_arrays(options, 4 * options.batch, size, part)))
        flow = dataflow.DataFromList(pictures, shuffle=part == "train")
    else:
        flow = dataflow.DataFromList(read_labels(Path(options.data), part), part == "train")
        flow = dataflow.MapData(flow, make_reader(size, part))
    if part != "train":
        return dataflow.BatchData(flow, options.batch, remainder=True)
    flow = dataflow.BatchData(dataflow.RepeatedData(flow, -1), options.batch)
    return dataflow.MultiProcessRunnerZMQ(flow, options.workers) if options.workers else flow


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
    return [(str(folder / row[0]), np.array(row[1:], np.float32)) for row in rows]


def make_reader(size, part):
    def read(point):
        image = Image.open(point[0]).convert("RGB")
        if min(image.size) < size:
            image = image.resize((size, size))
        right, down = image.width - size, image.height - size
        x, y = right // 2, down // 2
        if part == "train":
            x, y = np.random.randint(right + 1), np.random.randint(down + 1)
        pixels = np.asarray(image.crop((x, y, x + size, y + size)), np.float32) / 255
        if part == "train" and np.random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return [pixels, point[1]]

    return read


class Timed(dataflow.ProxyDataFlow):
    """Yield the batches, and note in `waits` how long each was waited for."""

    def __init__(self, flow):
        super().__init__(flow)
        self.waits = []

    def __iter__(self):
        batches = iter(self.ds)
        while True:
            asked = time.perf_counter()
            batch = next(batches)
            self.waits.append(time.perf_counter() - asked)
            yield batch


class Model(model_desc.ModelDesc):
    def __init__(self, options):
        super().__init__()
        self.options, self.size = options, SIZES.get(options.model, 32)
        self.folder = options.data not in ("synthetic", "learnable")

    def inputs(self):
        label = ([None, 14], tf.float32) if self.folder else ([None], tf.int64)
        image = tf.TensorSpec([None, self.size, self.size, 3], tf.float32, "image")
        return [image, tf.TensorSpec(*label, "label")]

    def build_graph(self, image, label):
        form = "channels_last"
        if self.options.layout == "NCHW":
            image, form = tf.transpose(image, (0, 3, 1, 2)), "channels_first"
        name = self.options.model
        layers = [models.Conv2D, models.MaxPooling, models.AvgPooling, models.BatchNorm]
        with argscope([*layers, models.GlobalAvgPooling], data_format=form):
            if name in SIZES:
                body = {"resnet50": resnet50, "densenet121": densenet, "alexnet": alexnet}[name]
                x = body(image)
            else:
                x = cifar_resnet(image, int(name[6:]))
        logits = models.FullyConnected("answers", x, 14 if self.folder else 10)
        if self.folder:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=logits)
            right = tf.equal(logits > 0, label > 0.5)
        else:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits)
            right = tf.equal(tf.argmax(logits, 1), label)
        tf.reduce_mean(tf.cast(right, tf.float32), name="accuracy")
        return tf.reduce_mean(losses, name="loss")

    def optimizer(self):
        return tfv1.train.MomentumOptimizer(self.options.learning_rate, 0.9)


def convolve(name, x, filters, width=3, stride=1, relu=True):
    x = models.Conv2D(name, x, filters, width, strides=stride, use_bias=False)
    return (models.BNReLU if relu else models.BatchNorm)(f"{name}_norm", x)


def cifar_resnet(x, depth):
    x = convolve("first", x, 16)
    for filters in (16, 32, 64):
        for block in range((depth - 2) // 6):
            name, stride = f"block{filters}_{block}", 2 if filters > 16 and block == 0 else 1
            y = convolve(f"{name}_a", x, filters, 3, stride)
            y = convolve(f"{name}_b", y, filters, relu=False)
            short = convolve(f"{name}_s", x, filters, 1, stride, False) if stride == 2 else x
            x = tf.nn.relu(short + y)
    return models.GlobalAvgPooling("pool", x)


def resnet50(x):
    x = models.MaxPooling("pool1", convolve("first", x, 64, 7, 2), 3, 2, padding="same")
    for stage, blocks in enumerate((3, 4, 6, 3)):
        filters = 64 << stage
        for block in range(blocks):
            name, stride = f"block{stage}_{block}", 2 if stage and block == 0 else 1
            y = convolve(f"{name}_a", x, filters, 1)
            y = convolve(f"{name}_b", y, filters, 3, stride)
            y = convolve(f"{name}_c", y, 4 * filters, 1, relu=False)
            short = x if block else convolve(f"{name}_s", x, 4 * filters, 1, stride, False)
            x = tf.nn.relu(short + y)
    return models.GlobalAvgPooling("pool", x)


def densenet(x):
    axis = 1 if x.shape[1] == 3 else 3
    x = models.MaxPooling("pool1", convolve("first", x, 64, 7, 2), 3, 2, padding="same")
    for stage, blocks in enumerate((6, 12, 24, 16)):
        for block in range(blocks):
            name = f"block{stage}_{block}"
            y = models.Conv2D(f"{name}_a", models.BNReLU(f"{name}_n", x), 128, 1, use_bias=False)
            y = models.Conv2D(f"{name}_b", models.BNReLU(f"{name}_m", y), 32, 3, use_bias=False)
            x = tf.concat([x, y], axis)
        x = models.BNReLU(f"stage{stage}_n", x)
        if stage < 3:
            x = models.Conv2D(f"stage{stage}", x, x.shape[axis] // 2, 1, use_bias=False)
            x = models.AvgPooling(f"stage{stage}_p", x, 2)
    return models.GlobalAvgPooling("pool", x)


def alexnet(x):
    sizes = ((64, 11, 4), (192, 5, 1), (384, 3, 1), (256, 3, 1), (256, 3, 1))
    for n, (filters, width, stride) in enumerate(sizes):
        x = models.Conv2D(f"layer{n}", x, filters, width, strides=stride, activation=tf.nn.relu)
        if n in (0, 1, 4):
            x = models.MaxPooling(f"pool{n}", x, 3, 2)
    for n in range(2):
        x = models.Dropout(f"drop{n}", x, rate=0.5)
        x = models.FullyConnected(f"full{n}", x, 4096, activation=tf.nn.relu)
    return x


def finite(loss):
    """JSON has no word for what a loss becomes that grows beyond bounds."""
    return float(loss) if math.isfinite(loss) else None


class Meter(callbacks.Callback):
    """How long each step took, the loss at some, and the end of training."""

    def __init__(self, options):
        self.options, self.seconds, self.losses = options, [], {}
        self.accuracy = self.target_s = None

    def _setup_graph(self):
        self.loss = self.trainer.towers.training()[0]["loss:0"]

    def _before_train(self):
        self.start = time.perf_counter()

    def _before_epoch(self):
        self.begin = time.perf_counter()

    def _before_run(self, _):
        # Only where the device is to be waited for.
        if len(self.seconds) in (0, self.options.warmup - 1, self.options.steps - 1):
            return tfv1.train.SessionRunArgs(self.loss)
        return None

    def _after_run(self, _, values):
        if values.results is not None:
            self.losses[len(self.seconds)] = float(values.results)

    def _trigger_step(self):
        now = time.perf_counter()
        self.seconds.append(now - self.begin)
        self.begin, done = now, len(self.seconds)
        if done == self.options.steps and done % self.options.epoch:
            raise train.StopTraining("all steps are done")

    def _trigger_epoch(self):
        if not self.options.target:
            return
        self.accuracy = self.trainer.monitors.get_latest("validation_accuracy")
        if self.accuracy >= self.options.target:
            self.target_s = time.perf_counter() - self.start
            raise train.StopTraining("the target is reached")

    def result(self, waits):
        steady, pictures = self.seconds[self.options.warmup :], self.options.batch
        pictures *= self.options.gpus
        return {
            "steps": len(self.seconds),
            "warmup": self.options.warmup,
            "samples_per_second": pictures * len(steady) / sum(steady) if steady else None,
            "samples_per_second_median": pictures / statistics.median(steady) if steady else None,
            "loss_first": finite(self.losses[0]),
            "loss_last": finite(self.losses[max(self.losses)]),
            "data_wait_s": None if waits is None else sum(waits),
            "data_waits": None if waits is None else len(waits),
            "accuracy": self.accuracy,
            "target_s": self.target_s,
        }


def make_trainer(options):
    """How the devices share the model."""
    if options.update == "single":
        return train.SimpleTrainer()
    if options.update.startswith("ps-"):
        return train.SyncMultiGPUTrainerParameterServer(options.gpus, options.update[3:])
    mode = "nccl" if options.update == "replicated-nccl" else "gpu"
    return train.SyncMultiGPUTrainerReplicated(options.gpus, mode=mode)


def make_callbacks(options, meter):
    if options.validate == "none" and not options.target:
        return [meter]
    flow, check = make_flow(options, "validation"), callbacks.ScalarStats("accuracy")
    if options.validate == "all" and options.gpus > 1:
        gpus = list(range(options.gpus))
        return [callbacks.DataParallelInferenceRunner(flow, [check], gpus), meter]
    return [callbacks.InferenceRunner(flow, [check]), meter]


def main():
    options = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    np.random.seed(options.seed)
    tfv1.set_random_seed(options.seed)
    flow, meter, waits = make_flow(options), Meter(options), None
    if options.gpus == 1 and not options.workers and options.staging == "off":
        flow = Timed(flow)
        waits, data = flow.waits, input_source.FeedInput(flow)
    else:
        data = input_source.QueueInput(flow)
        data = input_source.StagingInput(data) if options.staging == "on" else data
    config = train.TrainConfig(
        model=Model(options),
        data=data,
        callbacks=make_callbacks(options, meter),
        steps_per_epoch=options.epoch,
        max_epoch=math.ceil(options.steps / options.epoch),
    )
    train.launch_train_with_config(config, make_trainer(options))
    names = ("model", "update", "device", "gpus", "batch", "data", "layout", "workers")
    about = {name: getattr(options, name) for name in names}
    cards = tf.config.list_physical_devices("GPU") if options.device == "cuda" else []
    details = tf.config.experimental.get_device_details(cards[0]) if cards else {}
    about |= {"device_name": details.get("device_name", "CPU"), "pinned": False}
    about |= {"staging": options.staging == "on", **meter.result(waits)}
    print(json.dumps({"framework": "tensorpack", "version": tensorpack.__version__, **about}))
    sys.stdout = sys.stderr  # for what tensorpack says when its loaders end


if __name__ == "__main__":
    main()
