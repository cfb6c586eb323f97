"""Whether we run in a container, and how such a one gets the host's GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_FILES: Final = {"run/.containerenv": "Podman", ".dockerenv": "Docker"}
_CGROUPS: Final = {
    "kubepods": "Kubernetes",
    "libpod": "Podman",
    "docker": "Docker",
    "containerd": "containerd",
    "lxc": "LXC",
}
_HOW: Final = {
    "Docker": "start it with --gpus all, which needs the NVIDIA Container Toolkit on the host",
    "Podman": "start it with --device nvidia.com/gpu=all, which needs the NVIDIA Container Toolkit",
    "Kubernetes": "ask for nvidia.com/gpu in the limits of the pod",
    "Apptainer": "start it with --nv",
}
_NEEDED: Final = {"compute": "recording", "utility": "clocks and power"}
"""Capabilities of the NVIDIA Container Toolkit, and what does not work without each."""


def container(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> str | None:
    """What runs the container that we are in, or None; by the marks that each leaves."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    if "APPTAINER_CONTAINER" in environment or "SINGULARITY_CONTAINER" in environment:
        return "Apptainer"
    for file, name in _FILES.items():
        if (root / file).exists():
            return name
    try:
        groups = (root / "proc/1/cgroup").read_text()
    except OSError:
        return None
    return next((name for mark, name in _CGROUPS.items() if mark in groups), None)


def how_to_get_gpus(name: str) -> str:
    """What to do where the driver does not show in such a container."""
    return _HOW.get(name, "give it the devices /dev/nvidia* and the driver's libraries of the host")


def missing_capabilities(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What NVIDIA_DRIVER_CAPABILITIES leaves out that we need, and what for."""
    given = environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if not given or "all" in given.split(","):
        return {}
    return {name: what for name, what in _NEEDED.items() if name not in given.split(",")}
