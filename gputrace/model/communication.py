"""Results about GPUs that work together: links, collectives, forms of parallel training.

Times are integer nanoseconds; field names are those of the JSON.
"""

from __future__ import annotations

from typing import ClassVar

from gputrace.model.struct import Column, Columns, Struct, share
from gputrace.units import format_bytes, format_ids, format_ns, format_number, format_share


def _giga(rate: float) -> str:
    """Format bytes per second in GB/s."""
    return format_number(rate / 1e9)


class CollectiveTotals(Struct, frozen=True):
    """All collectives of one operation among the same GPUs, over the measured steps.

    Without steps, over the whole span. Times are of one GPU in one collective unless they are said
    to be totals; None is unknown.
    """

    operation: str
    """``AllReduce``, ``Broadcast``, ``PeerCopy`` and so on, or the kernel's name."""
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    one_process: bool
    """True if one process drives all these GPUs, as DataParallel does."""
    count: int
    """Number of collectives."""
    steps: int
    """Number of steps covered; 0 for the whole span."""
    bytes: int | None
    """Median message size."""
    wait_ns: int | None
    """Median time until the last rank arrives."""
    transfer_ns: int | None
    """Median time from the last arrival on."""
    total_ns: int
    """Time in these kernels or copies, per GPU and step; without steps, per GPU."""
    wait_total_ns: int | None
    """Part of the total before the last rank arrives."""
    transfer_total_ns: int | None
    """Part of the total after that."""
    exposed_ns: int
    """Part of ``total_ns`` with no computing kernel beside it."""
    algorithm_bandwidth: int | None
    """Median in bytes per second: message size by transfer time."""
    bus_bandwidth: int | None
    """Median in bytes per second over each link, comparable with what the hardware can do."""
    role: str = ""
    """``data``, ``sharded data``, ``tensor``, ``pipeline``, ``expert`` or ``context``: the form of
    parallel training that the group of GPUs is for; empty if unclear."""
    group: str = ""
    """Name that the program gives the group; empty if unknown."""
    communicator: str | None = None
    """Id of the communicator in hexadecimal, as NCCL's log has it; None if unknown."""
    group_size: int | None = None
    """Number of ranks in the communicator, recorded or not; None if unknown."""
    hosts: int = 1
    """Number of hosts that the recorded ranks are on; those without a name count as one."""
    COLUMNS: ClassVar[Columns] = (
        Column("count", lambda row: row.count / row.steps if row.steps else row.count),
        Column("size", "bytes", unknown="?"),
        Column("time", "total_ns"),
        Column("exposed", share("exposed_ns", "total_ns")),
        Column("wait", "wait_total_ns", unknown="?"),
        Column("transfer", "transfer_total_ns", unknown="?"),
        Column("bus", "bus_bandwidth", lambda rate: f"{_giga(rate)} GB/s", "?"),
    )


class PipelineStage(Struct, frozen=True):
    """One stage of a pipeline; nanoseconds of a step, the causes sum to ``bubble_ns``."""

    stage: int
    gpu: int
    rank: int
    work_ns: int
    """Time in which it works: all but the messages between stages, and waiting for other ranks."""
    bubble_ns: int
    """Time in which it does not work."""
    schedule_ns: int
    imbalance_ns: int
    """Negative for a stage that works longer than the mean by more than that costs."""
    transfer_ns: int
    host_ns: int
    COLUMNS: ClassVar[Columns] = (
        Column("", lambda stage: f"stage {stage.stage}, rank {stage.rank}"),
        Column("work", "work_ns"),
        Column("bubble", lambda row: format_share(row.bubble_ns, row.work_ns + row.bubble_ns)),
        Column("schedule", "schedule_ns"),
        Column("imbalance", "imbalance_ns"),
        Column("transfer", "transfer_ns"),
        Column("host", "host_ns"),
    )


class Pipeline(Struct, frozen=True):
    """Pipeline of stages, with the time in which these do not work: means of a step and stage.

    The causes sum to ``bubble_ns``, and that and ``work_ns`` to ``step_ns``.
    """

    schedule: str
    """``GPipe``, ``1F1B``, ``interleaved`` or ``unknown``."""
    micro_batches: int
    steps: int
    """Number of steps replayed."""
    step_ns: int
    work_ns: int
    bubble_ns: int
    schedule_ns: int
    """Bubble that stages of equal work, quick messages and a quick host still have."""
    imbalance_ns: int
    """Part of the bubble because stages have more or less work than the mean."""
    transfer_ns: int
    """Part of the bubble because messages take time."""
    host_ns: int
    """Rest of the bubble: gaps in which a stage waits for no message."""
    slowest: int
    """Stage with most work."""
    excess_ns: int
    """Work of that stage beyond the mean."""
    stages: tuple[PipelineStage, ...]


