"""Cost of recording for the program that is recorded, on a machine with a GPU.

Part ``turns`` trains on two GPUs, and turns each recorder off and on every few steps within a run:
where the host is shared, runs of the same differ by more than a recorder costs. There the hooks and
the sampling of NVML run throughout, and are in neither. In ``hooks``, these functions around those
of PyTorch are taken off and put back on so, with nothing of the GPU recorded.

The other parts are trainings in whole runs, on one GPU but for ``ddp-…``, in turn: without a
recorder, under `gputrace record`, where the GPU waits for its host also with `--sample 2%`, and
under torch.profiler (CUDA activity only). The step without the recorder as `gputrace analyze` tells
it is held against the runs without one. ``long`` and ``long-compute`` are the default over ten
minutes, or as many as are left: on two GPUs beside the same training without it, each with half of
the cores, after both trained without it for a tenth of that; on one between two shorter runs.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.experiment import (
    ROUNDS,
    WORKLOADS,
    Check,
    Figure,
    Journal,
    analysis,
    at_once,
    cards,
    completed,
    half_width,
    in_lane,
    in_turn,
    lacks,
    near,
    printed_result,
    program,
    recorded,
    unfit,
)
from benchmarks.options import Options

TRAIN: Final = Path(__file__).with_name("overhead_train.py")
JAX_TRAIN: Final = WORKLOADS / "frameworks" / "jax_steps.py"
TURNED: Final = (("resnet50", 128), ("resnet18", 8))
"""A step that the GPU's work fills, and one that the host's launches fill; on two GPUs."""
TURNS: Final = {
    "gputrace --api all": (70, 6),
    "gputrace --api none": (70, 6),
    "torch.profiler": (14, 30),
}
"""Turns of each kind in a run, and steps in a turn; torch.profiler takes a second to start."""
COLLECTOR: Final = {"GPUTRACE_HOLD_NS": str(60 * 10**9)}
"""CUPTI is held through the turns without it."""
HOOK_TURNS: Final = ("--hooks", "--turns", "24", "--turn-steps", "30", "--warmup", "60")
LONG_S: Final = 600.0
HOOKS_COST: Final = 0.01
OFF: Final = 0.04
"""Part of the step by which the unrecorded one may be off."""


@dataclass(frozen=True, slots=True)
class Training:
    """A training in whole runs, and the bound of what the default may cost it over ten minutes."""

    words: str
    steps: int
    waits_for_host: bool
    average: float
    script: Path = TRAIN
    modules: tuple[str, ...] = ("torch",)
    has_profiler: bool = True
    """It has torch.profiler's option."""
    ranks: int = 1


_SEES: Final = ("torch", "torchvision")
_JAX: Final = "--times --width 1024 --layers 24"
TRAININGS: Final = {
    "ddp-resnet50": Training(
        "--model resnet50 --batch 128", 220, False, 0.01, modules=_SEES, ranks=2
    ),
    "ddp-resnet18": Training("--model resnet18 --batch 8", 220, True, 0.02, modules=_SEES, ranks=2),
    "ddp-gpt2": Training("--model gpt2 --batch 2 --micro 8", 60, True, 0.02, ranks=2),
    "jax": Training(_JAX, 600, False, 0.01, JAX_TRAIN, ("jax",), has_profiler=False),
    "resnet18": Training("--model resnet18 --batch 4 --block 32", 1500, True, 0.02, modules=_SEES),
    "gpt2": Training("--model gpt2 --batch 2 --block 16", 480, True, 0.02),
    "resnet50": Training("--model resnet50 --batch 192 --block 8", 160, False, 0.01, modules=_SEES),
    "graph": Training(
        "--model resnet18 --batch 64 --block 32 --graph", 1500, False, 0.01, modules=_SEES
    ),
}
"""Trainings; what a machine may lack comes first, and leaves its time to the others."""
LONG: Final = {"long": "resnet18", "long-compute": "resnet50"}
ON_CPU: Final = Training("--model tiny --batch 2 --block 20 --cpu", 600, True, 0.02)
"""In place of each, to see that it runs."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One whole run: its mean and median step in ms by its own clock, and what analysis said."""

    mean_ms: float
    median_ms: float
    peak_mib: float
    steps: int = 0
    tenths_ms: tuple[float, ...] = ()
    """Mean step of each tenth of the steps."""
    unrecorded_ms: float = math.nan
    """Without the recorder, as analysis says it; nan where nothing is said."""
    launch_idle_ms: float = math.nan
    """Idle time of the GPU before launches, in a step."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The median step of each turn of one run, in ms, without and with the recorder."""

    off_ms: list[float]
    on_ms: list[float]

    @property
    def ratio(self) -> float:
        """Ratio of the mean turn with it to that without."""
        return statistics.mean(self.on_ms) / statistics.mean(self.off_ms)


