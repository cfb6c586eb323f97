"""Results of an analysis as plain dataclasses; field names are those of the JSON that other
programs rely on.

Times are integer nanoseconds; moments are on the trace's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from msgspec import field

from gputrace.model.cards import CardUse, Energy, Utilization
from gputrace.model.communication import (
    CollectiveTotals,
    Experts,
    GpuLink,
    Pipeline,
    ShardedData,
    TensorParallel,
)
from gputrace.model.host import Allocator, HostLine, HostLoad, InputPipeline, Loader, StepPhases
from gputrace.model.kernels import Kernels
from gputrace.model.memory import DeviceMemory
from gputrace.model.struct import Column, Columns, Struct
from gputrace.model.time_class import BUSY_CLASSES, CLASSES, IDLE_CAUSES
from gputrace.units import format_ns, format_pair

Evidence = Mapping[str, float | int | bool | str | None]

SCHEMA_VERSION = 1

_TOTALS: Final = {f"{name}_ns": "int" for name in (*BUSY_CLASSES, "idle")}
_TIMES: Final = {
    field: "int | None"
    for name in CLASSES
    for field in ([f"{name}_ns"] + ["communication_wait_ns"] * (name == "communication"))
}


class LeftOut(Struct, frozen=True):
    """A file of a run that could not be read, or only in part."""

    path: str
    problem: str
    """Why, in a sentence."""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class _ClassTimes(Struct, frozen=True):
    """Fields ``<class>_ns``, one for each class of time, that a dataclass takes from the table."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __init__(self, **fields: Any) -> None: ...


_Result = TypeVar("_Result")


class GpuTotals(_ClassTimes, frozen=True):
    """One GPU over the whole span; the busy classes and ``idle_ns`` sum to ``span_ns``."""

    gpu: int
    """Physical index where ``gpu_known``, else the CUDA ordinal."""
    gpu_known: bool
    """True if ``gpu`` is the index of a physical card, as NVML counts."""
    device: int
    """CUDA ordinal in its process."""
    rank: int
    """Rank of the process that feeds it."""
    rank_known: bool
    """True if ``rank`` was recorded; else processes are numbered by their GPUs."""
    host: str
    """Host name; empty if unknown."""
    name: str
    """Model of the card."""
    kernels: int
    """Number of launches."""
    copies: int
    """Number of copies."""
    start_ns: int
    """Start of its first operation."""
    span_ns: int
    """Length of its recorded time."""
    __annotations__ |= _TOTALS


KINDS: Final = (
    "training",
    "rl",
    "benchmark",
    "evaluation",
    "generation",
    "iterations",
    "pass",
    "start-up",
    "none",
)
"""Kinds of recordings: loops that train, also on what they generate (``rl``); that measure a
function, pass batches forward, or generate token by token; loops of another or an unknown kind; one
pass, forward or both ways; what a program does once before it works; and what none of these is
known of."""
TURNS: Final = {"training": "step", "rl": "step", "pass": "pass"}
"""Name of one turn, by kind; ``iteration`` otherwise."""


class Steps(Struct, frozen=True):
    """Source and durations of the steps; times are over the steady steps of all ranks."""

    source: str
    """``markers``, ``profiler``, ``nvtx``, ``inferred`` or ``none``."""
    kind: str
    """One of `KINDS`: of one ``pass``, the count is 1, and its times are the pass's."""
    confidence: float
    """Confidence from 0 to 1."""
    count: int
    """Steps that the program ran, of the rank that has most."""
    warmup_count: int
    """Steps of the warm-up."""
    steady_count: int
    """Measured steps."""
    mean_ns: int | None
    """Mean of the measured steps; None without any, as for the next two."""
    p50_ns: int | None
    """Median."""
    p95_ns: int | None
    """95th percentile."""
    reason: str
    """Reason why these are the steps, or why there are none."""
    control_count: int = 0
    """Steps among them that lie in control stretches or across their ends."""


