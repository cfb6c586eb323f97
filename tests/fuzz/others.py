"""Other inputs: study files, entries of the cache, results of studies."""

from __future__ import annotations

import json
import pickle
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gputrace.analyzers.hang_causes import find_cause
from gputrace.analyzers.memory_holders import report_memory
from gputrace.analyzers.timeline_model import Scene, read_scene
from gputrace.readers.flight_recorder import is_hang_report, read_ranks
from gputrace.readers.memory_snapshot import is_memory_snapshot, read_snapshot
from gputrace.readers.plain_pickle import plain_pickle
from gputrace.readers.registry import open_trace
from gputrace.report import FORMATS, render_as
from gputrace.store import cache
from gputrace.store.cache import dump_columns, load_columns
from gputrace.studies.database import FILE, Configuration, Database, Run, StudyHeader, StudyPlan
from gputrace.studies.framework_environments import Framework
from gputrace.studies.measures import read_results
from gputrace.studies.plan import arguments_of, key_of, make_plan, read_study
from gputrace.studies.report import render
from gputrace.studies.summary import summarize
from tests.fuzz import looking
from tests.fuzz.mutators import raw, trees
from tests.helpers import memory_snapshots, planted_study

if TYPE_CHECKING:
    from tests.fuzz.targets import Place

_FRAMEWORK: Final = Framework("torch", "PyTorch", Path("torch.py"))
_STUDIES: Final = ("scaling", "placements", "loader")


def give_study(path: Path, depth: int, place: Place) -> str:
    """A study file, and the runs that it asks for."""
    study = read_study(path)
    names = {settings["framework"] for settings in study.combinations}
    known = dict.fromkeys(names, _FRAMEWORK)
    if len(study.combinations) * study.repeats > 1000:
        return "many"
    plan = make_plan(study, known, 8)
    words = [arguments_of(planned, "folder") for planned in plan]
    return f"{len(plan)} {len(words)} {study.recording} {len(names)}"


def _example(suffix: str, folder: Path) -> Path:
    from tests.fuzz.targets import CORPUS, seed_of

    path = folder / f"run{suffix}"
    path.write_bytes(seed_of(CORPUS / "own" / "resnet18.sql"))
    return path


def give_dump(path: Path, _depth: int, _place: Place) -> str:
    """A dump of a flight recorder, or a report of a hang."""
    hang = find_cause(read_ranks([path]))
    return f"{hang.cause} {len(hang.states)} {is_hang_report(path)}"


def dumps() -> list[bytes]:
    """Dumps of one rank, pickled and as JSON."""
    entry = {
        "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0,
        "is_p2p": False, "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "retired": True,
        "input_sizes": ((4,),), "state": "completed",
        "frames": [{"filename": "train.py", "line": 20, "name": "step"}],
    }  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    content = {"version": "2.10", "pg_config": groups, "entries": [entry, entry]}
    return [pickle.dumps(content, 2), pickle.dumps(content, 4), json.dumps(content).encode()]


def give_snapshot(path: Path, depth: int, _place: Place) -> str:
    """A snapshot of PyTorch's allocator, in every form."""
    assert isinstance(is_memory_snapshot(path), bool)
    report = report_memory([(str(path), read_snapshot(path))])
    for device in report.devices:
        held = device.moments[0].allocated_bytes
        assert sum(row.held_bytes for row in device.kinds) == held
        assert (device.moments[0].largest_free_bytes or 0) >= 0
    if depth >= looking.LOOK:
        for form in FORMATS:
            render_as(report, form, "gputrace.report.memory")
    kinds = [[row.kind for row in device.kinds] for device in report.devices]
    return f"{kinds} {[device.out_of_memory is None for device in report.devices]}"


def snapshots() -> list[bytes]:
    """Snapshots of a training, of one that was refused memory, and of another protocol."""
    made = []
    for protocol, refused, stacks in ((4, "", "all"), (2, "forward", "python")):
        allocator = memory_snapshots.Allocator(stacks)
        memory_snapshots.train(allocator, 2, refused)
        made.append(pickle.dumps(allocator.content(), protocol))
    return [*made, made[0][:60] + _PLANTED + made[0][60:]]


