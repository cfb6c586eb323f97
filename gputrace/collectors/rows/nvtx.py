"""NVTX ranges, marks and domains of one process, as nsys has them in NVTX_EVENTS.

A moment has no end; a range that another thread ended names that one; a domain's creation has the
domain's name in place, and its domainId is that of the ranges within.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.files.records import Records
from gputrace.collectors.files.spool import Spool
from gputrace.collectors.rows.clock import global_tids
from gputrace.traces.enums import DOMAIN, MARK, PUSH_POP, START_END

_TYPES: Final = np.array([PUSH_POP, MARK, START_END, DOMAIN])
_MARK, _START_END, DOMAIN_CREATED = 1, 2, 3
"""Of the kinds that native/spool.h counts."""


def nvtx_columns(
    spool: Spool, rows: Records, span: Mapping[str, Any], texts: Sequence[int]
) -> dict[str, Any]:
    """Columns of NVTX_EVENTS; ``texts`` are the StringIds of the rows' names."""
    kinds = rows["kind"]
    threads = global_tids(spool.pid, rows["thread"])
    enders = global_tids(spool.pid, rows["end_thread"])
    elsewhere = (kinds == _START_END) & (enders != threads)
    domains = zip(rows["domain"].tolist(), kinds == DOMAIN_CREATED, strict=True)
    return {
        "start": span["start"],
        "end": _where((kinds != _MARK) & (kinds != DOMAIN_CREATED), span["end"]),
        "eventType": _TYPES.take(kinds.astype(np.int64), mode="clip"),
        "rangeId": _where(kinds == _START_END, rows["range"]),
        "text": [spool.name(domain) if created else None for domain, created in domains],
        "globalTid": threads,
        "endGlobalTid": _where(elsewhere, enders),
        "textId": _where(kinds != DOMAIN_CREATED, np.array(texts, np.int64)),
        "domainId": rows["domain"],
    }


def _where(there: NDArray[np.bool_], values: NDArray[Any]) -> list[Any]:
    """The values, and None where there is none."""
    return [value if here else None for here, value in zip(there, values.tolist(), strict=True)]