class RecordedCalls(Struct, frozen=True):
    """Coverage of CUDA calls, in traces where not all were recorded."""

    share: float
    """Fraction of the GPUs' time in which calls were recorded, 0 to 1."""
    steps: int
    """Measured steps with all their calls; the breakdown covers these, if there are any."""
    of_steps: int
    """All measured steps."""

    def __str__(self) -> str:
        if not self.of_steps:
            return (
                f"host calls were recorded in {self.share:.0%} of the time: what the host did and "
                "why GPUs idle is known for that part only"
            )
        if not self.steps:
            return "host calls were recorded in none of these steps: why GPUs idle is unknown"
        return (
            f"host calls were recorded in {self.steps / self.of_steps:.0%} of the steps "
            f"({self.steps:,} of {self.of_steps:,}): classes of time and what the host did cover "
            "these only"
        )


class Missing(Struct, frozen=True):
    """Rows that a recording lacks, as its other rows show."""

    rows: str
    """``operations`` of GPUs, ``kernels``, ``collectives`` or ``calls``."""
    rank: int
    share: float
    """Fraction of the rank's rows of the kind, 0 to 1."""
    count: int
    """Number of missing rows."""
    start_ns: int
    end_ns: int
    """First and last moment at which one is missing."""
    evidence: str
    """Reason to believe that they are missing."""
    gpu: int | None = None
    """GPU that lacks them; None if it is unknown which of several."""
    thread: int | None = None
    """System id of the thread whose launches alone lack them."""

    def __str__(self) -> str:
        return f"{self.share:.1%} of the {self.rows} of rank {self.rank}"


class RecorderCost(Struct, frozen=True):
    """Cost of recording, from steps in which the recorder was out of the program's way."""

    step_ns: int
    """Mean of the recorded steps, without warm-up and exceptions, from mark to mark."""
    unrecorded_step_ns: int
    """That without the recorder; never longer."""
    low_ns: int
    high_ns: int
    """Bounds of the unrecorded step."""
    stretches: int
    steps: int
    """Number of stretches without the recorder, and of the steps in them."""

    @property
    def added_ns(self) -> int:
        """Nanoseconds that recording adds to a step; 0 if the bounds do not exclude that."""
        return self.step_ns - self.unrecorded_step_ns if self.high_ns < self.step_ns else 0

    @property
    def ratio(self) -> float:
        """Length of an unrecorded step as a fraction of a recorded one; 1 without a proven cost."""
        return 1 - self.added_ns / self.step_ns if self.step_ns else 1.0

    def __str__(self) -> str:
        if not self.added_ns:
            return "recording lengthens no step measurably"
        more = self.step_ns / max(self.unrecorded_step_ns, 1) - 1
        lengths = format_pair(self.unrecorded_step_ns, "to", self.step_ns)
        return f"recording lengthens each step by {more:.0%} (from {lengths})"

    @property
    def basis(self) -> str:
        """Bounds, and what they follow from, as a clause."""
        least, most = (
            max(self.step_ns / max(step, 1) - 1, 0.0) for step in (self.high_ns, self.low_ns)
        )
        between = f"{least:.0%} to {most:.0%}" if self.added_ns else f"at most {most:.1%}"
        return f"{between}, by {self.steps:,} steps without the recorder"


class Breakdown(_ClassTimes, frozen=True):
    """One GPU over its steady steps, or over the whole span with ``steps`` 0.

    The classes sum to ``total_ns``. For a rank without GPU activity, they are None.
    ``communication_wait_ns`` is the part of ``communication_ns`` spent waiting for other ranks;
    None if unknown.
    """

    gpu: int | None
    """None where no GPU was seen."""
    gpu_known: bool
    device: int | None
    rank: int
    steps: int
    """Number of measured steps; 0 where it covers the whole span."""
    total_ns: int
    __annotations__ |= _TIMES
    host_data_ns: int | None
    """Host's own time in the data loader, hidden under GPU work or not; None if unknown."""

    def of(self, name: str) -> int:
        """Return the nanoseconds of one of `CLASSES`, or of ``host_data``; 0 where unknown."""
        return int(getattr(self, f"{name}_ns") or 0)

    def share(self, name: str) -> float:
        """Return the share of the total, 0 to 1, of a class that `of` takes."""
        return self.of(name) / self.total_ns if self.total_ns else 0.0

    @property
    def idle_ns(self) -> int:
        """All idle time, whatever its cause."""
        return sum(self.of(cause) for cause in IDLE_CAUSES)


