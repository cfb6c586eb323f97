"""Many mangled names at once, of which each may come to far more text than it has letters.

A part of a C++ name may name one before it twice, and the next that one: 260 letters come to eight
gigabytes, and the library that writes them cannot be stopped. So what might grow is written by a
process that has little memory and little time; where it fails, such names stay as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from typing import Final

from gputrace.traces.names import demangle

_FEW: Final = 8
"""References to earlier parts, each of which may double the text; each ends in an underscore."""
MEMORY: Final = 1 << 30
SECONDS: Final = 5
"""What the process gets; real names take microseconds."""
_TRIES: Final = 3
"""After so many names that were too much, the rest stay as they are."""

PROGRAM: Final = """
import json, resource, sys
sys.path[:] = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[3]),) * 2)
from gputrace.traces.names import bounded, demangle
for name in json.load(sys.stdin):
    print(json.dumps(bounded(demangle(name))), flush=True)
"""


def demangle_all(names: Collection[str]) -> dict[str, str]:
    """Each name in clear, or as it is where it has no such form, or too long a one."""
    growing = [name for name in names if name.startswith("_Z") and name.count("_") > _FEW]
    clear = {name: demangle(name) for name in set(names).difference(growing)}
    done: list[str] = []
    for _ in range(_TRIES):
        done += _apart(growing[len(done) :])
        # What it fails at stays as it is.
        done += growing[len(done) : len(done) + 1]
    return clear | dict(zip(growing, done + growing[len(done) :], strict=True))


def _apart(names: list[str]) -> list[str]:
    """The first of the names in clear, up to one that is too much."""
    if not names:
        return names
    limits = [json.dumps(sys.path), str(MEMORY), str(SECONDS)]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *limits],
        input=json.dumps(names),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return [json.loads(line) for line in ran.stdout.splitlines() if line.endswith('"')]
