"""Faults of the driver: CUPTI and NVML that fail, crash, hang or are taken."""

from __future__ import annotations

import random
from typing import Final

from tests.faults.model import Fault, Kind, May

_CUPTI, _NVML = "The driver, as CUPTI has it", "The driver, as NVML has it"
_FUNCTIONS: Final = (
    *("GetVersion", "Subscribe", "Unsubscribe", "EnableCallback", "EnableDomain", "Finalize"),
    *("ActivityRegisterCallbacks", "ActivityEnable", "ActivityDisable"),
    *("ActivityEnableDriverApi", "ActivityEnableRuntimeApi", "ActivityFlushAll"),
    *("ActivityGetNextRecord", "ActivityGetNumDroppedRecords"),
    *("ActivityRegisterTimestampCallback", "SetThreadIdType", "GetCallbackName"),
)
_CODES: Final = (1, 2, 3, 4, 8, 9, 11, 15, 16, 19, 26, 28, 34, 35, 38, 39, 41, 999)
"""Of CUptiResult."""
_NVML_CODES: Final = (*range(1, 30), 999)
"""All of nvmlReturn_t."""
_ASKED: Final = (
    *("DeviceGetHandleByIndex_v2", "DeviceGetName", "DeviceGetUUID", "DeviceGetPciInfo_v3"),
    *("DeviceGetMemoryInfo_v2", "DeviceGetMemoryInfo", "DeviceGetClockInfo"),
    *("DeviceGetPowerUsage", "DeviceGetTemperature", "DeviceGetUtilizationRates"),
    *("DeviceGetSamples", "DeviceGetFieldValues", "DeviceGetCurrentClocksEventReasons"),
    *("DeviceGetTopologyCommonAncestor", "DeviceGetP2PStatus", "DeviceGetNvLinkState", "*"),
)


def _seconds(choose: random.Random) -> str:
    return f"{choose.uniform(0.3, 1.2):.2f}"


def _one_fails(choose: random.Random) -> Fault:
    name, code = f"cupti{choose.choice(_FUNCTIONS)}", choose.choice(_CODES)
    env = {
        "GPUTRACE_CUPTI": "MACHINE/broken_cupti.so",
        "FAULT_CUPTI": f"{name} {code} {choose.choice((1, 1, 2, 5))}",
    }
    return Fault(("plain", _seconds(choose)), env, may_lack=May.GPU)


def _goes_away(choose: random.Random) -> Fault:
    """From some call on, nothing of it works: its records are lost, the steps are not."""
    env = {
        "GPUTRACE_CUPTI": "MACHINE/broken_cupti.so",
        "FAULT_CUPTI": f"* {choose.choice(_CODES)} {choose.randint(1, 300)}",
    }
    return Fault(("plain", _seconds(choose)), env, may_lack=May.GPU)


def _is_not_there(choose: random.Random) -> Fault:
    library = choose.choice(("/nowhere/libcupti.so", "MACHINE/libcuda.so.1", "/dev/null"))
    return Fault(("plain", _seconds(choose)), {"GPUTRACE_CUPTI": library}, may_lack=May.GPU)


def _is_taken(choose: random.Random) -> Fault:
    env = {"FAKE_CUPTI_TAKEN": "1"}
    return Fault(("plain", _seconds(choose)), env, may_lack=May.GPU)


def _drops(choose: random.Random) -> Fault:
    env = {"FAKE_CUPTI_DROPPED": str(choose.randint(1, 1 << 40))}
    return Fault(("plain", _seconds(choose)), env)


def _nvml(script: str, choose: random.Random) -> Fault:
    return Fault(("plain", _seconds(choose)), nvml=script)


def _nvml_refuses(choose: random.Random) -> Fault:
    return _nvml(f"init {choose.choice(_NVML_CODES)}\n", choose)


def _nvml_fails(choose: random.Random) -> Fault:
    lines = [
        f"fail {choose.choice(_ASKED)} {choose.choice('01*')} {choose.choice(_NVML_CODES)} "
        f"{choose.choice((1, 1, 2, 3))}\n"
        for _ in range(choose.randint(1, 3))
    ]
    return _nvml("".join(lines), choose)


def _nvml_crashes(choose: random.Random) -> Fault:
    signal = choose.choice((4, 6, 7, 8, 9, 11, 15))
    return _nvml(f"fail {choose.choice(_ASKED)} * -{signal} {choose.choice((1, 2, 3))}\n", choose)


def _nvml_is_slow(choose: random.Random) -> Fault:
    slow = choose.randint(10_000, 1_500_000)
    return _nvml(f"slow {choose.choice(_ASKED[:-1])} {slow}\n", choose)


def _card_is_lost(choose: random.Random) -> Fault:
    return _nvml(f"lost {choose.choice('01')} {choose.randint(1, 4)}\n", choose)


KINDS: Final = (
    Kind(
        _CUPTI, "one of its 17 functions gives one of 18 errors, from some call on", 60, _one_fails
    ),
    Kind(_CUPTI, "all of them do, from some call on", 40, _goes_away),
    Kind(_CUPTI, "libcupti is not there, or is something else", 10, _is_not_there),
    Kind(_CUPTI, "another tool holds it", 10, _is_taken),
    Kind(_CUPTI, "it says that it dropped records", 5, _drops),
    Kind(_NVML, "nvmlInit gives one of the 30 errors of nvmlReturn_t", 30, _nvml_refuses),
    Kind(_NVML, "one to three functions give one of these, from some call on", 60, _nvml_fails),
    Kind(_NVML, "the library ends its process by one of 7 signals", 20, _nvml_crashes),
    Kind(_NVML, "a function takes up to 1.5 s", 10, _nvml_is_slow),
    Kind(_NVML, "a card is lost", 10, _card_is_lost),
)
