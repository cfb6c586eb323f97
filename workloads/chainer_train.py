# /// script
# requires-python = ">=3.8,<3.12"
# dependencies = [
#     "chainer==7.8.1",
#     "numpy<1.24",
#     "setuptools<74",
#     "mpi4py==4.1.2",
#     "mpich==5.0.2",
#     "pillow>=9",
# ]
#
# [tool.uv]
# build-constraint-dependencies = ["setuptools<81"]
# ///
"""Trains a picture classifier with Chainer's Trainer, on several devices with ChainerMN.

    python chainer_train.py --model resnet50 --data DIR --workers 8
    python chainer_train.py --gpus 2 --update chainermn

DIR is a folder that images.py makes. ChainerMN has a process for each device: started alone, this
script starts mpiexec. With CuPy 13 or 14 it runs on Pythons and NumPys of today too, see modernize.
"""

import argparse
import csv
import importlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import sys
import time
import types
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np


def modernize():
    """Lends Chainer 7, of 2022, the little that it uses and that Python and NumPy dropped since."""

    class DistributionNotFound(Exception):
        pass

    def require(_):
        raise DistributionNotFound  # so it warns of no version

    stand_in = dict.fromkeys(("DistributionNotFound", "VersionConflict"), DistributionNotFound)
    for name in ("pkg_resources", "numpy.distutils", "numpy.distutils.system_info"):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(stand_in, require=require)
    kinds = {"int": [np.int8, np.int16, np.int32, np.int64]}
    kinds["float"] = [np.float16, np.float32, np.float64]
    for name, value in {"float": float, "int": int, "bool": np.bool_, "sctypes": kinds}.items():
        if name not in vars(np):
            setattr(np, name, value)


modernize()

# What modernize lends has to be there first.
import chainer  # noqa: E402
import chainer.functions as F  # noqa: E402
import chainer.links as L  # noqa: E402
from chainer import training  # noqa: E402
from chainer.backends import cuda  # noqa: E402
from chainer.training import extensions, updaters  # noqa: E402

SIZES = {"resnet50": 224, "inception3": 299, "densenet121": 224, "alexnet": 224}
UPDATES = ["single", "independent", "ps-gpu", "replicated-nccl", "chainermn"]
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def parse_options():
    """The options, or one line about what is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=["resnet20", "resnet44", "resnet110", *SIZES], default="resnet20")
    add("--batch", type=int, default=32, help="pictures a step and device")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--data", default="synthetic", help="synthetic, learnable or a folder of images.py")
    add("--gpus", type=int, default=1)
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--workers", type=int, default=0, help="processes of each MultiprocessIterator; 0: none")
    add("--layout", choices=["NCHW", "NHWC"], default="NCHW")
    add("--update", choices=UPDATES)
    add("--staging", choices=["on", "off"], default="off")
    add("--pinned", choices=["on", "off"], default="off")
    add("--validate", choices=["none", "one", "all"], default="none")
    add("--epoch", type=int, help="steps an epoch")
    add("--learning-rate", type=float, default=0.1)
    add("--target", type=float, help="accuracy to stop at")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    cards = count_cards()
    if options.device == "auto":
        options.device = "cuda" if cards else "cpu"
    options.update = options.update or ("single" if options.gpus == 1 else "chainermn")
    options.epoch = options.epoch or options.steps
    if options.target and options.validate == "none":
        options.validate = "one"
    problem = find_problem(options, cards)
    if problem:
        parser.error(problem)
    return options


def count_cards():
    """GPUs that CuPy can use."""
    if not cuda.available:
        return 0
    try:
        return cuda.cupy.cuda.runtime.getDeviceCount()
    except cuda.cupy.cuda.runtime.CUDARuntimeError:
        return 0


def find_problem(options, cards):
    """Return in one line why these options cannot be run; nothing if they can."""
    cpu, update, data = options.device == "cpu", options.update, options.data
    counts = (options.batch, options.steps, options.epoch, options.gpus)
    staging = options.staging == "on"
    labels = Path(data, "labels.csv")
    ranks = update in ("independent", "chainermn")
    wrong = {
        "--batch, --steps, --epoch and --gpus must be 1 or more": min(counts) < 1,
        "--workers must be 0 or more": options.workers < 0,
        "--warmup must be less than --steps": not 0 <= options.warmup < options.steps,
        f"--gpus {options.gpus}: CuPy sees {cards}": not cpu and options.gpus > cards,
        "--update single takes one device": update == "single" and options.gpus > 1,
        "--update replicated-nccl needs GPUs": cpu and update == "replicated-nccl",
        "--layout NHWC: Chainer computes it with cuDNN alone": options.layout == "NHWC",
        "--staging on needs a GPU": staging and cpu,
        f"--staging on: --update {update} takes no converter of that kind": staging
        and update in ("ps-gpu", "replicated-nccl"),
        "--pinned on: Chainer pins with --staging on alone": options.pinned == "on" and not staging,
        f"--validate all: --update {update} validates on one device": options.validate == "all"
        and not ranks
        and options.gpus > 1,
        "--target needs --data learnable": options.target and data != "learnable",
        "--target needs an --epoch longer than --warmup": options.target
        and options.epoch <= options.warmup,
        "--data learnable is for the ResNets of 32x32": data == "learnable"
        and options.model in SIZES,
        f"--data: no {labels}; images.py makes such a folder": data
        not in ("synthetic", "learnable")
        and not labels.is_file(),
        "no mpiexec here: install mpich or Open MPI": ranks
        and options.gpus > 1
        and not under_mpi()
        and not find_mpiexec(),
    }
    return next((problem for problem, found in wrong.items() if found), None)


def under_mpi():
    """Return True if an mpiexec or srun has started this."""
    return any(name in os.environ for name in RANKS)


def find_mpiexec():
    """The one beside this Python goes before others."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")


