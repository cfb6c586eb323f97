"""Modules, MFU, tokens, energy and memory as `gputrace analyze` tells them, by counts of others.

The training counts its own tokens, FLOPs, energy and memory (`modules_train.py`). The forward time
of each module is summed anew from a profile of PyTorch (with_stack) of the same training: each
kernel belongs to the calls of modules in which it was launched. As one CUDA graph, a step has the
kernels and the modules that it has without.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.experiment import (
    ROUNDS,
    Check,
    Figure,
    Journal,
    analysis,
    completed,
    in_turn,
    near,
    printed_result,
    program,
    recorded,
    unfit,
)
from benchmarks.measure import MIB
from benchmarks.options import Options

TRAIN: Final = Path(__file__).with_name("modules_train.py")
OFF: Final = 0.05
PROFILED: Final = 3
"""Steps of a profile."""
WORTH: Final = 0.02
"""A module is compared if it has this part of the forward pass, a family if of all kernels."""
SAME: Final = 0.02
"""By how much families of kernels of a graph may be off."""
_MODULE: Final = re.compile(r"nn\.Module: (\w+?)(?:_\d+)?$")


def run(options: Options) -> int:
    """Print each figure beside the other count; 1 where something is missed."""
    if why := unfit(options, "torch"):
        print(f"modules: {why}")
        return 0
    journal = Journal("modules", options)
    parts = {"counts": _counts, "tree": _tree, "graphs": _graphs}
    return journal.each(parts, lambda part: parts[part](journal, options))


def _train(options: Options, *more: str) -> tuple[str, ...]:
    cpu = ("--cpu", "--batch", "32") if options.cpu else ()
    return program(str(TRAIN), *cpu, *more)


def _counts(journal: Journal, options: Options) -> None:
    """Tokens, FLOPs, energy and memory, by what the program counts in recorded runs."""
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        "bare": lambda: printed_result(completed(_train(options))),
        "recorded": lambda: _recorded(options),
    }
    found = in_turn(journal, variants, options.runs_or(ROUNDS))
    for name, lines in found.items():
        step = Figure(tuple(1e3 * line["step"] for line in lines))
        journal.row("counts", runs=name, step_ms=step)
    for name, (compare, unknown) in COMPARED.items():
        rows = [line["report"][name] for line in found["recorded"]]
        checks = compare(found["recorded"], [row[0] for row in rows]) if all(rows) else []
        for check in checks:
            journal.check("counts", check)
        if not checks:
            journal.skip("counts", unknown)


def _recorded(options: Options, *more: str, how: Sequence[str] = ()) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "t.sqlite")
        line = printed_result(completed(recorded(trace, _train(options, *more), *how)))
        return line | {"report": analysis(trace)}


def _tree(journal: Journal, options: Options) -> None:
    """Modules of recorded runs, by a profile of the same training."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile.json")
        completed(_train(options, "--profile", str(profile)))
        events = json.loads(profile.read_bytes())["traceEvents"]
    truth = forward_times(events)
    if not truth:
        return journal.skip("tree", "the profile has no kernels of modules")
    found = in_turn(journal, {"": lambda: _recorded(options)}, options.runs_or(ROUNDS))
    for check in compare_trees([line["report"]["modules"] for line in found[""]], truth):
        journal.check("tree", check)
    return None


def _graphs(journal: Journal, options: Options) -> None:
    """Families of kernels and modules of a step as one CUDA graph, by the same step without."""
    if options.cpu:
        return journal.skip("graphs", "needs a GPU")
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        "eager": lambda: _recorded(options),
        "graph": lambda: _recorded(options, "--graph", how=("--graph-nodes", "--sample", "all")),
    }
    found = in_turn(journal, variants, options.runs_or(ROUNDS))
    eager, graph = ([line["report"] for line in found[name]] for name in variants)
    for check in compare_graphs(eager, graph):
        journal.check("graphs", check)
    return None


