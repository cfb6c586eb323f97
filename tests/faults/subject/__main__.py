"""Runs the behaviour that the command line names."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults.subject import children, ends, handlers, own, watched
from tests.faults.subject.common import BEHAVIOURS, open_ledger, say, start_gpu, the_ledger

_ALL = (children, ends, handlers, own, watched)
"""Each offers its behaviours when it is imported."""


def main() -> None:
    name, seconds = sys.argv[1], float(sys.argv[2])
    if name == "drops_privileges":
        Path.cwd().chmod(0o777)
    open_ledger()
    start_gpu()
    say("begins")
    if name not in ("handles", "saves"):
        the_ledger().begin()
    BEHAVIOURS[name](seconds)
    say("ends")
    the_ledger().end()


if __name__ == "__main__":
    main()
