"""Results about the hosts: how their threads got processor time, the phases of their steps, and
their data loaders.

Times are integer nanoseconds; field names are those of the JSON.
"""

from __future__ import annotations

from typing import ClassVar, Final

from gputrace.model.struct import Column, Columns, Struct


class HostLoad(Struct, frozen=True):
    """How the host thread of a rank that marks the steps came by its time, in the measured steps.

    The times sum to ``covered_ns``, the part of the steps that was counted.
    """

    rank: int
    steps: int
    covered_ns: int
    on_core_ns: int
    queued_ns: int
    """Time in which the thread was ready to run, and others had the cores."""
    blocked_ns: int
    """Time in which it waited for something else: data, a GPU, a lock, a disk, a clock."""
    others_queued: float
    """Share of the time for which the longest-queued other thread of the process was so."""
    process_cores: float
    """Cores that the process used, on average."""
    threads: int
    """Threads of the process that wanted a core for a third of the time or more."""
    wanted_cores: float
    """Cores that these would use if they never queued."""
    cores: int
    """Cores that the process may use."""
    quota_cores: float | None
    """Cores' worth of time that its control group allows; None without a limit."""
    runnable: float | None
    """Threads of the machine that were on a core or queued for one, on average."""
    openmp: str | None
    """OpenMP's library, where its threads spin: ``libgomp``, ``libiomp5``, ``libomp``."""
    spinning: int
    """Threads, with the one that marks steps, that want a core all the time and have it for as
    long: those that wait for the others spin; 0 if there are none, or no such library."""
    at_once: float
    """Share of the time in which all of these have a core, if their turns are independent."""
    throttled: float
    """Share of the time for which the control group's quota stopped it, summed over cores."""
    pressure: float
    """Share of the time for which some thread of the machine was queued."""
    core_mhz: float | None
    """Mean clock of the cores that the thread was on; None where the kernel does not say."""
    fastest_mhz: float | None
    """The fastest that any core was seen at in the whole run."""
    minor_faults: int
    major_faults: int
    preemptions: int
    """Page faults without and with a read of a disk, and involuntary switches, of that thread."""

    def of(self, share_ns: int, step_ns: int) -> int:
        """Return a time as nanoseconds of a step of the given length."""
        return round(share_ns / max(self.covered_ns, 1) * step_ns)


class HostLine(Struct, frozen=True):
    """Line of the program that samples of a rank's stepping thread met in the measured steps, or in
    all its time where there are none.
    """

    rank: int
    line: str
    """Text such as ``train.py:48 load_batch``, with as much of the path as makes it unique."""
    step_ns: int
    """Its part of a mean step, or of all the time, by its share of the samples."""
    share: float
    """Share of the rank's samples then."""
    samples: int
    """Number of samples at the line."""
    COLUMNS: ClassVar[Columns] = (
        Column("", "line"),
        Column("time", "step_ns"),
        Column("share", "share", "{:.1%}"),
        Column("samples", "samples"),
    )


class Allocator(Struct, frozen=True):
    """torch's caching allocator on the device of a rank, as it counts, in the measured steps."""

    rank: int
    steps: int
    retries: int
    """Times that the GPU had no memory left: torch gave its cache back, and asked again."""
    segments: int
    """Segments taken from the GPU (cudaMalloc); with ``expandable_segments``, new or longer."""
    segment_bytes: int
    """Bytes of a mean one of these."""
    segments_freed: int
    """Segments given back (cudaFree)."""
    request_bytes: tuple[int, ...]
    """Sizes of the tensors for which segments were taken, in the few steps in which torch was asked
    for them: the most frequent first, five at most."""
    emptied: int
    """Calls of `torch.cuda.empty_cache`."""
    emptying_ns: int
    """Time of these in a mean step."""
    allocated_bytes: int
    """Bytes of tensors at the ends of steps, at most."""
    reserved_bytes: int
    """Bytes that are held of the GPU at the ends of steps, at most."""
    split_bytes: int
    """Unused bytes of these in segments that are in use, which cannot be given back, at most."""
    peak_bytes: int | None
    """Largest peak that was seen to be reached in these steps or before; None if it was before the
    first."""
    peak_phase: str | None
    """The one of `PHASES` in which it was reached; None where that is unknown."""


