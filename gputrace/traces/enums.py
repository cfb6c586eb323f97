"""The ENUM_ tables of nsys exports, of what is in a trace of ours.

Programs made for exports join them for labels: `nsys stats` refuses a file without
ENUM_CUDA_MEMCPY_OPER. Numbers, names and labels are those of export schemas 3.7 to 3.25.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_Names = Mapping[int, tuple[str, str]]

_COPIES: Final = (
    ("UNKNOWN", "Unknown"),
    ("HTOD", "Host-to-Device"),
    ("DTOH", "Device-to-Host"),
    ("HTOA", "Host-to-Array"),
    ("ATOH", "Array-to-Host"),
    ("ATOA", "Array-to-Array"),
    ("ATOD", "Array-to-Device"),
    ("DTOA", "Device-to-Array"),
    ("DTOD", "Device-to-Device"),
    ("HTOH", "Host-to-Host"),
    ("PTOP", "Peer-to-Peer"),
    ("UVM_HTOD", "Unified Host-to-Device"),
    ("UVM_DTOH", "Unified Device-to-Host"),
    ("UVM_DTOD", "Unified Device-to-Device"),
)
_MEMORY: Final = (
    "Pageable",
    "Pinned",
    "Device",
    "Array",
    "Managed",
    "Device Static",
    "Managed Static",
    "Unknown",
)
_LAUNCHES: Final = (
    ("UNKNOWN", "Unknown"),
    ("REGULAR", "Regular"),
    ("COOPERATIVE_SINGLE_DEVICE", "Coop Single Device"),
    ("COOPERATIVE_MULTI_DEVICE", "Coop Multi Device"),
)
_OVERHEADS: Final = (
    ("UNDEFINED", "Undefined"),
    ("UNKNOWN", "Unknown"),
    ("DRIVER_COMPILER", "Driver JIT compiler (CUDA)"),
    ("CUPTI_BUFFER_FLUSH", "Buffer flush (Profiler)"),
    ("CUPTI_INSTRUMENTATION", "Instrumentation (Profiler)"),
    ("CUPTI_RESOURCE", "Resource creation/destruction (Profiler)"),
    ("RUNTIME_TRIGGERED_MODULE_LOADING", "Runtime module loading (CUDA)"),
    ("LAZY_FUNCTION_LOADING", "Lazy function loading (CUDA)"),
    ("COMMAND_BUFFER_FULL", "Command buffer full (CUDA)"),
)

UNKNOWN_OVERHEAD: Final = (1, "Unknown")
OVERHEADS: Final = {
    1: (2, "Driver JIT compiler (CUDA)"),
    1 << 16: (3, "Buffer flush (Profiler)"),
    2 << 16: (4, "Instrumentation (Profiler)"),
    3 << 16: (5, "Resource creation/destruction (Profiler)"),
    4 << 16: (6, "Runtime module loading (CUDA)"),
    5 << 16: (7, "Lazy function loading (CUDA)"),
    6 << 16: (8, "Command buffer full (CUDA)"),
    7 << 16: (1, "Activity buffer request (Profiler)"),
}
"""Numbers and names that nsys gives to CUPTI's kinds of overhead."""

MARK: Final = 34
PUSH_POP: Final = 59
START_END: Final = 60
DOMAIN: Final = 75
"""What NVTX has of ENUM_NSYS_EVENT_TYPE."""

ENUMS: Final[Mapping[str, _Names]] = {
    "ENUM_CUDA_MEMCPY_OPER": {
        i: (f"CUDA_MEMCPY_KIND_{name}", label) for i, (name, label) in enumerate(_COPIES)
    },
    "ENUM_CUDA_MEM_KIND": {
        i: (f"CUDA_MEMOPR_MEMORY_KIND_{label.upper().replace(' ', '_')}", label)
        for i, label in enumerate(_MEMORY)
    },
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": {
        i: (f"CUDA_KERNEL_LAUNCH_TYPE_{name}", label) for i, (name, label) in enumerate(_LAUNCHES)
    },
    "ENUM_CUPTI_OVERHEAD_TYPE": {
        i: (f"OVERHEAD_{name}", label) for i, (name, label) in enumerate(_OVERHEADS)
    },
    "ENUM_NSYS_EVENT_CLASS": {
        0: ("TRACE_PROCESS_EVENT_CUDA_RUNTIME", "CUDA runtime"),
        1: ("TRACE_PROCESS_EVENT_CUDA_DRIVER", "CUDA driver"),
    },
    "ENUM_NSYS_EVENT_TYPE": {
        MARK: ("NvtxMark", "NvtxMark"),
        PUSH_POP: ("NvtxPushPopRange", "NvtxPushPopRange"),
        START_END: ("NvtxStartEndRange", "NvtxStartEndRange"),
        DOMAIN: ("NvtxDomainCreate", "NvtxDomainCreate"),
    },
}
"""By table, the name and the label of each number."""
