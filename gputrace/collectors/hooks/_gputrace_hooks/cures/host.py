"""Cures of the host: what it waits for, its threads and cores, its garbage collections."""

import os
import sys
from functools import partial, wraps
from typing import Any

from ..wrappers import ours
from .trial import (
    MOST_CALLS,
    between,
    cures,
    guarded,
    is_on,
    read_number,
    sees_gpu,
    switched,
    trial,
)


def torch_calls(torch: Any) -> None:
    """Change what torch's calls wait for, and its threads."""
    changes = {
        "async-launches": _let_launches_return,
        "defer-item": _defer_item,
        "non-blocking": _non_blocking,
        "skip-anomalies": _skip_anomalies,
        "threads": _set_threads,
    }
    for cure, change in changes.items():
        # Without cures, most say what the program has.
        if cure in cures or (not cures and cure not in ("non-blocking", "threads")):
            guarded(cure, change, torch)


def _set_threads(torch: Any) -> None:
    """Set them again after the first step, should the program have said otherwise."""
    threads = cures["threads"]
    between.append(lambda count: torch.set_num_threads(threads) if count == 1 else None)


def _let_launches_return(torch: Any) -> None:
    """Have a variable that the program or its caller set be off once CUDA reads it."""
    begin, name = torch.cuda._lazy_init, "CUDA_LAUNCH_BLOCKING"

    @wraps(begin)
    def begin_cuda() -> None:
        if os.environ.get(name, "0") != "0":
            trial.has.add("launches-wait")
            if "async-launches" in cures:
                trial.change("async-launches", "", name, -1, os.environ[name], "0")
                os.environ[name] = "0"
        begin()

    torch.cuda._lazy_init = begin_cuda


def _skip_anomalies(torch: Any) -> None:
    """Have autograd look for anomalies only while the cure is off."""
    enable, cure = torch.set_anomaly_enabled, "skip-anomalies"
    asked_for = [False, True]

    @wraps(enable)
    def enable_unless_on(mode: bool, check_nan: bool = True) -> None:
        asked_for[:] = mode, check_nan
        if mode and "anomalies" not in trial.has:
            trial.has.add("anomalies")
            if cure in cures:
                trial.change(cure, "", "", -1, "", "")
        enable(mode and not is_on(cure), check_nan)

    torch.set_anomaly_enabled = enable_unless_on
    switched.append((cure, lambda on: enable(asked_for[0] and not on, asked_for[1])))


def _non_blocking(torch: Any) -> None:
    """Have copies to a GPU return at once; those from pageable memory wait as before."""
    if not sees_gpu("non-blocking"):
        return
    for name in ("to", "cuda"):
        _without_waiting(torch.Tensor, name)


def _without_waiting(tensor: Any, name: str) -> None:
    copy = getattr(tensor, name)

    @wraps(copy)
    def copied(self: Any, *args: Any, **keywords: Any) -> Any:
        said = keywords.get("non_blocking") or any(isinstance(arg, bool) for arg in args)
        if is_on("non-blocking") and not said and not self.is_cuda:
            result = copy(self, *args, **dict(keywords, non_blocking=True))
            if result.is_cuda and len(trial.changes) < MOST_CALLS:
                trial.change("non-blocking", name, "non_blocking", -1, False, True)
            return result
        return copy(self, *args, **keywords)

    setattr(tensor, name, copied)


def _defer_item(torch: Any) -> None:
    """Have each line of the program that reads a number from a GPU get that of the step before.

    It was copied meanwhile. The first step of all reads, and torch itself, read what they ask for.
    """
    if not sees_gpu("defer-item"):
        return
    trial.skip("defer-item", "no line of the program reads a number from a GPU")
    for name in ("item", "__float__", "__bool__"):
        if hasattr(torch.Tensor, name):
            _defer(torch, name)


