"""Causes of a late host, planted in real processes: is the first finding that of the plant?

Those of the data loader need torch: GPUTRACE_TORCH_PYTHON names a Python that has it. Runs follow
each other on all cores; with GPUTRACE_CORES_EACH, as many are made at once as have so many cores
each. GPUTRACE_TRIES and GPUTRACE_HEALTHY set how many runs there are.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gputrace
from benchmarks.options import Options
from gputrace.api import Report
from tests.synthetic.late_hosts import LOADER, PLANTS, STEPS, Plant

PYTHON: Final = os.environ.get("GPUTRACE_TORCH_PYTHON", sys.executable)
TRIES: Final = int(os.environ.get("GPUTRACE_TRIES", "3"))
HEALTHY: Final = int(os.environ.get("GPUTRACE_HEALTHY", "20"))
CORES_EACH: Final = int(os.environ.get("GPUTRACE_CORES_EACH", "0"))
OF_THE_HOST: Final = frozenset(
    (
        *("cpu-starved", "cpu-throttled", "page-faults", "garbage-collection", "recompilation"),
        *("host-blocked", "data-feeding", "gil-wait", "slow-cores"),
    )
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one recording of a plant.

    Attributes:
        wrong: what came first; empty if that is right.
        queued: the time that the thread was queued, as a fraction of what its clock says; None
            where its clock does not say.
        missing: why the cause cannot be planted on this machine; empty if it can.
    """

    wrong: str = ""
    queued: float | None = None
    missing: str = ""


def run(options: Options) -> int:
    """Prints how often each plant is the first finding; gives 1 where fewer than 11 of 12 are."""
    lanes = _lanes()
    right, planted, quiet, queued = 0, 0, 0, []
    with ProcessPoolExecutor(len(lanes), initializer=_take, initargs=(_filled(lanes),)) as pool:
        tries = [[pool.submit(_finds, plant) for _ in range(TRIES)] for plant in PLANTS]
        healthy = [pool.submit(_of_healthy, seed) for seed in range(HEALTHY)]
        print(
            f"| planted | first in {TRIES} | queued, of the thread's clock |\n| :-- | --: | --: |"
        )
        for plant, futures in zip(PLANTS, tries, strict=True):
            outcomes = [future.result() for future in futures]
            missing = next((outcome.missing for outcome in outcomes if outcome.missing), "")
            if missing:
                print(f"| {plant.name} | not planted: {missing} | |", flush=True)
                continue
            wrong = [outcome.wrong for outcome in outcomes if outcome.wrong]
            right, planted = right + TRIES - len(wrong), planted + TRIES
            shares = [outcome.queued for outcome in outcomes if outcome.queued is not None]
            queued += [statistics.median(shares)] if shares else []
            shown = " ".join([str(TRIES - len(wrong)), *sorted(set(wrong))])
            print(
                f"| {plant.name} | {shown} | {' '.join(f'{share:.3f}' for share in shares)} |",
                flush=True,
            )
        print()
        for seed, future in enumerate(healthy):
            causes = future.result()
            quiet += not causes
            if causes:
                print(f"- healthy run {seed}: {', '.join(sorted(causes))}", flush=True)
    print(f"{right} of {planted} are first; nothing is named in {quiet} of {HEALTHY} healthy runs")
    enough = right >= planted * 11 / 12 and quiet == HEALTHY
    enough = enough and all(abs(share - 1) <= 0.1 for share in queued)
    return int(not enough) if options.check else 0


def _lanes() -> list[set[int]]:
    """Return disjoint sets of cores, one for each run that is made at a time."""
    cores = sorted(os.sched_getaffinity(0))
    each = CORES_EACH or len(cores)
    return [set(cores[i : i + each]) for i in range(0, len(cores) - each + 1, each)] or [set(cores)]


def _filled(lanes: list[set[int]]) -> multiprocessing.SimpleQueue[set[int]]:
    queue: multiprocessing.SimpleQueue[set[int]] = multiprocessing.SimpleQueue()
    for lane in lanes:
        queue.put(lane)
    return queue


def _take(lanes: multiprocessing.SimpleQueue[set[int]]) -> None:
    """Keep this process, and what it starts, to a lane that no other one has."""
    os.sched_setaffinity(0, lanes.get())


def _finds(plant: Plant) -> Outcome:
    """Record a plant; say what came of it."""
    try:
        with _quota(plant.quota) as before:
            report, said = _record(plant.source + plant.program, plant.options, before)
    except OSError as error:
        return Outcome(missing=str(error))
    except RuntimeError as error:
        # Who may make a group may not always move a process into it.
        return Outcome(missing=str(error)) if plant.quota else Outcome(f"failed: {error}")
    queued = None
    if plant.queues and report.host_load:
        load = report.host_load[0]
        off_core = float(said.rpartition("off the core")[2])
        queued = load.queued_ns / load.covered_ns / off_core
    if not report.findings:
        return Outcome("nothing", queued)
    first = report.findings[0]
    if first.id == plant.finding and plant.says in "; ".join((first.message, *first.details)):
        return Outcome(queued=queued)
    return Outcome(first.id if first.id != plant.finding else first.message, queued)


def _of_healthy(seed: int) -> set[str]:
    """Return the causes that are named in a run that has none."""
    # A batch takes a millisecond to receive, which no worker can hide.
    step = (0.040, 0.060, 0.080, 0.120, 0.160)[seed % 5]
    if seed % 2:
        source = LOADER + f"train(Samples(Compose(Decode(0.0002))), lambda: hash_for({step}))"
    else:
        idle = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        source = f"{STEPS}{idle}steps({max(30, round(2 / step))}, lambda: hash_for({step}))"
    try:
        report, _ = _record(source, ("--python",) if seed % 4 < 2 else ())
    except RuntimeError as error:
        return {f"failed: {error}"}
    return {finding.id for finding in report.findings} & OF_THE_HOST


def _record(
    source: str, options: tuple[str, ...] = (), before: tuple[str, ...] = ()
) -> tuple[Report, str]:
    """Record a program; return what is found, and what it printed.

    Raises RuntimeError with the last line of its errors where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, trace = Path(folder) / "train.py", Path(folder) / "run.sqlite"
        script.write_text(source, encoding="utf-8")
        python = PYTHON if source.startswith(LOADER) else sys.executable
        command = [sys.executable, "-m", "gputrace", "record", "--backend", "host", "--no-nvml"]
        command += ["-o", str(trace), *options, "--", *before, python, str(script)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if ran.returncode:
            raise RuntimeError((ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"])[-1])
        with gputrace.open(trace) as opened:
            return opened.analyze(), ran.stdout


@contextmanager
def _quota(cores: float) -> Iterator[tuple[str, ...]]:
    """Make a control group, of version 1 or 2, as root; yield what runs a command in it.

    Raises OSError where none can be made, or its quota cannot be set.
    """
    if not cores:
        yield ()
        return
    root = Path("/sys/fs/cgroup")
    old = root / "cpu"
    folder = (old if (old / "cpu.cfs_quota_us").exists() else root) / f"gputrace-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        most = round(cores * 100_000)
        if folder.parent == old:
            (folder / "cpu.cfs_quota_us").write_text(str(most))
        else:
            with suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+cpu")
            (folder / "cpu.max").write_text(f"{most} 100000")
        yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    finally:
        with suppress(OSError):
            folder.rmdir()
