"""What the cards' own counters say went over NVLink and over PCIe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.gpus import Gpu
from gputrace.traces.nvml.model import Nvml, Samples

_WRAP: Final = 1 << 32
"""Where PCIe's counter begins anew."""


@dataclass(frozen=True)
class Sent:
    """Bytes that cards sent between their first and last sample that has the counters."""

    nvlink: int
    pcie: int
    """At least: the counter may have begun anew more than once from one sample to the next."""
    start: int
    """Nanoseconds on the trace's clock: the last of the cards' first samples."""
    end: int


def sent(nvml: Nvml, gpus: Sequence[Gpu]) -> Sent | None:
    """What these cards sent together; None where one does not say, or was reset."""
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
    by_nvlink, by_pcie = np.diff(nvlink[rows]), np.diff(pcie[rows])
    if (by_nvlink < 0).any() or (by_pcie < -_WRAP).any():
        return None
    by_pcie[by_pcie < 0] += _WRAP
    start, end = int(samples.time[rows[0]]), int(samples.time[rows[-1]])
    return Sent(int(by_nvlink.sum()), int(by_pcie.sum()), start, end)
