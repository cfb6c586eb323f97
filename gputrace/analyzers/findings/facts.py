"""Facts that rules look at, each computed when it is first asked for, and helpers that make
findings of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, reduce
from typing import Any, Final, TypeVar

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from gputrace.analyzers.collectives import Collectives
from gputrace.analyzers.cuda_api_calls import are_of_hip
from gputrace.analyzers.gpu_links import Links, measure_links
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.grouping import OfGpu, StepsOf, edges_of, time_of
from gputrace.analyzers.host_state import measure_load, read_counters
from gputrace.analyzers.lanes import Lane, LaneSummary, ranks_of
from gputrace.analyzers.lateness import LateGains
from gputrace.analyzers.ledger import Ledger, account, charges_of, move_amounts
from gputrace.analyzers.ledger.causes import Cause, path_of
from gputrace.analyzers.load_balance import KernelRatio, kernel_ratios
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.parallelism import Groups, find_roles
from gputrace.analyzers.python_samples import PythonLines, SampledLine, host_is_at
from gputrace.analyzers.step_phases import measure_phases, read_phases
from gputrace.analyzers.steps import FoundSteps
from gputrace.analyzers.steps.inferred import BACKWARD
from gputrace.model.events import Kind, distinct_ids
from gputrace.model.host import CHECKPOINT, DATA, OTHER, PHASES, HostLine, HostLoad, StepPhases
from gputrace.model.impossible_times import MISTIMED
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, union
from gputrace.model.kernels import Kernels
from gputrace.model.results import TURNS, Breakdown, Evidence, Finding, LedgerRow, Phase, Step
from gputrace.model.struct import Struct
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.model.trace import Trace
from gputrace.units import format_ids, format_pair, format_steps

_Fact = TypeVar("_Fact")

_FEWEST_TURNS: Final = 3
"""Fewer steps may all hold what a process does once: none shows how long they are without it."""
_FEWEST_TO_COUNT: Final = 8
_MUCH, NEARLY_ALL, _FEW_STEPS = 2, 0.8, 0.25
"""Steps from which it is said that few of them have a cause's time: those with so many times the
mean have nearly all of it, and are at most this part of the steps."""
_STRAY_OPERATIONS: Final = 0.01
"""Fraction of the operations of its rank's busiest GPU below which a GPU does not count."""

_FRAMEWORKS: Final = (
    ("pytorch", ("at::native", "c10::", "triton_", "torch.")),
    ("tensorflow", ("tensorflow::", "Eigen::", "tensorflow.", "keras.")),
    ("jax", ("loop_fusion", "input_fusion", "wrapped_", "dali.plugin.jax")),
    ("mxnet", ("mxnet",)),
    ("chainer", ("cupy_", "chainer")),
)
"""Parts of the names of kernels, marks and recorded waits that are unique to a framework."""


HIGH: Final = 0.20
MEDIUM: Final = 0.05
"""Shares of the time from which a cost is high and medium: xprof's limits for input-bound."""

_WHOLE_PERCENT: Final = 0.01
"""Share from which a percentage has no decimals."""
_NAMED_LINE_SHARE: Final = 0.3
"""Share of the samples that must be at one line for it to be named."""
_NAMED_PHASE: Final = 0.5
"""Share of the idle time that one phase must have for it to be named."""

_RANKS_NAMED: Final = 3
"""Runs of ranks up to which a sentence names them."""