def _defer(torch: Any, name: str) -> None:
    """Have a method that reads a number of a GPU return that of the step before."""
    item, home = getattr(torch.Tensor, name), os.path.dirname(torch.__file__) + os.sep
    copies: dict[tuple[str, int, int], tuple[Any, Any]] = {}
    counts: dict[tuple[str, int], tuple[int, int]] = {}

    @wraps(item)
    def item_before(self: Any) -> Any:
        code = sys._getframe(1)
        line = code.f_code.co_filename, code.f_lineno
        if not self.is_cuda or line[0].startswith(home):
            return item(self)
        if trial.ends:
            trial.has.add("reads")
        if not is_on("defer-item"):
            return item(self)
        step, count = counts.get(line, (-1, 0))
        # Reads of one line in a step are told apart by their number.
        count = count + 1 if step == len(trial.ends) else 0
        counts[line] = len(trial.ends), count
        copy = torch.empty_like(self, device="cpu", pin_memory=True)
        copy.copy_(self.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        before = copies.get((*line, count))
        copies[(*line, count)] = copy, event
        if before is None:
            return item(self)
        trial.change("defer-item", name, "", -1, "", "")
        before[1].synchronize()
        return item(before[0])

    setattr(torch.Tensor, name, ours(item_before))


def collect_between_steps() -> None:
    """Keep what the first step leaves out of all collections, and collect what is new between steps
    alone.
    """
    import gc

    def collect(count: int) -> None:
        if count == 1 and not gc.isenabled():
            trial.skip("gc", "the program has the collector off already")
        elif count == 1:
            # Once: its time, and the caches that it sweeps, would be of each turn with the cure.
            gc.collect()
            switched.append(("gc", switch))
            if is_on("gc"):
                switch(True)
            trial.change("gc", "", "gc", -1, "", "")
        elif ("gc", switch) in switched and is_on("gc") and count % 10 == 0:
            gc.collect(0)

    def switch(on: bool) -> None:
        if on:
            gc.freeze()
            gc.disable()
        else:
            gc.unfreeze()
            gc.enable()

    between.append(partial(guarded, "gc", collect))


def pin_cores() -> None:
    """Give each rank of this machine cores of its own, of the NUMA node of its GPU."""
    rank = read_number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    ranks = read_number(
        *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")
    )
    cores = os.sched_getaffinity(0)
    if rank is None or ranks is None or not 1 < ranks <= len(cores):
        trial.skip("pin-cores", "no launcher names one of several ranks, or too few cores")
        return
    share = _cores_of(rank, _gpu_nodes(ranks), sorted(_layout(core) for core in cores))
    os.sched_setaffinity(0, share)
    trial.change("pin-cores", "", "cores", -1, len(cores), len(share))


_SYSTEM = "/sys"
_GPUS = "/proc/driver/nvidia/gpus"


def _cores_of(rank: int, gpus: "list[int]", layout: "list[tuple[int, int, int]]") -> "list[int]":
    """Return the cores of a rank: its part of those of its GPU's node, or of all of them.

    ``gpus`` are the nodes of the ranks' GPUs, -1 where one is unknown. Neighbours in the layout
    share a node, and threads of one core.
    """
    beside = [other for other, node in enumerate(gpus) if node == gpus[rank]]
    near = [core for node, _, core in layout if node == gpus[rank]]
    if -1 in gpus or len(near) < len(beside):
        beside, near = list(range(len(gpus))), [core for _, _, core in layout]
    share, at = len(near) // len(beside), beside.index(rank)
    return near[at * share : (at + 1) * share]


def _layout(core: int) -> "tuple[int, int, int]":
    """Return the NUMA node of a core, the first of the threads that share it, and its number."""
    folder = f"{_SYSTEM}/devices/system/cpu/cpu{core}"
    try:
        nodes = [int(name[4:]) for name in os.listdir(folder) if name[:4] == "node"]
        with open(f"{folder}/topology/thread_siblings_list") as file:
            first = int(file.read().replace("-", ",").partition(",")[0])
    except (OSError, ValueError):
        return 0, core, core
    return min(nodes, default=0), first, core


def _gpu_nodes(ranks: int) -> "list[int]":
    """Return the NUMA nodes of the GPUs that ranks see, in the order of the bus; -1 if unknown."""
    try:
        buses = sorted(os.listdir(_GPUS))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [_bus_of(gpu.strip(), buses) for gpu in visible.split(",")] if visible else buses
        nodes = []
        for bus in gpus[:ranks]:
            with open(f"{_SYSTEM}/bus/pci/devices/{bus.lower()}/numa_node") as file:
                nodes.append(int(file.read()))
    except (OSError, ValueError, IndexError):
        nodes = []
    return nodes if len(nodes) == ranks else [-1] * ranks


def _bus_of(gpu: str, buses: "list[str]") -> str:
    """Return which of some buses has a GPU that is named by its number, or its UUID's beginning."""
    if gpu.isdigit():
        return buses[int(gpu)]
    for bus in buses:
        with open(f"{_GPUS}/{bus}/information") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name == "GPU UUID" and value.strip().startswith(gpu):
                    return bus
    raise ValueError(gpu)
