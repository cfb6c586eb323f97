"""Write a recording as AMD's rocprofv3 does: one SQLite file per rank, of the documented schema."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from tests.synthetic.recording import Kind, Process, Recording, Table

BOOTED = 3_600_000_000_000
"""Nanoseconds since the machine was booted at 0 of the recording's clock."""
CPU, FIRST_GPU = 0, 2
"""Ids of agents: the CPUs come first."""

_TIMES = {
    False: (
        "nid, pid, tid, agent_id, queue_id, stream_id, start, end",
        "nid, pid, tid, start, end",
    ),
    True: ("track_id, start_id, end_id", "track_id, start_id, end_id"),
}


def write_rocpd(
    recording: Recording, folder: str | Path, *, tracked: bool = False, ranges: Iterable[str] = ()
) -> list[Path]:
    """Write a file for each rank into a folder, which is made; return them in order of rank.

    ``tracked`` is for the later schema, in which rows name tracks and timestamps; ``ranges`` says
    which of "step" and "data" to write.
    """
    Path(folder).mkdir()
    paths = []
    for process in recording.processes:
        paths.append(Path(folder) / f"{process.pid}_results.db")
        with closing(sqlite3.connect(paths[-1])) as database:
            _Writer(database, recording, process, tracked).write(tuple(ranges))
            database.commit()
    return paths


