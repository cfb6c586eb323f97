"""Recording of the current process in stretches: the cells of a notebook."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gputrace import marks
from gputrace.collectors.armed import arming
from gputrace.collectors.backend import Merged, has_driver
from gputrace.collectors.backends.cupti import CUPTI, collector_library, cupti_folders
from gputrace.collectors.job_tasks import describe
from gputrace.collectors.nvml import Sampler
from gputrace.collectors.session import HOOKS, can_be_read_meanwhile, finish
from gputrace.collectors.spool import copy_since
from gputrace.errors import GputraceError, UsageError

_FOR_CUDA: Final = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
_LATE: Final = (
    "CUDA had been started before gputrace was loaded; restart the kernel and run `%load_ext "
    "gputrace` first, or record a script with `gputrace record`"
)
_NO_DRIVER: Final = "there is no NVIDIA driver on this machine"


class ProcessRecorder:
    """Recorder of this process from each `begin` to the following `end`.

    Attributes:
        obstacle: why the GPUs cannot be recorded in this process, and after a semicolon what to do;
            None if they can.
        notice: what is missing of the samples of the cards; known at the end of a stretch.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gputrace-"))
        atexit.register(_remove, self._folder, os.getpid())
        self._library = collector_library()
        self.obstacle: str | None = _NO_DRIVER
        if has_driver():
            self.obstacle = CUPTI.obstacle(os.environ) or (_LATE if has_started() else None)
        self.notice = ""
        self._sampler: Sampler | None = None
        self._cells = 0
        os.environ["GPUTRACE_DIR"] = str(self._folder)
        if self.obstacle is None:
            os.environ |= dict.fromkeys((*_FOR_CUDA, "GPUTRACE_LIBRARY"), str(self._library))
            os.environ |= {"GPUTRACE_CAPTURE": "manual"} | cupti_folders()
        self._recorder, self._steps = _install_hooks()
        self._forget()

    def begin(self, gpu: bool) -> None:
        """Begin a stretch; with ``gpu``, record the GPUs unless there is an obstacle."""
        self._asked, self.notice = gpu, ""
        self._gpu = gpu and self.obstacle is None
        self._cells += 1
        self._cell = self._folder / f"cell-{self._cells}"
        self._cell.mkdir()
        collector = self._collector()
        if collector is not None:
            collector.gputrace_write()
        self._recorder.write(time.time_ns())
        self._steps.restart()
        self._sizes = {path.name: path.stat().st_size for path in self._files()}
        if gpu and has_driver():
            self._sampler = Sampler()
            self._sampler.start(self._cell)
        self._began = time.time_ns(), time.monotonic_ns()
        if self._gpu and collector is not None:
            collector.gputrace_capture(1)
        elif self._gpu:
            # CUDA may be started meanwhile.
            os.environ["GPUTRACE_CAPTURE"] = "all"

    def end(self) -> None:
        """End the stretch once the GPUs have finished their work."""
        collector = self._collector()
        if self._gpu and collector is not None:
            finish_work()
            collector.gputrace_capture(0)
            collector.gputrace_write()
        elif self._gpu and has_started():
            self.obstacle = "CUDA was started without the collector; see `gputrace doctor`"
        if "GPUTRACE_CAPTURE" in os.environ:
            os.environ["GPUTRACE_CAPTURE"] = "manual"
        self._recorder.write(time.time_ns())
        self._forget()
        if self._sampler is not None:
            self._sampler.stop()
            self.notice = self._sampler.notice
            self._sampler = None

    def save(self, trace: Path) -> Merged:
        """Write the trace of the ended stretch; raise OSError if that fails."""
        from gputrace.collectors.finalize import merge  # It imports numpy.

        for path in self._files():
            copy_since(path, self._cell / path.name, self._sizes.get(path.name, 0), self._began)
        backend = "cupti" if self._gpu and self.obstacle is None else "host"
        meta = describe(["%%gputrace"], backend)
        if self._asked and self.obstacle:
            meta["no_gpu"] = self.obstacle
        merged = merge(self._cell, trace, meta)
        shutil.rmtree(self._cell, ignore_errors=True)
        return merged

    def _collector(self) -> Any:
        return loaded(self._library) if self._library and not self.obstacle else None

    def _files(self) -> list[Path]:
        pid = os.getpid()
        kinds = (f"*.{pid}.spool", f"*.{pid}-*.spool", f"*.{pid}.host", f"*.{pid}.*.host")
        return sorted(path for kind in kinds for path in self._folder.glob(kind))

    def _forget(self) -> None:
        """Unset the variables that CUDA has read by now, since children must not inherit them."""
        if self.obstacle is None and self._collector() is None:
            return
        for name in (*_FOR_CUDA, "GPUTRACE_CAPTURE", "GPUTRACE_DIR"):
            os.environ.pop(name, None)


