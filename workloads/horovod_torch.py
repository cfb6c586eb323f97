# /// script
# requires-python = ">=3.9"
# dependencies = [
#     "horovod==0.28.1", "torch==2.13.0", "torchvision==0.28.0", "numpy>=2", "pillow>=11",
#     "setuptools<81",
# ]
#
# [tool.uv]
# no-build-package = ["horovod"]
# ///
"""Trains an image classifier with Horovod on PyTorch, a process for each GPU.

    python horovod_torch.py --gpus 2               # starts the ranks itself, with Gloo
    mpiexec -n 2 python horovod_torch.py           # or horovodrun -np 2, or srun with MPI

Horovod 0.28.1 comes as source alone: prepare_horovod.py builds its wheel, and workloads/README.md
says how to with MPI. With `--device cpu`, ranks stand in for GPUs. The last line on stdout is the
result, as JSON.
"""

import argparse
import csv
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import horovod.runner
import horovod.torch as hvd
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# Pixels along a side.
MODELS = {"resnet20": 32, "resnet44": 32, "resnet110": 32}
MODELS |= {"resnet50": 224, "inception3": 299, "densenet121": 224, "alexnet": 224}
# What launchers call the number of ranks.
SIZES = ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]


def main():
    options = parse()
    if options.launched or options.gpus == 1:
        result = train(options)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // options.gpus)))
        result = horovod.runner.run(train, (options,), np=options.gpus, use_gloo=True)[0]
    if result:
        print(json.dumps(result), flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet20")
    add("--batch", type=int, default=32, help="samples per device and step")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--data", default="synthetic", help="synthetic, learnable, or a folder made by images.py")
    add("--gpus", type=int, default=1, help="devices on this machine")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--workers", type=int, default=0, help="loader processes of each rank")
    add("--layout", choices=["NCHW", "NHWC"], default="NCHW")
    add("--update", choices=["horovod"], default="horovod")
    add("--staging", choices=["on", "off"], default="off", help="prefetch to the device")
    add("--pinned", choices=["on", "off"], default="off")
    add("--validate", choices=["none", "one", "all"], default="none")
    add("--epoch", type=int, help="steps of an epoch")
    add("--learning-rate", type=float, help="default: 0.1, AlexNet 0.01")
    add("--target", type=float, help="stop at this accuracy")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.launched = any(int(os.environ.get(name, 1)) > 1 for name in SIZES)
    options.epoch = options.steps if options.epoch is None else options.epoch
    if options.learning_rate is None:
        options.learning_rate = 0.01 if options.model == "alexnet" else 0.1
    if options.target and options.validate == "none":
        options.validate = "all"
    wrong = unusable(options)
    if wrong:
        parser.error(wrong)
    return options


def unusable(options):
    """Return which option cannot be met; nothing if all can."""
    here, size = torch.cuda.device_count(), MODELS[options.model]
    on_cpu, learnable = options.device == "cpu", options.data == "learnable"
    for wrong, why in [
        (min(options.batch, options.epoch, options.gpus) < 1, "--batch, --epoch, --gpus: from 1"),
        (min(options.workers, options.seed) < 0, "--workers and --seed: from 0"),
        (options.learning_rate < 0, "--learning-rate is negative"),
        (not 0 <= options.warmup < options.steps, "--warmup must be less than --steps"),
        (not on_cpu and options.gpus > here, f"--gpus {options.gpus}: {here} CUDA GPUs are here"),
        (options.pinned == "on" and on_cpu, "--pinned on needs CUDA GPUs"),
        (learnable and size != 32, "--data learnable is for resnet20, resnet44 and resnet110"),
        (options.target and not learnable, "--target needs --data learnable"),
        (not 0 <= (options.target or 0) < 1, "--target is an accuracy between 0 and 1"),
    ]:
        if wrong:
            return why
    if size > 32:
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError) as error:
            return f"--model {options.model} needs torchvision: {error}"
    return unusable_folder(Path(options.data), size) if is_folder(options) else None


def unusable_folder(folder, size):
    """Return what is wrong with the folder of pictures, if anything."""
    try:
        pictures = json.loads((folder / "done.json").read_text())["size"]
    except (OSError, ValueError, KeyError):
        return f"--data {folder}: no folder that images.py has made"
    if pictures < size:
        return f"--data {folder}: pictures of {pictures} pixels, and the model takes {size}"
    return None


