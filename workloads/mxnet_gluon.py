# /// script
# requires-python = ">=3.8,<3.12"
# dependencies = ["mxnet==1.9.1", "numpy==1.23.5"]
# ///
"""Trains a network on pictures with MXNet 1.9.1's Gluon: one process, one or several devices.

    python mxnet_gluon.py
    python mxnet_gluon.py --model resnet50 --gpus 4 --update ps-gpu --data PICTURES --workers 8

The pictures of a folder (DIR/train, DIR/validation, DIR/labels.csv) carry 14 labels each, so that
the loss is a sigmoid's cross-entropy; else it is a softmax's. With several devices a key-value
store sums the gradients: on the CPU, on a GPU, or by NCCL where MXNet was built with it.
The last line printed is the result, as JSON.
"""

import argparse
import csv
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

SIZES = {"resnet20": 32, "resnet44": 32, "resnet110": 32, "resnet50": 224}
SIZES.update({"inception3": 299, "densenet121": 224, "alexnet": 224})
ZOO = {"resnet50": vision.resnet50_v1, "inception3": vision.inception_v3}
ZOO.update({"densenet121": vision.densenet121, "alexnet": vision.alexnet})
STORES = {"single": None, "independent": None, "ps-cpu": "local", "ps-gpu": "device"}
STORES["replicated-nccl"] = "nccl"
LABELS = 14