DATA: Final = "data"
ROLLOUT: Final = "rollout"
REWARD: Final = "reward"
REFERENCE: Final = "reference"
WEIGHT_SYNC: Final = "weight sync"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
UNSCALING: Final = "gradient unscaling"
CLIPPING: Final = "gradient clipping"
OPTIMIZER: Final = "optimizer"
CHECKPOINT: Final = "checkpoint"
UPDATE: Final = "update"
OTHER: Final = "other"
MODEL: Final = "model"
"""Name of the recorded calls of modules that no other module calls, parts of a forward pass."""

DATA_RANGE: Final = (
    r"(?i)^data$|data.?(load|wait|feed|fetch|iter)|(load|next|fetch|get).?(batch|data|input)"
    r"|__next__|infeed"
)
"""Names of ranges that wait for the next batch, or make it."""

PHASES: Final = {
    DATA: "the wait for data",
    ROLLOUT: "rollouts",
    REWARD: "rewards",
    REFERENCE: "log-probabilities without gradients",
    WEIGHT_SYNC: "the sync of weights",
    FORWARD: "the forward pass",
    BACKWARD: "the backward pass",
    UNSCALING: "gradient unscaling",
    CLIPPING: "gradient clipping",
    OPTIMIZER: "the optimizer's step",
    CHECKPOINT: "the saving of a checkpoint",
    UPDATE: "the rest of the update",
    OTHER: "none of the phases",
}
"""Each phase in its order in a step, and its name in a sentence."""


class StepPhase(Struct, frozen=True):
    """One phase of the steps of a rank, in mean nanoseconds of a step."""

    name: str
    """One of `PHASES`."""
    host_ns: int
    """Time for which the thread that trains was in it."""
    idle_ns: int | None
    """Time in which a GPU of the rank ran nothing meanwhile; None where no GPU was seen."""
    launch_ns: int | None
    """Part of it in which the GPU waited for a launch; None where calls were not recorded."""


class StepPhases(Struct, frozen=True):
    """The measured steps of a rank by phase.

    Times of the host sum to ``step_ns``, idle times to the idle time of the breakdown, both exactly
    but for the remainder of a mean.
    """

    rank: int
    steps: int
    step_ns: int
    """Mean step."""
    phases: tuple[StepPhase, ...]
    """All of them, in the order of `PHASES`; of those that were not met, the times are 0."""

    def of(self, name: str) -> StepPhase:
        """Return a phase by name."""
        return next(phase for phase in self.phases if phase.name == name)


READING, COLLATING, SENDING = "read", "collate", "send"
"""Parts of a batch beside its transforms: the samples without them, making a batch, sending it."""


class LoaderPart(Struct, frozen=True):
    """One part of a batch, in the workers."""

    name: str
    """``read``, ``transform Decode``, ``collate`` or ``send``."""
    batch_ns: int
    """Mean of a batch."""
    share: float
    """Fraction of the workers' time at batches, 0 to 1."""


class LoaderWorker(Struct, frozen=True):
    """One worker; several processes, where each epoch starts new ones."""

    worker: int
    batches: int
    batch_ns: int
    """Median of its batches."""
    waiting: float
    """Share of its time that it waited for work, 0 to 1."""
    read_bytes: int | None
    """Read by system calls over the whole run; None where it was not seen for a second."""
    disk_bytes: int | None
    """Part of that which came from disks."""


class LoaderChoice(Struct, frozen=True):
    """A step as a simulation of the queue predicts it for a number of workers."""

    workers: int
    step_ns: int
    wait_ns: int
    """Part of the step that waits for a batch."""
    COLUMNS: ClassVar[Columns] = (Column("a step", "step_ns"), Column("waits", "wait_ns"))


