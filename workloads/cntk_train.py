# /// script
# requires-python = "==3.6.*"
# dependencies = ["cntk==2.7", "numpy==1.19.5", "scipy==1.5.4", "pillow==8.4.0"]
# ///
"""Trains a network on pictures with CNTK 2.7, each device in a process of its own under mpiexec.

    python cntk_train.py
    python cntk_train.py --gpus 2 --update allreduce --data PICTURES --workers 1

It is for Python 3.6. CNTK wants the libraries of Open MPI 1.10; those of Open MPI 4 (Debian's
openmpi-bin) serve too, under the old names: prepare_cntk.py links them, as `gputrace bench
--install` does.

CNTK's own decoder of pictures wants libraries that are gone, so that a deserializer in Python does
it, on the thread on which CNTK reads ahead. The pictures of a folder (DIR/train, DIR/validation,
DIR/labels.csv) carry 14 labels each, so that the loss is a sigmoid's cross-entropy; else it is a
softmax's. With several devices, data-parallel SGD sums the gradients by MPI. The last line printed
is the result, as JSON.
"""

import argparse
import csv
import json
import os
import platform
import random
import shutil
import statistics
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

import cntk as C
import numpy as np
from cntk.layers import (
    BatchNormalization,
    Convolution2D,
    Dense,
    Dropout,
    GlobalAveragePooling,
    MaxPooling,
    Sequential,
)
from cntk.train.distributed import Communicator, data_parallel_distributed_learner
from PIL import Image

SIZES = {"resnet20": 32, "resnet44": 32, "resnet110": 32, "resnet50": 224, "alexnet": 224}
LABELS = 14
UNDER_MPI = any(name.startswith(("OMPI_COMM_", "PMI_")) for name in os.environ)