def run(options: Options) -> int:
    """Print a line for each run and check; 1 where something is missed."""
    if why := unfit(options):
        print(f"overhead: {why}")
        return 0
    journal = Journal("overhead", options)
    parts: dict[str, Callable[[], None]] = {
        "turns": partial(_by_turns, journal, options),
        "hooks": partial(_by_hooks, journal, options),
    }
    for name, training in TRAININGS.items():
        parts[name] = partial(_whole, journal, name, training, options)
    for name, of in LONG.items():
        parts[name] = partial(_long, journal, name, TRAININGS[of], options)
    return journal.each(parts, lambda part: parts[part]())


def _chosen(training: Training, options: Options) -> tuple[Training, str]:
    """Return the training that is run, and what it lacks."""
    if training.ranks > 1 and (options.cpu or len(cards()) < training.ranks):
        return training, "needs two GPUs"
    if options.cpu and training.script == JAX_TRAIN:
        training = replace(training, words="--times")
    elif options.cpu:
        training = ON_CPU
    return training, lacks(*training.modules)


def _whole(journal: Journal, part: str, training: Training, options: Options) -> None:
    """Whole runs in turn, and what is asked of them."""
    chosen, why = _chosen(training, options)
    if why:
        return journal.skip(part, why)
    words = (*chosen.words.split(), "--steps", str(chosen.steps))
    train = program(str(chosen.script), *words, ranks=chosen.ranks)
    variants = {
        "bare": partial(_ran, train),
        "recorded": partial(_ran_recorded, train),
        "torch.profiler": partial(_ran, (*train, "--profiler")),
    }
    if options.cpu or not chosen.has_profiler:
        del variants["torch.profiler"]
    if chosen.waits_for_host and not options.cpu:
        variants["sampled"] = partial(_ran_recorded, train, "--sample", "2%")
    found = in_turn(journal, variants, options.runs_or(ROUNDS))
    for name, runs in found.items():
        cells = {"step_ms": Figure(tuple(ran.median_ms for ran in runs))}
        more = statistics.median(ran.peak_mib for ran in runs) - statistics.median(
            ran.peak_mib for ran in found["bare"]
        )
        journal.row(part, runs=name, **cells, MiB_more=round(more))
    for check in asked(found):
        journal.check(part, check)
    return None


def asked(found: Mapping[str, Sequence[Ran]]) -> list[Check]:
    """Return what whole runs should show, of those that were made."""
    steps = {name: Figure(tuple(ran.median_ms for ran in runs)) for name, runs in found.items()}
    bare, checks = steps["bare"], []
    # Analysis has means, trimmed, of steps; so a clock of its kind is what it is held against.
    means = Figure(tuple(ran.mean_ms for ran in found["bare"]))
    estimates = [
        ran.unrecorded_ms for ran in found["recorded"] if not math.isnan(ran.unrecorded_ms)
    ]
    if estimates:
        what = "unrecorded step, ms"
        checks.append(near(what, statistics.median(estimates), means, OFF))
    if "torch.profiler" in steps:
        half = 0.5 * max(steps["torch.profiler"].median - bare.median, 0.0)
        extra = steps["recorded"].median - bare.median
        checks.append(Check("recording adds, ms", extra, half, 0.0, bare.spread, at_most=True))
    if "sampled" in found:
        idle = [Figure(tuple(ran.launch_idle_ms for ran in found[name])) for name in _BOTH]
        checks.append(near("launch idle, ms a step", idle[0].median, idle[1], 0.1))
    return checks


_BOTH: Final = ("recorded", "sampled")


def _long(journal: Journal, part: str, training: Training, options: Options) -> None:
    """The default over minutes, beside the same training without a recorder."""
    chosen, why = _chosen(training, options)
    if why:
        return journal.skip(part, why)
    are_beside = len(cards()) > 1 and not options.cpu
    # Starts take time.
    length = min(LONG_S, (journal.left_s - 60) / (1 + (_BESIDE if are_beside else 2 * _BETWEEN)))
    if length < 20:
        return journal.skip(part, f"no time was left ({max(journal.left_s, 0):.0f} s)")

    def train(seconds: float) -> tuple[str, ...]:
        return program(str(chosen.script), *chosen.words.split(), "--seconds", f"{seconds:.0f}")

    if are_beside:
        own, other = at_once([partial(_ran, train(_BESIDE * length), lane) for lane in range(2)])
        lanes = own.mean_ms / other.mean_ms
        default, bare = at_once(
            [partial(_ran_recorded, train(length), lane=0), partial(_ran, train(length), 1)]
        )
        ratios = [a / b / lanes for a, b in zip(default.tenths_ms, bare.tenths_ms, strict=True)]
        # The lanes were compared for a tenth of the time.
        cost = statistics.mean(ratios) - 1
        noise = math.hypot(1, len(ratios) ** 0.5) * half_width(ratios)
        without = Figure(bare.tenths_ms)
        journal.row(part, lanes=lanes, cost_by_tenths=Figure(tuple(r - 1 for r in ratios)))
    else:
        before = _ran(train(_BETWEEN * length))
        default = _ran_recorded(train(length))
        without = Figure((before.mean_ms, _ran(train(_BETWEEN * length)).mean_ms))
        cost = default.mean_ms / statistics.mean(without.rounds) - 1
        noise = without.spread / without.median
    journal.row(
        part,
        seconds=round(length),
        steps=default.steps,
        bare_mean_ms=without,
        default_mean_ms=round(default.mean_ms, 3),
        unrecorded_ms=round(default.unrecorded_ms, 3),
    )
    bound = Check("average cost", cost, training.average, 0.0, noise, at_most=True)
    journal.check(part, bound)
    return None


