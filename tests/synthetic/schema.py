"""The tables of an nsys 2025.3 export (schema 3.20.3), and the rows that are always the same."""

from __future__ import annotations

# Columns by table, as exported: `!` is NOT NULL, `#` the primary key, `:` a type but INTEGER.
_COLUMNS = {
    "StringIds": """
        id# value!:TEXT
    """,
    "ANALYSIS_DETAILS": """
        globalVid! duration! startTime! stopTime!
    """,
    "TARGET_INFO_SESSION_START_TIME": """
        utcEpochNs utcTime:TEXT localTime:TEXT
    """,
    "PROCESSES": """
        globalPid pid name:TEXT
    """,
    "ThreadNames": """
        nameId! priority globalTid
    """,
    "TARGET_INFO_GPU": """
        vmId! id! name:TEXT busLocation:TEXT isDiscrete l2CacheSize totalMemory memoryBandwidth
        clockRate smCount pwGpuId uuid:TEXT luid chipName:TEXT cuDevice ctxswDevPath:TEXT
        ctrlDevPath:TEXT revision nodeMask constantMemory maxIPC maxRegistersPerBlock
        maxShmemPerBlock maxShmemPerBlockOptin maxShmemPerSm maxRegistersPerSm threadsPerWarp
        asyncEngines maxWarpsPerSm maxBlocksPerSm maxThreadsPerBlock maxBlockDimX maxBlockDimY
        maxBlockDimZ maxGridDimX maxGridDimY maxGridDimZ computeMajor computeMinor smMajor
        smMinor
    """,
    "TARGET_INFO_CUDA_DEVICE": """
        gpuId cudaId! pid!
    """,
    "CUPTI_ACTIVITY_KIND_KERNEL": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid
        demangledName! shortName! mangledName launchType cacheConfig registersPerThread! gridX!
        gridY! gridZ! blockX! blockY! blockZ! staticSharedMemory! dynamicSharedMemory!
        localMemoryPerThread! localMemoryTotal! gridId! sharedMemoryExecuted graphNodeId
        sharedMemoryLimitConfig
    """,
    "CUPTI_ACTIVITY_KIND_MEMCPY": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid bytes!
        copyKind! deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId
        dstContextId migrationCause graphNodeId virtualAddress copyCount
    """,
    "CUPTI_ACTIVITY_KIND_MEMSET": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid value!
        bytes! graphNodeId memKind
    """,
    "CUPTI_ACTIVITY_KIND_RUNTIME": """
        start! end! eventClass! globalTid correlationId nameId! returnValue! callchainId
    """,
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid
        deprecatedSyncType syncType! eventId! eventSyncId
    """,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": """
        start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid
        graphId! graphExecId!
    """,
    "OSRT_API": """
        start! end! eventClass! globalTid nameId! returnValue! nestingLevel callchainId!
    """,
    "NVTX_EVENTS": """
        start! end eventType! rangeId category color text:TEXT globalTid endGlobalTid textId
        domainId uint64Value int64Value doubleValue:REAL uint32Value int32Value floatValue:REAL
        jsonTextId jsonText:TEXT binaryData:TEXT
    """,
    "META_DATA_EXPORT": """
        name!:TEXT value:TEXT
    """,
}

_ENUMS = {
    "ENUM_NSYS_EVENT_CLASS": (
        (0, "TRACE_PROCESS_EVENT_CUDA_RUNTIME", "CUDA runtime"),
        (1, "TRACE_PROCESS_EVENT_CUDA_DRIVER", "CUDA driver"),
        (27, "TRACE_PROCESS_EVENT_OS_RUNTIME", "OSRT runtime"),
    ),
    "ENUM_NSYS_EVENT_TYPE": (
        (34, "NvtxMark", "NvtxMark"),
        (59, "NvtxPushPopRange", "NvtxPushPopRange"),
        (60, "NvtxStartEndRange", "NvtxStartEndRange"),
        (75, "NvtxDomainCreate", "NvtxDomainCreate"),
    ),
    "ENUM_CUDA_MEMCPY_OPER": (
        (1, "CUDA_MEMCPY_KIND_HTOD", "Host-to-Device"),
        (2, "CUDA_MEMCPY_KIND_DTOH", "Device-to-Host"),
        (8, "CUDA_MEMCPY_KIND_DTOD", "Device-to-Device"),
        (10, "CUDA_MEMCPY_KIND_PTOP", "Peer-to-Peer"),
    ),
    "ENUM_CUDA_MEM_KIND": (
        (0, "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE", "Pageable"),
        (1, "CUDA_MEMOPR_MEMORY_KIND_PINNED", "Pinned"),
        (2, "CUDA_MEMOPR_MEMORY_KIND_DEVICE", "Device"),
    ),
    "ENUM_CUPTI_SYNC_TYPE": (
        (1, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE", "Event sync"),
        (2, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT", "Stream wait sync"),
        (3, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE", "Stream sync"),
        (4, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE", "Context sync"),
    ),
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": (
        (0, "CUDA_KERNEL_LAUNCH_TYPE_UNKNOWN", "Unknown"),
        (1, "CUDA_KERNEL_LAUNCH_TYPE_REGULAR", "Regular"),
    ),
}

# What an H200 says of itself.
H200: dict[str, int | str] = {
    "name": "NVIDIA H200",
    "isDiscrete": 1,
    "l2CacheSize": 62914560,
    "totalMemory": 150109880320,
    "memoryBandwidth": 4814304000000,
    "clockRate": 1980000000,
    "smCount": 132,
    "luid": 0,
    "chipName": "GH100",
    "ctxswDevPath": "",
    "ctrlDevPath": "",
    "revision": 161,
    "nodeMask": 0,
    "constantMemory": 65536,
    "maxIPC": 0,
    "maxRegistersPerBlock": 65536,
    "maxShmemPerBlock": 49152,
    "maxShmemPerBlockOptin": 232448,
    "maxShmemPerSm": 233472,
    "maxRegistersPerSm": 65536,
    "threadsPerWarp": 32,
    "asyncEngines": 3,
    "maxWarpsPerSm": 64,
    "maxBlocksPerSm": 32,
    "maxThreadsPerBlock": 1024,
    "maxBlockDimX": 1024,
    "maxBlockDimY": 1024,
    "maxBlockDimZ": 64,
    "maxGridDimX": 2147483647,
    "maxGridDimY": 65535,
    "maxGridDimZ": 65535,
    "computeMajor": 9,
    "computeMinor": 0,
    "smMajor": 9,
    "smMinor": 0,
}


def columns(table: str) -> list[str]:
    """The names of a table's columns."""
    return [text.split(":")[0].rstrip("!#") for text in _COLUMNS[table].split()]


def create(table: str) -> str:
    """The statement that makes a table, laid out as nsys does."""
    lines = []
    for text in _COLUMNS[table].split():
        name, _, kind = text.partition(":")
        bare = name.rstrip("!#")
        rest = "   NOT NULL" if name != bare else ""
        rest += "   PRIMARY KEY" if name.endswith("#") else ""
        lines.append(f"    {bare:<28}{kind or 'INTEGER'}{rest}")
    return f"CREATE TABLE {table} (\n" + ",\n".join(lines) + "\n)"


def enums() -> dict[str, tuple[tuple[int, str, str], ...]]:
    """(id, name, label) by enum table."""
    return dict(_ENUMS)


def create_enum(table: str) -> str:
    return f"CREATE TABLE {table} (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT)"
