"""One recording as a file for each node or rank, as `gputrace record` on several machines does."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.synthetic import Recording, write_nsys

_PID = "({0} >> 24 & 0xFFFFFF)"


@dataclass(frozen=True)
class Node:
    """A part of a run: some ranks on one machine."""

    host: str
    ranks: tuple[int, ...]
    began_ns: int = 0
    """How long after the whole its session began."""
    clock_ahead_ns: int = 0
    """How wrong its wall clock is."""
    world_size: int | None = None
    """What its processes say; the number of ranks if not given."""
    job: str = ""


def write_whole(recording: Recording, path: Path, host: str = "node0") -> Path:
    """One file of everything, with the ranks in it."""
    write_nsys(recording, path)
    ranks = range(len(recording.processes))
    with closing(sqlite3.connect(path)) as database, database:
        _write_own(database, recording, Node(host, tuple(ranks)))
    return path


def write_parts(
    recording: Recording,
    folder: Path,
    nodes: Sequence[Node],
    *,
    same_pids: bool = False,
    first_gpus: Sequence[int] = (),
) -> list[Path]:
    """A file for each node; ``same_pids`` gives the nth process the same id on every node.

    ``first_gpus`` is the card of the whole that each node counts as its 0.
    """
    folder.mkdir(exist_ok=True)
    whole = folder / "whole"
    write_nsys(recording, whole)
    paths = []
    for number, node in enumerate(nodes):
        path = folder / f"run.{number}.sqlite"
        shutil.copy(whole, path)
        with closing(sqlite3.connect(path)) as database, database:
            _write_own(database, recording, node)
            _keep(database, [recording.processes[rank].pid for rank in node.ranks])
            _shift(database, node.began_ns)
            sql = "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = utcEpochNs + ?"
            database.execute(sql, (node.clock_ahead_ns,))
            if first_gpus:
                _renumber_cards(database, first_gpus[number])
            if same_pids:
                for place, rank in enumerate(node.ranks):
                    _rename(database, recording.processes[rank].pid, 7 + place)
        paths.append(path)
    whole.unlink()
    return paths


def _write_own(database: sqlite3.Connection, recording: Recording, node: Node) -> None:
    database.execute("CREATE TABLE GPUTRACE_META (name TEXT, value TEXT)")
    meta = {"format": "1", "hostname": node.host} | ({"job": node.job} if node.job else {})
    database.executemany("INSERT INTO GPUTRACE_META VALUES (?, ?)", meta.items())
    database.execute(
        "CREATE TABLE GPUTRACE_PROCESS (globalPid INTEGER, pid INTEGER, host TEXT, rank INTEGER, "
        "worldSize INTEGER, localRank INTEGER, whole INTEGER, note TEXT)"
    )
    size = node.world_size or len(recording.processes)
    for place, rank in enumerate(node.ranks):
        pid = recording.processes[rank].pid
        row = (1 << 48 | pid << 24, pid, node.host, rank, size, place, 1, None)
        database.execute("INSERT INTO GPUTRACE_PROCESS VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _columns(database: sqlite3.Connection) -> dict[str, set[str]]:
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        table: {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        for (table,) in tables
    }


def _keep(database: sqlite3.Connection, pids: Collection[int]) -> None:
    """Only what is of some processes."""
    listed = ", ".join(map(str, pids))
    for table, columns in _columns(database).items():
        for column in {"globalPid", "globalTid"} & columns:
            pid = _PID.format(column)
            database.execute(f"DELETE FROM {table} WHERE {pid} NOT IN ({listed})")
        if "pid" in columns:
            database.execute(f"DELETE FROM {table} WHERE pid NOT IN ({listed})")


def _shift(database: sqlite3.Connection, began_ns: int) -> None:
    """Times from a later moment on."""
    for table, columns in _columns(database).items():
        for column in {"start", "end"} & columns:
            database.execute(f'UPDATE {table} SET "{column}" = "{column}" - {began_ns}')
    database.execute(
        f"UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = utcEpochNs + {began_ns}"
    )


def _renumber_cards(database: sqlite3.Connection, first: int) -> None:
    database.execute(f"DELETE FROM TARGET_INFO_GPU WHERE id < {first}")
    database.execute(f"DELETE FROM TARGET_INFO_CUDA_DEVICE WHERE gpuId < {first}")
    database.execute(f"UPDATE TARGET_INFO_GPU SET id = id - {first}")
    database.execute(f"UPDATE TARGET_INFO_CUDA_DEVICE SET gpuId = gpuId - {first}")


def _rename(database: sqlite3.Connection, pid: int, new: int) -> None:
    for table, columns in _columns(database).items():
        for column in {"globalPid", "globalTid"} & columns:
            mask = ~(0xFFFFFF << 24)
            database.execute(
                f"UPDATE {table} SET {column} = ({column} & {mask}) | {new << 24} "
                f"WHERE {_PID.format(column)} = {pid}"
            )
        if "pid" in columns:
            database.execute(f"UPDATE {table} SET pid = {new} WHERE pid = {pid}")
