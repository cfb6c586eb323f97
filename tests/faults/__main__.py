"""`python -m tests.faults [OPTIONS]`: injects faults into recordings, and prints the table."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Final

from gputrace.collectors.backends.cupti import collector_library
from tests.faults.building import build
from tests.faults.catalogue import KINDS, plan
from tests.faults.checking import run_fault
from tests.faults.model import Outcome
from tests.faults.summary import summarize, table, total, write_into

_NEW_NAMESPACE: Final = 0x20000
"""CLONE_NEWNS: file systems that are mounted by us are seen by us alone, and go with us."""
_PRIVATE: Final = 0x44000
"""MS_REC | MS_PRIVATE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; 1 where anything was lost or changed."""
    asked = _parser().parse_args(arguments)
    if collector_library() is None or shutil.which("cc") is None:
        print("needs the collector and a C compiler", file=sys.stderr)
        return 4
    _heed_signals()
    _leave_mounts()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        root = Path(asked.keep or folder)
        machine = root / "machine"
        machine.mkdir(parents=True)
        build(machine)
        outcomes = _run_all(asked, machine, root)
    rows = summarize(KINDS, outcomes)
    print(table(rows), total(rows), sep="\n\n")
    if asked.docs:
        write_into(Path(asked.docs), rows)
    return int(not all(outcome.is_good for outcome in outcomes))


def _run_all(asked: argparse.Namespace, machine: Path, root: Path) -> list[Outcome]:
    planned = list(plan(asked.seed, asked.only, asked.share))
    if asked.armed:
        planned = [(k, n, armed) for k, n, fault in planned if (armed := fault.arm())]
    # So that those that wait and those that work come mixed, and a run cut short has some of all.
    random.Random(asked.seed).shuffle(planned)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(asked.at_once) as pool:
        futures = [
            pool.submit(run_fault, kind.name, number, fault, machine, root / f"{place}")
            for place, (kind, number, fault) in enumerate(planned)
        ]
        for future in as_completed(futures):
            outcomes.append(future.result())
            _tell(outcomes[-1])
            if len(outcomes) % 50 == 0 or len(outcomes) == len(planned):
                print(f"{len(outcomes)} of {len(planned)}", file=sys.stderr)
                _write(asked, outcomes)
    return outcomes


def _tell(outcome: Outcome) -> None:
    if not outcome.is_good:
        print(f"{outcome.kind}, number {outcome.number}: {outcome.fault}", file=sys.stderr)
        for line in outcome.changed + outcome.broken:
            print(f"    {line[:1500]}", file=sys.stderr)


def _write(asked: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    if asked.json:
        bad = [asdict(outcome) for outcome in outcomes if not outcome.is_good]
        told = {"seed": asked.seed, "kinds": summarize(KINDS, outcomes), "not_good": bad}
        Path(asked.json).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _heed_signals() -> None:
    """Restore signals that a background job ignores, as its programs would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _leave_mounts() -> None:
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0 and not libc.unshare(_NEW_NAMESPACE):
        libc.mount(None, b"/", None, _PRIVATE, None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name or group has this in it")
    parser.add_argument("--share", type=float, default=1.0, help="of the times of each kind")
    parser.add_argument(
        "--armed", action="store_true", help="arm the programs, and open windows in them all along"
    )
    parser.add_argument("--at-once", type=int, default=8, help="how many run at the same time")
    parser.add_argument("--json", help="where to write what came of it")
    parser.add_argument("--docs", help="a page whose tables are to be these")
    parser.add_argument("--keep", help="a folder in which those that went wrong stay")
    return parser


if __name__ == "__main__":
    sys.exit(main())
