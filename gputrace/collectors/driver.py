"""The CUDA driver and the collector, as far as they are loaded in this process."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_DRIVER: Final = "libcuda.so.1"


def loaded(library: str | Path) -> ctypes.CDLL | None:
    """A library that this process has loaded; None where it has not."""
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def has_started() -> bool:
    """Whether this process has started CUDA (cuInit)."""
    driver = loaded(_DRIVER)
    if driver is None:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) == 0)


def finish_work() -> None:
    """Waits until the GPUs have done what this process gave them.

    That is what is in the primary context of each device, which all frameworks use. A GPU in an
    error has nothing left to do.
    """
    driver = loaded(_DRIVER)
    if driver is None:
        return
    count = ctypes.c_int()
    # A driver that lacks one of the functions is none of NVIDIA's.
    with suppress(AttributeError):
        driver.cuDeviceGetCount(ctypes.byref(count))
        for device in range(count.value):
            _finish_device(driver, device)


def _finish_device(driver: ctypes.CDLL, device: int) -> None:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    asked = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    context = ctypes.c_void_p()
    if asked or not active.value or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return
    if not driver.cuCtxPushCurrent_v2(context):
        driver.cuCtxSynchronize()
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    driver.cuDevicePrimaryCtxRelease_v2(device)