class Step(_ClassTimes, frozen=True):
    """One step of one GPU; the classes sum to ``end_ns - start_ns``.

    They are None where no GPU was seen.
    """

    step: int
    rank: int
    gpu: int | None
    start_ns: int
    end_ns: int
    phase: str
    """``warmup`` or ``steady``; ``validation`` or ``checkpoint`` for a step in which the rank waits
    for others that validate or save."""
    __annotations__ |= _TIMES
    host_data_ns: int | None
    """Host time in the data loader, as in `Breakdown`."""
    number: int | None = None
    """Number that the program's own count gives it, from which ``step`` differs if recording began
    later or paused; None where the marks have none, or no GPU was seen: then all are recorded."""


class Phase(Struct, frozen=True):
    """Interval of one rank that is not steady training, or the wait that begins an epoch."""

    phase: str
    """``warmup``, ``validation``, ``checkpoint``, ``epoch``, or ``between`` for what else parts
    steps."""
    rank: int
    start_ns: int
    end_ns: int
    idle_ns: int | None
    """Idle time of its GPUs in it; None where no GPU was seen."""
    evidence: str
    """Reason to believe that it is one."""
    step: int | None = None
    """Step that it follows; for an epoch, the step that it begins; None for warm-up."""
    cost_ns: int = 0
    """Cost to the run: all of it; for warm-up and epochs, the part beyond the usual."""
    before_ns: int | None = None
    after_ns: int | None = None
    """Idle time at the edges: before its first operation, and from its last one to the next step's
    first; None where no GPU was seen or there is no such edge."""
    communication_ns: int | None = None
    """Communication with nothing concurrent, as on a rank that waits in a collective."""
    waits_for: tuple[int, ...] = ()
    """Ranks that work meanwhile, where this one only waits for them."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Nanoseconds by cause that warm-up has more of than as many steady steps."""


class Gap(Struct, frozen=True):
    """Interval in which a GPU runs nothing."""

    gpu: int
    rank: int
    step: int | None
    """Step that has its middle; None outside of steps."""
    start_ns: int
    end_ns: int
    cause: str
    """One of `IDLE_CAUSES`, the one that covers most of it."""
    evidence: str
    """Activity of the host meanwhile."""
    charges: Mapping[str, int] = field(default_factory=dict)
    """Nanoseconds by cause of the ledger, the largest first; they sum to its length."""

    def __hash__(self) -> int:
        return hash((self.gpu, self.rank, self.start_ns))

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


class Gaps(Struct, frozen=True):
    """All gaps of all GPUs in the span, and the largest of them."""

    count: int
    """Number of all gaps."""
    total_ns: int
    by_cause: Mapping[str, int]
    """Nanoseconds by cause; they sum to ``total_ns``."""
    largest: tuple[Gap, ...]
    """Largest gaps of all, the largest first."""
    largest_in_steps: tuple[Gap, ...]
    """Largest gaps that lie in the measured steps."""
    hint: str = ""
    """How to record more of what the host does in them; empty if that would not help."""


class Finding(Struct, frozen=True):
    """Cause of lost time, or a limit on how far the figures can be trusted."""

    id: str
    """Name of the rule, listed in the documentation."""
    severity: str
    """``high``, ``medium``, ``low`` or ``info``."""
    gpus: tuple[int, ...]
    """GPUs that it is about."""
    ranks: tuple[int, ...]
    """Their ranks."""
    impact_ns: int
    """Cost per step, or over the whole span where there are no steps."""
    message: str
    """Cause and its share of the time: one sentence of at most 25 words, without its full stop."""
    advice: str
    """Remedy, without its full stop; empty without one."""
    evidence: Evidence = field(default_factory=dict)
    """Figures of the message and its details, by name."""
    details: tuple[str, ...] = ()
    """Evidence of the cause in the trace, in sentences without their full stops."""


class CauseNode(Struct, frozen=True):
    """Node of the tree of causes of lost time."""

    id: str
    parent: str
    """Id of the more general cause; empty at the root."""
    label: str
    """Name in tables."""