class Layers(chainer.ChainList):
    """Links and functions, one after the other, which ParallelUpdater can copy and add up."""

    def __init__(self, *steps):
        super().__init__(*(step for step in steps if isinstance(step, chainer.Link)))
        self.steps = steps

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


class Sum(Layers):
    """Links and functions side by side, added."""

    def forward(self, x):
        return F.relu(F.add(*[step(x) for step in self.steps]))


class Joined(Layers):
    """Links and functions side by side; their channels come one after the other."""

    def forward(self, x):
        return F.concat([step(x) for step in self.steps])


def convolve(filters, size, stride=1, pad=None, act=F.relu):
    """Normalised; a picture keeps its size, but for the stride, unless `pad` says else."""
    size = (size, size) if isinstance(size, int) else size
    pad = (size[0] // 2, size[1] // 2) if pad is None else pad
    weights = chainer.initializers.HeNormal()
    layer = L.Convolution2D(None, filters, size, stride, pad, nobias=True, initialW=weights)
    return Layers(layer, L.BatchNormalization(filters), act)


linear = partial(convolve, act=F.identity)
pool_max = partial(F.max_pooling_2d, ksize=3, stride=2, cover_all=False)
pool_average = partial(F.average_pooling_2d, ksize=3, stride=1, pad=1)
pool_all = partial(F.mean, axis=(2, 3))


def make_network(name, classes):
    """A network that takes (N, 3, H, W) and gives (N, classes)."""
    body = globals()[name]() if name in SIZES else cifar_resnet(int(name[6:]))
    return Layers(*body, L.Linear(None, classes))


def cifar_resnet(depth):
    """For pictures of 32 x 32."""
    layers = [convolve(16, 3)]
    for filters in (16, 32, 64):
        for block in range((depth - 2) // 6):
            stride = 2 if filters > 16 and block == 0 else 1
            short = linear(filters, 1, 2) if stride == 2 else F.identity
            layers.append(Sum(Layers(convolve(filters, 3, stride), linear(filters, 3)), short))
    return [*layers, pool_all]


def resnet50():
    """With its strides on the 3 x 3 convolutions, as in other frameworks."""
    layers = [convolve(64, 7, 2), partial(pool_max, pad=1)]
    for filters, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            stride = 2 if filters > 64 and block == 0 else 1
            short = F.identity if block else linear(4 * filters, 1, stride)
            path = convolve(filters, 1), convolve(filters, 3, stride), linear(4 * filters, 1)
            layers.append(Sum(Layers(*path), short))
    return [*layers, pool_all]


def alexnet():
    """In the form of one device."""
    layers = []
    for filters, size, stride, pad, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [L.Convolution2D(None, filters, size, stride, pad), F.relu]
        layers += [pool_max] * pooled
    for _ in range(2):
        layers += [F.dropout, L.Linear(None, 4096), F.relu]
    return layers


def densenet121(growth=32):
    """Four blocks, each half as wide and high as the one before."""

    def normalised(filters, size):
        layer = L.Convolution2D(None, filters, size, pad=size // 2, nobias=True)
        return L.BatchNormalization(axis=(0, 2, 3)), F.relu, layer

    layers, channels = [convolve(64, 7, 2), partial(pool_max, pad=1)], 64
    for blocks in (6, 12, 24, 16):
        for _ in range(blocks):
            more = Layers(*normalised(4 * growth, 1), *normalised(growth, 3))
            layers.append(Joined(F.identity, more))
        channels = (channels + blocks * growth) // 2
        layers += [*normalised(channels, 1), partial(F.average_pooling_2d, ksize=2, stride=2)]
    return [*layers[:-2], pool_all]


def inception3():
    """Without its second classifier, which helps early training alone."""
    wide, high = (1, 7), (7, 1)

    def chain(*steps):
        return Layers(*(convolve(*s) if isinstance(s, tuple) else s for s in steps))

    def joined(*chains):
        return Joined(*(chain(*steps) for steps in chains))

    def early(n):
        first = [(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)]
        return joined(*first, [pool_average, (n, 1)])

    def middle(n):
        far = [(n, 1), (n, high), (n, wide), (n, high), (192, wide)]
        return joined([(192, 1)], [(n, 1), (n, wide), (192, high)], far, [pool_average, (192, 1)])

    def late():
        split = [joined([(384, (1, 3))], [(384, (3, 1))]) for _ in range(2)]
        near, far = [(384, 1), split[0]], [(448, 1), (384, 3), split[1]]
        return joined([(320, 1)], near, far, [pool_average, (192, 1)])

    stem = (32, 3, 2, 0), (32, 3, 1, 0), (64, 3), pool_max, (80, 1), (192, 3, 1, 0), pool_max
    half = joined([(384, 3, 2, 0)], [(64, 1), (96, 3), (96, 3, 2, 0)], [pool_max])
    far = [(192, 1), (192, wide), (192, high), (192, 3, 2, 0)]
    quarter = joined([(192, 1), (320, 3, 2, 0)], far, [pool_max])
    layers = [chain(*stem), early(32), early(64), early(64), half]
    layers += [middle(n) for n in (128, 160, 160, 192)]
    return [*layers, quarter, late(), late(), pool_all, F.dropout]


class Folder(chainer.dataset.DatasetMixin):
    """Pictures of one part of the folder: a random part of each and its mirror image, to train."""

    def __init__(self, folder, part, size):
        self.folder, self.part, self.size = Path(folder), part, size
        with (self.folder / "labels.csv").open(newline="") as file:
            self.rows = [row for row in csv.reader(file) if row[0].startswith(part + "/")]

    def __len__(self):
        return len(self.rows)

    def get_example(self, i):
        from PIL import Image

        name, *labels = self.rows[i]
        picture = Image.open(self.folder / name).convert("RGB")
        if min(picture.size) < self.size:
            picture = picture.resize((self.size, self.size))
        across, down = (side - self.size for side in picture.size)
        left, top = across // 2, down // 2
        if self.part == "train":
            left, top = random.randint(0, across), random.randint(0, down)
        pixels = np.asarray(picture.crop((left, top, left + self.size, top + self.size)))
        if self.part == "train" and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        chw = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
        return chw / 255, np.array(labels, np.int32)


def make_data(options, part):
    """The pictures and classes of `train` or `validation`."""
    size = SIZES.get(options.model, 32)
    if options.data not in ("synthetic", "learnable"):
        return Folder(options.data, part, size)
    # Random pictures and classes, or such as can be learnt: its class's picture, and noise.
    count = 4 * options.batch * options.gpus
    generator = np.random.default_rng((options.seed, part == "train"))
    classes = generator.integers(10, size=count)
    pictures = generator.standard_normal((count, 3, size, size), np.float32)
    if options.data == "learnable":
        prototypes = np.random.default_rng(options.seed).standard_normal((10, 3, size, size))
        pictures += prototypes[classes].astype(np.float32)
    return chainer.datasets.TupleDataset(pictures, classes.astype(np.int32))


def share(data, rank, ranks, seed):
    """One rank's share of the pictures, drawn at random and as large as the others'."""
    order, each = np.random.RandomState(seed).permutation(len(data)), len(data) // ranks
    return chainer.datasets.SubDataset(data, rank * each, (rank + 1) * each, order)


class Timed(chainer.dataset.Iterator):
    """An iterator, and how long the waits for its batches were, in seconds."""

    def __init__(self, iterator):
        self.iterator, self.waits, self.seconds = iterator, 0, 0.0

    def __next__(self):
        start = time.perf_counter()
        batch = next(self.iterator)
        self.seconds += time.perf_counter() - start
        self.waits += 1
        return batch

    def finalize(self):
        self.iterator.finalize()

    def __getattr__(self, name):
        if name == "iterator":  # asked for while this is unpickled
            raise AttributeError(name)
        return getattr(self.iterator, name)


def make_iterator(options, data, batch, **how):
    """Chainer's own, with worker processes or without."""
    if options.workers == 0:
        return chainer.iterators.SerialIterator(data, batch, **how)
    workers = options.workers
    return chainer.iterators.MultiprocessIterator(data, batch, n_processes=workers, **how)


class Stopwatch(training.Extension):
    """When the steps ended, and the loss; the devices are at rest where it starts and stops."""

    trigger = 1, "iteration"
    priority = training.extension.PRIORITY_WRITER + 1  # before the validation

    def __init__(self, warmup, rest):
        self.warmup, self.rest, self.laps, self.losses = warmup, rest, [], []

    def initialize(self, trainer):
        self.begin = self.start = self.last = time.perf_counter()

    def __call__(self, trainer):
        now = time.perf_counter()
        self.laps.append(now - self.last)
        self.losses[1:] = [trainer.observation["main/loss"]]
        if len(self.laps) == self.warmup:
            self.rest()
            self.start = time.perf_counter()
        self.last = time.perf_counter()

    @contextmanager
    def held(self):
        self.rest()
        held = time.perf_counter()
        yield
        self.start += time.perf_counter() - held
        self.last = time.perf_counter()

    def finalize(self):
        self.rest()
        self.seconds = time.perf_counter() - self.start


class Validation(extensions.Evaluator):
    """Keeps the accuracy, and its time out of the figures."""

    accuracy = 0.0

    def __init__(self, stopwatch, *args, **how):
        super().__init__(*args, **how)
        self.stopwatch = stopwatch

    def __call__(self, trainer=None):
        with self.stopwatch.held():
            result = super().__call__(trainer)
        self.accuracy = float(result["validation/main/accuracy"])
        return result


class Run:
    """One training with the options, on this rank."""

    def __init__(self, options, comm):
        self.options, self.comm = options, comm
        self.rank, self.ranks = (comm.rank, comm.size) if comm else (0, 1)
        cpu = options.device == "cpu"
        first = comm.intra_rank if comm else 0
        count = 1 if comm else options.gpus
        names = ["@numpy"] * count if cpu else [f"@cupy:{first + i}" for i in range(count)]
        self.devices = [chainer.get_device(name) for name in names]
        folder = options.data not in ("synthetic", "learnable")
        self.model = L.Classifier(
            make_network(options.model, 14 if folder else 10),
            F.sigmoid_cross_entropy if folder else F.softmax_cross_entropy,
            F.binary_accuracy if folder else F.accuracy,
        )
        # Lets the layers see how many channels they get.
        size = SIZES.get(options.model, 32)
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            self.model.predictor(np.zeros((1, 3, size, size), np.float32))
        self.stopwatch = Stopwatch(options.warmup, self.rest)
        self.validation = None
        self.target_s = None

    def rest(self):
        """Waits until the devices have done all they were given, those of other ranks too."""
        for device in self.devices:
            if device.xp is not np:
                device.device.synchronize()

    def make_updater(self):
        options, data = self.options, make_data(self.options, "train")
        several = options.update == "replicated-nccl"
        parts = len(self.devices) if several else self.ranks
        batch = options.batch * (1 if several else len(self.devices))
        shares = [share(data, rank, parts, options.seed) for rank in range(parts)]
        mine = shares if several else [shares[self.rank]]
        iterators = [Timed(make_iterator(options, part, batch)) for part in mine]
        self.waits = iterators[0]
        rate = options.learning_rate
        if options.update == "ps-gpu":
            rate /= len(self.devices)  # it adds the gradients, where the others take the mean
        optimizer = chainer.optimizers.MomentumSGD(rate)
        if options.update == "chainermn":
            import chainermn

            optimizer = chainermn.create_multi_node_optimizer(optimizer, self.comm)
        optimizer.setup(self.model)
        if several:
            return updaters.MultiprocessParallelUpdater(iterators, optimizer, devices=self.devices)
        if options.update == "ps-gpu":
            names = ["main", *map(str, range(1, len(self.devices)))]
            devices = dict(zip(names, self.devices))
            return updaters.ParallelUpdater(iterators[0], optimizer, devices=devices)
        converter = chainer.dataset.concat_examples
        if options.staging == "on":
            converter = chainer.dataset.ConcatWithAsyncTransfer()
        return updaters.StandardUpdater(iterators[0], optimizer, converter, self.devices[0])

    def make_validation(self):
        """On rank 0, or a share on each."""
        options, everywhere = self.options, self.options.validate == "all"
        data = make_data(options, "validation")
        if everywhere:
            data = share(data, self.rank, self.ranks, options.seed)
        iterator = make_iterator(options, data, options.batch, repeat=False, shuffle=False)
        device = self.devices[0]
        validation = Validation(self.stopwatch, iterator, self.model, device=device)
        if everywhere and options.update == "chainermn":
            import chainermn

            return chainermn.create_multi_node_evaluator(validation, self.comm)
        return validation

    def done(self, trainer):
        options, step = self.options, trainer.updater.iteration
        if options.target and step and step % options.epoch == 0 and self.reached():
            self.target_s = time.perf_counter() - self.stopwatch.begin
            return True
        return step >= options.steps

    def reached(self):
        # That of rank 0, which may be the only one to validate, counts for all.
        accuracy = self.validation.accuracy if self.rank == 0 else None
        if self.comm:
            accuracy = self.comm.bcast_obj(accuracy)
        return accuracy >= self.options.target

    def train(self):
        options = self.options
        if self.devices[0].xp is not np and options.update != "replicated-nccl":
            self.devices[0].use()
        trainer = training.Trainer(self.make_updater(), self.done, out=".")
        trainer.extend(self.stopwatch)
        if options.validate == "all" or (options.validate == "one" and self.rank == 0):
            self.validation = self.make_validation()
            trainer.extend(self.validation, trigger=(options.epoch, "iteration"))
        trainer.run()

    def result(self):
        options, watch = self.options, self.stopwatch
        pictures = options.batch * options.gpus
        laps, (first, last) = watch.laps[options.warmup :], watch.losses
        names = ("model", "update", "device", "gpus", "batch", "data", "layout", "workers")
        return {
            "framework": "chainermn" if options.update == "chainermn" else "chainer",
            "version": chainer.__version__,
            **{name: getattr(options, name) for name in names},
            "device_name": name_device(self.devices[0]),
            "staging": options.staging == "on",
            "pinned": options.staging == "on",
            "steps": len(watch.laps),
            "warmup": options.warmup,
            "samples_per_second": pictures * len(laps) / watch.seconds,
            "samples_per_second_median": pictures / statistics.median(laps),
            "loss_first": float(first.array),
            "loss_last": float(last.array),
            "data_wait_s": self.waits.seconds,
            "data_waits": self.waits.waits,
            "accuracy": self.validation.accuracy if self.validation else None,
            "target_s": self.target_s,
        }


def name_device(device):
    """Return the name that the driver or the system has for it."""
    if device.xp is np:
        return platform.processor() or platform.machine()
    return cuda.cupy.cuda.runtime.getDeviceProperties(device.device.id)["name"].decode()


def main():
    """Trains, with a process for each device where the placement has one."""
    options = parse_options()
    ranks = options.update in ("independent", "chainermn")
    if ranks and options.gpus > 1 and not under_mpi():
        command = [find_mpiexec(), "-n", str(options.gpus), sys.executable, *sys.argv]
        os.execv(command[0], command)
    if options.device == "cuda" or ranks:
        # A fork of a process that uses CUDA or MPI is not safe: a clean process, begun now, forks.
        multiprocessing.set_start_method("forkserver")
        process = multiprocessing.Process()
        process.start()
        process.join()
    comm = None
    if ranks:
        import chainermn

        chainermn.global_except_hook.add_hook()  # a rank that fails ends the others
        comm = chainermn.create_communicator("naive" if options.device == "cpu" else "pure_nccl")
        options.gpus = comm.size
    random.seed(options.seed)
    np.random.seed(options.seed)
    run = Run(options, comm)
    run.train()
    if run.rank == 0:
        print(json.dumps(run.result()))


if __name__ == "__main__":
    main()