_BESIDE: Final = 0.1
_BETWEEN: Final = 0.25
"""Parts of the ten minutes for which is trained without a recorder first, and first and last."""


def _ran(command: Sequence[str], lane: int | None = None) -> Ran:
    line = printed_result(completed(in_lane(command, lane), LONG_S + 180))
    tenths = tuple(line.get("tenths_ms", ()))
    return Ran(line["mean_ms"], line["median_ms"], line["peak_mib"], line["steps"], tenths)


def _ran_recorded(command: Sequence[str], *how: str, lane: int | None = None) -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "t.sqlite")
        ran = _ran(recorded(trace, command, *how), lane)
        report = analysis(trace)
    recorder, rows = report["recorder"], report["breakdown"]
    # Where the trace has no control stretches, recording is said to cost nothing.
    unrecorded = recorder["unrecorded_step_ns"] if recorder else report["steps"]["mean_ns"]
    idle = [row["launch_ns"] / row["steps"] for row in rows if row["steps"] and row["launch_ns"]]
    return replace(
        ran,
        unrecorded_ms=math.nan if unrecorded is None else unrecorded / 1e6,
        launch_idle_ms=statistics.mean(idle) / 1e6 if idle else 0.0,
    )


def _by_turns(journal: Journal, options: Options) -> None:
    """Recorders turned off and on within each of the runs, on two GPUs."""
    if options.cpu or len(cards()) < 2:
        return journal.skip("turns", "needs two GPUs")
    if why := lacks("torchvision"):
        return journal.skip("turns", why)
    for model, batch in TURNED:
        variants = {name: partial(_turned, name, model, batch) for name in TURNS}
        for name, runs in in_turn(journal, variants, options.runs).items():
            journal.row("turns", model=model, recorder=name, **_by_turn(runs))
    return None


def _by_turn(runs: Sequence[Turns]) -> dict[str, float | str]:
    """Return the mean turn without and with the recorder, and their ratio with its interval."""
    ratios = [run.ratio for run in runs]
    mean, half = statistics.mean(ratios), half_width(ratios)
    return {
        "off_ms": statistics.mean(statistics.mean(run.off_ms) for run in runs),
        "on_ms": statistics.mean(statistics.mean(run.on_ms) for run in runs),
        "ratio": f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})",
    }


def _turned(variant: str, model: str, batch: int) -> Turns:
    turns, steps = map(str, TURNS[variant])
    words = ["--model", model, "--batch", str(batch), "--turns", turns, "--turn-steps", steps]
    name, *how = variant.split()
    if name == "torch.profiler":
        line = printed_result(completed(program(str(TRAIN), *words, "--profiler", ranks=2)))
        return Turns(line["off_ms"], line["on_ms"])
    with tempfile.TemporaryDirectory() as folder:
        command = recorded(Path(folder, "t.sqlite"), program(str(TRAIN), *words, ranks=2), *how)
        held = [f"{name}={value}" for name, value in COLLECTOR.items()]
        line = printed_result(completed(("env", *held, *command)))
    return Turns(line["off_ms"], line["on_ms"])


def _by_hooks(journal: Journal, options: Options) -> None:
    """The hooks taken off and put on within each of the runs of what waits for its host."""
    for name in ("resnet18", "gpt2"):
        chosen, why = _chosen(TRAININGS[name], options)
        if why:
            journal.skip("hooks", f"{name}: {why}")
            continue
        train = program(str(chosen.script), *chosen.words.split(), *HOOK_TURNS, "--block", "1")
        turned = in_turn(journal, {"": partial(_turned_hooks, train)}, options.runs_or(ROUNDS))[""]
        journal.row("hooks", model=name, **_by_turn(turned))
        # Two turns of each kind make a ratio: off, on, on, off.
        ratios = [
            sum(turns.on_ms[two : two + 2]) / sum(turns.off_ms[two : two + 2])
            for turns in turned
            for two in range(0, len(turns.on_ms), 2)
        ]
        what, cost = f"{name}: hooks lengthen a step by", statistics.mean(ratios) - 1
        bound = Check(what, cost, HOOKS_COST, 0.0, half_width(ratios), at_most=True)
        journal.check("hooks", bound)


def _turned_hooks(command: Sequence[str]) -> Turns:
    how = ("--backend", "host", "--no-nvml")
    with tempfile.TemporaryDirectory() as folder:
        line = printed_result(completed(recorded(Path(folder, "t.sqlite"), command, *how)))
    return Turns(line["off_ms"], line["on_ms"])
