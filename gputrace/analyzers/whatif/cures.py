"""The cures: each changes the durations and edges of a graph as if one cause were gone.

To add one, write a function of a graph and of how far it works, and put it in `CURES`. It returns
None where there is nothing to cure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.whatif.dataparallel import ddp
from gputrace.analyzers.whatif.edits import Effect
from gputrace.analyzers.whatif.gpu_changes import overlap, pinned
from gputrace.analyzers.whatif.graph import Graph
from gputrace.analyzers.whatif.host_changes import alloc, graphs, prefetch, sync
from gputrace.analyzers.whatif.ranks import late_host, straggler

__all__ = ["CURES", "Cure", "Effect"]

Change = Callable[[Graph, Effect], Graph | None]


@dataclass(frozen=True, slots=True)
class Cure:
    """One entry of the list."""

    id: str
    findings: tuple[str, ...]
    """Ids of the findings that it cures; it belongs to the first of them that the analysis has."""
    change: Change
    what: str
    """The cure in a few words, as the beginning of a sentence on what it would save."""
    assumption: str
    bounds: tuple[Effect, ...] = (Effect.MOST, Effect.LEAST)
    """How far it works else; none where it is all or nothing."""


CURES: Final = (
    Cure(
        "ddp",
        ("gpu0-skew", "launch-bound"),
        ddp,
        "DistributedDataParallel",
        "one process trains on each GPU (DistributedDataParallel), and loads and copies its own "
        "part of the batch; its threads wait for no others, and gradients are exchanged meanwhile",
    ),
    Cure(
        "prefetch",
        ("data-feeding",),
        prefetch,
        "A loader that keeps up",
        "every batch is ready when it is asked for, and at best on the GPU already; at the least, "
        "one batch at a time is made beside the training",
    ),
    Cure(
        "pinned",
        ("h2d-exposed", "h2d-pageable"),
        pinned,
        "Copying from pinned memory beside the computation",
        "input is copied from pinned memory on a stream of its own, as early as the host asks",
    ),
    Cure(
        "straggler",
        ("straggler",),
        straggler,
        "A rank as fast as the others",
        "every rank's kernels take what the median's do",
        bounds=(),
    ),
    Cure(
        "late-host",
        ("late-host",),
        late_host,
        "A host as quick as on the other ranks",
        "every rank's host is as quick as the median's between the same calls",
        bounds=(),
    ),
    Cure(
        "overlap",
        ("communication-exposed",),
        overlap,
        "Overlapping all communication",
        "nothing waits for communication but communication, and it slows nothing down; at the "
        "least, each step's last exchange stays exposed",
    ),
    Cure(
        "graphs",
        ("launch-bound",),
        graphs,
        "CUDA graphs of whole steps",
        "consecutive launches become one, without host time between them; kernels take what "
        "they do",
    ),
    Cure(
        "sync",
        ("sync-bound",),
        sync,
        "A host that waits for no GPU",
        "the host never waits for a GPU, and runs ahead as far as launches can be queued",
        bounds=(),
    ),
    Cure(
        "alloc",
        ("alloc-stall",),
        alloc,
        "Keeping memory allocated",
        "no memory is allocated or given back in a step",
        bounds=(),
    ),
)
