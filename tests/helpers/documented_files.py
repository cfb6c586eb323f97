"""The files that pages of the documentation name in their commands, made when a page is run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from gputrace.data import unpacked
from gputrace.trials.ledger import Entry, append
from tests.helpers import command, memory_snapshots
from tests.helpers.handmade import Run, train
from tests.helpers.once import once
from tests.helpers.rank_files import Node, write_parts
from tests.helpers.recordings import unpack
from tests.synthetic import NvmlCard, Plan, simulate, write_nsys, write_nvml
from tests.synthetic.link_plants import write_two_sorts

MS: Final = 1_000_000
BY_HEAT: Final = 0x20
"""NVML's bit for a clock that software lowers because of heat."""

ONE: Final = Plan(seed=3, steps=24, sync_every_step=True)
"""One GPU that is well: steps of some 7 ms."""
RANKS: Final = replace(ONE, allreduces=4, allreduce_ns=400_000)


def _written(plan: Plan) -> Callable[[Path], None]:
    """The run of a plan, as nsys exports it."""
    return lambda path: write_nsys(simulate(plan), path)


def _unpacked(name: str) -> Callable[[Path], object]:
    """One of the real recordings of the tests."""
    return lambda path: shutil.move(unpack(name, path.parent), path)


def _demo(path: Path) -> None:
    """The recording that comes with gputrace."""
    with unpacked("demo.sqlite.xz") as source:
        shutil.copy(source, path)


def _training(path: Path) -> None:
    """The training that `gputrace demo` records, shorter; it waits most on a busy machine too."""
    with unpacked("train.py") as source:
        text = source.read_text(encoding="utf-8")
    for whole, part in (
        ("STEPS, BATCH, CLASSES = 60, 32", "STEPS, BATCH, CLASSES = 10, 1"),
        ("LOADING_S = 0.020", "LOADING_S = 0.15"),
    ):
        assert whole in text
        text = text.replace(whole, part)
    path.write_text(text, encoding="utf-8")


def _ledger(path: Path) -> None:
    """Three answers of `gputrace try`, two of which were foretold."""
    entry = Entry(
        time_ns=1_795_510_440 * 1000 * MS,
        program="python train.py",
        host="node",
        gpu="",
        ranks=1,
        versions="torch 2.13.0",
        cure="workers=2",
        verdict="faster",
        why="",
        ratio=0.365,
        low=0.313,
        high=0.426,
        rounds=3,
        steps=20,
        bare_ns=125e6,
        predicted=0.373,
        predicted_low=None,
        predicted_high=None,
        numerics=False,
        loss_differs=False,
    )
    more = replace(entry, cure="workers=4", ratio=0.305, low=0.279, high=0.332, predicted=0.26)
    none = replace(
        entry, cure="threads=1", verdict="cannot tell yet", ratio=0.998, low=0.852, high=1.167
    )
    append(path, [entry, more, replace(none, predicted=None)])


def _pairs(path: Path) -> None:
    """Two pairs of ranks; only the second one's cards share a switch."""
    plan = replace(RANKS, ranks=4, group_size=2, allreduces=3, allreduce_ns=MS)
    plan = replace(plan, slow_pairs=((0, 1),), slow_link=1.8)
    write_two_sorts(simulate(plan), path)


def _neighbours(path: Path) -> None:
    """Write the topology in which both pairs share a switch."""
    write_two_sorts(simulate(replace(RANKS, ranks=4, group_size=2, allreduces=3)), path)


def _hot(path: Path) -> None:
    """The third of four cards is held at two thirds of its clock by heat."""
    recording = simulate(replace(RANKS, ranks=4, slow_rank=2, slow_factor=1.4))
    hot = NvmlCard(busy={"smClock": 1410, "clocksEventReasons": BY_HEAT, "temperature": 88})
    write_nsys(recording, path)
    write_nvml(recording, path, {2: hot})


def _cool(path: Path) -> None:
    """Write cards with nothing wrong."""
    recording = simulate(replace(RANKS, ranks=4))
    write_nsys(recording, path)
    write_nvml(recording, path)


def _sampled(path: Path) -> None:
    """Two lines of Python were sampled before the training."""
    run = Run()
    run.wait_at(*["/home/me/project/loader.py:48 load_batch"] * 3, "train.py:9 <module>")
    train(run, 8)
    run.export.write(path)


def _of_node(node: int) -> Callable[[Path], None]:
    """Write the recording of one of two machines with two ranks each."""

    def write(path: Path) -> None:
        nodes = [Node("node1", (0, 1)), Node("node2", (2, 3))]
        folder = path.parent / f"parts{node}"
        part = write_parts(simulate(replace(RANKS, ranks=4)), folder, nodes, first_gpus=(0, 2))[
            node
        ]
        shutil.move(part, path)
        shutil.rmtree(folder)

    return write


def _refused(path: Path) -> None:
    """A snapshot of a training that ran out of memory."""
    allocator = memory_snapshots.Allocator()
    memory_snapshots.train(allocator, refused_in="forward")
    allocator.write(path)


FILES: Final[dict[str, Callable[[Path], object]]] = {
    "ledger": _ledger,
    "demo": _demo,
    "training": _training,
    "sleeping loop": _unpacked("h200x4-ddp-starved-9-15.sqlite"),
    "DataParallel": _unpacked("h200x4-dataparallel-7-9.sqlite"),
    "validation": _unpacked("h200x2-ddp-validation-12-19.sqlite"),
    "two GPUs before": _unpacked("nsys-ai-mfu_2gpu_before.sqlite"),
    "two GPUs after": _unpacked("nsys-ai-mfu_2gpu_after.sqlite"),
    "starved": _written(replace(ONE, data_wait_ns=2 * MS)),
    "fed": _written(ONE),
    "sampled": _sampled,
    "1 GPU": _written(replace(ONE, data_wait_ns=100_000)),
    "2 GPUs": _written(replace(RANKS, ranks=2)),
    "4 GPUs": _written(replace(RANKS, ranks=4, allreduce_ns=900_000)),
    "8 GPUs": _written(replace(RANKS, ranks=8, allreduce_ns=1_400_000)),
    "late rank": _written(
        replace(RANKS, ranks=4, late_host_rank=2, late_host_ns=2 * MS, late_in_loader=True)
    ),
    "server on GPU 0": _written(replace(ONE, gpus_per_process=4, exchange="gpu-server")),
    "no server": _written(replace(RANKS, ranks=4)),
    "a pair across PHB": _pairs,
    "pairs under switches": _neighbours,
    "a hot card": _hot,
    "a refusal of memory": _refused,
    "cool cards": _cool,
    "node 1": _of_node(0),
    "node 2": _of_node(1),
    "workloads": lambda path: shutil.copytree(command.ROOT / "workloads", path),
}


def make(recipe: str, path: Path, kept: Path) -> None:
    """Puts a file, or a folder, at a path; it is made once and kept in a folder."""
    source = once(kept / recipe.replace(" ", "-"), FILES[recipe])
    path.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