class LedgerRow(Struct, frozen=True):
    """Time that one GPU does not compute, or computes what need not be, charged to one cause.

    Over the measured steps, or over the whole span without steps. The rows of a GPU that are not of
    ``compute`` sum to the ``total_ns`` less the ``compute_ns`` of its `Breakdown`.
    """

    cause: str
    """Id of the most specific cause that is proven, and of its finding."""
    path: tuple[str, ...]
    """Ids of the causes from the most general to this one."""
    of: str
    """Time that it is a part of: ``idle``, ``copy``, ``communication`` or ``compute``."""
    gpu: int | None
    """GPU that loses the time."""
    rank: int
    """Rank on which the cause is, even if the GPU of another waits for it."""
    thread: int | None
    """System id of the host thread on which it is; None if it is on none, or on several."""
    line: str | None
    """Line of the program at which most samples met its host meanwhile, or in whose function; None
    where none has most."""
    ns: int
    """Lost time in nanoseconds."""
    evidence: str
    """Samples at the line, the system call that the thread was in, what another rank was at."""
    frame: str | None
    """Innermost frame that most of the samples at the line met, in a library mostly."""
    paid_by: int
    """Rank of the GPU that loses the time."""
    call: str | None = None
    """System call that the thread was in for most of it."""

    @property
    def waits(self) -> bool:
        """True if the GPU waits for another one, on which the cause is."""
        return self.rank != self.paid_by or "waiting" in self.path


class Load(Struct, frozen=True):
    """Work of one GPU over its measured steps, or over the whole span with ``steps`` 0.

    Durations are sums over operations, which may overlap.
    """

    gpu: int
    rank: int
    steps: int
    kernels: int
    """Launches of kernels that do not communicate."""
    kernel_ns: int
    own_kernels: int
    """Part of ``kernels``: launches of kernels that no other GPU runs."""
    own_kernel_ns: int
    communication_ns: int
    """Duration of kernels that communicate, their waiting included."""
    h2d_ns: int
    h2d_bytes: int
    d2h_ns: int
    d2h_bytes: int
    d2d_ns: int
    d2d_bytes: int
    peer_ns: int
    """Copies from and to other GPUs."""
    peer_bytes: int
    h2d_run_ns: int
    """Host-to-device copies over the whole recording."""
    memory_bytes: int | None
    """Peak memory use of the card; None where it was not sampled."""
    extra_ns: Mapping[str, int]
    """Work that no other GPU has, by kind: ``kernels``, ``h2d``, ``d2h``, ``d2d``, ``peer``."""
    alone_ns: int
    """Part of the extra work during which no other GPU does any of its own."""

    @property
    def turns(self) -> int:
        """Divisor that turns a total into a mean per step."""
        return max(self.steps, 1)


class Throughput(Struct, frozen=True):
    """Work of one rank, by what ``gputrace.step(samples=…, tokens=…, flop=…)`` was given, and its
    FLOPs also by the shapes of its operators; None if unknown.
    """

    rank: int
    samples_per_step: float | None
    tokens_per_step: float | None
    flop_per_step: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    flop_per_s: float | None
    precision: str | None = None
    """Precision in which most time goes to matrix products; the peak is that of it."""
    peak_flop_per_s: float | None = None
    """Peak of the rank's cards, by their data sheets; None where unknown."""
    mfu: float | None = None
    """``flop_per_s`` as a fraction of the peak."""
    flop_source: str | None = None
    """``program``, or ``shapes`` of operators in the trace."""
    COLUMNS: ClassVar[Columns] = (
        Column("", "rank", "rank {}"),
        Column("samples a step", "samples_per_step", "{:,.0f}"),
        Column("tokens a step", "tokens_per_step", "{:,.0f}"),
        Column("samples a second", "samples_per_s", "{:,.0f}"),
        Column("tokens a second", "tokens_per_s", "{:,.0f}"),
        Column("TFLOP/s", "flop_per_s", lambda flop: f"{flop / 1e12:,.1f}"),
        Column("MFU", "mfu", "{:.1%}"),
    )


class ModuleUse(Struct, frozen=True):
    """Launches by modules of one class at one place of a network, in a mean measured step."""

    rank: int
    path: str
    """Classes of the modules around them and their own, parted by slashes; empty for what no module
    launched."""
    instances: int
    """Number of different modules."""
    forward_ns: int
    """Sum of the durations of the kernels that they and their parts launched, without
    communication."""
    backward_ns: int
    """Likewise, of kernels for their gradients, and of what is computed again for these."""
    exposed_communication_ns: int
    """Communication that they launched, while nothing else ran."""
    launches: float
    """Number of kernels."""
    line: str = ""
    """Line that calls most of them, such as ``model.py:48 Block.forward``; empty if unknown."""
    COLUMNS: ClassVar[Columns] = (
        Column("modules", lambda row: row.instances or None, "{}", ""),
        Column("launches", "launches", "{:,.0f}"),
        Column("forward", lambda row: row.forward_ns or None, format_ns, ""),
        Column("backward", lambda row: row.backward_ns or None, format_ns, ""),
        Column("exposed comm.", lambda row: row.exposed_communication_ns or None, format_ns, ""),
        Column("called at", lambda row: row.line.partition(" ")[0], unknown=""),
    )