def parse_options():
    """Options, and what MXNet cannot do as one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, switch = parser.add_argument, {"choices": ("on", "off"), "default": "off"}
    option("--model", choices=SIZES, default="resnet20")
    option("--batch", type=int, default=32, help="samples a step on each device")
    option("--steps", type=int, default=20)
    option("--warmup", type=int, default=5, help="first steps, left out of the figures")
    option("--data", default="synthetic", metavar="synthetic|learnable|DIR")
    option("--gpus", type=int, default=1)
    option("--device", choices=("auto", "cuda", "cpu"), default="auto")
    option("--workers", type=int, default=0, help="processes that load data")
    option("--layout", choices=("NCHW", "NHWC"), default="NCHW")
    option("--update", choices=STORES)
    option("--staging", **switch, help="copy the next batch while this one is trained on")
    option("--pinned", **switch)
    option("--validate", choices=("none", "one", "all"), default="none")
    option("--epoch", type=int, help="steps an epoch; all are one if not given")
    option("--learning-rate", type=float, default=0.02)
    option("--target", type=float, help="accuracy at which to stop")
    option("--seed", type=int, default=0)
    options = parser.parse_args()
    if not mx.__version__.startswith("1."):
        parser.error(f"MXNet {mx.__version__} is installed: mxnet2_gluon.py is for it")
    there = mx.context.num_gpus()
    if options.device == "auto":
        options.device = "cuda" if there else "cpu"
    options.update = options.update or ("single" if options.gpus == 1 else "ps-gpu")
    options.epoch = options.epoch or options.steps
    problem = find_problem(options, there)
    if problem:
        parser.error(problem)
    return options


def find_problem(options, there):
    """Return what these options ask for that cannot be done; nothing if all can."""
    o, cuda = options, options.device == "cuda"
    folder = o.data not in ("synthetic", "learnable")
    problems = {
        "--batch, --gpus and --epoch must be 1 or more": min(o.batch, o.gpus, o.epoch) < 1,
        "--steps must be more than --warmup, which is 0 or more": not 0 <= o.warmup < o.steps,
        "--workers must be 0 or more": o.workers < 0,
        f"--gpus {o.gpus}: this MXNet sees {there} GPUs": cuda and o.gpus > there,
        "--update single is for one device": o.update == "single" and o.gpus > 1,
        "--update replicated-nccl: this MXNet was built without NCCL, or is to use CPUs": (
            o.update == "replicated-nccl"
            and not (cuda and mx.runtime.Features().is_enabled("NCCL"))
        ),
        "--layout NHWC: MXNet's convolutions have it on GPUs alone": (
            o.layout == "NHWC" and not cuda
        ),
        f"--layout NHWC: Gluon's {o.model} is NCHW": o.layout == "NHWC" and o.model in ZOO,
        "--pinned on: copies to CPU devices have no pinned memory": o.pinned == "on" and not cuda,
        f"--data learnable is 32 x 32: {o.model} takes more": (
            o.data == "learnable" and o.model in ZOO
        ),
        "--target is an accuracy between 0 and 1, of --data learnable": (
            o.target is not None and not (0 < o.target < 1 and o.data == "learnable")
        ),
        f"--data {o.data}: has no labels.csv; make one with images.py": (
            folder and not (Path(o.data) / "labels.csv").is_file()
        ),
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


class Residual(nn.HybridBlock):
    """Two convolutions and a shortcut."""

    def __init__(self, channels, stride, layout):
        super().__init__()
        axis = layout.index("C")
        self.body, self.shortcut = nn.HybridSequential(), nn.HybridSequential()
        for step in (stride, 1):
            self.body.add(
                nn.Conv2D(channels, 3, step, 1, use_bias=False, layout=layout), nn.BatchNorm(axis)
            )
            if step is stride:
                self.body.add(nn.Activation("relu"))
        if stride > 1:
            self.shortcut.add(
                nn.Conv2D(channels, 1, stride, use_bias=False, layout=layout), nn.BatchNorm(axis)
            )

    def hybrid_forward(self, F, x):
        """Relu of the sum."""
        shortcut = self.shortcut(x) if len(self.shortcut) else x
        return F.relu(self.body(x) + shortcut)


def make_network(options, classes):
    """A network of the model zoo, or a ResNet for 32 x 32 pixels."""
    if options.model in ZOO:
        return ZOO[options.model](classes=classes)
    layout = options.layout
    network = nn.HybridSequential()
    network.add(nn.Conv2D(16, 3, 1, 1, use_bias=False, layout=layout))
    network.add(nn.BatchNorm(layout.index("C")), nn.Activation("relu"))
    for channels in (16, 32, 64):
        for block in range((int(options.model[len("resnet") :]) - 2) // 6):
            network.add(Residual(channels, 2 if channels > 16 and not block else 1, layout))
    network.add(nn.GlobalAvgPool2D(layout), nn.Flatten(), nn.Dense(classes))
    return network


class Pictures(gluon.data.Dataset):
    """Pictures of a folder, cropped to the size: at random and flipped, or from the middle."""

    def __init__(self, folder, split, size, layout):
        with (Path(folder) / "labels.csv").open(newline="") as file:
            rows = [row for row in csv.reader(file) if row[0].startswith(f"{split}/")]
        self.paths = [str(Path(folder) / row[0]) for row in rows]
        self.labels = np.array([row[1:] for row in rows], np.float32)
        self.size, self.layout, self.at_random = (size, size), layout, split == "train"

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        picture = mx.image.imread(self.paths[index])
        crop = mx.image.random_crop if self.at_random else mx.image.center_crop
        picture = crop(picture, self.size)[0]
        if self.at_random:
            picture = mx.ndarray.image.random_flip_left_right(picture)
        picture = mx.ndarray.image.to_tensor(picture)
        return picture if self.layout == "NCHW" else picture.transpose((1, 2, 0)), self.labels[
            index
        ]


def make_data(options):
    """Data sets to train on and to validate with, and how many classes or labels there are."""
    size, layout = SIZES[options.model], options.layout
    if options.data not in ("synthetic", "learnable"):
        sets = [Pictures(options.data, split, size, layout) for split in ("train", "validation")]
        return (*sets, LABELS)
    shape = (3, size, size) if layout == "NCHW" else (size, size, 3)
    classes = 1000 if options.model in ZOO else 10
    draw, together = np.random.default_rng(options.seed), options.batch * options.gpus
    counts = (2048, 512) if options.data == "learnable" else (together, together)
    prototypes = draw.normal(size=(classes, *shape)) if options.data == "learnable" else None
    sets = []
    for count in counts:
        labels = draw.integers(0, classes, count)
        values = draw.standard_normal((count, *shape), np.float32)
        if prototypes is not None:
            values += prototypes[labels]
        sets.append(gluon.data.ArrayDataset(values, labels.astype(np.float32)))
    return (*sets, classes)


class Repeated(gluon.data.Sampler):
    """All samples in a random order, and again, until there were enough."""

    def __init__(self, length, count):
        self.length, self.count = length, count

    def __iter__(self):
        for index in range(self.count):
            if index % self.length == 0:
                order = np.random.permutation(self.length).tolist()
            yield order[index % self.length]

    def __len__(self):
        return self.count


def clocked(loader, waits):
    """Batches, and how long the wait for each took, in seconds."""
    batches = iter(loader)
    for _ in range(len(loader)):
        start = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - start)
        yield batch


def on_devices(batches, devices, ahead):
    """Each batch split over the devices; copies of the next may begin before it is asked for."""
    copied = []
    for batch in batches:
        copied.append([gluon.utils.split_and_load(part, devices) for part in batch])
        if len(copied) > ahead:
            yield copied.pop(0)
    yield from copied


class Training:
    """Networks on devices, and what trains them."""

    def __init__(self, options, classes):
        place = mx.gpu if options.device == "cuda" else mx.cpu
        self.options, self.devices = options, [place(n) for n in range(options.gpus)]
        apart = options.update == "independent"
        groups = [[device] for device in self.devices] if apart else [self.devices]
        networks = [self.start_network(classes, group) for group in groups]
        self.networks = networks if apart else networks * options.gpus
        rates = {"learning_rate": options.learning_rate, "momentum": 0.9, "wd": 1e-4}
        store = STORES[options.update]
        self.trainers = [
            gluon.Trainer(network.collect_params(), "sgd", rates, kvstore=store)
            for network in networks
        ]
        self.together = options.batch * (1 if apart else options.gpus)
        several = options.data not in ("synthetic", "learnable")
        self.loss = (
            gluon.loss.SigmoidBinaryCrossEntropyLoss()
            if several
            else gluon.loss.SoftmaxCrossEntropyLoss()
        )
        self.metric = mx.metric.CustomMetric(labels_right) if several else mx.metric.Accuracy()

    def start_network(self, classes, devices):
        """A network with its first values on these devices."""
        network = make_network(self.options, classes)
        network.initialize(mx.init.Xavier(), ctx=devices)
        network.hybridize(static_alloc=True, static_shape=True)
        return network

    def step(self, parts, labels):
        """Trains on a batch; its loss on each device, which may be still at work."""
        with autograd.record():
            losses = [
                self.loss(network(part), label)
                for network, part, label in zip(self.networks, parts, labels)
            ]
        autograd.backward(losses)
        for trainer in self.trainers:
            trainer.step(self.together)
        return losses

    def validate(self, dataset):
        """Share of labels that are right, on the first device or on all."""
        options = self.options
        devices = self.devices if options.validate == "all" else self.devices[:1]
        size = options.batch * len(devices)
        loader = gluon.data.DataLoader(dataset, size, num_workers=options.workers)
        self.metric.reset()
        for batch in loader:
            parts, labels = (
                gluon.utils.split_and_load(part, devices, even_split=False) for part in batch
            )
            self.metric.update(labels, [net(part) for net, part in zip(self.networks, parts)])
        return self.metric.get()[1]


def labels_right(labels, values):
    """Share of the labels that the sign of the network's value tells."""
    return float(((values > 0) == (labels > 0)).mean())


