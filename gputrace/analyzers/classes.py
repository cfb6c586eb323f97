"""Which class of the partition each GPU operation belongs to."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.events import Events, Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Trace


class OperationClass(IntEnum):
    """Classes of busy GPU time, in order of precedence: of two at once, the first counts."""

    COMPUTE = 0
    COMMUNICATION = 1
    H2D = 2
    OTHER_COPY = 3
    MEMSET = 4


_CLASS_OF_KIND: Final = {
    Kind.KERNEL: OperationClass.COMPUTE,
    Kind.GRAPH: OperationClass.COMPUTE,
    Kind.COPY_H2D: OperationClass.H2D,
    Kind.COPY_D2H: OperationClass.OTHER_COPY,
    Kind.COPY_D2D: OperationClass.OTHER_COPY,
    Kind.COPY_PEER: OperationClass.COMMUNICATION,
    Kind.COPY_OTHER: OperationClass.OTHER_COPY,
    Kind.MEMSET: OperationClass.MEMSET,
}

_COMMUNICATION: Final = re.compile(
    r"""
    (?<![A-Za-z])                # at the start of a word, or after the length in a mangled name
    (?: nccl\w*Kernel            # NCCL and RCCL: ncclKernel_…, ncclDevKernel_…, ncclSymkDevKernel_…
      | rccl\w*Kernel
      | msccl(?:pp)?\w*          # Microsoft's collectives
      | nvshmem\w*
      | cross_device_reduce\w*   # vLLM's own
    )
    # PyTorch's symmetric memory, TensorRT-LLM:
    | all_?reduce | all_?gather | reduce_?scatter | all_?to_?all
    """,
    re.VERBOSE | re.IGNORECASE,
)


def is_communication(kernel: str) -> bool:
    """Whether a kernel's name, demangled or not, is that of a collective or a send/receive.

    Only the function's own name counts, not the types among its template arguments.
    """
    return _COMMUNICATION.search(kernel.partition("<")[0] or kernel) is not None


def classify(trace: Trace, events: Events) -> NDArray[np.int8]:
    """The `OperationClass` of each GPU operation; needs the columns ``kind`` and ``name``."""
    of_kind = np.zeros(max(_CLASS_OF_KIND) + 1, np.int8)
    for kind, operation_class in _CLASS_OF_KIND.items():
        of_kind[kind] = operation_class
    classes = of_kind[events.kind]
    collectives = communication_names(trace, events.name[events.kind == Kind.KERNEL])
    if collectives.size:
        classes[np.isin(events.name, collectives) & (events.kind == Kind.KERNEL)] = (
            OperationClass.COMMUNICATION
        )
    return classes


def communication_names(trace: Trace, kernel_names: NDArray[np.int32]) -> NDArray[np.int32]:
    """The name ids, of those given, whose kernels communicate."""
    names = trace.names(distinct_ids(kernel_names))
    return np.array([id for id, text in names.items() if is_communication(text)], np.int32)
