"""Classes of time: one table of what a nanosecond of a GPU can be, in the order of the partition.

A nanosecond belongs to the first class that applies (docs/definitions.md). The colours were chosen
by a search so that any two are distinguishable with any colour vision.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class TimeClass(NamedTuple):
    """One class of time, with all words and looks that reports have for it."""

    id: str
    """Name in the JSON, before ``_ns``."""
    label: str
    """Name in tables and legends."""
    short: str
    """Name where there is little room."""
    column: str
    """Column of the table for many GPUs, which may sum several classes."""
    noun: str
    """Name in sentences about what changed: "… is 3.1 ms longer"."""
    activity: str
    """Name in sentences about what the time went to: "… takes 3.1 ms of them"."""
    gate: str
    """Beginning of the sentence of a gate: "… 12% of a step"."""
    longer: str
    """Predicate of a rank that has more of it; ``{}`` is the duration."""
    color: str
    """Colour in hexadecimal."""
    basic: str
    """Colour in terminals of 16 colours."""
    letter: str
    """Letter in terminals without colours."""
    is_idle: bool = False
    """True if the GPU runs nothing."""
    waits_for_host: bool = False
    """True if the GPU waits for what its host does."""
    findings: tuple[str, ...] = ()
    """Ids of the findings that a gap of this cause may belong to, the closest first."""
    advice: str = ""
    """Advice for a rank that alone has more of it."""


# fmt: off
TIME_CLASSES: Final = (
    TimeClass(
        "compute", "compute", "compute", "compute", "compute", "compute", "compute takes",
        "computes {} longer", "#3a8c7a", "#00aa00", "█",
    ),
    TimeClass(
        "communication", "communication", "comm", "comm", "communication", "communication",
        "communication takes", "communicates {} longer", "#8c78ff", "#0000aa", "▒",
    ),
    TimeClass(
        "h2d", "host to device", "h2d", "h2d", "host-to-device copies", "host-to-device copies",
        "host-to-device copies take", "copies from the host for {} longer",
        "#4cdcff", "#00aaaa", "H",
    ),
    TimeClass(
        "other_copy", "other copies", "copies", "other", "other copies", "copies",
        "other copies take", "copies for {} longer", "#98975f", "#5555ff", "c",
    ),
    TimeClass(
        "memset", "memset", "memset", "other", "memset", "memset",
        "memset takes", "sets memory for {} longer", "#64262b", "#aa5500", "m",
    ),
    TimeClass(
        "recorder", "idle: recorder", "recorder", "rec.", "idle for the recorder", "the recorder",
        "the recorder keeps the GPUs idle for", "waits {} longer for the recorder",
        "#ffffff", "#ffffff", "R",
        is_idle=True,
        findings=("recorder-overhead",),
        advice="record less on this rank",
    ),
    TimeClass(
        "data_feeding", "idle: data feeding", "data", "data", "data feeding", "waiting for data",
        "data feeding takes", "waits {} longer for its next batch",
        "#fbc735", "#ffff55", "D",
        is_idle=True,
        waits_for_host=True,
        findings=("data-feeding",),
    ),
    TimeClass(
        "sync", "idle: sync", "sync", "sync", "idle for synchronisation", "synchronisation",
        "synchronisation keeps the GPUs idle for",
        "idles {} longer while its host is in a synchronising call",
        "#b15cb1", "#ff55ff", "s",
        is_idle=True,
        waits_for_host=True,
        findings=("autotune-repeated", "sync-bound", "late-host"),
        advice="look for a .item(), a .cpu() or a print that this rank alone makes",
    ),
    TimeClass(
        "alloc", "idle: allocation", "alloc", "alloc", "idle for allocation", "memory allocation",
        "allocation keeps the GPUs idle for", "waits {} longer in cudaMalloc and cudaFree",
        "#c87316", "#ff5555", "a",
        is_idle=True,
        waits_for_host=True,
        findings=("autotune-repeated", "alloc-stall", "late-host"),
        advice="keep this rank's memory allocated: equal shapes every step",
    ),
    TimeClass(
        "launch", "idle: launch", "launch", "launch", "idle for launches", "waiting for launches",
        "launching keeps the GPUs idle for", "waits {} longer for its host to launch work",
        "#990900", "#aa0000", "l",
        is_idle=True,
        waits_for_host=True,
        findings=("autotune-repeated", "launch-bound", "late-host"),
        advice="look at what this rank's host does that the others do not: logging, writing files, "
        "loading, garbage collection, other programs on its cores (pin ranks to cores of their "
        "own)",
    ),
    TimeClass(
        "other_idle", "idle: unexplained", "idle?", "idle?", "unexplained idle time",
        "unexplained idle time", "nothing explains that the GPUs are idle for",
        "runs nothing for {} longer, and the trace does not show why",
        "#092b5e", "#555555", "·",
        is_idle=True,
        findings=("idle-unexplained",),
        advice="look at events and streams that this rank's work waits for",
    ),
)
# fmt: on
"""All classes, in the order of the partition: of two at once, the first counts."""

BY_ID: Final = {row.id: row for row in TIME_CLASSES}
CLASSES: Final = tuple(BY_ID)
"""Ids of all classes."""
BUSY_CLASSES: Final = tuple(row.id for row in TIME_CLASSES if not row.is_idle)
"""Ids of the classes in which the GPU works, in order of precedence."""
IDLE_CAUSES: Final = tuple(row.id for row in TIME_CLASSES if row.is_idle)
"""Ids of the classes in which the GPU runs nothing."""