class CopyUse(Struct, frozen=True):
    """Copies of one direction in the measured steps of a GPU, or in its span without any."""

    gpu: int
    rank: int
    kind: str
    """``h2d``, ``d2h``, ``d2d`` (within the GPU's memory) or ``peer``."""
    memory: str
    """Memory of the host: ``pinned``, ``pageable``, ``managed``; empty if unknown, or not the
    host's."""
    steps: int
    """Number of measured steps; 0 for the whole span."""
    count: int
    bytes: int
    total_ns: int
    """Sum of their durations."""
    bytes_per_s: int
    """Bytes by the sum of the durations."""
    limit_bytes_per_s: int | None
    """Rate of the card's slot, or half of that of its memory, which is read and written; None if
    unknown."""


class ExtraTable(Struct, frozen=True):
    """Table that a report shows after its own."""

    title: str
    header: tuple[str, ...]
    """Titles of the columns."""
    rows: tuple[tuple[str | int | float | None, ...], ...]
    """Rows of as many cells as the header has, the first of them text; None is unknown."""


class WhatIf(Struct, frozen=True):
    """Optimization, and the step time that a replay of the steps predicts with it.

    All times are nanoseconds per step, ``low_ns <= step_ns <= high_ns``.
    """

    id: str
    """Name of the optimization, such as ``prefetch``."""
    finding: str | None
    """Id of the finding that it addresses; None where the analysis has no such finding."""
    what: str
    """Optimization in a few words."""
    now_ns: int
    """Mean step as recorded."""
    step_ns: int
    """Mean step as predicted."""
    low_ns: int
    """Mean step if the optimization achieves the most that it can."""
    high_ns: int
    """Mean step if it achieves the least that can be expected."""
    gain_ns: int
    """``now_ns - step_ns``."""
    sure_ns: int
    """Part of the gain that nine in ten of the measured pairs of the optimization reached."""
    assumption: str
    """Assumed effect of the optimization, and what bounds it."""
    beyond: str
    """Further gains that may come with it, beyond the finding's cost; empty if there are none."""
    replay_error: float
    """Fraction of the recorded step time that the known dependencies leave unexplained, 0 to 1."""
    steps: int
    """Number of steps replayed."""
    pairs: int
    """Number of measured pairs, of a prediction and of what came, that the range allows for."""