def parse_options():
    """Options, and what CNTK cannot do as one line; several devices begin under mpiexec."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--model", choices=sorted(SIZES), default="resnet20")
    option("--batch", type=int, default=32, help="samples a step on each device")
    option("--steps", type=int, default=20)
    option("--warmup", type=int, default=5, help="first steps, left out of the figures")
    option("--data", default="synthetic", metavar="synthetic|learnable|DIR")
    option("--gpus", type=int, default=1)
    option("--device", choices=("auto", "cuda", "cpu"), default="auto")
    option("--workers", type=int, default=0, help="threads that decode pictures, beside CNTK's")
    option("--layout", default="NCHW")
    option("--update", choices=("single", "independent", "allreduce"))
    option("--staging", choices=("on", "off"), default="off")
    option("--pinned", choices=("on", "off"), default="off")
    option("--validate", choices=("none", "one", "all"), default="none")
    option("--epoch", type=int, help="steps an epoch; all are one if not given")
    option("--learning-rate", type=float, default=0.02)
    option("--target", type=float, help="accuracy at which to stop")
    option("--seed", type=int, default=0)
    options = parser.parse_args()
    there = sum(device.type() == C.device.DeviceKind.GPU for device in C.device.all_devices())
    if options.device == "auto":
        options.device = "cuda" if there else "cpu"
    if UNDER_MPI:
        options.gpus = Communicator.num_workers()
    options.update = options.update or ("single" if options.gpus == 1 else "allreduce")
    options.epoch = options.epoch or options.steps
    problem = find_problem(options, there)
    if problem:
        parser.error(problem)
    if options.gpus > 1 and not UNDER_MPI:
        launch = ["mpiexec", "-n", str(options.gpus), "--oversubscribe", sys.executable]
        os.execvp("mpiexec", launch + sys.argv)
    return options


def find_problem(options, there):
    """Return what these options ask for that cannot be done; nothing if all can."""
    o, cuda = options, options.device == "cuda"
    folder = o.data not in ("synthetic", "learnable")
    problems = {
        "--batch, --gpus and --epoch must be 1 or more": min(o.batch, o.gpus, o.epoch) < 1,
        "--steps must be more than --warmup, which is 0 or more": not 0 <= o.warmup < o.steps,
        "--workers must be 0 or more": o.workers < 0,
        f"--gpus {o.gpus}: this CNTK sees {there} GPUs": cuda and o.gpus > there,
        "--update single is for one device": o.update == "single" and o.gpus > 1,
        "mpiexec is not on PATH, which several devices need": (
            o.gpus > 1 and shutil.which("mpiexec") is None
        ),
        "--layout must be NCHW, the only one of CNTK": o.layout != "NCHW",
        "--staging, --pinned: CNTK's readers decide that": "on" in (o.staging, o.pinned),
        f"--data learnable is 32 x 32: {o.model} takes more": (
            o.data == "learnable" and SIZES[o.model] > 32
        ),
        "--target is an accuracy between 0 and 1, of --data learnable on one device": (
            o.target is not None
            and not (0 < o.target < 1 and o.data == "learnable" and o.gpus == 1)
        ),
        f"--data {o.data}: has no labels.csv; make one with images.py": (
            folder and not (Path(o.data) / "labels.csv").is_file()
        ),
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def convolution(size, channels, stride=1):
    """A convolution and the normalization after it."""
    return Sequential(
        [
            Convolution2D(size, channels, strides=stride, pad=True, bias=False),
            BatchNormalization(map_rank=1, normalization_time_constant=64),
        ]
    )


def residual(parts, channels, stride, project):
    """Convolutions, (size, channels) each, and a shortcut."""
    body = [convolution(*parts[0], stride=stride)]
    for part in parts[1:]:
        body += [C.relu, convolution(*part)]
    shortcut = convolution(1, channels, stride) if project else C.combine
    body = Sequential(body)
    return lambda x: C.relu(body(x) + (shortcut(x) if project else x))


def cifar_resnet(depth):
    """For 32 x 32 pixels."""
    layers = [convolution(3, 16), C.relu]
    for channels in (16, 32, 64):
        for block in range((depth - 2) // 6):
            down = channels > 16 and block == 0
            layers.append(residual([(3, channels)] * 2, channels, 1 + down, down))
    return [*layers, GlobalAveragePooling()]


def resnet50():
    """For 224 x 224 pixels."""
    layers = [convolution(7, 64, 2), C.relu, MaxPooling((3, 3), (2, 2), pad=True)]
    for narrow, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            parts = [(1, narrow), (3, narrow), (1, 4 * narrow)]
            stride = 2 if narrow > 64 and block == 0 else 1
            layers.append(residual(parts, 4 * narrow, stride, block == 0))
    return [*layers, GlobalAveragePooling()]


def alexnet():
    """For 224 x 224 pixels."""
    layers = [Convolution2D(11, 64, C.relu, strides=4, pad=True), MaxPooling((3, 3), (2, 2))]
    layers += [Convolution2D(5, 192, C.relu, pad=True), MaxPooling((3, 3), (2, 2))]
    layers += [Convolution2D(3, channels, C.relu, pad=True) for channels in (384, 256, 256)]
    layers += [MaxPooling((3, 3), (2, 2))]
    return [*layers, Dense(4096, C.relu), Dropout(0.5), Dense(4096, C.relu), Dropout(0.5)]


def make_network(model, classes):
    """The layers of a model, and one for the classes."""
    if model in ("resnet50", "alexnet"):
        layers = {"resnet50": resnet50, "alexnet": alexnet}[model]()
    else:
        layers = cifar_resnet(int(model[len("resnet") :]))
    return Sequential([*layers, Dense(classes)])


class InMemory:
    """Arrays of this rank's own, drawn through CNTK's source of such."""

    def __init__(self, options, rank, is_training, size, classes):
        # One draw for the classes, which all ranks share, and one for what is made of them.
        prototypes = np.random.RandomState(options.seed).normal(size=(classes, 3, size, size))
        draw = np.random.RandomState(options.seed + 1 + 2 * rank + is_training)
        count = options.batch * (-(-1024 // options.batch) if options.data == "learnable" else 1)
        labels = draw.randint(0, classes, count)
        values = draw.normal(size=(count, 3, size, size))
        if options.data == "learnable":
            values += prototypes[labels]
        data = {"x": values.astype(np.float32), "y": np.eye(classes, dtype=np.float32)[labels]}
        self.count, self.batch = count, options.batch
        self.source = C.io.MinibatchSourceFromData(data)

    def next(self, x, y):
        """The next batch."""
        batch = self.source.next_minibatch(self.batch)
        return {x: batch[self.source.streams.x], y: batch[self.source.streams.y]}


class Decoder(C.io.UserDeserializer):
    """A rank's pictures, cropped to the size: at random and flipped, or from the middle."""

    def __init__(self, options, rank, split, size):
        with (Path(options.data) / "labels.csv").open(newline="") as file:
            rows = [row for row in csv.reader(file) if row[0].startswith(split + "/")]
        # CNTK could part them itself, but dies when a deserializer in Python is to do so.
        rows = rows[rank :: options.gpus]
        self.paths = [Path(options.data) / row[0] for row in rows]
        self.labels = np.array([row[1:] for row in rows], np.float32)
        self.size, self.at_random, self.chunk = size, split == "train", options.batch
        self.map = ThreadPool(options.workers).map if options.workers else map
        super().__init__()

    def stream_infos(self):
        """Return the streams of which a sample is made."""
        shapes = {"x": (3, self.size, self.size), "y": (LABELS,)}
        stream = C.io.StreamInformation
        return [
            stream(name, n, "dense", np.float32, shape)
            for n, (name, shape) in enumerate(shapes.items())
        ]

    def num_chunks(self):
        """Chunks are what CNTK reads ahead."""
        return -(-len(self.paths) // self.chunk)

    def get_chunk(self, chunk_id):
        """The chunk's pictures and labels."""
        part = slice(chunk_id * self.chunk, (chunk_id + 1) * self.chunk)
        return {
            "x": np.stack(list(self.map(self.decode, self.paths[part]))),
            "y": self.labels[part],
        }

    def decode(self, path):
        """One picture."""
        picture = Image.open(str(path)).convert("RGB")
        spare = [max(0, side - self.size) for side in picture.size]
        left, top = (random.randint(0, n) if self.at_random else n // 2 for n in spare)
        picture = picture.crop((left, top, left + self.size, top + self.size))
        if self.at_random and random.random() < 0.5:
            picture = picture.transpose(Image.FLIP_LEFT_RIGHT)
        return np.asarray(picture, np.float32).transpose(2, 0, 1) / 255


class Pictures:
    """A rank's share of a folder's pictures."""

    def __init__(self, options, rank, split):
        decoder = Decoder(options, rank, split, SIZES[options.model])
        self.count, self.batch = len(decoder.paths), options.batch
        self.source = C.io.MinibatchSource(decoder, randomize=split == "train")

    def next(self, x, y):
        """The next batch."""
        streams = {x: self.source.streams.x, y: self.source.streams.y}
        return self.source.next_minibatch(self.batch, streams)


def make_trainer(options, network, x, y, several):
    """CNTK's trainer, and the share of labels that are right."""
    z = network(x)
    if several:
        loss = C.binary_cross_entropy(C.sigmoid(z), y) / LABELS
        right = C.reduce_mean(C.equal(C.greater(z, 0), y))
    else:
        loss, right = C.cross_entropy_with_softmax(z, y), 1 - C.classification_error(z, y)
    rate = C.learning_parameter_schedule(options.learning_rate)
    learner = C.momentum_sgd(z.parameters, rate, C.momentum_schedule(0.9), use_mean_gradient=True)
    if options.update == "allreduce":
        learner = data_parallel_distributed_learner(learner)
    return C.Trainer(z, (loss, None), [learner]), right


def validate(right, x, y, held_out):
    """Share of labels that are right, of those this rank holds out."""
    shares = []
    for _ in range(max(1, held_out.count // held_out.batch)):
        batch = held_out.next(x, y)
        shares.append(float(np.mean(right.eval({v: batch[v] for v in right.arguments}))))
    return statistics.mean(shares)


def train(options, rank):
    """Trains; the figures of the result."""
    size, several = SIZES[options.model], options.data not in ("synthetic", "learnable")
    classes = LABELS if several else 10 if size == 32 else 1000
    if several:
        data, held_out = (Pictures(options, rank, split) for split in ("train", "validation"))
    else:
        data, held_out = (InMemory(options, rank, kind, size, classes) for kind in (1, 0))
    x, y = C.input_variable((3, size, size)), C.input_variable(classes)
    network = make_network(options.model, classes)
    trainer, right = make_trainer(options, network, x, y, several)
    together = options.batch * options.gpus
    waits, seconds, accuracy, reached, first = [], [], None, None, None
    began = start = time.perf_counter()
    for step in range(1, options.steps + 1):
        before = time.perf_counter()
        batch = data.next(x, y)
        waits.append(time.perf_counter() - before)
        trainer.train_minibatch(batch)
        is_check = step % options.epoch == 0 or step == options.steps
        if step in (1, options.warmup) or is_check:
            # Asking for the loss waits for the device.
            last = trainer.previous_minibatch_loss_average
            first = last if first is None else first
        seconds.append(time.perf_counter() - start)
        asked = options.validate == "all" or (options.validate == "one" and rank == 0)
        if is_check and (asked or options.target):
            accuracy = validate(right, x, y, held_out)
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
        "loss_first": first,
        "loss_last": last,
        "data_wait_s": sum(waits),
        "data_waits": len(waits),
        "accuracy": accuracy if options.target else None,
        "target_s": reached,
    }


def choose_device(options, rank):
    """The rank's device; its name."""
    if options.device == "cpu":
        C.device.try_set_default_device(C.device.cpu())
        return platform.processor() or platform.machine()
    device = C.device.gpu(rank)
    C.device.try_set_default_device(device)
    return C.device.get_gpu_properties(device).name


def main():
    """Trains, and prints the result."""
    options = parse_options()
    rank = Communicator.rank() if options.gpus > 1 else 0
    random.seed(options.seed + rank)
    C.cntk_py.set_fixed_random_seed(options.seed)
    result = {"framework": "cntk", "version": C.__version__}
    result["device_name"] = choose_device(options, rank)
    names = ("model", "update", "device", "gpus", "batch", "data", "layout", "workers", "warmup")
    result.update({name: getattr(options, name) for name in names})
    result.update(staging=False, pinned=False)
    result.update(train(options, rank))
    if rank == 0:
        print(json.dumps(result))
    if UNDER_MPI:
        sys.stdout.flush()
        Communicator.finalize()


if __name__ == "__main__":
    main()