def _install_hooks() -> tuple[Any, Any]:
    """Load the hooks into this process; return their recorder and the counter of steps."""
    sys.path.append(str(HOOKS))
    try:
        import_module("_gputrace_hooks.imports").install()
        loaded = [import_module(f"_gputrace_hooks.{name}") for name in ("recorder", "steps")]
    finally:
        sys.path.remove(str(HOOKS))
    marks.reload_hooks()
    return loaded[0], loaded[1]


def arm() -> str:
    """Have this program wait for ``gputrace on``, as one that ``gputrace arm`` has started.

    Call it before the program starts CUDA, best in its first lines. Processes that it starts are
    armed too. Does nothing in a program that is armed or recorded already; never raises.

    Returns:
        Why its GPUs, or all of it, cannot be recorded; empty if they can.
    """
    late = _LATE if has_driver() and has_started() else ""
    try:
        return late if _arm() else ""
    except (GputraceError, OSError, ImportError) as error:
        return str(error)


def environment() -> dict[str, str]:
    """Return the variables with which programs that another one starts belong to this one's job.

    They are recorded like this program, or armed with it, which it is from now on unless it was:
    ``RunConfig(worker_runtime_env={"env_vars": gputrace.environment()})`` for Ray's workers.
    gputrace must be installed there under the same path; programs on other machines can be armed,
    but are not recorded with this one.

    Raises MissingError or UsageError where programs cannot be armed here, OSError where the folder
    of armed programs cannot be made.
    """
    _arm()
    kept = ("PYTHONPATH", *_FOR_CUDA)
    named = os.environ.items()
    return {name: text for name, text in named if name in kept or name.startswith("GPUTRACE_")}


def _arm() -> bool:
    """Arm this program; return False if it is armed or recorded already."""
    if marks.recording_folder() is not None:
        return False
    os.environ |= arming(os.environ)
    _install_hooks()
    return True


def save_so_far(folder: Path, trace: Path) -> Merged:
    """Write the trace of a recording under way of which this process is a part.

    Other processes are in it but for their last second. Raises UsageError where the backend writes
    nothing before the program ends, OSError where the trace cannot be written.
    """
    if not can_be_read_meanwhile(folder):
        raise UsageError(f"{folder}: the recorder writes nothing before the program has ended")
    library = collector_library()
    if library is not None and (collector := loaded(library)) is not None:
        collector.gputrace_write()
    if (recorder := sys.modules.get("_gputrace_hooks.recorder")) is not None:
        recorder.write(time.time_ns())
    return finish(folder, trace, keep=True)


def _remove(folder: Path, owner: int) -> None:
    """Remove the folder at exit, unless in a forked child."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


_DRIVER: Final = "libcuda.so.1"


def loaded(library: str | Path) -> ctypes.CDLL | None:
    """Return a library that this process has loaded; None if it has not."""
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def has_started() -> bool:
    """Return whether this process has started CUDA (cuInit)."""
    driver, count = loaded(_DRIVER), ctypes.c_int()
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) == 0


def finish_work() -> None:
    """Wait until the GPUs have finished the work of this process.

    Covers the primary context of each device, which all frameworks use, and skips failed GPUs.
    """
    driver = loaded(_DRIVER)
    if driver is None:
        return
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    state, context = (ctypes.byref(flags), ctypes.byref(active)), ctypes.c_void_p()
    # A driver that lacks one of the functions is none of NVIDIA's.
    with suppress(AttributeError):
        driver.cuDeviceGetCount(ctypes.byref(count))
        for device in range(count.value):
            if driver.cuDevicePrimaryCtxGetState(device, *state) or not active.value:
                continue
            if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
                continue
            if not driver.cuCtxPushCurrent_v2(context):
                driver.cuCtxSynchronize()
                driver.cuCtxPopCurrent_v2(ctypes.byref(context))
            driver.cuDevicePrimaryCtxRelease_v2(device)
