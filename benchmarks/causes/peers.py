"""First answers of other programs about the same runs, where they are installed.

What each says first, by its own order, is mapped to findings of gputrace, generously: an answer is
right if one of those that it could mean is. What only says where the time went, and could mean many
causes (idle time, a host that is late), is right for the most usual of them and accuses nothing.
``docs/studies/causes.md`` has the whole mapping.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from benchmarks.causes.judge import Answer
from benchmarks.experiment import execute
from benchmarks.measure import Failed

Reader = Callable[[Path], Answer | None]
"""Returns the first answer about a file; None where the tool is not installed."""
_COPIES: Final = ("h2d-pageable", "h2d-exposed", "copies-exposed")
_IDLE: Final = "idle-unexplained"
_LAUNCHES: Final = "launch-bound"


def nsys_ai(trace: Path) -> Answer | None:
    """Return the first of nsys-ai's ranked findings; None where it is not installed."""
    named = os.environ.get("GPUTRACE_BENCH_NSYS_AI_PYTHON")
    program = str(Path(named).with_name("nsys-ai")) if named else shutil.which("nsys-ai")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        # It writes into its input, beside it, and into the current folder.
        copy, report = Path(folder, "trace.sqlite"), Path(folder, "findings.json")
        shutil.copy(trace, copy)
        window = ("--trim", *(f"{ns / 1e9:.6f}" for ns in _later(trace)))
        command = ("diagnose", str(copy), *window, "--format", "json", "-o", str(report))
        ended = execute(("env", "-C", folder, program, *command))
        if not report.exists():
            raise Failed(ended.last_words)
        first = json.loads(report.read_text(encoding="utf-8"))["findings"][:1]
    if not first:
        return Answer("")
    category, words = first[0].get("category") or "", f"{first[0]['label']}\n{first[0]['note']}"
    means = {
        "idle": (_IDLE,),
        "compute": ("compute-bound",),
        "launch_overhead": (_LAUNCHES,),
        "communication": ("communication-exposed",),
        "sync": ("sync-bound",),
        "memory": _COPIES,
    }
    return Answer(category, words, means=means.get(category, ()), broad=category == "idle")


_RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda-async-memcpy": _COPIES,
    "cuda-sync-memcpy": (*_COPIES, "sync-bound"),
    "cuda-sync-memset": ("sync-bound",),
    "cuda-sync-api": ("sync-bound",),
    "gpu-starv:gap=1": (_IDLE,),
}
"""Rules of nsys 2022.4 in their order, gaps from 1 ms on, and what they mean."""
_LEAST: Final = 0.05
"""Part of the time that a rule's rows must take to be what nsys says first."""


def nsys(trace: Path) -> Answer | None:
    """Return nsys' rule whose rows take longest, in the later two thirds of the GPU's work; the two
    longest of them do not count.

    nsys has no order of importance: by the order of its rules, copies of the start, or two short
    synchronizations, would come first nearly always.
    """
    program = os.environ.get("GPUTRACE_BENCH_NSYS") or shutil.which("nsys")
    if program is None:
        return None
    begin, last = _later(trace)
    taken: dict[str, int] = {}
    for rule in _RULES:
        words = f"{rule}:rows=1000000:start={begin}:end={last}"
        ended = execute((program, "analyze", "-q", "-r", words, "-f", "csv", str(trace)))
        if "could not be found" in ended.error:
            # It ends with 0 all the same; later releases have other names for the rules.
            raise Failed(ended.last_words)
        rows = csv.DictReader(ended.output.splitlines())
        # The program's clock waits for the GPU twice, which is no part of its training.
        taken[rule] = sum(sorted(int(row["Duration (ns)"]) for row in rows)[:-2])
    causes = [rule for rule in _RULES if _RULES[rule] != (_IDLE,)]
    rule = max(causes, key=lambda one: taken[one])
    if taken[rule] < _LEAST * (last - begin):
        rule = "gpu-starv:gap=1"
    if not taken[rule]:
        return Answer("")
    words = f"{rule}: {taken[rule] / (last - begin):.0%} of the time"
    return Answer(rule.partition(":")[0], words, means=_RULES[rule], broad=rule not in causes)


_HTA: Final = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
idle = trace.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
said = {"idle": idle.groupby("idle_category")["idle_time"].sum().to_dict()}
kinds, kernels = trace.get_gpu_kernel_breakdown(visualize=False, num_kernels=5)
said["kinds"] = dict(zip(kinds["kernel_type"], kinds["sum"].astype(float)))
try:
    parts = trace.get_temporal_breakdown(visualize=False).iloc[0]
    names = ("idle", "compute", "non_compute")
    said["shares"] = {name: parts[name + "_time_pctg"] for name in names}
except AssertionError:
    computed = said["kinds"].get("COMPUTATION", 0)
    rest = sum(said["kinds"].values()) - computed
    said["shares"] = {"idle": idle["idle_time"].sum(), "compute": computed, "non_compute": rest}
