"""What a machine and an environment have of CUDA: a driver, and what else records it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_OTHER_TOOLS: Final = ("NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_PROXY")


def has_driver() -> bool:
    """Whether an NVIDIA kernel driver is there."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def other_recorder(inherited: Mapping[str, str], own: Path | None = None) -> str | None:
    """What else in an environment records CUDA, and what to do about it; None where nothing."""
    if any(variable in inherited for variable in _OTHER_TOOLS):
        return "this shell runs under nsys, and CUDA has room for one recorder; run without nsys"
    other = inherited.get("CUDA_INJECTION64_PATH")
    if other and Path(other) != own:
        return f"CUDA_INJECTION64_PATH names another tool ({other}); unset it to record"
    return None
