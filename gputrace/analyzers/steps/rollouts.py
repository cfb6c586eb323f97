"""Generation, token by token, and reinforcement learning, which updates on what it generates.

Phases of its turns are known by ranges, as programs name them: verl (``gen``, ``old_log_prob``,
``update_actor``), OpenRLHF (``make_experience``, ``broadcast_to_vllm``, ``ppo_train``), NeMo-RL
(``policy_and_reference_logprobs``, ``policy_training``), slime (``actor_train``, ``train_wait``),
AReaL (``train.rollout``, ``train.ppo_update``). The ranges read so far do not say with which
weights answers were made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.grouping import median, times_by_process
from gputrace.analyzers.kernel_names import family_of
from gputrace.analyzers.operations import GpuOperations
from gputrace.model.events import Kind, Mask, distinct_ids, is_among
from gputrace.model.host import REFERENCE, REWARD, ROLLOUT, UPDATE, WEIGHT_SYNC
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

Rows = NDArray[np.intp]

_CACHES: Final = (
    r"(?i)kv_?cache|reshape_and_cache|paged_att|splitkv|batch_?decode|mmha|multihead_att"
)
"""Kernels that keep keys and values of earlier tokens, or read them for one more."""
_VECTOR: Final = r"(?i)gemv|mul_mat_vec|gemmSN"
_ATTENDS: Final = r"(?i)attn|attention|flash|softmax"
_IN_A_ROW: Final = 32
_ATTENTIONS: Final = 3
"""Products of a matrix and the vectors of a token or few; what attention is known by; and the
products in a row of which most are such, among so many that attend, where tokens are generated."""
_BETWEEN_UPDATES: Final = (
    r"(?i)(?<![a-z])(ppo|grpo|rlhf|rewards?)(?![a-z])"
    "|roll_?out|generate_sequences|make_experience"
)
BACKWARDS: Final = r"backward|bwd"
UPDATES: Final = r"optimi[sz]er[._ ]?step|optimi[sz]er$"
"""Ranges and phases of the host that go backward, and update."""
_PHASES: Final = {
    name: rf"(?i)(?<![a-z])({words})(?![a-z])"
    for name, words in (
        ("", "dump|save|load|checkpoint(ing)?|valid(ation)?|eval(uation)?|test(ing)?|prep|step"),
        (
            WEIGHT_SYNC,
            "(sync|update|send|broadcast|transfer)(_\\w*)?_weights?|weights?_?sync|broadcast_to_[a-z]+"
            "|refit|prepare_for_generation",
        ),
        (REWARD, "rewards?|verify|verifier|verification|scores?|scoring|rm_score"),
        (REFERENCE, "log_?p(rob)?s?|ref(erence)?|(compute_)?values"),
        (
            ROLLOUT,
            "roll_?outs?|generate(_sequences|_batch|_samples)?|(?<!_)gen(eration)?(?!_)"
            "|make_experience|train_wait",
        ),
        (UPDATE, r"update|(ppo_|actor_|critic_)?train(?!\.)|policy_training|learn"),
    )
}
"""Words in the ranges of a phase, the first of which to match counts; no phase has no name."""
FEWEST_TURNS: Final = 3
MOST_UPDATES: Final = 32
"""Turns to be sure of, and updates a turn: programs that train may generate now and then, too."""


def generates(trace: Trace, operations: GpuOperations, edges: Rows) -> Mask:
    """Return the stretches before each of some rows, from one to the next, in which tokens are
    generated.
    """
    events = operations.events
    kernels = events.kind == Kind.KERNEL
    names = trace.names(operations.kernel_names)

    def rows(ids: Iterable[int]) -> Rows:
        return np.flatnonzero(kernels & is_among(events.name, [*ids]))

    found = rows(trace.search(names, _CACHES))
    vectors = rows(trace.search(names, _VECTOR))
    others = (id for id, name in names.items() if family_of(name) == "gemm")
    products = np.union1d(vectors, rows(others)) if len(vectors) else vectors
    if len(products) >= _IN_A_ROW:
        of_tokens = np.isin(products, vectors)
        attends = np.searchsorted(rows(trace.search(names, _ATTENDS)), products)
        many = np.convolve(of_tokens, np.ones(_IN_A_ROW), "valid") > _IN_A_ROW / 2
        attended = attends[_IN_A_ROW - 1 :] - attends[: 1 - _IN_A_ROW] >= _ATTENTIONS
        found = np.union1d(found, products[_IN_A_ROW - 1 :][many & attended])
    return np.diff(np.searchsorted(found, edges, "right"), prepend=0) > 0


def phase_of(name: str) -> str:
    """Return the phase of a turn that a range of some name is; empty if it is none."""
    return next((phase for phase, words in _PHASES.items() if re.search(words, name)), "")


class NamedRanges(Struct, frozen=True):
    """Ranges and phases of the hosts that are named as what a training does.

    Attributes:
        reinforces: whether some are named as what reinforcement learning does between its updates.
        training: names of those that go backward, or update.
        rollouts: those that are named as generation, by process; of ranges, where it trains.
    """

    reinforces: bool
    training: tuple[str, ...]
    rollouts: Mapping[int, Intervals]


def read_named_ranges(trace: Trace) -> NamedRanges:
    """Read the ranges and phases of a trace that are named as what a training does."""
    kinds = [kind for kind in (Kind.RANGE, Kind.PHASE) if kind in trace.kinds]
    ids = distinct_ids(trace.events(kinds, ["name"]).name) if kinds else ()
    reinforces = trace.search(ids, _BETWEEN_UPDATES)
    training = trace.search(ids, f"(?i:{BACKWARDS}|{UPDATES})")
    texts = trace.search(ids, _PHASES[ROLLOUT])
    named = [id for id, text in texts.items() if phase_of(text) == ROLLOUT]
    rollouts = {}
    # Programs that only infer have ranges of such names, too.
    kinds = kinds if training or reinforces else [kind for kind in kinds if kind == Kind.PHASE]
    if named and kinds:
        events = trace.events(kinds, ("start", "end", "name", "process"))
        rollouts = times_by_process(events.select(np.isin(events.name, named)))
    return NamedRanges(bool(reinforces), tuple(training.values()), rollouts)


def rollouts_of(process: int, by_process: Mapping[int, Intervals]) -> Intervals:
    """Return the rollouts of a process; those of the others where it has none, since engines may be
    processes of their own.
    """
    if process in by_process:
        return by_process[process]
    return reduce(merge_touching, by_process.values(), EMPTY)


def join_updates(rolled: Intervals, start: Times, end: Times) -> tuple[Rows, Rows, Times] | None:
    """Return the first and last update of each turn of a process, and when it begins, of updates by
    its host's times; None if it does not roll out.
    """
    ended = np.searchsorted(rolled.end, end)
    begins = begin_turns(np.diff(ended, prepend=0) > 0)
    if begins is None:
        return None
    first = np.flatnonzero(begins)
    starts = start[first]
    # Before its first known update, the first turn may have made another after its rollout.
    starts[0] = min(int(starts[0]), int(rolled.start[ended[first[0]] - 1]))
    return first, np.append(first[1:] - 1, len(end) - 1), starts


def begin_turns(rolled: Mask) -> Mask | None:
    """Return which updates begin a turn, of those before which something was generated; None if
    too few do for generation to be a part of the loop.
    """
    first = np.flatnonzero(rolled)
    if len(first) < FEWEST_TURNS or median(np.diff(first)) > MOST_UPDATES:
        return None
    return rolled
