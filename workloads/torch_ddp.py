# /// script
# requires-python = ">=3.10"
# dependencies = ["torch==2.13.0", "torchvision==0.28.0", "numpy>=2", "pillow>=11"]
# ///
"""Trains an image classifier with PyTorch on one GPU or several.

    python torch_ddp.py                            # ResNet-20 on random pictures, 20 steps
    python torch_ddp.py --gpus 4 --model resnet50  # DistributedDataParallel, starts torchrun itself

`torchrun`, `mpiexec` and `srun` may start the ranks too. With `--device cpu`, ranks of gloo stand
in for GPUs. The last line on stdout is the result, as JSON.
"""

import argparse
import copy
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

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

# Pixels along a side.
MODELS = {"resnet20": 32, "resnet44": 32, "resnet110": 32}
MODELS |= {"resnet50": 224, "inception3": 299, "densenet121": 224, "alexnet": 224}
ONE_PROCESS = ["single", "dataparallel", "dataparallel-loss", "ps-cpu"]
RANKED = ["ddp", "independent"]
# What launchers tell a rank: its number, how many there are, its number on this machine.
LAUNCHERS = [
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
]


def main():
    options = parse()
    if options.update in RANKED:
        if not options.launched:
            launch(options)
        join(options)
    result = train(options).result(options)
    if options.rank == 0:
        print(json.dumps(result), flush=True)
    if options.update in RANKED:
        dist.destroy_process_group()


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
    add("--update", choices=ONE_PROCESS + RANKED, help="default: single, or ddp on several")
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
    options.launched, options.rank, options.world, options.local_rank = ranks()
    several = options.gpus > 1 or options.launched
    options.update = options.update or ("ddp" if several else "single")
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
    here, size, update = torch.cuda.device_count(), MODELS[options.model], options.update
    devices = max(options.gpus, options.local_rank + 1)
    on_cpu, ranked = options.device == "cpu", update in RANKED
    learnable = options.data == "learnable"
    for wrong, why in [
        (min(options.batch, options.epoch, options.gpus) < 1, "--batch, --epoch, --gpus: from 1"),
        (min(options.workers, options.seed) < 0, "--workers and --seed: from 0"),
        (options.learning_rate < 0, "--learning-rate is negative"),
        (not 0 <= options.warmup < options.steps, "--warmup must be less than --steps"),
        (not on_cpu and devices > here, f"{devices} CUDA GPUs are wanted and {here} are here"),
        (update == "single" and devices > 1, "--update single is for one device"),
        (options.launched and not ranked, f"--update {update} is one process: use no launcher"),
        (options.launched and options.world < options.gpus, "fewer ranks were started than --gpus"),
        (update.startswith("dataparallel") and on_cpu, f"--update {update} needs CUDA GPUs"),
        (options.pinned == "on" and on_cpu, "--pinned on needs CUDA GPUs"),
        (options.staging == "on" and update == "ps-cpu", "--update ps-cpu does its own copies"),
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


def ranks():
    """Return if a launcher started this, the rank, the number of ranks, and the local rank."""
    for names in LAUNCHERS:
        rank, world, local = (int(os.environ.get(name, 0)) for name in names)
        if world > 1 or (names[0] == "RANK" and world):
            return True, rank, world, local
    return False, 0, 1, 0


def launch(options):
    """Becomes torchrun, which starts this script once for each rank."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // options.gpus)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def join(options):
    for name, value in zip(LAUNCHERS[0], (options.rank, options.world, options.local_rank)):
        os.environ[name] = str(value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    # Figures are exchanged on the CPU, so that `independent` has nothing to do with NCCL.
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")


class Folder(Dataset):
    """Pictures that images.py made, cropped and flipped."""

    def __init__(self, folder, split, size):
        with Path(folder, "labels.csv").open() as file:
            rows = [row for row in csv.reader(file) if row[0].startswith(split)]
        self.paths = [f"{folder}/{row[0]}" for row in rows]
        self.labels = torch.tensor([[float(label) for label in row[1:]] for row in rows])
        self.size, self.random = size, split == "train"

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
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
        train, held = (Folder(options.data, split, size) for split in ("train", "validation"))
        return drawn(train, len(train), length), held, 14
    random = torch.Generator().manual_seed(options.seed)
    classes, count = (10, 4096) if size == 32 else (1000, 128)
    labels = torch.randint(classes, (count + 1024,), generator=random)
    if options.data == "learnable":
        # A coarse picture for each class, under noise.
        prototypes = F.interpolate(torch.randn(classes, 3, 4, 4, generator=random), size)
        images = 0.5 * prototypes[labels] + torch.randn(count + 1024, 3, 32, 32, generator=random)
        pictures = TensorDataset(images, labels)
        held = Subset(pictures, range(count, len(labels)))
    else:
        images = torch.randn(count, 3, size, size, generator=random)
        pictures = TensorDataset(images, labels[:count])
        held = drawn(pictures, count, max(1, length // 8))
    return drawn(pictures, count, length), held, classes


def drawn(pictures, count, length):
    """So many samples of the first pictures, which come again where these are fewer."""
    return Subset(pictures, [index % count for index in range(length)])


def loaders(options):
    """Return loaders of an epoch's steps and of this rank's validation, and the classes' number."""
    per_step = options.batch if options.update in RANKED else options.batch * options.gpus
    train, held, classes = datasets(options, options.epoch * per_step * options.world)
    sampler = DistributedSampler(train, options.world, options.rank, seed=options.seed)
    if options.world > 1 and options.validate == "all":
        held = Subset(held, range(options.rank, len(held), options.world))
    common = {
        "num_workers": options.workers,
        "persistent_workers": options.workers > 0,
        "pin_memory": options.pinned == "on",
    }
    loader = DataLoader(train, per_step, sampler=sampler, drop_last=True, **common)
    return loader, DataLoader(held, per_step, **common), classes


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


class WithLoss(nn.Module):
    """A model and its loss, which DataParallel then computes on every GPU."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, images, labels):
        return self.loss(self.model(images), labels).reshape(1)


class Placement:
    """The model on one device or, with `--update`, on several."""

    def __init__(self, options, model, loss, device):
        layout = torch.channels_last if options.layout == "NHWC" else torch.contiguous_format
        self.options, self.loss = options, loss
        self.network = self.model = model.to(device, memory_format=layout)
        if options.update == "ddp":
            self.network = DistributedDataParallel(model)
        elif options.update == "dataparallel":
            self.network = DataParallel(model, list(range(options.gpus)))
        elif options.update == "dataparallel-loss":
            self.network = DataParallel(WithLoss(model, loss), list(range(options.gpus)))
        rate = options.learning_rate
        self.optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)

    def step(self, images, labels):
        self.optimizer.zero_grad()
        if self.options.update == "dataparallel-loss":
            loss = self.network(images, labels).mean()
        else:
            loss = self.loss(self.network(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def predict(self, images):
        """Scores, on one device or on all that this process has."""
        if self.options.validate == "all" and self.options.update.startswith("dataparallel"):
            return nn.parallel.data_parallel(self.model, images, list(range(self.options.gpus)))
        return self.model(images)

    def training(self, mode):
        self.model.train(mode)


class ParameterServer(Placement):
    """Parameters on the CPU: each step, gradients come from the devices and parameters go back."""

    def __init__(self, options, model, loss, device):
        super().__init__(options, model, loss, "cpu")
        devices = [f"cuda:{n}" if options.device == "cuda" else "cpu" for n in range(options.gpus)]
        self.copies = [(device, copy.deepcopy(model).to(device)) for device in devices]

    def step(self, images, labels):
        losses = []
        parts = zip(images.chunk(len(self.copies)), labels.chunk(len(self.copies)))
        for (device, model), (x, y) in zip(self.copies, parts):
            losses.append(self.loss(model(x.to(device)), y.to(device)))
        for loss in losses:
            loss.backward()
        copies = (model.parameters() for _, model in self.copies)
        pairs = list(zip(self.model.parameters(), *copies))
        for parameter, *others in pairs:
            parameter.grad = sum(other.grad.cpu() for other in others) / len(others)
        self.optimizer.step()
        for parameter, *others in pairs:
            for other in others:
                other.data.copy_(parameter.data)
                other.grad = None
        return sum(loss.detach().cpu() for loss in losses) / len(losses)

    def predict(self, images):
        copies = self.copies[: 1 if self.options.validate == "one" else None]
        parts = zip(copies, images.chunk(len(copies)))
        return torch.cat([model(part.to(device)).cpu() for (device, model), part in parts])

    def training(self, mode):
        for _, model in self.copies:
            model.train(mode)


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
def accuracy(placement, loader, device, options):
    """Over the ranks that validate; None on one that does not and need not know."""
    counts = torch.zeros(2)
    if options.validate == "all" or options.rank == 0:
        placement.training(False)
        for images, labels in fed(loader, device, options):
            scores = placement.predict(images).cpu()
            right = scores.argmax(1) if labels.ndim == 1 else (scores > 0).float()
            counts += torch.tensor([(right == labels.cpu()).sum(), labels.numel()])
        placement.training(True)
    if options.world > 1 and options.validate == "all":
        dist.all_reduce(counts)
    elif options.world > 1 and options.target:
        dist.broadcast(counts, 0)
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
        if options.world > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        devices = max(options.gpus, options.world)
        mean, median = (number(options.batch * devices / each) for each in slowest.tolist())
        names = ["model", "update", "device", "batch", "data", "layout", "workers", "warmup"]
        return {
            "framework": "torch",
            "version": torch.__version__,
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
    torch.manual_seed(options.seed)
    device = torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(options.local_rank)
        device = torch.device("cuda", options.local_rank)
    loader, held, classes = loaders(options)
    loss = F.binary_cross_entropy_with_logits if is_folder(options) else F.cross_entropy
    place = ParameterServer if options.update == "ps-cpu" else Placement
    placement = place(options, build(options.model, classes), loss, device)
    figures, inputs = Figures(device), torch.device("cpu") if options.update == "ps-cpu" else device
    for epoch in range(math.ceil(options.steps / options.epoch)):
        loader.sampler.set_epoch(epoch)
        count = min(options.epoch, options.steps - epoch * options.epoch)
        batches = timed(itertools.islice(loader, count), figures.waits)
        for images, labels in fed(batches, inputs, options):
            figures.step(placement.step(images, labels), options.warmup)
        figures.end = figures.now()
        figures.seconds = figures.end - figures.begin
        if options.validate != "none":
            figures.validated(accuracy(placement, held, inputs, options), options.target)
            print(f"epoch {epoch}: accuracy {figures.accuracy}", file=sys.stderr)
        if figures.target_s:
            break
    return figures


if __name__ == "__main__":
    main()
