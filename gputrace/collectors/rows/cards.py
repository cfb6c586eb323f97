"""The rows of a machine's cards, as the processes that the embedded collector was in saw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from gputrace.collectors.files.spool import Spool
from gputrace.collectors.rows.clock import LARGEST, global_pid
from gputrace.traces.writer import TraceWriter


def write_cards(writer: TraceWriter, spools: Sequence[Spool]) -> dict[bytes, int]:
    """The cards that any process saw, numbered by PCI address; their numbers by uuid."""
    seen: dict[bytes, Any] = {}
    for spool in spools:
        for row in spool.records[b"DEVI"]:
            seen.setdefault(bytes(row["uuid"]), row)
    ordered = sorted(seen.values(), key=lambda row: row["bus"].lower())
    if ordered:
        rows = [_card(i, row) for i, row in enumerate(ordered)]
        writer.add_rows("TARGET_INFO_GPU", list(rows[0]), [tuple(row.values()) for row in rows])
    return {bytes(row["uuid"]): i for i, row in enumerate(ordered)}


def _card(id: int, row: Any) -> dict[str, Any]:
    """A row of TARGET_INFO_GPU; what the driver did not say is NULL."""
    return {
        "vmId": global_pid(0),
        "id": id,
        "name": _text(row["name"]),
        "busLocation": _text(row["bus"]).lower(),
        "isDiscrete": 1,
        "l2CacheSize": int(row["l2_cache"]) or None,
        "totalMemory": int(row["memory"]) % LARGEST or None,
        "memoryBandwidth": int(row["bandwidth"]) % LARGEST or None,
        "clockRate": int(row["clock"]) % LARGEST or None,
        "smCount": int(row["multiprocessors"]) or None,
        "uuid": str(UUID(bytes=bytes(row["uuid"]))),
        "computeMajor": int(row["compute_major"]) or None,
        "computeMinor": int(row["compute_minor"]) if row["compute_major"] else None,
    }


def _text(value: bytes) -> str:
    return value.split(b"\0")[0].decode("utf-8", "replace")