class Facts(Struct, frozen=True, dict=True):
    """Facts about a trace, and helpers that make findings of them.

    A trace without GPU activity has no GPUs.
    """

    per_gpu: PerGpu
    all_steps: FoundSteps
    steps: Sequence[Step]
    """All steps on all GPUs."""
    measured: Sequence[Step]
    """Steps that the breakdown covers: those with all CUDA calls, where not all have them."""
    breakdown: tuple[Breakdown, ...]
    lines: PythonLines | None
    """Source lines of the host threads, where they were sampled."""
    collectives: Collectives
    """Collectives matched among the operations."""
    kernels: Kernels | None = None
    """Kernels of the measured steps."""
    phases: tuple[Phase, ...] = ()
    """Intervals that are not steady training, and the starts of epochs."""
    late_gains: dict[int, LateGains] = field(default_factory=dict)
    """By rank that is late in all steps, what a step gains without each reason for it, as far as
    it was replayed."""
    late_causes: dict[int, str] = field(default_factory=dict)
    """Cause to charge for waiting for a rank, by rank that is late in a way that is no chance."""
    timed: Sequence[Step] = ()
    """Measured steps, and those that would be measured if they had all CUDA calls."""
    causes: Sequence[Cause] = ()
    """Causes of lost time, in the order in which they are charged."""

    def once(self, work: Callable[[Facts], _Fact]) -> _Fact:
        """Return a function's result for these facts, computed once."""
        if work not in self._known:
            self._known[work] = work(self)
        fact: _Fact = self._known[work]
        return fact

    def by_group(
        self,
        find: Callable[[Groups], tuple[_Fact, ...]],
        role: str = "",
    ) -> tuple[_Fact, ...]:
        """Return what a function finds in the groups of communicating GPUs, computed once; nothing
        where no group has the role that it is about.
        """
        if role and role not in self.roles:
            return ()
        if find not in self._known:
            self._known[find] = find(self.groups)
        found: tuple[_Fact, ...] = self._known[find]
        return found

    @cached_property
    def groups(self) -> Groups:
        """Groups of communicating GPUs, with the measured steps."""
        return Groups(self.per_gpu, self.collectives, self.roles, self.measured)

    @cached_property
    def _known(self) -> dict[Any, Any]:
        """Answers that rules share, by the function that gives them, or by the steps compared."""
        return {}

    @property
    def trace(self) -> Trace:
        """Trace of the run."""
        return self.per_gpu.trace

    @property
    def operations(self) -> Sequence[GpuOperations]:
        """Operations of each GPU; raises LookupError where they are on the workers of a cluster."""
        return self._rows_here.operations

    @property
    def lanes(self) -> Sequence[Lane]:
        """Lane of each GPU; raises LookupError where its operations are on the workers of a
        cluster.
        """
        return [lane for lane in self._rows_here.lanes if isinstance(lane, Lane)]

    @property
    def _rows_here(self) -> Shard:
        shard = self.per_gpu.whole
        if len(shard.operations) < len(self.per_gpu.operations):
            raise LookupError("the rows are on the workers of a cluster")
        return shard

    @cached_property
    def ledger(self) -> Ledger:
        """Lost time of the GPUs, each nanosecond charged to one cause."""
        if not self.per_gpu.operations:
            return Ledger((), 1)
        lanes = self.lanes_of(self.listed)
        rows = {(row.gpu, row.rank): row for row in self.listed}
        in_order = [rows[lane.gpu.gpu, lane.gpu.rank] for lane in lanes]
        charged = account(
            self.groups,
            self.causes,
            lanes,
            in_order,
            self.late_causes,
            is_loop=self.is_loop,
            repeats=self.repeats,
        )
        turns = {(row.gpu, row.rank): max(row.steps, 1) for row in in_order}
        for cause in self.causes:
            if cause.amount is not None and (amounts := cause.amount(self)):
                path = path_of(cause.id, self.causes)
                charged = move_amounts(charged, cause, amounts, turns, path)
        for cause in self.causes:
            spent = cause.work(self) if cause.work is not None else {}
            path = path_of(cause.id, self.causes)
            charged += [
                LedgerRow(cause.id, path, "compute", *gpu, None, None, ns, "", None, gpu[1])
                for gpu, ns in spent.items()
                if ns and gpu in turns
            ]
        counted = {(row.gpu, row.rank) for row in self.rows}
        rows_of = tuple(sorted(charged, key=lambda row: -row.ns))
        return Ledger(rows_of, self.turns, frozenset(counted))

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Role of each group of communicating GPUs."""
        return find_roles(self.per_gpu, self.collectives, self.measured)

    @cached_property
    def host_load(self) -> tuple[HostLoad, ...]:
        """Time of the hosts' threads in the measured steps, by rank; empty where not counted."""
        counters = self.read(read_counters)
        return measure_load(counters, self.processes, self.timed or self.steps)

    @property
    def host_lines(self) -> tuple[HostLine, ...]:
        """Sampled lines of each rank in its measured steps, or in all its time where there are
        none, the most first.
        """
        if self.lines is None or not self.mean_ns:
            return ()
        rows: list[HostLine] = []
        for rank, process in sorted(self.processes.items()):
            always = union([0], [np.iinfo(np.int64).max])
            met = self.lines.count(process, self.time_of_rank(rank) if self.measured else always)
            whole = met.total()
            rows += (
                HostLine(rank, line, round(self.mean_ns * count / whole), count / whole, count)
                for line, count in met.most_common()
            )
        return tuple(rows)

    @property
    def unrecorded(self) -> float:
        """Length of an unrecorded step as a fraction of a recorded one."""
        return 1.0 if self.all_steps.cost is None else self.all_steps.cost.ratio

    @cached_property
    def processes(self) -> dict[int, int]:
        """Process of each rank; of ranks without a GPU, those that mark steps, or whose lines were
        sampled.
        """
        processes = {
            operations.gpu.rank: operations.gpu.process for operations in self.per_gpu.operations
        }
        kind = Kind.STEP if Kind.STEP in self.trace.kinds else Kind.SAMPLE
        if processes or kind not in self.trace.kinds:
            return processes
        stepping = self.trace.events([kind], ["process"]).process
        return ranks_of(self.trace, dict.fromkeys(distinct_ids(stepping).tolist(), 0))[0]

    @cached_property
    def step_phases(self) -> tuple[StepPhases, ...]:
        """Measured steps of each rank by phase; empty where no phases were recorded."""
        return measure_phases(self.per_gpu, self.working, self.processes, self.measured)

    @cached_property
    def framework(self) -> str:
        """Framework, by the kernels' names and by what its hooks recorded; empty if unknown."""
        recorded = self.trace.events([Kind.DATA_WAIT, Kind.STEP], ["name"]).name
        kernels = [gpu.kernels for gpu in self.per_gpu.operations]
        names = self.trace.names(distinct_ids(np.concatenate([recorded, *kernels]))).values()
        # XLA's own kernels are in programs of JAX and TensorFlow alike.
        text = [name for name in names if "stream_executor::" not in name]
        for framework, parts in _FRAMEWORKS:
            if any(part in name for name in text for part in parts):
                return framework
        return "pytorch" if "kineto" in self.trace.source.split("+") else ""

    @property
    def idle_unknown(self) -> bool:
        """Return whether the GPUs' idle time says nothing of the program."""
        return bool(self.trace.idle_unknown) or MISTIMED in self.trace.quality.notes

    @cached_property
    def is_hip(self) -> bool:
        """Return whether the calls are HIP's: the GPUs are AMD's, which gputrace cannot record."""
        calls = self.per_gpu.whole.calls
        return calls is not None and are_of_hip(self.trace, calls.name)

    def kernel_ratios(self, steps: Collection[int] | None = None) -> tuple[KernelRatio, ...]:
        """Return the relative speeds of the GPUs on kernels that several run, in all measured steps
        or some; each choice is compared once.
        """
        chosen = [step for step in self.measured if steps is None or step.step in steps]
        key = frozenset(step.step for step in chosen)
        if key not in self._known:
            self._known[key] = kernel_ratios(self.per_gpu, chosen)
        ratios: tuple[KernelRatio, ...] = self._known[key]
        return ratios

    @cached_property
    def listed(self) -> tuple[Breakdown, ...]:
        """Rows of the breakdown without GPUs that appear only as an end of another's copies: what
        they do meanwhile is unknown.
        """
        ends = {
            (summary.gpu.gpu, summary.gpu.rank)
            for summary in self.per_gpu.operations
            if summary.kinds == {Kind.COPY_PEER}
        }
        rows = tuple(row for row in self.breakdown if (row.gpu, row.rank) not in ends)
        return rows or self.breakdown

    def lanes_of(self, rows: Sequence[Breakdown]) -> list[LaneSummary]:
        """Return the lanes of the GPUs of some rows."""
        gpus = {(row.gpu, row.rank) for row in rows}
        return [lane for lane in self.per_gpu.lanes if (lane.gpu.gpu, lane.gpu.rank) in gpus]

    @cached_property
    def rows(self) -> tuple[Breakdown, ...]:
        """Rows of the breakdown that count: those of the GPUs that do the work.

        If some rows have steps, only those. GPUs that do next to nothing beside the others of their
        rank, such as those that only hold a context, are left out.
        """
        busiest: dict[int, int] = {}
        for lane in self.per_gpu.lanes:
            busiest[lane.gpu.rank] = max(busiest.get(lane.gpu.rank, 0), lane.operations)
        stray = {
            (lane.gpu.gpu, lane.gpu.rank)
            for lane in self.per_gpu.lanes
            if lane.operations < _STRAY_OPERATIONS * busiest[lane.gpu.rank]
        }
        rows = [row for row in self.listed if (row.gpu, row.rank) not in stray]
        return tuple([row for row in rows if row.steps] or rows)

    @cached_property
    def working(self) -> list[LaneSummary]:
        """Lanes of the GPUs that count."""
        return self.lanes_of(self.rows) if self.per_gpu.operations else []

    @property
    def waits_known(self) -> bool:
        """Return whether it is known for how long each GPU waits for other ranks."""
        return all(row.communication_wait_ns is not None for row in self.rows)

    @cached_property
    def links(self) -> Links | None:
        """Links between the GPUs and their traffic; None where there is one GPU."""
        return measure_links(self.per_gpu, self.collectives)

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(row.gpu for row in self.rows if row.gpu is not None)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({row.rank for row in self.rows}))

    @property
    def trains(self) -> bool:
        """Return whether training steps were found."""
        return self.all_steps.kind in ("training", "rl")

    @cached_property
    def infers(self) -> bool:
        """Return whether what runs is inference: no training, and no kernel of a backward pass."""
        kernels = [gpu.kernels for gpu in self.per_gpu.operations]
        may_be = self.all_steps.kind in ("evaluation", "generation", "pass") and bool(kernels)
        return may_be and not self.trace.search(distinct_ids(np.concatenate(kernels)), BACKWARD)

    @property
    def repeats(self) -> bool:
        """Return whether turns of a loop are measured: start-up is over."""
        is_later = self.all_steps.warmup or (self.all_steps.chosen or (0,))[0]
        fewest = 1 if is_later else _FEWEST_TURNS
        return self.is_loop and len({step.step for step in self.measured}) >= fewest

    @property
    def is_loop(self) -> bool:
        """Return whether the measured steps are turns of a loop."""
        return bool(self.measured) and self.all_steps.kind != "pass"

    @property
    def per(self) -> str:
        """Unit of shares: ``each step``, ``the pass``; ``the time`` where there are no steps."""
        kind = self.all_steps.kind
        if not self.measured:
            return "the time"
        return "the pass" if kind == "pass" else f"each {TURNS.get(kind, 'iteration')}"

    @cached_property
    def mean_ns(self) -> int:
        """Mean nanoseconds of a measured step, or of a GPU's span.

        The recorder's cost is left out as far as it was measured.
        """
        return round(self.mean("total") * self.unrecorded)

    def mean(self, name: str) -> int:
        """Return the mean nanoseconds of a class on one GPU, per step where there are steps."""
        return sum(row.of(name) for row in self.rows) // self.turns

    def mean_over_gpus(self, measure: Callable[[GpuShardView, Intervals], int]) -> int:
        """Return the mean of what a function measures on each GPU in its measured time, per step
        where there are steps; 0 where no CUDA calls were recorded.
        """
        return sum(self.each(measure)) // self.turns if self.per_gpu.has_calls else 0

    def each(self, measure: Callable[[GpuShardView, Intervals], _Fact]) -> list[_Fact]:
        """Return what a function measures on each GPU that counts, in its measured time."""
        return self.per_gpu.each(measure, self.working, self.working_times)

    def read(self, work: Callable[[Shard], _Fact]) -> _Fact:
        """Return what a function reads of all hosts, once."""
        return self.per_gpu.whole.once(work)

    def share(self, *names: str) -> float:
        """Return the share of the time that some classes have, over all GPUs."""
        total = sum(row.total_ns for row in self.rows) * self.unrecorded
        return sum(row.of(name) for row in self.rows for name in names) / max(total, 1)

    def share_of(self, cost_ns: float) -> float:
        """Return a cost in nanoseconds per step as a share of the mean step."""
        return cost_ns / max(self.mean_ns, 1)

    @property
    def turns(self) -> int:
        """Steps of all GPUs that count, one for a GPU without steps; at least 1."""
        return max(1, sum(max(row.steps, 1) for row in self.rows))

    def of_step(self, cost_ns: float, in_few: bool = False) -> str:
        """Return a share, and what it is of: ``40% of each step (25.1 of 62.8 ms)``; if few steps
        have it, ``40% of the time (25.1 of 62.8 ms a step)``.
        """
        share, pair = self.share_of(cost_ns), format_pair(cost_ns, "of", self.mean_ns)
        percent = f"{share:.0%}" if share >= _WHOLE_PERCENT else f"{share:.1%}"
        of = f"the time ({pair} a step)" if in_few else f"{self.per} ({pair})"
        return f"{percent} of {of}"

    def do(self, verb: str, ranks: Sequence[int] = ()) -> str:
        """Return a subject and its verb: ``the GPUs wait``, ``the GPU of rank 3 waits``; the GPUs
        of some ranks, or without ``ranks`` all that count.
        """
        rows = [row for row in self.rows if row.rank in ranks] or self.rows
        of = ""
        if ranks:
            of = f" of {format_ids('rank', ranks)}"
            of = of if of.count(",") < _RANKS_NAMED else f" of {len(ranks)} ranks"
        return f"the GPU{of} {verb}s" if len(rows) == 1 else f"the GPUs{of} {verb}"

    def finding(
        self,
        id: str,
        severity: str,
        impact_ns: int,
        message: str,
        advice: str,
        evidence: Evidence | None = None,
        details: Sequence[str] = (),
        of: Collection[OfGpu] | None = None,
    ) -> Finding:
        """Return a finding about some GPUs, or all that count; empty details are left out."""
        gpus, ranks = self.gpus, self.ranks
        if of is not None:
            gpus = tuple(sorted({each.gpu for each in of if each.gpu is not None}))
            ranks = tuple(sorted({each.rank for each in of}))
        known, shown = evidence or {}, tuple(filter(None, details))
        return Finding(id, severity, gpus, ranks, impact_ns, message, advice, known, shown)

    def _where_most(self, *causes: str) -> tuple[list[Breakdown], int]:
        """Return the GPUs of the ranks that most of some causes is on, and what a step of these
        loses to them, in nanoseconds.
        """
        where_most = self.ledger.ranks(*causes)
        rows = [row for row in self.rows if row.rank in where_most]
        if not rows or len(rows) == len(self.rows):
            return list(self.rows), self.ledger.mean(*causes)
        return rows, self.ledger.mean_on(rows, *causes)

    def is_costly(self, cause: str, least: float = MEDIUM) -> bool:
        """Return whether at least a part of the time is charged to a cause, as `costly` asks."""
        return self.share_of(self._where_most(cause)[1]) >= least

    def costly(
        self,
        id: str,
        message: str,
        advice: str,
        details: Sequence[str] = (),
        *,
        verb: str = "wait",
        medium: float = MEDIUM,
        high: float = HIGH,
        beside: Sequence[str] = (),
    ) -> Iterator[Finding]:
        """Yield a finding if the share of the time that is charged to a cause is at least
        ``medium``.

        In the message, ``{cost}`` stands for the cost, ``40% of each step (25.1 of 62.8 ms)``;
        ``{gpus}`` for the GPUs and the verb, ``the GPUs wait``; ``{at}`` for the host's line, `` at
        train.py:48 load``. Where most is on some ranks, cost and GPUs are those of these ranks.
        ``beside`` are causes that the finding is about, too. The phase of the step, the line and
        the system call that the host is in then become further details.
        """
        causes = id, *beside
        rows, cost = self._where_most(*causes)
        share = self.share_of(cost)
        severity = severity_of(share, medium, high)
        charged = self.ledger.of(*causes)
        is_unknown = self.idle_unknown and {row.of for row in charged} == {"idle"}
        if severity is None or is_unknown:
            return
        evidence: dict[str, float | int | str | None] = {
            "share": round(share, 4),
            "cost_ns": cost,
            "total_ns": self.mean_ns,
        }
        shown, at = list(details), ""
        if few := self._few_steps(causes, rows):
            shown.insert(0, few)
        phase = self._phase_of(causes, rows)
        if phase is not None and phase[0] != CHECKPOINT:
            name, spent, total = phase
            shown.append(f"most of it is in {PHASES[name]} ({format_pair(spent, 'of', total)})")
            evidence |= {"phase": name, "phase_ns": spent}
        if (sampled := self.at_line(*causes)) is not None:
            at = f" at {sampled.line}"
            shown.append(self.host_is_at(*causes))
            evidence |= {"line": sampled.line}
        elif charged and charged[0].thread is not None and charged[0].evidence:
            shown.append(f"thread {charged[0].thread} {charged[0].evidence}")
        others = [row for row in self.rows if row not in rows]
        passed_on = self.ledger.mean_on(others, *causes)
        if severity_of(self.share_of(passed_on)):
            lose = self.do("lose", sorted({row.rank for row in others}))
            shown.append(f"{lose} {format_pair(passed_on, 'of', self.mean_ns)} to it, too")
        ranks = sorted({row.rank for row in rows})
        gpus = self.do(verb, ranks if len(rows) < len(self.rows) else ())
        text = message.format(gpus=gpus, cost=self.of_step(cost, bool(few)), at=at)
        mean = self.ledger.mean(*causes)
        yield self.finding(id, severity, mean, text, advice, evidence, shown, of=rows)

    def at_line(self, *causes: str) -> LedgerRow | None:
        """Return the largest row of some causes that has a line, among the large ones."""
        charged = self.ledger.of(*causes)
        most = [row for row in charged if row.ns >= _NAMED_PHASE * charged[0].ns]
        return next((row for row in most if row.line is not None), None)

    def host_is_at(self, *causes: str) -> str:
        """Return the line of some causes, with the samples that show it; empty without one."""
        row = self.at_line(*causes)
        return host_is_at(row.line or "", row.evidence) if row is not None else ""

    def _few_steps(self, causes: Sequence[str], rows: Sequence[Breakdown]) -> str:
        """Return in which steps most of the time of some causes is, if few of them have it."""
        lanes, numbers = self.lanes_of(rows), sorted({step.step for step in self.measured})
        if len(numbers) < _FEWEST_TO_COUNT:
            return ""
        mine = [self.measured_of(lane.gpu) for lane in lanes]
        spent = dict.fromkeys(numbers, 0)
        edges = map(edges_of, mine)
        each = self.per_gpu.each(_charged_in_steps, lanes, edges, same=(tuple(causes),))
        for steps, amounts in zip(mine, each, strict=True):
            for step, ns in zip(steps, amounts, strict=True):
                spent[step.step] += ns
        total = sum(spent.values())
        few = [number for number in numbers if spent[number] * len(numbers) > _MUCH * total]
        share = sum(spent[number] for number in few) / max(total, 1)
        if share < NEARLY_ALL or len(few) > _FEW_STEPS * len(numbers):
            return ""
        return f"{share:.0%} of it is in {len(few)} of {len(numbers)} steps ({format_steps(few)})"

    def _phase_of(
        self, causes: Sequence[str], rows: Sequence[Breakdown]
    ) -> tuple[str, int, int] | None:
        """Return the phase of a step that the hosts of some GPUs are in for most of what is charged
        to some causes: its name, the nanoseconds per step, and those of all phases; None if none
        has most, or if it is the wait for data, which says nothing more.
        """
        if not self.step_phases:
            return None
        lanes = self.lanes_of(rows)
        times = [self.time_of(lane) for lane in lanes]
        each = self.per_gpu.each(_charged_in_phases, lanes, times, same=(tuple(causes),))
        idle = [phases for phases in each if phases is not None]
        turns = sum(max(row.steps, 1) for row in rows)
        means = (np.sum(idle, axis=0) // max(turns, 1)).tolist() if idle else [0] * len(PHASES)
        named = dict(zip(PHASES, means, strict=True))
        total = sum(named.values())
        del named[OTHER]
        most = max(named, key=lambda name: named[name])
        if most == DATA or named[most] <= _NAMED_PHASE * total:
            return None
        return most, named[most], total

    def host_cost(self, cause: str, host_ns: float) -> int:
        """Return the cost of a cause of the host per step: the GPUs' idle time that is charged to
        it, or without a GPU ``host_ns``.
        """
        return self.ledger.mean(cause) if self.per_gpu.operations else round(host_ns)

    @cached_property
    def measured_of(self) -> StepsOf:
        """Lookup of the measured steps of one GPU."""
        return StepsOf(self.measured)

    @property
    def working_times(self) -> list[Intervals]:
        """Measured time of each of the GPUs that count."""
        return [self.time_of(lane) for lane in self.working]

    def line_in(
        self, time: Intervals, processes: Collection[int], *, blocked: bool = False
    ) -> SampledLine | None:
        """Return the line at which most samples met some processes in some time; None if none has
        30 % of them.

        With ``blocked``, only samples count that met a thread waiting, if there are any.
        """
        lines = self.lines
        if lines is None:
            return None
        samples = {
            thread: lines.within(thread, time)
            for thread in lines.times
            # Without a stand-in, another thread trains than those that were sampled.
            if thread[0] in processes and thread[0] in lines.stand_ins
        }
        place = None
        if blocked:
            waiting = {
                thread: mine[lines.blocked[thread][mine]] for thread, mine in samples.items()
            }
            place = lines.place(waiting)
        place = place or lines.place(samples)
        return place if place is not None and place.share >= _NAMED_LINE_SHARE else None

    def time_of_rank(self, rank: int) -> Intervals:
        """Return the measured steps of a rank."""
        return time_of(step for step in self.measured if step.rank == rank)

    def time_of(self, lane: LaneSummary) -> Intervals:
        """Return the measured steps of a GPU; its window where there are none."""
        return self.measured_of.time(lane.gpu, lane.window)


def _charged_in_steps(view: GpuShardView, steps: Times, causes: Sequence[str]) -> list[int]:
    """Return the nanoseconds of each step of a GPU that are charged to some causes."""
    mine = (times for (cause, _), times in charges_of(view).items() if cause in causes)
    return list(sum((times.within(*steps) for times in mine), np.zeros(steps.shape[1], np.int64)))


def _charged_in_phases(
    gpu: GpuShardView, time: Intervals, causes: Sequence[str]
) -> NDArray[np.int64] | None:
    """Return the nanoseconds of idle time that are charged to causes, in each of `PHASES`."""
    phases = gpu.once(read_phases).get(gpu.operations.gpu.process)
    if phases is None:
        return None
    charged = [
        times.intersection(time)
        for (cause, name), times in charges_of(gpu).items()
        if cause in causes and name in IDLE_CAUSES
    ]
    return phases.within(reduce(merge_touching, charged, EMPTY))


Rule = Callable[[Facts], Iterator[Finding]]
"""Function that yields findings, or none."""


def severity_of(share: float, medium: float = MEDIUM, high: float = HIGH) -> str | None:
    """Return the severity of a cost by its share of the time; None if it is not worth reporting."""
    if share >= high:
        return "high"
    return "medium" if share >= medium else None


SEVERITIES: Final = ("high", "medium", "low", "info")
"""Severities, the worst first."""
