"""Files as people reported them to be misread, each kind made with chance, whose answer is known.

An input names a kind and the chance: ``{"kind": "cut_off", "seed": 17}``.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import gputrace
from gputrace.api import Report
from gputrace.errors import InputError
from tests.fuzz import looking
from tests.helpers.exports import STEP, Export, global_id

if TYPE_CHECKING:
    from tests.fuzz.targets import Place

Events = list[dict[str, Any]]
PID: Final = 4242
BASE_NS: Final = 1_732_000_000_000_000_000
DATA: Final = "data-feeding"


class Training:
    """A profile: each step waits for its batch for half of it and longer, then computes."""

    def __init__(self, rng: Random, first: int = 5, at: float = 1e6, steps: int = 0) -> None:
        self.kernels, self.waits = rng.randint(3, 6), rng.randint(4_000, 9_000)
        self.steps, self.events = steps or rng.randint(8, 14), list[dict[str, Any]]()
        self.correlation = 1000
        for step in range(self.steps):
            at = self._step(first + step, at)

    def _step(self, number: int, begin: float) -> float:
        at = begin + self.waits
        wait = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        self.call("user_annotation", wait, begin, at)
        self.launch("Memcpy HtoD (Pinned -> Device)", at + 40, 200, "cudaMemcpyAsync")
        for kernel in range(self.kernels):
            self.launch(("gemm", "relu")[kernel % 2], at + 250 + 1000 * kernel, 990)
        end = at + 300 + 1000 * self.kernels
        self.call("user_annotation", "Optimizer.step#SGD.step", end - 200, end - 150)
        self.call("cuda_runtime", "cudaStreamSynchronize", end - 60, end - 50)
        self.call("user_annotation", f"ProfilerStep#{number}", begin, end)
        return end

    def call(self, cat: str, name: str, start: float, end: float, **args: int) -> None:
        row = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start}
        self.events.append(row | {"pid": PID, "tid": PID, "args": args})

    def launch(self, name: str, at: float, length: float, call: str = "cudaLaunchKernel") -> None:
        self.correlation += 1
        self.call("cuda_runtime", call, at - 30, at - 20, correlation=self.correlation)
        cat = "gpu_memcpy" if "Memcpy" in name else "kernel"
        args = {"device": 0, "stream": 7, "correlation": self.correlation}
        row = {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": length, "pid": 0, "tid": 7}
        self.events.append(row | {"args": args})

    @property
    def on_gpu(self) -> Events:
        return [event for event in self.events if event["cat"] == "kernel"]


def _text(events: Events, **around: Any) -> str:
    about = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, **around}
    return json.dumps(about | {"traceEvents": events})


def _write(folder: Path, data: str | bytes, name: str = "host_4242.pt.trace.json") -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def _read(*paths: Path, keep_going: bool = False) -> Report:
    with gputrace.open(*paths, keep_going=keep_going) as trace:
        return trace.analyze()


def _ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


def _is_base(report: Report, training: Training) -> str:
    """Check the answer of a clean file."""
    steps = abs(report.steps.count - training.steps)
    assert steps <= 1, f"{report.steps.count} steps of {training.steps}"
    assert _ids(report)[:1] == [DATA], f"first is {_ids(report)[:1]}"
    return "base"


def _odd_name(rng: Random, folder: Path, names: Iterable[str]) -> str:
    training = Training(rng)
    marked = rng.sample(training.events, rng.randint(1, 3))
    for event in marked:
        at, end = event["ts"], event["ts"] + 1
        training.call("python_function", "ODD", at, end)
    text = _text(training.events).replace("ODD", rng.choice(list(names)))
    return _is_base(_read(_write(folder, text)), training)


def windows_backslash(rng: Random, folder: Path) -> str:
    names = (r"C:\Users\me\train.py(3): f", r"D:\data\new\x.py(1): g", "C:\\\\ok\\tmp\\u12")
    return _odd_name(rng, folder, names)


def unescaped_quotes(rng: Random, folder: Path) -> str:
    return _odd_name(rng, folder, ('<genexpr "x">', 'f("a", "b")', '"', 'say "hi'))


def long_durations(rng: Random, folder: Path) -> str:
    training = Training(rng)
    for event in rng.sample(training.on_gpu, 1):
        event["dur"] = 10.0 ** rng.randint(10, 15)
    return _is_base(_read(_write(folder, _text(training.events))), training)


def kernel_overlaps_next(rng: Random, folder: Path) -> str:
    training = Training(rng)
    row = rng.randrange(training.kernels)
    training.on_gpu[row * training.steps % len(training.on_gpu)]["dur"] *= rng.randint(3, 30)
    return _is_base(_read(_write(folder, _text(training.events))), training)


def merged_ranks(rng: Random, folder: Path) -> str:
    ranks = [Training(Random(rng.random()), steps=10) for _ in range(rng.randint(2, 4))]
    label = rng.choice(("TP", "DP", "Rank "))
    for rank, training in enumerate(ranks):
        for event in training.events:
            pid = event["pid"] + 10 * rank
            event["pid"] = f"[{label}{rank:02d}] {pid}"
    merged = [event for training in ranks for event in training.events]
    report = _read(_write(folder, _text(merged, distributedInfo={"world_size": len(ranks)})))
    assert len([gpu for gpu in report.gpus if gpu.kernels]) == len(ranks)
    assert _ids(report)[:1] == [DATA]
    return "ranks"


def byte_order_mark(rng: Random, folder: Path) -> str:
    training = Training(rng)
    text = _text(training.events)
    data = text.encode(rng.choice(("utf-8-sig", "utf-16", "utf-8")))
    for _ in range(rng.randint(0, 2)):
        data = gzip.compress(data, 1)
    return _is_base(_read(_write(folder, data)), training)


def two_windows(rng: Random, folder: Path) -> str:
    same, apart = rng.random(), rng.uniform(5e6, 9e7)
    first = Training(Random(same), steps=rng.randint(6, 12))
    second = Training(Random(same), 50, 1e6 + apart, steps=rng.randint(6, 12))
    paths = [
        _write(folder, _text(window.events), f"host_{PID}.17320000{number}.pt.trace.json")
        for number, window in enumerate((first, second))
    ]
    report = _read(*paths)
    first.steps += second.steps
    return _is_base(report, first)


def step_marks_overlap(rng: Random, folder: Path) -> str:
    training = Training(rng)
    marks = [event for event in training.events if event["name"].startswith("ProfilerStep")]
    if rng.random() < 0.5:
        for event in marks:
            event["dur"] += 0.001
    else:
        training.events += rng.sample(marks, rng.randint(1, 3))
    return _is_base(_read(_write(folder, _text(training.events))), training)


def impossible_launch(rng: Random, folder: Path) -> str:
    training = Training(rng, steps=14)
    for event in training.on_gpu[: rng.randint(1, 2)]:
        event["ts"] -= rng.uniform(2e6, 9e6)
    report = _read(_write(folder, _text(training.events)))
    assert report.warnings or report.dropped_rows
    return _is_base(report, training)


def cut_off(rng: Random, folder: Path) -> str:
    text = _text(Training(rng, steps=14).events)
    path = _write(folder, text[: rng.randrange(len(text) // 2, len(text) - 9)])
    try:
        said = " ".join(_read(path).warnings)
    except InputError as error:
        said = str(error)
    assert "--keep-going" in said or "it was cut off" in said
    assert _ids(_read(path, keep_going=True))
    return "cut"


def steps_grow(rng: Random, folder: Path) -> str:
    training, at = Training(rng, steps=1), 5e6
    training.events.clear()
    training.kernels = 3
    for step in range(rng.randint(60, 90)):
        training.waits = 5_000 + step * rng.randint(60, 90)
        at = training._step(step, at)
    assert "steps-grow" in _ids(_read(_write(folder, _text(training.events))))
    return "grow"


def graph_nodes_idle(rng: Random, folder: Path) -> str:
    training, at = Training(rng, steps=1), 1e6
    training.events.clear()
    nodes, pause = rng.randint(300, 400), rng.uniform(1, 4)
    length = 80 + nodes * (9 + pause)
    for step in range(12):
        training.call("user_annotation", f"ProfilerStep#{step}", at, at + length)
        training.call("cuda_runtime", "cudaGraphLaunch", at + 5, at + 60, correlation=step + 1)
        for node in range(nodes):
            args = {"device": 0, "stream": 7, "correlation": step + 1}
            row = {"ph": "X", "cat": "kernel", "name": f"flash_fwd_{node % 5}", "pid": 0, "tid": 7}
            times = {"ts": at + 70 + node * (9 + pause), "dur": 9.0}
            args |= {"graph id": 1, "graph node id": node + 1}
            training.events.append(row | times | {"args": args})
        at += length
    assert "launch-bound" not in _ids(_read(_write(folder, _text(training.events))))
    return "graph"


def nsys_table_suffix(rng: Random, folder: Path) -> str:
    export, at = Export(), 1_000_000
    for _ in range(rng.randint(8, 20)):
        export.copy(at, at + 300_000, bytes=1 << 20)
        export.kernel(at + 300_000, at + 990_000)
        at += 1_000_000
    path = export.write(folder / "run.sqlite")
    suffix = rng.choice(("_V3", "_V12", "2", "_NEW"))
    with closing(sqlite3.connect(path)) as database, database:
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"):
            database.execute(f"ALTER TABLE {table} RENAME TO {table}{suffix}")
    try:
        report = _read(path)
    except InputError as error:
        return f"refused {bool(str(error))}"
    assert {"idle-unexplained", "low-utilization"}.isdisjoint(_ids(report))
    return "suffix"


def mig(rng: Random, folder: Path) -> str:
    names = ("timestamp", "index", "mig.mode.current", "utilization.gpu [%]", "power.draw [W]")
    rows = [", ".join(names)]
    for second in range(rng.randint(20, 50)):
        power = f"{rng.uniform(100, 300):.2f} W"
        rows.append(f"2026/11/27 10:00:{second:02d}.000, 0, Enabled, [N/A], {power}")
    report = _read(_write(folder, "\n".join(rows), "smi.csv"))
    assert "low-utilization" not in _ids(report)
    assert "MIG" in report.render()
    return "mig"


def jax_perfetto_copy(rng: Random, folder: Path) -> str:
    from tests.fuzz.targets import CORPUS

    run = folder / "plugins" / "profile" / f"2026_0{rng.randint(1, 9)}_01"
    run.mkdir(parents=True)
    shutil.copy(CORPUS / "xplane" / "made.pb", run / "host.xplane.pb")
    copied = gzip.compress(_text(Training(rng).events).encode(), 1)
    _write(run, copied, "perfetto_trace.json.gz")
    return _read(run).source


class HostTraining:
    """A recording of a host: each step waits, goes forward and back, sleeps, and updates."""

    def __init__(self) -> None:
        self.export = Export().give("GPUTRACE_META", "name", "value")
        self.export.give("GPUTRACE_HOST_RANGE", "start", "end", "globalTid", "nameId", "kind")
        columns = ("start", "end", "globalTid", "nameId", "value")
        self.export.give("GPUTRACE_HOST_COUNTER", *columns)
        self.export.rows.setdefault("GPUTRACE_META", [])
        self.at = self.began = 1_000_000
        self.number = 0

    def _row(self, table: str, name: str, start: int, end: int, **more: int) -> None:
        who = {"globalTid": global_id(100, thread=100), "nameId": self.export.string(name)}
        self.export.add(table, start=start, end=end, **who, **more)

    def step(self, waits: int, sleeps: int, batch: str = "") -> None:
        """Add a step of so many nanoseconds that wait for a batch, and that sleep."""
        start = self.at
        if waits:
            self._row("GPUTRACE_HOST_RANGE", "torch.wait", start, start + waits, kind=1)
        self.at += waits + (0 if waits else 100_000)
        for name, before, length in (
            ("forward", 0, 1),
            ("backward", 0, 1),
            ("optimizer", sleeps, 1),
        ):
            self.at += before
            span = self.at, self.at + length * 500_000
            self._row("GPUTRACE_HOST_RANGE", name, *span, kind=4)
            self.at = span[1]
        for what in ("on core", "process on core"):
            self._row("GPUTRACE_HOST_COUNTER", what, start, self.at, value=1_600_000)
        self._row(STEP, "torch.optim.Optimizer.step", start, self.at, step=self.number)
        self.number += 1


def background_prefetch(rng: Random, folder: Path) -> str:
    host = HostTraining()
    for _ in range(rng.randint(20, 40)):
        host.step(0, rng.randint(20_000_000, 40_000_000))
    report = _read(host.export.write(folder / "run.sqlite"))
    assert {DATA, "host-blocked"}.isdisjoint(_ids(report))
    return "fed"


def validation_between_epochs(rng: Random, folder: Path) -> str:
    host, each = HostTraining(), rng.randint(15, 25)
    for _ in range(rng.randint(3, 5)):
        for _ in range(each):
            host.step(1_000_000, 20_000_000)
        host.at += rng.randint(500_000_000, 900_000_000)
    report = _read(host.export.write(folder / "run.sqlite"))
    assert DATA not in _ids(report)
    return "validation"


KINDS: Final[dict[str, Callable[[Random, Path], str]]] = {
    kind.__name__: kind
    for kind in (
        *(windows_backslash, unescaped_quotes, long_durations, kernel_overlaps_next),
        *(merged_ranks, byte_order_mark, two_windows, step_marks_overlap, impossible_launch),
        *(cut_off, steps_grow, graph_nodes_idle, nsys_table_suffix, mig, jax_perfetto_copy),
        *(background_prefetch, validation_between_epochs),
    )
}
"""Kinds of reports: each makes files in a folder, and checks what is said of them."""


def give_report(path: Path, depth: int, place: Place) -> str:
    """Make the files of a report, and check the answer."""
    recipe = json.loads(path.read_bytes())
    folder = place.out / "report"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about = f"{recipe['kind']} {KINDS[recipe['kind']](Random(recipe['seed']), folder)}"
    if depth >= looking.LOOK and recipe["kind"] not in ("cut_off", "nsys_table_suffix"):
        looking.look(tuple(sorted(folder.iterdir())), depth, place.out)
    return about


def mutate_report(rng: Random, _data: bytes) -> bytes:
    """Another kind, or other chance."""
    return json.dumps({"kind": rng.choice(list(KINDS)), "seed": rng.getrandbits(32)}).encode()


def reports() -> list[bytes]:
    """Return one input of each kind."""
    return [json.dumps({"kind": kind, "seed": 1}).encode() for kind in KINDS]
