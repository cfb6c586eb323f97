"""nsys reports (.nsys-rep, .qdrep), exported to SQLite by an nsys of this machine.

The export is kept in the user's cache folder, so that a report is converted once and nothing is
written beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Final

from gputrace.errors import InputError, MissingError
from gputrace.traces.sqlite import check_file

_SUFFIXES: Final = (".nsys-rep", ".qdrep")
_INSTALLED: Final = (
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-x64/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)
"""The last is the one inside Nsight Compute."""


def is_report(path: Path) -> bool:
    """Reports have no magic number in common; their suffix tells."""
    return path.suffix.lower() in _SUFFIXES


def export_report(path: Path) -> Path:
    """The report as an SQLite file in the cache.

    Raises MissingError where there is no nsys, InputError where nsys cannot export the report.
    """
    target = cache_folder() / "nsys" / f"{_key(path)}.sqlite"
    if target.exists():
        return target
    nsys = find_nsys()
    if nsys is None:
        raise MissingError(
            f"{path}: a report must be exported by nsys, and there is none here; install "
            f"Nsight Systems, or run `nsys export -t sqlite {path.name}` where it was recorded"
        )
    make_folder(target.parent)
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        run_export(nsys, path, unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def run_export(nsys: str, report: Path, target: Path) -> None:
    """Has nsys export a report to an SQLite file, which is whole afterwards.

    Raises MissingError where nsys cannot be run, InputError where it cannot export the report.
    """
    import subprocess

    command = [nsys, "export", "--type", "sqlite", "-o", str(target), str(report.absolute())]
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise MissingError(f"{nsys}: cannot be run ({error.strerror})") from error
    if run.returncode != 0 or not target.exists():
        raise InputError(report, _why(nsys, run.stdout + "\n" + run.stderr))
    _check(target, report)


def make_folder(folder: Path) -> None:
    """Makes a folder of the cache, for its owner alone; MissingError where it cannot be made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise MissingError(
            f"{folder}: cannot be made ({error.strerror}), and exports of reports are kept there; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def _check(exported: Path, report: Path) -> None:
    try:
        check_file(exported)
    except InputError as error:
        raise InputError(report, f"what nsys exported is broken: {error.problem}") from None


def cache_folder() -> Path:
    """gputrace's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputrace"


def find_nsys() -> str | None:
    """The nsys of GPUTRACE_NSYS, of the PATH, or the newest in the usual places."""
    return next(_candidates(), None)


def _candidates() -> Iterator[str]:
    if named := os.environ.get("GPUTRACE_NSYS"):
        yield named
    import shutil

    if found := shutil.which("nsys"):
        yield found
    for pattern in _INSTALLED:
        yield from sorted(glob(pattern), reverse=True)


def _key(path: Path) -> str:
    import hashlib

    status = path.stat()
    text = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _why(nsys: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    version = nsys_version(nsys)
    return (
        f"nsys {version} could not export it ({said or 'it said nothing'}); "
        "a report needs the nsys that recorded it, or a newer one"
    )


def nsys_version(nsys: str) -> str:
    """What `nsys --version` says, the number alone."""
    import subprocess

    run = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=False)
    words = run.stdout.split()
    return next((word for word in words if word[:1].isdigit()), "of unknown version")