def is_folder(options):
    return options.data not in ("synthetic", "learnable")


class Held(Dataset):
    """Pictures in memory, drawn as often as an epoch wants them."""

    def __init__(self, images, labels, length=None):
        self.images, self.labels = images, labels
        self.length = length or len(images)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        index %= len(self.images)
        return self.images[index], self.labels[index]


class Folder(Dataset):
    """Pictures that images.py made, cropped and flipped."""

    def __init__(self, folder, split, size, length=None):
        with Path(folder, "labels.csv").open() as file:
            rows = [row for row in csv.reader(file) if row[0].startswith(split)]
        self.paths = [f"{folder}/{row[0]}" for row in rows]
        self.labels = torch.tensor([[float(label) for label in row[1:]] for row in rows])
        self.size, self.random = size, split == "train"
        self.length = length or len(rows)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        index %= len(self.paths)
        with Image.open(self.paths[index]) as picture:
            pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
        room = pixels.shape[1] - self.size
        top, left = torch.randint(room + 1, (2,)) if self.random else (room // 2, room // 2)
        pixels = pixels[:, top : top + self.size, left : left + self.size]
        if self.random and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return pixels / 255, self.labels[index]


def datasets(options, length):
    """Return training data as long as an epoch, validation data, and the number of classes."""
    size = MODELS[options.model]
    if is_folder(options):
        train = Folder(options.data, "train", size, length)
        return train, Folder(options.data, "validation", size), 14
    random = torch.Generator().manual_seed(options.seed)
    classes, count = (10, 4096) if size == 32 else (1000, 128)
    labels = torch.randint(classes, (count + 1024,), generator=random)
    if options.data == "learnable":
        # A coarse picture for each class, under noise.
        prototypes = F.interpolate(torch.randn(classes, 3, 4, 4, generator=random), size)
        images = 0.5 * prototypes[labels] + torch.randn(count + 1024, 3, 32, 32, generator=random)
        held = Held(images[count:], labels[count:])
    else:
        images = torch.randn(count, 3, size, size, generator=random)
        held = Held(images, labels, max(1, length // 8))
    return Held(images[:count], labels[:count], length), held, classes


def loaders(options):
    """Return loaders of an epoch's steps and of this rank's validation, and the classes' number."""
    train, held, classes = datasets(options, options.epoch * options.batch * hvd.size())
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=options.seed)
    if options.validate == "all":
        held = torch.utils.data.Subset(held, range(hvd.rank(), len(held), hvd.size()))
    common = {
        "num_workers": options.workers,
        "persistent_workers": options.workers > 0,
        "pin_memory": options.pinned == "on",
    }
    loader = DataLoader(train, options.batch, sampler=sampler, drop_last=True, **common)
    return loader, DataLoader(held, options.batch, **common), classes


class Block(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        past = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(self.norm2(self.conv2(y)) + past)


def build(name, classes):
    """The model, with random weights."""
    if MODELS[name] > 32:
        from torchvision import models

        if name == "inception3":
            return models.inception_v3(
                num_classes=classes, aux_logits=False, init_weights=False, weights=None
            )
        return getattr(models, name)(num_classes=classes, weights=None)
    blocks, inputs = [], 16
    for outputs in (16, 32, 64):
        for _ in range((int(name[6:]) - 2) // 6):
            blocks.append(Block(inputs, outputs, stride=1 if inputs == outputs else 2))
            inputs = outputs
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
    return nn.Sequential(*stem, *blocks, *head)


def timed(batches, waits):
    """The batches; how long each was waited for, in seconds, goes into a list."""
    batches = iter(batches)
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        waits.append(time.perf_counter() - start)
        yield batch


def to_device(batch, device, options):
    layout = torch.channels_last if options.layout == "NHWC" else torch.contiguous_format
    images, labels = (part.to(device, non_blocking=options.pinned == "on") for part in batch)
    return images.to(memory_format=layout), labels


def fed(batches, device, options):
    """Batches on the device. Staged, the next is copied, on its own stream, during this one."""
    if options.staging == "off":
        yield from (to_device(batch, device, options) for batch in batches)
        return
    on_gpu = device.type == "cuda"
    stream, ready = (torch.cuda.Stream() if on_gpu else None), None
    for batch in itertools.chain(batches, [None]):
        with torch.cuda.stream(stream):
            following = batch and to_device(batch, device, options)
        if ready:
            yield ready
        if on_gpu and following:
            torch.cuda.current_stream().wait_stream(stream)
            for part in following:
                part.record_stream(torch.cuda.current_stream())
        ready = following


@torch.no_grad()
def accuracy(model, loader, device, options):
    """Over the ranks that validate; None on one that does not and need not know."""
    counts = torch.zeros(2)
    if options.validate == "all" or hvd.rank() == 0:
        model.eval()
        for images, labels in fed(loader, device, options):
            scores = model(images)
            right = scores.argmax(1) if labels.ndim == 1 else (scores > 0).float()
            counts += torch.tensor([(right == labels).sum(), labels.numel()])
        model.train()
    if options.validate == "all":
        counts = hvd.allreduce(counts, name="accuracy", op=hvd.Sum)
    elif options.target:
        counts = hvd.broadcast(counts, 0, name="accuracy")
    return float(counts[0] / counts[1]) if counts[1] else None


class Figures:
    """Clocks of the training, without what validation takes."""

    def __init__(self, device):
        self.device, self.waits, self.steps, self.losses = device, [], [], []
        self.begin = self.previous = self.start = time.perf_counter()
        self.accuracy = self.target_s = None

    def step(self, loss, warmup):
        now = time.perf_counter()
        self.steps.append(now - self.previous)
        self.losses = [*self.losses[:1], loss]
        if len(self.steps) == warmup:
            now = self.begin = self.now()
        self.previous = now

    def now(self):
        """The time, when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def validated(self, accuracy, target):
        now = time.perf_counter()
        self.accuracy = accuracy
        if target and accuracy >= target:
            self.target_s = now - self.start
        self.begin, self.previous = self.begin + now - self.end, now

    def result(self, options):
        """Return the figures of the run; of several ranks the slowest one's speed counts."""
        steady = self.steps[options.warmup :] or [math.nan]
        slowest = torch.tensor([self.seconds / len(steady), statistics.median(steady)])
        slowest = hvd.allgather(slowest[None], name="figures").amax(0)
        devices = hvd.size()
        mean, median = (number(options.batch * devices / each) for each in slowest.tolist())
        names = ["model", "update", "device", "batch", "data", "layout", "workers", "warmup"]
        return {
            "framework": "horovod",
            "version": f"{horovod.__version__} (torch {torch.__version__})",
            **{name: getattr(options, name) for name in names},
            "device_name": device_name(self.device),
            "gpus": devices,
            "staging": options.staging == "on",
            "pinned": options.pinned == "on",
            "steps": len(self.steps),
            "samples_per_second": mean,
            "samples_per_second_median": median,
            "loss_first": number(float(self.losses[0])),
            "loss_last": number(float(self.losses[-1])),
            "data_wait_s": sum(self.waits),
            "data_waits": len(self.waits),
            "accuracy": self.accuracy,
            "target_s": self.target_s,
        }


def number(value):
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def device_name(device):
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()


def train(options):
    """The result on rank 0, None on the others."""
    hvd.init()
    torch.manual_seed(options.seed)
    device = torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())
    loader, held, classes = loaders(options)
    loss_of = F.binary_cross_entropy_with_logits if is_folder(options) else F.cross_entropy
    # With NHWC, only the pictures are laid out so: Horovod wants parameters contiguous.
    model = build(options.model, classes).to(device)
    rate = options.learning_rate
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    figures = Figures(device)
    for epoch in range(math.ceil(options.steps / options.epoch)):
        loader.sampler.set_epoch(epoch)
        count = min(options.epoch, options.steps - epoch * options.epoch)
        batches = timed(itertools.islice(loader, count), figures.waits)
        for images, labels in fed(batches, device, options):
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            figures.step(loss.detach(), options.warmup)
        figures.end = figures.now()
        figures.seconds = figures.end - figures.begin
        if options.validate != "none":
            figures.validated(accuracy(model, held, device, options), options.target)
            print(f"epoch {epoch}: accuracy {figures.accuracy}", file=sys.stderr)
        if figures.target_s:
            break
    result = figures.result(options)
    return result if hvd.rank() == 0 else None


if __name__ == "__main__":
    main()