_PLANTED: Final = b"cos\nsystem\nX\x04\x00\x00\x00true\x85R"
"""Opcodes that call a function; `tests.fuzz.guard` notices if they ever do."""


def mutate_snapshot(rng: Random, data: bytes) -> bytes:
    """Other values, keys or order; other bytes; code to run at some place."""
    kind = rng.random()
    if kind < 0.1:
        at = rng.randrange(len(data) + 1)
        return data[:at] + _PLANTED + data[at:]
    if kind < 0.5:
        return raw.mutate(rng, data)
    try:
        tree = plain_pickle(data)
        return pickle.dumps(trees.change(rng, tree), rng.choice((2, 3, 4, 5)))
    except Exception:
        return raw.mutate(rng, data)


def kernels() -> list[bytes]:
    """A table of kernels as nsys exports it to Parquet."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {"start": [10, 200, 400], "end": [110, 300, 500]}
    columns |= {"deviceId": [0] * 3, "contextId": [1] * 3, "streamId": [7] * 3}
    columns |= {"correlationId": [1, 2, 3], "globalPid": [281487744172032] * 3}
    columns |= {"demangledName": [4] * 3, "shortName": [4] * 3}
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink, compression="snappy")
    plain = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), plain, compression="none", use_dictionary=False)
    return [sink.getvalue().to_pybytes(), plain.getvalue().to_pybytes()]


def entries() -> list[bytes]:
    """Return the cache entry of a trace."""

    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "entry")
        with open_trace(_example(".sqlite", Path(folder))) as trace:
            cache._write(kept, dump_columns(read_scene(trace)))
        return [kept.read_bytes()]


def mutate_kept(rng: Random, data: bytes) -> bytes:
    """Another text, or other bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path, changed = Path(folder, "entry"), Path(folder, "changed")
        path.write_bytes(data)
        try:
            kept = cache._read(path)
            value = msgspec.json.encode(msgspec.msgpack.decode(kept.text))
            text = trees.mutate_json(rng, value)
            packed = msgspec.msgpack.encode(msgspec.json.decode(text))
            # To another file: the columns are mapped from the first.
            cache._write(changed, cache.Kept(packed, kept.columns))
        except Exception:
            return raw.mutate(rng, data)
        return raw.mutate(rng, data) if rng.random() < 0.3 else changed.read_bytes()


def give_kept(path: Path, depth: int, place: Place) -> str:
    """An entry of the cache; whatever is wrong with it, it counts as none."""
    try:
        kept = cache._read(path)
    except Exception as error:
        return type(error).__name__
    scene = load_columns(kept, Scene)
    return f"{len(kept.columns)} {scene is None}"


def results() -> list[bytes]:
    """Results of studies, each in a file."""
    return [_results(name) for name in _STUDIES]


def _results(name: str) -> bytes:
    found = getattr(planted_study, name)()
    keys = [key_of(one.settings) for one in found.runs]
    with tempfile.TemporaryDirectory() as folder:
        with Database(Path(folder), create=True) as database:
            row = StudyHeader(found.title, found.question, 3, "recorded", "study.toml")
            configurations = [
                Configuration(key, "torch", 1, one.settings)
                for key, one in zip(keys, found.runs, strict=True)
            ]
            asked = {each.key: each for each in configurations}
            database.set_plan(StudyPlan(row, tuple(asked.values())))
            for key, one in zip(keys, found.runs, strict=True):
                saved = database.save(Run(key, one.repeat, True, one.state, result=one.result))
                if one.measure is not None:
                    database.save_measure(saved, one.measure)
        with closing(sqlite3.connect(Path(folder, FILE))) as file:
            return file.serialize()


def give_results(path: Path, depth: int, place: Place) -> str:
    """The results of a study, in every form."""
    with Database(path.parent) as database:
        summary = summarize(read_results(database))
        if depth >= looking.LOOK:
            for form in FORMATS:
                render(summary, form, database=database)
    counts = len(summary.rows), len(summary.efficiency), len(summary.checks)
    return f"{counts} {len(summary.notes)} {len(summary.effects)}"
