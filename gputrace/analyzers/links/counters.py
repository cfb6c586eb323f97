"""What the cards' own counters say went over NVLink and over PCIe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gputrace.analyzers.gpus import Gpu
from gputrace.traces.nvml.model import Nvml, Samples


@dataclass(frozen=True)
class Sent:
    """Bytes that cards sent between their first and last sample that has the counters."""

    nvlink: int
    pcie: int
    start: int
    """Nanoseconds on the trace's clock: the last of the cards' first samples."""
    end: int


def sent(nvml: Nvml, gpus: Sequence[Gpu]) -> Sent | None:
    """What these cards sent together; None where one does not say, or a counter began anew."""
    found = [_sent(nvml.samples.of(gpu.host, gpu.gpu)) for gpu in gpus if gpu.gpu_known]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(gpus):
        return None
    return Sent(
        sum(one.nvlink for one in known),
        sum(one.pcie for one in known),
        max(one.start for one in known),
        min(one.end for one in known),
    )


def _sent(samples: Samples) -> Sent | None:
    nvlink, pcie = samples["nvlinkTx"], samples["pcieTx"]
    rows = np.flatnonzero(~np.isnan(nvlink) & ~np.isnan(pcie))
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    if (np.diff(nvlink[rows]) < 0).any() or (np.diff(pcie[rows]) < 0).any():
        return None
    start, end = int(samples.time[first]), int(samples.time[last])
    return Sent(int(nvlink[last] - nvlink[first]), int(pcie[last] - pcie[first]), start, end)