def compare_graphs(
    eager: Sequence[Mapping[str, Any]], graph: Sequence[Mapping[str, Any]]
) -> list[Check]:
    """Hold each family of kernels that counts against its time without a graph, in ms of a step,
    and the launches of each module against those without.
    """

    def families(report: Mapping[str, Any]) -> dict[str, float]:
        kernels = report["kernels"]
        rows = ((row["family"], row["total_ns"]) for row in kernels["families"])
        return {family: ns / 1e6 / kernels["steps"] for family, ns in rows}

    truth, found = (list(map(families, reports)) for reports in (eager, graph))
    checks = []
    for family, time in truth[0].items():
        if time >= WORTH * sum(truth[0].values()):
            wanted = Figure(tuple(times.get(family, 0.0) for times in truth))
            median = statistics.median(times.get(family, 0.0) for times in found)
            checks.append(near(f"{family} in a graph, ms", median, wanted, SAME))
    without, within = (
        {row["path"]: row["launches"] for row in reports[0]["modules"]}
        for reports in (eager, graph)
    )
    return checks + [
        Check(f"launches by {path or 'no module'} in a graph", within.get(path, 0), count, 0.5)
        for path, count in without.items()
    ]


def forward_times(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum kernels by the path of modules in whose calls they were launched, ms of a step.

    A path has classes, parted by slashes. Kernels of the backward pass are launched in none.
    """
    stacks: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches, kernels = {}, []
    for event in events:
        kind, args = event.get("cat", ""), event.get("args", {})
        if kind == "python_function" and (found := _MODULE.match(event["name"])):
            stacks[event["tid"]].append((event["ts"], event["ts"] + event["dur"], found[1]))
        elif kind in ("cuda_runtime", "cuda_driver") and "correlation" in args:
            launches[args["correlation"]] = event["tid"], event["ts"]
        elif kind == "kernel":
            kernels.append((args.get("correlation"), event["dur"]))
    for calls in stacks.values():
        calls.sort()
    times: dict[str, float] = defaultdict(float)
    for correlation, duration in kernels:
        thread, moment = launches.get(correlation, (None, 0.0))
        calls = stacks.get(thread, [])
        around = calls[: bisect_right(calls, (moment, float("inf"), ""))]
        path = [name for _, end, name in around if end > moment]
        for depth in range(1, len(path) + 1):
            times["/".join(path[:depth])] += duration / 1e3 / PROFILED
    return dict(times)


def compare_trees(
    trees: Sequence[Sequence[Mapping[str, Any]]], truth: Mapping[str, float]
) -> list[Check]:
    """Hold the forward time of each module that counts against the truth, in ms of a step."""
    checks = []
    worth = WORTH * max(truth.values())
    for path, wanted in truth.items():
        rounds = [
            sum(row["forward_ns"] for row in tree if row["path"] == path and row["rank"] == 0) / 1e6
            for tree in trees
        ]
        found = Figure(tuple(rounds))
        if wanted >= worth:
            what = f"forward of {path}, ms"
            checks.append(Check(what, found.median, wanted, OFF * wanted, found.spread))
    return checks


def throughput(runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Hold what analysis tells of throughput against what the program counted."""
    checks = []
    for name in ("tokens_per_s", "flop_per_s", "mfu"):
        pairs = [(row[name], run[name]) for row, run in zip(rows, runs, strict=True)]
        if all(None not in pair for pair in pairs):
            found, counted = (Figure(side) for side in zip(*pairs, strict=True))
            checks.append(near(name, found.median, counted, OFF))
    return checks


def energy(runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Hold power against the program's, and the sum of the classes against the counter."""
    if runs[0]["watts"] is None:
        return []
    power = Figure(tuple(1e6 * row["total_mj"] / row["measured_ns"] for row in rows))
    counted = Figure(tuple(run["watts"] for run in runs))
    classes = sum(rows[0]["classes_mj"].values())
    total = rows[0]["total_mj"]
    return [
        near("power, W", power.median, counted, OFF),
        Check("sum of the classes, mJ", classes, total, 1.0),
    ]


def memory(runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Hold the allocator's peak against the program's.

    Analysis has none where the peak was not seen to rise in measured steps: the most that tensors
    had at the ends of steps, which is less, stands in for it and misses.
    """
    if runs[0]["peak_bytes"] is None:
        return []
    peaks = [row["peak_bytes"] or row["allocated_bytes"] for row in rows]
    counted = Figure(tuple(run["peak_bytes"] / MIB for run in runs))
    return [near("peak of memory, MiB", statistics.median(peaks) / MIB, counted, OFF)]


COMPARED: Final = {
    "throughput": (throughput, "analysis tells no throughput"),
    "energy": (energy, "NVML's counter of energy cannot be read"),
    "allocators": (memory, "torch's allocator on a GPU was not read"),
}
"""Comparisons by the list of the report that they need, with why one may not be made."""
