"""Findings about modes for debugging that were left on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from gputrace.analyzers.cuda_api_calls import NOBODY
from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.host_state import read_host_state
from gputrace.analyzers.ledger.causes import Host
from gputrace.model.events import Kind
from gputrace.model.intervals import EMPTY, Intervals
from gputrace.model.results import Finding

_LONG_NS: Final = 20_000
"""Duration of a kernel from which its launch returns before it ends, unless it waits for it."""
_FEWEST, _MOST = 10, 1_000
"""Number of such kernels that are looked at."""
_WAITED_FOR: Final = 0.9
"""Share of them that launches wait for: at most an eighth in 146 recordings without the mode."""


def claim_debugging(host: Host) -> Intervals:
    """Prove that a mode for debugging holds the host up at each launch: launches return when their
    kernels have ended, or autograd looks for anomalies, which is recorded.
    """
    if host.process in host.state.anomaly_modes or _launches_wait(host):
        return Intervals(*np.array(host.window, np.int64)[:, None])
    return EMPTY


def _launches_wait(host: Host) -> bool:
    """Return whether launches return when their kernels have ended."""
    operations, calls = host.view.operations, host.view.calls
    if calls is None:
        return False
    is_long = operations.end - operations.start >= _LONG_NS
    rows = np.flatnonzero(is_long & (operations.events.kind == Kind.KERNEL))[:_MOST]
    issued_by = calls.issued_by(operations.events.having("process", "correlation").select(rows))
    known = issued_by != NOBODY
    waited = calls.end[issued_by[known]] >= operations.end[rows[known]]
    return len(waited) >= _FEWEST and bool(waited.mean() >= _WAITED_FOR)


def debugging(facts: Facts) -> Iterator[Finding]:
    """A mode for debugging was left on: launches return when their kernels have ended
    (`CUDA_LAUNCH_BLOCKING=1`), or PyTorch looks for anomalies in gradients.

    Cost: idle time before launches and in synchronising calls that no other cause is proven for.

    Wrong if: the step is no shorter without the mode.
    """
    finds_anomalies = bool(facts.per_gpu.whole.once(read_host_state).anomaly_modes)
    yield from facts.costly(
        "debugging",
        "{gpus} {cost} while autograd looks for anomalies (detect_anomaly)"
        if finds_anomalies
        else "{gpus} {cost} because each launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1)",
        "train without torch.autograd.set_detect_anomaly(True) and detect_anomaly(): they check "
        "each gradient and keep a traceback of each operation"
        if finds_anomalies
        else "unset CUDA_LAUNCH_BLOCKING, which is for finding a kernel that fails",
    )
