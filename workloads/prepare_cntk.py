"""Installs CNTK, and has it find Open MPI 4: `gputrace bench --install` calls this.

    python prepare_cntk.py WHEELS REQUIREMENT...

CNTK 2.7 wants the libraries of Open MPI 1.10, under the old names. Those of Open MPI 4 serve too;
links beside CNTK's libraries are found before all else.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

OLD_NAMES = {"libmpi.so.40": "libmpi.so.12", "libmpi_cxx.so.40": "libmpi_cxx.so.1"}


def path_of(name):
    """Where the loader finds a library."""
    ctypes.CDLL(name)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return min(line.split()[-1] for line in maps if name.split(".so")[0] + ".so" in line)


def main(_wheels, *requirements):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.check_call([*pip, "install", "--no-compile", *requirements])
    (package,) = Path(sys.prefix).glob("lib/python*/site-packages/cntk/libs")
    for name, old in OLD_NAMES.items():
        link = package / old
        if link.is_symlink():
            link.unlink()
        link.symlink_to(path_of(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