def train(options):
    """Trains; the figures of the result."""
    dataset, held_out, classes = make_data(options)
    training = Training(options, classes)
    together = options.batch * options.gpus
    loader = gluon.data.DataLoader(
        dataset,
        together,
        sampler=Repeated(len(dataset), options.steps * together),
        num_workers=options.workers,
        pin_memory=options.pinned == "on",
    )
    waits, seconds, losses, accuracy, reached = [], [], [], None, None
    batches = on_devices(clocked(loader, waits), training.devices, options.staging == "on")
    began = start = time.perf_counter()
    for step in range(1, options.steps + 1):
        losses.append(training.step(*next(batches)))
        is_check = step % options.epoch == 0 or step == options.steps
        if is_check or step == options.warmup:
            mx.ndarray.waitall()
        # One step is under way while the next is prepared, not more: memory is finite.
        for loss in losses[-2] if step > 1 else ():
            loss.wait_to_read()
        seconds.append(time.perf_counter() - start)
        if is_check and (options.validate != "none" or options.target):
            accuracy = training.validate(held_out)
            print(f"step {step}: accuracy {accuracy:.4f}", file=sys.stderr)
            if options.target and accuracy >= options.target:
                reached = time.perf_counter() - began
                break
        start = time.perf_counter()
    steady = seconds[options.warmup :]
    return {
        "steps": len(seconds),
        "samples_per_second": together * len(steady) / sum(steady) if steady else None,
        "samples_per_second_median": together / statistics.median(steady) if steady else None,
        "loss_first": average(losses[0]),
        "loss_last": average(losses[-1]),
        "data_wait_s": sum(waits),
        "data_waits": len(waits),
        "accuracy": accuracy if options.target else None,
        "target_s": reached,
    }


def average(losses):
    """Mean loss over all devices."""
    return statistics.fmean(float(loss.mean().asscalar()) for loss in losses)


def device_name(options):
    """The GPU's or the processor's."""
    if options.device == "cpu":
        return platform.processor() or platform.machine()
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(ask, capture_output=True, text=True).stdout.partition("\n")[0]


def main():
    """Trains, and prints the result."""
    options = parse_options()
    random.seed(options.seed)
    np.random.seed(options.seed)
    mx.random.seed(options.seed)
    result = {"framework": "mxnet", "version": mx.__version__, "device_name": device_name(options)}
    names = ("model", "update", "device", "gpus", "batch", "data", "layout", "workers", "warmup")
    result.update({name: getattr(options, name) for name in names})
    result.update(staging=options.staging == "on", pinned=options.pinned == "on")
    print(json.dumps({**result, **train(options)}))


if __name__ == "__main__":
    main()
