"""The list of backends, and which one records here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gputrace.collectors.backend import Backend, Plan
from gputrace.collectors.cuda import has_driver
from gputrace.collectors.cupti import CUPTI
from gputrace.collectors.host import HOST
from gputrace.collectors.nsys.backend import NSYS
from gputrace.collectors.nvprof.backend import NVPROF
from gputrace.errors import MissingError

BACKENDS: Final = {backend.name: backend for backend in (CUPTI, NSYS, NVPROF, HOST)}
"""By name, the best first."""


def choose(plan: Plan, inherited: Mapping[str, str]) -> Backend:
    """The backend that a plan means on this machine.

    Raises MissingError where the one asked for cannot record here, and where there is an NVIDIA
    driver but nothing to record its GPUs with.
    """
    if plan.backend == "auto" and not has_driver():
        return HOST
    backend = CUPTI if plan.backend == "auto" else BACKENDS[plan.backend]
    obstacle = backend.obstacle(inherited)
    if obstacle is not None:
        raise MissingError(obstacle)
    return backend