class _Writer:
    """Writer of one process."""

    def __init__(
        self, database: sqlite3.Connection, recording: Recording, process: Process, tracked: bool
    ) -> None:
        self.database, self.recording, self.process = database, recording, process
        self.tracked = tracked
        self.uuid = f"_00000450_565d_765d_bc41_{process.pid:012x}"
        self.categories = {
            name: -1 - number
            for number, name in enumerate(
                ("KERNEL_DISPATCH", "MEMORY_COPY", "HIP_RUNTIME_API_EXT", "MARKER_CORE_RANGE_API")
            )
        }
        self.tracks: dict[tuple[int, ...], int] = {}

    def write(self, ranges: tuple[str, ...]) -> None:
        self.about()
        self.operations(self._of(self.recording.ops))
        self.host_calls(self._of(self.recording.api))
        chosen = [
            row
            for row in self._of(self.recording.nvtx)
            if self.recording.names[row["name"]].partition(" ")[0] in ranges
        ]
        self.markers(chosen)
        self.table("track", "id, nid, pid, tid, agent_id, queue_id, stream_id")
        self.rows("track", ((id, *track) for track, id in self.tracks.items()))

    def about(self) -> None:
        process = self.process
        self.table("metadata", "id, tag TEXT, value TEXT")
        self.rows("metadata", [(1, "schema_version", "3"), (2, "uuid", self.uuid)])
        self.table("info_node", "id, hostname TEXT")
        self.rows("info_node", [(9, "node0")])
        variables = {"RANK": str(process.rank), "WORLD_SIZE": str(len(self.recording.processes))}
        self.table("info_process", "id, nid, pid, command TEXT, environment JSONB")
        self.rows("info_process", [(7, 9, process.pid, "python train.py", json.dumps(variables))])
        threads = sorted({int(row["thread"]) for row in self._of(self.recording.api)})
        self.table("info_thread", "id, nid, pid, tid")
        self.rows("info_thread", [(thread + 1, 9, 7, thread) for thread in threads])
        self.table(
            "info_agent", "id, nid, pid, type TEXT, type_index, name TEXT, product_name TEXT"
        )
        gpus = [
            (FIRST_GPU + device, 9, 7, "GPU", device, "gfx942", f"GPU {gpu}")
            for device, gpu in process.devices
        ]
        self.rows("info_agent", [(CPU, 9, 7, "CPU", 0, "EPYC", ""), *gpus])
        names = list(enumerate(self.recording.names))
        self.table("info_kernel_symbol", "id, kernel_name TEXT, display_name TEXT")
        self.rows("info_kernel_symbol", [(id, f"{name}.kd", name) for id, name in names])
        self.table("string", "id, string TEXT")
        self.rows("string", names + [(id, name) for name, id in self.categories.items()])
        self.table("event", "id, category_id, stack_id, parent_stack_id, extdata JSONB")
        self.table("timestamp", "id, value")

    def operations(self, ops: Table) -> None:
        """Kernels and copies; a memset is a kernel of the runtime."""
        kernel = _TIMES[self.tracked][0]
        self.table("kernel_dispatch", f"id, {kernel}, kernel_id, event_id")
        copied = "name_id, src_agent_id, dst_agent_id, size, event_id"
        self.table("memory_copy", f"id, {kernel.replace('agent_id, ', '')}, {copied}")
        for number, row in enumerate(ops):
            name, correlation = int(row["name"]), int(row["correlation"])
            agent = FIRST_GPU + int(row["device"])
            ends = {
                Kind.H2D: (CPU, agent),
                Kind.D2H: (agent, CPU),
                Kind.PEER: (agent, FIRST_GPU + int(row["peer"])),
            }.get(Kind(row["kind"]))
            category = "MEMORY_COPY" if ends else "KERNEL_DISPATCH"
            event = self.event(category, correlation)
            place = (0, agent, 0, int(row["stream"]))
            times = self.times(row, *place)
            if ends is None:
                self.rows("kernel_dispatch", [(number, *times, name, event)])
            else:
                if not self.tracked:
                    times = (*times[:3], *times[4:])
                self.rows("memory_copy", [(number, *times, name, *ends, int(row["bytes"]), event)])

    def host_calls(self, calls: Table) -> None:
        self.table("region", f"id, {_TIMES[self.tracked][1]}, name_id, event_id")
        for row in calls:
            event = self.event("HIP_RUNTIME_API_EXT", int(row["correlation"]))
            self.region(event, row, int(row["name"]))

    def markers(self, rows: Sequence[Table]) -> None:
        for row in rows:
            text = json.dumps({"message": self.recording.names[row["name"]]})
            event = self.event("MARKER_CORE_RANGE_API", 0, text)
            self.region(event, row, self.categories["MARKER_CORE_RANGE_API"])

    def region(self, event: int, row: Table, name: int) -> None:
        times = self.times(row, int(row["thread"]) + 1)
        if not self.tracked:
            times = (*times[:3], *times[-2:])
        self.rows("region", [(event, *times, name, event)])

    def event(self, category: str, correlation: int, data: str = "{}") -> int:
        """Add an event and return its id."""
        cursor = self.database.execute(
            f"INSERT INTO rocpd_event{self.uuid} VALUES (NULL, ?, ?, ?, ?)",
            (self.categories[category], correlation, 0, data),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def times(
        self, row: Table, thread: int, agent: int = CPU, queue: int = 0, stream: int = 0
    ) -> tuple[int, ...]:
        """Return what the columns of `_TIMES` hold."""
        track = (9, 7, thread, agent, queue, stream)
        moments = [BOOTED + int(row[edge]) for edge in ("start", "end")]
        if not self.tracked:
            return (*track, *moments)
        insert = f"INSERT INTO rocpd_timestamp{self.uuid} VALUES (NULL, ?)"
        ids = [self.database.execute(insert, (moment,)).lastrowid or 0 for moment in moments]
        return (self.tracks.setdefault(track, len(self.tracks) + 1), *ids)

    def table(self, name: str, columns: str) -> None:
        """Create a table; columns without a type hold integers, and the first is the key."""
        declared = [text if " " in text else f'"{text}" INTEGER' for text in columns.split(", ")]
        declared[0] += " PRIMARY KEY"
        self.database.execute(f"CREATE TABLE rocpd_{name}{self.uuid} ({', '.join(declared)})")

    def rows(self, name: str, rows: Iterable[tuple[object, ...]]) -> None:
        for row in rows:
            slots = ", ".join("?" * len(row))
            self.database.execute(f"INSERT INTO rocpd_{name}{self.uuid} VALUES ({slots})", row)

    def _of(self, rows: Table) -> Table:
        mine: Table = rows[rows["rank"] == self.process.rank]
        return mine