named = kernels[kernels["name"] != "others"].sort_values("sum (us)", ascending=False)
said["kernels"] = list(named["name"].head(3))
try:
    path, done = trace.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=1)
    said["path"] = path.summary().to_dict() if done else {}
except Exception as failure:
    said["path"] = {"failed": str(failure)}
print(json.dumps(said, default=float))
"""


def hta(trace: Path) -> Answer | None:
    """Return the largest part of HTA's temporal breakdown, and what it says of that part.

    Idle time is what its idle-time breakdown blames most, computation the longest kernel, the rest
    the kind of kernel that takes longest. Words have the critical path of one step. Where an
    assertion of its own ends the temporal breakdown, the sums of the other two stand for it.
    """
    python = os.environ.get("GPUTRACE_BENCH_HTA_PYTHON")
    if python is None:
        return None
    said = _said(execute((python, "-W", "ignore", "-c", _HTA, str(trace))), '{"')
    shares: dict[str, float] = said["shares"]
    path = ", ".join(f"{name} {part:.0f}" for name, part in said["path"].items() if name)
    words = "\n".join((str(shares), str(said["idle"]), *said["kernels"], path))
    most = max(shares, key=lambda name: shares[name])
    if most == "idle":
        waits: dict[str, float] = said["idle"]
        why = max(waits, key=lambda name: waits[name])
        means = (_LAUNCHES,) if why == "host_wait" else (_IDLE,)
        return Answer(why, words, means=means, broad=True)
    if most == "compute":
        return Answer("compute", words, means=("compute-bound",), broad=True)
    kinds = {name: time for name, time in said["kinds"].items() if "COMPUTATION" not in name}
    kind = max(kinds, key=lambda name: kinds[name])
    meant = ("communication-exposed",) if kind == "COMMUNICATION" else _COPIES
    return Answer(kind, words, means=meant)


def tracelens(trace: Path) -> Answer | None:
    """Return the largest part of TraceLens' GPU timeline, and its costliest operation.

    It runs as the skill of its agent calls it, without the agent. Its answer has the call stack of
    that operation, where it found one.
    """
    python = os.environ.get("GPUTRACE_BENCH_TRACELENS_PYTHON")
    if python is None:
        return None
    program = Path(python).with_name("TraceLens_generate_perf_report_pytorch")
    with tempfile.TemporaryDirectory() as folder:
        options = ("--enable_pseudo_ops", "--group_by_num_kernels", "--include_call_stack")
        paths = ("--profile_json_path", str(trace), "--output_csvs_dir", folder)
        ended = execute((str(program), *paths, *options))
        try:
            timeline = _rows(Path(folder, "gpu_timeline.csv"))
            operations = _rows(Path(folder, "unified_perf_summary.csv"))
        except OSError as failure:
            raise Failed(ended.last_words) from failure
    shares = {row["type"]: float(row["percent"]) for row in timeline}
    means = {
        "idle_time": (_IDLE,),
        "computation_time": ("compute-bound",),
        "exposed_memcpy_time": _COPIES,
        "exposed_comm_time": ("communication-exposed",),
    }
    most = max(means, key=lambda name: shares.get(name, 0.0))
    top = operations[0] if operations else {}
    stack = re.sub(r"([\w.-]+\.py)\((\d+)\)", r"\1:\2", top.get("call_stack_full", ""))
    words = "\n".join((str(shares), top.get("name", ""), top.get("op category", ""), stack))
    return Answer(most, words, means=means[most], broad=most in ("idle_time", "computation_time"))


def _later(trace: Path) -> tuple[int, int]:
    """Return the later two thirds of the GPU's work, in nanoseconds: what start-up is not in."""
    with closing(sqlite3.connect(f"file:{trace}?mode=ro", uri=True)) as opened:
        query = "SELECT min(start), max(end) FROM CUPTI_ACTIVITY_KIND_KERNEL"
        try:
            first, last = opened.execute(query).fetchone()
        except sqlite3.OperationalError as failure:
            raise Failed(str(failure)) from failure
    if first is None:
        raise Failed("it has no kernels")
    return first + (last - first) // 3, last


def _said(ended: Any, begins: str) -> dict[str, Any]:
    """Return the last line of JSON of a program that may say more."""
    lines = [line for line in ended.output.splitlines() if line.startswith(begins)]
    if not lines:
        raise Failed(ended.last_words)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    # Stacks of some operations are longer than what the module reads by default.
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


RECORDING: Final[Mapping[str, Reader]] = {"nsys": nsys, "nsys-ai": nsys_ai}
"""Readers of recordings in nsys' schema."""
PROFILE: Final[Mapping[str, Reader]] = {"HTA": hta, "TraceLens": tracelens}
"""Readers of torch.profiler's traces."""
