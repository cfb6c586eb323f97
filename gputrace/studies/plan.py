"""Study files, the runs that they plan (every combination of settings, repeated), and their
commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product, takewhile
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from gputrace.errors import MissingError, UsageError
from gputrace.model.struct import Struct
from gputrace.studies.database import Configuration, Recording, Settings
from gputrace.studies.framework_environments import (
    CORES,
    GENERATED,
    KINDS,
    LAUNCHERS,
    OPTIONS,
    Count,
    Framework,
    Natural,
    OnOff,
    check_keys,
    convert,
    nearest,
    read_toml,
)
from gputrace.studies.summary import label as settings_label
from gputrace.studies.summary import varying
from gputrace.units import format_count, format_ns, parse_duration

Cards = Literal["pairs", "each"] | tuple[tuple[int, ...], ...]
_MOST_COMBINATIONS: Final = 2000
"""Maximum combinations of one table."""


class _Cards(msgspec.Struct, forbid_unknown_fields=True):
    visible: Literal["pairs", "each"] | tuple[tuple[Natural, ...], ...]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """Study file as written; its settings are converted one by one."""

    title: str = ""
    question: str = ""
    repeats: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    record: bool | Literal["both"] = True
    timeout: str | None = None
    images: Count = 1024
    options: dict[str, Any] = {}
    matrix: dict[str, list[Any]] = {}
    include: list[dict[str, Any]] = []
    exclude: list[dict[str, Any]] = []
    cards: _Cards | None = None


class Study(Struct, frozen=True):
    """Content of a study file."""

    path: Path
    title: str
    question: str
    repeats: int
    recording: Recording
    timeout_ns: int | None
    """Limit of one run."""
    images: int
    """Number of images to generate for a ``data`` of `GENERATED`."""
    combinations: tuple[Settings, ...]
    """Settings of the matrix and [[include]], without [[exclude]]."""
    cards: Cards | None
    """GPUs that a run may see, a configuration for each group; None for the first ones."""


def read_study(path: Path) -> Study:
    """Read a study file; raises InputError if it is unreadable, UsageError if it is invalid."""
    tables = read_toml(path)
    check_keys(path, "", tables, _File.__struct_fields__)
    if isinstance(tables.get("cards"), dict):
        check_keys(path, "[cards]", tables["cards"], _Cards.__struct_fields__)
    file = convert(path, "", tables, _File)
    timeout_ns = None
    if file.timeout is not None:
        try:
            timeout_ns = parse_duration(file.timeout)
        except ValueError as error:
            raise UsageError(f"{path}: timeout: {error}") from None
        if timeout_ns <= 0:
            raise UsageError(f"{path}: timeout: a run cannot end within {format_ns(timeout_ns)}")
    study = Study(
        path,
        file.title or path.stem,
        file.question,
        file.repeats,
        "both" if file.record == "both" else "recorded" if file.record else "bare",
        timeout_ns,
        file.images,
        tuple(_combinations(path, file)),
        file.cards.visible if file.cards else None,
    )
    _check_whole(study)
    return study


def _combinations(path: Path, file: _File) -> Iterator[Settings]:
    """Yield each combination once, in the order of the file."""
    options = _read(path, "[options]", file.options)
    left_out = [_lists(path, "[[exclude]]", table) for table in file.exclude]
    tables = [_lists(path, "[[include]]", table) for table in file.include]
    if file.matrix or not tables:
        tables.insert(0, _lists(path, "[matrix]", file.matrix))
    known = []
    for table in tables:
        if (count := prod(map(len, table.values()))) > _MOST_COMBINATIONS:
            problem = (
                f"a table asks for {count:,} combinations; the maximum is {_MOST_COMBINATIONS:,}"
            )
            raise UsageError(f"{path}: {problem}")
        for values in product(*table.values()):
            settings = options | dict(zip(table, values, strict=True))
            excluded = (
                all(settings.get(key) in values for key, values in each.items())
                for each in left_out
            )
            if settings not in known and not any(excluded):
                known.append(settings)
                yield settings


def _lists(path: Path, name: str, table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Read the values of each key of a table; a scalar is a list of one."""
    columns = {}
    for key, value in table.items():
        values = value if isinstance(value, list) else [value]
        if not values:
            raise UsageError(f"{path}: {name} {key} is empty; give it values, or leave it out")
        columns[key] = [_read(path, name, {key: each})[key] for each in values]
    if not columns and name != "[matrix]":
        raise UsageError(f"{path}: a table {name} is empty; name settings in it")
    return columns


