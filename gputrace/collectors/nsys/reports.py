"""The report that nsys left in a folder, made of its raw recording where nsys could not."""

from __future__ import annotations

import re
from glob import glob
from pathlib import Path
from typing import Final

from gputrace.collectors.program.tool import ask
from gputrace.errors import MissingError

_IMPORTERS: Final = (
    "../host-linux-*/QdstrmImporter",
    "../linux-desktop-*/QdstrmImporter",
    "../../host-linux-*/QdstrmImporter",
    "../../../nsight-systems/host-linux-*/QdstrmImporter",
)
"""Where the importer lies, from the folder of nsys itself; the third is Debian's."""
_PACKAGES: Final = {"libdw.so.1": "libdw1", "libelf.so.1": "libelf1", "libssh.so.4": "libssh-4"}
"""Debian's packages of libraries that importers have been seen to lack."""


def find_report(folder: Path, nsys: str | None) -> Path | None:
    """The report in a folder; None where there is none, nor anything to make one of.

    Raises MissingError where there is a raw recording that cannot be imported here.
    """
    reports = [path for path in _sorted(folder) if path.suffix in (".nsys-rep", ".qdrep")]
    if reports:
        return reports[0]
    raw = [path for path in _sorted(folder) if path.suffix == ".qdstrm"]
    return _imported(raw[0], nsys) if raw else None


def _sorted(folder: Path) -> list[Path]:
    """Files, the largest first."""
    return sorted(
        (path for path in folder.iterdir() if path.is_file()), key=lambda p: -p.stat().st_size
    )


def find_importer(nsys: str) -> str | None:
    """The importer that belongs to an nsys."""
    here = Path(nsys).resolve().parent
    found = (path for pattern in _IMPORTERS for path in sorted(glob(str(here / pattern))))
    return next(found, None)


def importer_obstacle(nsys: str) -> str | None:
    """Why the importer of an nsys cannot run here, and what to do; None where it can."""
    importer = find_importer(nsys)
    if importer is None:
        return "its QdstrmImporter is not beside it; install all of Nsight Systems"
    code, said = ask([importer, "--version"])
    return _why_not_imported(said) if code else None


def _imported(raw: Path, nsys: str | None) -> Path:
    importer = find_importer(nsys) if nsys is not None else None
    if importer is None:
        raise MissingError(
            f"nsys left a raw recording ({raw.name}), and its QdstrmImporter is not beside it; "
            "install all of Nsight Systems"
        )
    report = raw.with_suffix(".nsys-rep")
    code, said = ask([importer, "-i", str(raw), "-o", str(report)])
    if code or not report.exists():
        report.unlink(missing_ok=True)
        raise MissingError(_why_not_imported(said))
    return report


def _why_not_imported(output: str) -> str:
    missing = re.search(r"loading shared libraries: (\S+): cannot open", output)
    if missing:
        library = missing[1]
        package = f" (package {_PACKAGES[library]})" if library in _PACKAGES else ""
        return f"nsys's QdstrmImporter needs {library}: install it{package}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1] if lines else "it said nothing"
    return f"nsys's QdstrmImporter could not read the raw recording: {said}"