class Loader(Struct, frozen=True):
    """Data loader that feeds a rank, over its measured steps."""

    rank: int
    workers: int
    """0 where the process that trains loads by itself."""
    batches: int
    batches_per_step: float
    prefetch_factor: int
    pins_memory: bool
    cores: int
    """Cores that the process may use."""
    batch_ns: int
    """Mean time of a worker at a batch: the sum of the parts."""
    processor_ns: int
    """Processor time of a batch, in a worker."""
    receive_ns: int
    """Mean time of the process that trains at reading and unpickling a batch."""
    pin_ns: int | None
    """Mean time of its thread that copies batches into pinned memory; None where unknown."""
    parts: tuple[LoaderPart, ...]
    """Parts of a batch, the longest first."""
    by_worker: tuple[LoaderWorker, ...]
    start_workers_ns: int
    """Median time to start all workers, in the process that trains."""
    queue_median: float | None
    """Batches that were ready when one was asked for; None without workers."""
    queue_empty: float | None
    """Share of the asks that found none ready."""
    step_ns: int
    """Mean measured step; ``wait_ns`` is the part of it that waits for batches."""
    wait_ns: int
    predictions: tuple[LoaderChoice, ...]
    """Steps by number of workers, the present number among them; empty where threads of the program
    are queued for cores, by which all that was measured is longer than it would be with others, and
    where a thread of the process that trains makes batches ahead."""
    half_step_ns: int | None
    """Predicted step if the longest transform took half as long; None without transforms, and where
    nothing is predicted."""
    no_disk_step_ns: int | None = None
    """Predicted step if reading samples waited for nothing, as of files in memory."""
    cached_step_ns: int | None = None
    """Predicted step if samples were kept as the transforms leave them."""
    doubled_step_ns: int | None = None
    """Predicted step if each worker made twice as many batches ahead; None without workers."""

    @property
    def from_disk(self) -> float | None:
        """Fraction of what workers read that was not in memory, 0 to 1; None where unknown."""
        seen = [(w.disk_bytes or 0, w.read_bytes) for w in self.by_worker if w.read_bytes]
        # Files that are mapped are in the first number alone.
        return min(sum(d for d, _ in seen) / sum(r for _, r in seen), 1.0) if seen else None

    @property
    def computes(self) -> bool:
        """True if workers have the processor for nearly all of their time at a batch."""
        return self.processor_ns >= _COMPUTES * self.batch_ns

    def keeps_up(self, choice: LoaderChoice) -> bool:
        """Return whether next to nothing of the step waits, beside receiving batches."""
        beside = choice.wait_ns - self.receiving_ns
        return beside < _NO_WAIT * choice.step_ns and choice.wait_ns < _LITTLE_WAIT * choice.step_ns

    @property
    def receiving_ns(self) -> float:
        """Time of a step that the thread that trains spends receiving batches."""
        return 0.0 if self.pins_memory else self.receive_ns * self.batches_per_step

    @property
    def now(self) -> LoaderChoice | None:
        """The step as predicted for the present number of workers; None if nothing is predicted."""
        return next((row for row in self.predictions if row.workers == self.workers), None)

    @property
    def better(self) -> LoaderChoice | None:
        """The fewest workers that shorten a step nearly as far as any number; None if none do."""
        now = self.now
        more = [choice for choice in self.predictions if choice.workers > self.workers]
        if now is None or not more:
            return None
        least = min(choice.step_ns for choice in more)
        if least > (1 - _LEAST_GAIN) * now.step_ns:
            return None
        keeping_up = (choice for choice in more if self.keeps_up(choice))
        enough = next(choice for choice in more if choice.step_ns <= (1 + _LEAST_GAIN) * least)
        return max(enough, next(keeping_up, enough), key=lambda choice: choice.workers)

    @property
    def slow(self) -> tuple[LoaderWorker, float] | None:
        """A worker that takes much longer than the others, and how many times as long."""
        if len(self.by_worker) < 2 or min(w.batches for w in self.by_worker) < _LEAST_BATCHES:
            return None
        ordered = sorted(self.by_worker, key=lambda worker: worker.batch_ns)
        usual = ordered[(len(ordered) - 1) // 2].batch_ns
        ratio = ordered[-1].batch_ns / max(usual, 1)
        return (ordered[-1], ratio) if ratio >= _UNEVEN else None

    @property
    def sending(self) -> float:
        """Share that sending and receiving have of all that is done for a batch, 0 to 1."""
        sent = sum(part.batch_ns for part in self.parts if part.name == SENDING)
        both = sent + self.receive_ns
        return both / max(self.batch_ns + self.receive_ns, 1)


class InputSetting(Struct, frozen=True):
    """Setting of one stage of an input pipeline."""

    stage: str
    """``map decode``, ``the pipeline``."""
    name: str
    """The library's name for it: ``num_parallel_calls``, ``worker_count``."""
    value: int | None
    """None where the library finds it by itself."""


class InputPipeline(Struct, frozen=True):
    """Input pipeline that is not torch's DataLoader, such as tf.data's, of a rank."""

    rank: int
    library: str
    """``tf.data``, ``Grain``, ``DALI``, ``torchdata.nodes``."""
    cores: int
    """Cores that the process may use."""
    settings: tuple[InputSetting, ...]
    """The last stage first, as far as stages are known."""
    queue_median: float | None
    """Batches that were ready when one was asked for; None where the library does not say."""
    queue_empty: float | None
    """Share of the asks that found none ready."""
    step_ns: int
    """Mean measured step; ``wait_ns`` is the part of it that waits for batches."""
    wait_ns: int

    @property
    def narrowest(self) -> InputSetting | None:
        """The setting by which fewest batches or samples are worked at at a time; None where the
        library finds all of them.
        """
        named = [row for row in self.settings if row.name == _AT_ONCE.get(self.library)]
        given = [row for row in named if row.value is not None]
        return min(given, key=lambda row: row.value or 0, default=None)

    @property
    def is_ahead(self) -> bool:
        """True where batches are made while others are trained on."""
        ahead = (row.value for row in self.settings if row.name == _AHEAD.get(self.library))
        if any(value is None or value > 0 for value in ahead):
            return True
        starts = (row.value for row in self.settings if row.name in ("worker_count", "num_workers"))
        return any(starts)

    def step_with(self, workers: int) -> int:
        """Return the step to expect if so many were worked at at a time, and ahead."""
        narrowest = self.narrowest
        now = 1 if narrowest is None else min(max(narrowest.value or 0, 1), self._most)
        making = self.step_ns if self.is_ahead else self.wait_ns
        return max(self.step_ns - self.wait_ns, making * now // workers)

    @property
    def enough(self) -> int:
        """The fewest that keep up, or make a step nearly as short as any number."""
        counts = range(1, self._most + 1)
        least = self.step_with(counts[-1])
        return next(count for count in counts if self.step_with(count) <= (1 + _LEAST_GAIN) * least)

    @property
    def _most(self) -> int:
        """The most at a time: TensorFlow has as many threads as cores, and DALI's compute; others
        may wait for disks, with more of them than cores.
        """
        return max(self.cores, 1 if self.library in ("tf.data", "DALI") else _MOST_GUESSED)


_AT_ONCE = {
    "tf.data": "num_parallel_calls",
    "Grain": "worker_count",
    "DALI": "num_threads",
    "torchdata.nodes": "num_workers",
}
_AHEAD = {
    "tf.data": "buffer_size",
    "DALI": "prefetch_queue_depth",
    "torchdata.nodes": "prefetch_factor",
}
_MOST_GUESSED = 8

_COMPUTES = 0.75
"""Processor time of a batch to all of its time, from which on it waits for next to nothing."""
_LEAST_BATCHES, _UNEVEN = 5, 1.5
"""Batches of each worker from which they are compared, and how many times as long is uneven."""
_NO_WAIT, _LITTLE_WAIT = 0.05, 0.15
"""Shares of a step that may wait where the workers keep up: beside receiving, and in all."""
_LEAST_GAIN = 0.05
"""Share of a step that more workers must gain to be worth it."""
