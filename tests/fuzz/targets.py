"""Targets of fuzzing: how an input becomes another, and how it is given to gputrace."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz import looking, others, reports, spools
from tests.fuzz.mutators import Mutator, chunks, lines, raw, tables, trees, wire

CORPUS: Final = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an input is given: folders that are emptied between inputs."""

    input: Path
    out: Path
    beside: Path
    """What goes with every input of the target."""


Give = Callable[[Path, int, Place], str]
"""Takes the file of an input, and how much to do with it; raises GputraceError to refuse it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One of the things that are fuzzed."""

    name: str
    file: str
    """What the file of an input is called."""
    mutate: Mutator
    give: Give
    prepare: Callable[[Place], None] | None = None
    made: Callable[[], list[bytes]] | None = None
    """Inputs to begin with beside those of the corpus."""

    @property
    def seeds(self) -> list[bytes]:
        """The inputs of the corpus; one in SQL is the file that it makes."""
        found = []
        for path in sorted((CORPUS / self.name).glob("*")):
            found.append(seed_of(path))
            if path.suffix == ".sql":
                found += tables.parts(found[-1])
        return found + (self.made() if self.made else [])


def seed_of(path: Path) -> bytes:
    """The input that a file of the corpus stands for."""
    if path.suffix != ".sql":
        return path.read_bytes()
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.executescript(path.read_text(encoding="utf-8"))
        return database.serialize()


def _trace(path: Path, depth: int, place: Place) -> str:
    return looking.look((path,), depth, place.out)


def _log(path: Path, depth: int, place: Place) -> str:
    """A log of nvidia-smi, beside a trace."""
    return looking.look((place.beside / "run.sqlite", path), depth, place.out)


def _prepare_run(place: Place) -> None:
    whole = seed_of(CORPUS / "nsys" / "h100.sql")
    small = next(part for part in tables.parts(whole) if b"utcEpochNs" in part)
    (place.beside / "run.sqlite").write_bytes(small)


def _tables(path: Path, depth: int, place: Place) -> str:
    """A table of nsys in a folder of them."""
    return looking.look((path.parent,), depth, place.out)


_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"

TARGETS: Final = (
    Target("own", "run.sqlite", tables.mutate, _trace),
    Target("nsys", "run.sqlite", tables.mutate, _trace),
    Target("tables", f"{_KERNELS}.parquet", raw.mutate, _tables, made=others.kernels),
    Target("nvprof", "run.nvvp", tables.mutate, _trace),
    Target("rocpd", "run_results.db", tables.mutate, _trace),
    Target("rocprof", "run_results.json", trees.mutate_json, _trace),
    Target("kineto", "run.pt.trace.json", trees.mutate_json, _trace),
    Target("xplane", "run.xplane.pb", wire.mutate, _trace),
    Target("trace-viewer", "run.trace.json", trees.mutate_json, _trace),
    Target("mxnet", "profile.json", trees.mutate_json, _trace),
    Target("smi", "smi.csv", lines.mutate, _log, _prepare_run),
    Target("dump", "nccl_trace_rank_0", raw.mutate, others.give_dump, made=others.dumps),
    Target(
        *("snapshot", "snapshot.pickle", others.mutate_snapshot, others.give_snapshot),
        made=others.snapshots,
    ),
    Target("spool", "node0.4711.spool", chunks.mutate, spools.give_spool),
    Target("host", "node0.4711.host", chunks.mutate, spools.give_host),
    Target(
        *("reports", "report.json", reports.mutate_report, reports.give_report),
        made=reports.reports,
    ),
    Target("study", "study.toml", lines.mutate, others.give_study),
    Target("kept", "entry", others.mutate_kept, others.give_kept, made=others.entries),
    Target("results", "results.sqlite", tables.mutate, others.give_results, made=others.results),
)


def target_of(name: str) -> Target:
    """Raises KeyError for a name that no target has."""
    return {target.name: target for target in TARGETS}[name]