def _read(path: Path, name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings of a table to their types."""
    check_keys(path, name, table, KINDS)
    read = {key: convert(path, f"{name} {key}", value, KINDS[key]) for key, value in table.items()}
    for key, value in read.items():
        if KINDS[key] is OnOff and isinstance(value, bool):
            read[key] = "on" if value else "off"
    if (word := read.get("data", "synthetic")) not in ("synthetic", "learnable", *GENERATED):
        folder = path.parent / word  # Relative to the study file.
        if not os.path.isdir(folder):  # noqa: PTH112 - what cannot be looked at is none either
            known = f"synthetic, learnable, {', '.join(GENERATED)}"
            raise UsageError(f"{path}: {name} data: {word!r} is not a folder, nor one of {known}")
        read["data"] = str(folder.resolve())
    return read


def _check_whole(study: Study) -> None:
    """Raise UsageError if nothing is left to run, or settings are missing or contradictory."""
    if not study.combinations:
        raise UsageError(f"{study.path}: nothing is left to run; [[exclude]] drops everything")
    for settings in study.combinations:
        if "framework" not in settings:
            raise UsageError(f"{study.path}: no framework is named; write it into [matrix]")
        if study.cards is not None and "gpus" in settings:
            raise UsageError(f"{study.path}: [cards] says how many GPUs; take gpus out")
    if isinstance(study.cards, tuple):
        for cards in study.cards or ((),):
            if not cards or len(set(cards)) < len(cards):
                group = list(cards)
                raise UsageError(
                    f"{study.path}: [cards] visible: {group} is not a list of distinct GPUs"
                )


class PlannedRun(Struct, frozen=True):
    """Planned run; ``recorded`` by `gputrace record`, or bare."""

    configuration: Configuration
    framework: Framework
    repeat: int
    """Counted from 1."""
    recorded: bool

    @property
    def key(self) -> tuple[str, int, bool]:
        """Return the key of the run, equal to `Run.key`."""
        return self.configuration.key, self.repeat, self.recorded

    @property
    def name(self) -> str:
        """Return the stem of its files."""
        bare = "" if self.recorded else "-bare"
        return f"{self.framework.name}-{self.configuration.key}-{self.repeat}{bare}"


def make_plan(study: Study, frameworks: Mapping[str, Framework], gpus: int) -> list[PlannedRun]:
    """Return all runs in order: each configuration once, then all again.

    Thus a machine that warms up, or is used by others for a while, affects all alike. Bare and
    recorded runs alternate in going first.
    """
    configurations: dict[str, Configuration] = {}
    for settings in study.combinations:
        for visible in groups(study.cards, gpus):
            count = len(visible) or settings.get("gpus", 1)
            whole = {**settings, "gpus": count}
            if visible:
                whole["visible"] = list(visible)
            if settings.get("data") in GENERATED:
                whole["images"] = study.images
            # Two ways to write the same settings are one configuration.
            key = key_of(whole)
            configurations[key] = Configuration(key, settings["framework"], count, whole)
    return [
        PlannedRun(each, frameworks[each.framework], repeat, recorded)
        for repeat in range(1, study.repeats + 1)
        for each in configurations.values()
        for recorded in ((False, True) if repeat % 2 else (True, False))
        if study.recording in ("both", "recorded" if recorded else "bare")
    ]


def key_of(settings: Settings) -> str:
    """Return the key of a configuration, independent of the order of its settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def configurations_of(plan: Iterable[PlannedRun]) -> list[Configuration]:
    """Return the configurations of a plan, each once, in its order."""
    return list({run.configuration.key: run.configuration for run in plan}.values())


def arguments_of(
    planned: PlannedRun, data: str | None = None, gpus: int | None = None
) -> list[str]:
    """Return the arguments of the script.

    ``data`` is the folder of images generated for the study; ``gpus`` are those per machine, if the
    run spans several.
    """
    settings = dict(planned.configuration.settings)
    if data is not None:
        settings["data"] = data
    if gpus is not None:
        settings["gpus"] = gpus
    if settings.get("workers") == CORES:
        settings["workers"] = len(os.sched_getaffinity(0))
    if "learning-rate" in settings:
        # Linear scaling rule: the batch per GPU stays, so the global batch grows.
        settings["learning-rate"] *= planned.configuration.gpus
    words = list(planned.framework.arguments)
    for name in ("gpus", *OPTIONS):
        if name in settings:
            value = settings[name]
            words += [f"--{name}", f"{value:.12g}" if isinstance(value, float) else str(value)]
    return words


def run_label(configuration: Configuration, among: Iterable[Configuration]) -> str:
    """Return the framework and the settings that vary among configurations: ``torch, 2 GPUs``."""
    names = varying([each.settings for each in among])
    return settings_label(configuration.settings, dict.fromkeys(("framework", *names)))


def why_not(planned: PlannedRun, gpus: int) -> str:
    """Return why a run is impossible on this machine, regardless of what is installed; or empty."""
    settings, updates = planned.configuration.settings, planned.framework.updates
    update = settings.get("update")
    if updates and update is not None and update not in updates:
        known = ", ".join(updates)
        return f"{planned.framework.title} knows no placement {update}; it has {known}"
    visible = settings.get("visible")
    needed = max(visible) + 1 if visible else planned.configuration.gpus
    device = settings.get("device", "auto")
    # With ``auto``, the script falls back to the CPU.
    free = device == "cpu" or (device == "auto" and needed == 1 and not visible)
    if free or needed <= gpus:
        return ""
    wanted = f"GPU {needed - 1}" if visible else format_count(needed, "GPU")
    return f"takes {wanted}, and this machine has {gpus or 'none'}"


def only(plan: Iterable[PlannedRun], filters: Iterable[tuple[str, str]]) -> list[PlannedRun]:
    """Select the runs that match the ``--only`` filters; raises UsageError if there are none."""
    wanted: dict[str, set[str]] = {}
    for name, value in filters:
        if name not in KINDS:
            raise UsageError(f"--only {name}={value}: no such setting; {nearest(name, KINDS)}")
        wanted.setdefault(name, set()).add(value)
    chosen = [
        run
        for run in plan
        if all(str(run.configuration.settings.get(name)) in wanted[name] for name in wanted)
    ]
    if not chosen:
        asked = " ".join(f"{name}={','.join(sorted(wanted[name]))}" for name in wanted)
        raise UsageError(f"--only {asked}: the study has no such run")
    return chosen


_COUNT: Final = """
import pynvml
try:
    pynvml.nvmlInit()
    print(pynvml.nvmlDeviceGetCount())
except pynvml.NVMLError:
    print(0)
"""


def find_gpus() -> list[str]:
    """Return the GPUs visible to this process, as named in CUDA_VISIBLE_DEVICES."""
    try:
        # In a process apart, so that the driver's library cannot disturb the study.
        ran = subprocess.run(
            [sys.executable, "-P", "-c", _COUNT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        count = int(ran.stdout)
    except (OSError, subprocess.SubprocessError):
        count = 0
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return [str(gpu) for gpu in range(count)]
    names = (name.strip() for name in allowed.split(","))
    # CUDA ignores all entries after an invalid one, such as -1.
    return list(takewhile(lambda name: name and not name.startswith("-"), names))[:count]


def groups(cards: Cards | None, gpus: int) -> list[tuple[int, ...]]:
    """Return the groups of GPUs to try; a single empty group for a study without [cards]."""
    if cards is None:
        return [()]
    if not isinstance(cards, str):
        return list(cards)
    size = {"each": 1, "pairs": 2}[cards]
    if gpus < size:
        raise MissingError(
            f'visible = "{cards}" takes {size} or more GPUs; there are {gpus} here '
            "(for another machine, say with --slurm how many --gpus-per-node it has)"
        )
    return list(combinations(range(gpus), size))


_PORT: Final = 29400
"""Rendezvous port of torchrun on the first node."""


class Nodes(Struct, frozen=True):
    """Nodes of an allocation, with the GPUs of each."""

    count: int = 1
    gpus: int = 0
    mpi: str = "srun"
    """Launcher of MPI ranks: ``srun`` or ``mpiexec``."""

    def spreads(self, planned: PlannedRun) -> bool:
        """Return whether a run spans several nodes."""
        return self.count > 1 and planned.configuration.gpus > self.gpus > 0

    def why_not(self, planned: PlannedRun) -> str:
        """Return why a run on several nodes is impossible; empty if it is possible."""
        gpus = planned.configuration.gpus
        if gpus > self.count * self.gpus:
            return f"takes {gpus} GPUs, and {self.count} nodes have {self.count * self.gpus}"
        if gpus % self.gpus:
            return f"takes {gpus} GPUs, which are not whole nodes of {self.gpus}"
        if not launcher(planned):
            return f"{planned.framework.title} has no placement that spans several nodes here"
        return ""

    def command(
        self, planned: PlannedRun, record: Sequence[str], script: Sequence[str]
    ) -> list[str]:
        """Return the command that launches a run on its nodes.

        ``record`` is the prefix for recording, up to ``--``, or empty; ``script`` the Python, the
        script and its options.
        """
        nodes = planned.configuration.gpus // self.gpus
        if launcher(planned) == "torchrun":
            python, *rest = script
            return [
                *self._srun(planned, nodes, 1),
                *record,
                *(python, "-m", "torch.distributed.run", f"--nnodes={nodes}"),
                f"--nproc-per-node={self.gpus}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={socket.gethostname()}:{_PORT}",
                f"--rdzv-id={planned.name}",
                *rest,
            ]
        if self.mpi == "mpiexec":
            return ["mpiexec", "-n", str(planned.configuration.gpus), *record, *script]
        return [*self._srun(planned, nodes, self.gpus), *record, *script]

    def _srun(self, planned: PlannedRun, nodes: int, tasks: int) -> list[str]:
        """Return srun's words; tasks share a node's cores, as srun's default is one core each."""
        words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}"]
        words += [f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=1"]
        cores = int(os.environ.get("SLURM_CPUS_ON_NODE", 0)) // tasks
        words += [f"--cpus-per-task={cores}"] if cores else []
        on_cpu = planned.configuration.settings.get("device") == "cpu"
        return words if on_cpu else [*words, f"--gpus-per-node={self.gpus}"]


def launcher(planned: PlannedRun) -> str:
    """Return ``torchrun`` or ``mpi``; empty for a framework with one process for all devices."""
    asked = planned.configuration.settings.get("update")
    able = [asked] if asked is not None else planned.framework.updates
    return next((LAUNCHERS[name] for name in able if name in LAUNCHERS), "")