class Analysis(Struct, frozen=True):
    """Result of the analysis of one trace."""

    schema_version: int
    """Version of the JSON; grows when the meaning of a name changes."""
    source: str
    """Recorder; the names of several are joined by ``+``."""
    path: str
    """File analyzed; of several, the first in order of rank."""
    paths: tuple[str, ...]
    """All files."""
    origin_ns: int
    """Moment that texts call 0, on the clock of all other moments."""
    span_ns: int
    """Time from the first start to the last end on any GPU; else of any step or wait for data."""
    gpus: tuple[GpuTotals, ...]
    """Each GPU over the whole span; empty where no GPU activity was recorded."""
    steps: Steps
    """Source and durations of the steps."""
    step_list: tuple[Step, ...]
    """Each step of each GPU."""
    phases: tuple[Phase, ...]
    """Warm-up, validation, checkpoints, and the waits that begin epochs."""
    breakdown: tuple[Breakdown, ...]
    """Each GPU over the measured steps."""
    gaps: Gaps
    """Intervals in which a GPU runs nothing."""
    collectives: tuple[CollectiveTotals, ...]
    """Collectives of the measured steps by operation, the longest total first."""
    balance: tuple[Load, ...]
    """GPUs that work side by side; empty where there is one."""
    links: tuple[GpuLink, ...]
    """Both directions of every pair of GPUs of a host about which anything is known."""
    findings: tuple[Finding, ...]
    """Findings, the most important first; the first is the verdict's reason."""
    what_if: tuple[WhatIf, ...]
    """Predicted step times without one cause each, the greatest gain first."""
    dropped_rows: Mapping[str, int]
    """Rows of the file that could not be used, by reason."""
    kernels: Kernels | None
    """Kernels of the measured steps; None where none ran."""
    warnings: tuple[str, ...]
    """Recorder's warnings, and limits on the figures of merged traces."""
    cards: tuple[CardUse, ...] = ()
    """Cards in the measured steps, of those that NVML sampled."""
    utilization: Utilization | None = None
    """Cards over the whole run; None where no GPU was seen."""
    recorded_calls: RecordedCalls | None = None
    """Coverage of CUDA calls; None where all were recorded, or none."""
    recorder: RecorderCost | None = None
    """Cost of recording; None without control stretches."""
    loader: tuple[Loader, ...] = ()
    """Data loader of each rank in the measured steps; empty where none was recorded."""
    input_pipelines: tuple[InputPipeline, ...] = ()
    """Input pipeline of each rank that has one which is not torch's DataLoader."""
    host_load: tuple[HostLoad, ...] = ()
    """Time of the hosts' threads, a row per rank; empty where it was not counted."""
    host_lines: tuple[HostLine, ...] = ()
    """Lines of the program that samples met in the measured steps, by rank, the most first."""
    pipelines: tuple[Pipeline, ...] = ()
    """Pipelines of stages whose messages are known."""
    experts: tuple[Experts, ...] = ()
    """Load of the ranks in groups of expert-parallel training."""
    sharded: tuple[ShardedData, ...] = ()
    """Gathering of parameters in groups of sharded data-parallel training."""
    tensor: tuple[TensorParallel, ...] = ()
    """Communication of groups of tensor-parallel training."""
    step_phases: tuple[StepPhases, ...] = ()
    """Measured steps by phase of the host, a row per rank; empty where none were recorded."""
    missing: tuple[Missing, ...] = ()
    """Rows that the recording lacks, the largest share first."""
    left_out: tuple[LeftOut, ...] = ()
    """Files of the run that could not be read, or not to their end (``--keep-going``)."""
    tables: tuple[ExtraTable, ...] = ()
    """Tables of plugins' analyzers."""
    throughput: tuple[Throughput, ...] = ()
    """Samples and tokens of each rank; empty where the program gave none."""
    ledger: tuple[LedgerRow, ...] = ()
    """Lost time of each GPU in the measured steps by cause, the largest first."""
    causes: tuple[CauseNode, ...] = ()
    """Tree of all causes that the ledger knows, the general ones first."""
    energy: tuple[Energy, ...] = ()
    """Energy of each GPU whose counter was read in the measured steps."""
    allocators: tuple[Allocator, ...] = ()
    """Allocator of torch on each rank in the measured steps; empty where it was not read."""
    memory: tuple[DeviceMemory, ...] = ()
    """Who holds the memory of each GPU at its peak; empty without events of memory."""
    modules: tuple[ModuleUse, ...] = ()
    """Modules of the network in order of their tree, by rank; empty where none were recorded."""
    copies: tuple[CopyUse, ...] = ()
    """Copies in the measured steps, by GPU and direction, most time first."""
    framework: str = ""
    """``pytorch``, ``tensorflow``, ``jax``, ``mxnet`` or ``chainer``, by names of kernels, steps
    and waits; empty if unknown."""

    def cause_label(self, cause: str, general: str = "") -> str:
        """Return the label of a cause after a more general one, by default its parent's, unless the
        cause repeats that.
        """
        nodes = {node.id: node for node in self.causes}
        if (node := nodes.get(cause)) is None:
            return cause
        if not general and node.parent in nodes:
            parent = nodes[node.parent].label
            general = "" if parent.split()[-1] in node.label else parent
        return f"{general}: {node.label}" if general else node.label

    def unrecorded(self, step_ns: int | None) -> int | None:
        """Return the length of a recorded step without the measured cost of recording."""
        ratio = 1.0 if self.recorder is None else self.recorder.ratio
        return None if step_ns is None else round(step_ns * ratio)


def as_subclass(result: Any, kind: type[_Result]) -> _Result:
    """Convert a result, a struct or a dataclass, to a subclass that adds no fields."""
    names = getattr(result, "__struct_fields__", None) or result.__dataclass_fields__
    return kind(**{name: getattr(result, name) for name in names})