class ExpertRank(Struct, frozen=True):
    """Load of the experts of one rank."""

    gpu: int
    rank: int
    work_ns: int
    """Compute between the exchange of tokens with their experts and that back, of a step."""
    ratio: float
    """That as a multiple of the mean over the ranks."""
    busiest: float
    """Fraction of the exchanges in which this rank has most."""
    COLUMNS: ClassVar[Columns] = (
        Column("", "rank", "rank {}"),
        Column("work", "work_ns"),
        Column("of the mean", "ratio", "{:.2f}"),
        Column("busiest", "busiest", lambda part: format_share(part, 1)),
    )


class Experts(Struct, frozen=True):
    """Load of the experts of a group of ranks, in the measured steps."""

    steps: int
    exchanges: int
    """Exchanges of tokens with experts, and back, of a step: two of each layer with experts."""
    work_ns: int
    """Mean work of a rank's experts, of a step."""
    imbalance_ns: int
    """Time for which the mean rank has no work while the busiest one has, of a step."""
    wait_ns: int | None
    """Time that the mean rank waits for others in the group, of a step; None if unknown."""
    ranks: tuple[ExpertRank, ...]


class ShardedData(Struct, frozen=True):
    """Gathering of sharded parameters and scattering of gradients in a group of ranks.

    Numbers and nanoseconds are of a step, on the mean of its ranks.
    """

    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: int
    gathers: int
    """Number of gathers of parameters."""
    gather_ns: int
    gather_exposed_ns: int
    """Part with no computing kernel beside it."""
    gather_wait_ns: int | None
    """Part of the exposed time in which it waits for other ranks; None if unknown."""
    scatters: int
    """Number of scatters of gradients."""
    scatter_ns: int
    scatter_exposed_ns: int
    prefetched: float
    """Fraction of the gathers that begin while kernels compute."""
    hideable_ns: int
    """Exposed time of other gathers, waiting apart, that fits beside the compute since the gather
    before."""
    gathered_again: int
    """Gathers beyond one for each scatter: of parameters that are freed after the forward pass."""
    unsharded_bytes: int | None
    """Size of all parameters that are gathered for the forward pass; None if unknown."""
    COLUMNS: ClassVar[Columns] = (
        Column("", lambda group: format_ids("rank", group.ranks)),
        Column("gathers", "gathers"),
        Column("exposed", "gather_exposed_ns"),
        Column("wait", "gather_wait_ns", unknown="?"),
        Column("prefetched", "prefetched", "{:.0%}"),
        Column("could hide", "hideable_ns"),
        Column("again", "gathered_again"),
        Column("scatters", "scatters"),
    )


class TensorParallel(Struct, frozen=True):
    """Communication of a group of ranks that split matrix products; of a step, on the mean rank."""

    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: int
    collectives: int
    """Number of collectives: two in each pass of a transformer's layer, mostly."""
    total_ns: int
    exposed_ns: int
    """Part with no computing kernel beside it."""
    beside_products_ns: int
    """Part with a matrix product or convolution beside it."""
    wait_ns: int | None
    """Part in which it waits for other ranks; None if unknown."""
    COLUMNS: ClassVar[Columns] = (
        Column("", lambda group: format_ids("rank", group.ranks)),
        Column("times", "collectives"),
        Column("time", "total_ns"),
        Column("exposed each", lambda row: row.exposed_ns // max(row.collectives, 1), format_ns),
        Column("exposed", share("exposed_ns", "total_ns")),
        Column("beside products", share("beside_products_ns", "total_ns")),
        Column("wait", "wait_ns", unknown="?"),
    )


class GpuLink(Struct, frozen=True, rename={"from_": "from"}):
    """One direction between two GPUs of a host, over the whole recording.

    Bandwidths are bytes per second; None is unknown.
    """

    from_: int
    """Index of the sending GPU, as in all results; the JSON calls it ``from``."""
    to: int
    from_rank: int
    to_rank: int
    """Ranks of the processes; they distinguish GPUs whose indices are equal."""
    host: str
    """Host name; empty if unknown."""
    link: str
    """``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``; empty if unknown."""
    peer_access: str
    """``OK``, or NVML's reason why there is none (CNS, GNS, TNS, DR, NS, U); empty if unknown."""
    able: int | None
    """Capacity of the link in this direction."""
    copies: int
    """Copies from the sending to the receiving GPU."""
    bytes: int
    busy_ns: int
    """Sum of their durations."""
    bandwidth: int | None
    """Median over large copies; None where there were fewer than three."""
    staged_copies: int
    """Copies to the host, each followed by one of the same size from it to the other GPU."""
    staged_bytes: int
    staged_ns: int
    """Sum over them of the time from the start of the first half to the end of the second."""
    collectives: int
    """Collectives in which both took part."""
    COLUMNS: ClassVar[Columns] = (
        Column("link", "link", unknown="?"),
        Column("copies", "copies"),
        Column("bytes", "bytes"),
        Column("GB/s", "bandwidth", _giga),
        Column("link carries", "able", _giga),
        Column("through the host", "staged"),
    )

    @property
    def staged(self) -> str:
        """Number and size of the copies through the host; empty without any."""
        size = format_bytes(self.staged_bytes)
        return f"{self.staged_copies:,} copies, {size}" if self.staged_copies else ""
