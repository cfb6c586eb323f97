"""Checks that the program was as without gputrace, and its trace whole."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

from tests.faults import ledger
from tests.faults.model import Fault, Outcome
from tests.faults.running import Life, Ran
from tests.faults.tracing import find_trace


def run_fault(kind: str, number: int, fault: Fault, machine: Path, folder: Path) -> Outcome:
    """Runs one fault with and without a recorder in a folder, and says what came of it.

    The folder stays where anything is wrong.
    """
    outcome = Outcome(kind, number, repr(fault))
    lives = [Life(fault, machine, folder / name, name == "recorded") for name in _BOTH]
    try:
        with closing(_Disk(lives[1].folder / "disk", fault.disk)):
            truth, recorded = in_parallel(lives)
            _compare(fault, truth, recorded, outcome)
            if fault.armed:
                outcome.broken += [f"{path} is left" for path in _left_of(lives[1], recorded)]
            else:
                find_trace(fault, lives[1], recorded, outcome)
            _compare_folders(lives, outcome)
            outcome.broken += lives[1].problems
    except Exception:
        outcome.broken.append(f"the check failed: {traceback.format_exc()}")
    if outcome.is_good:
        shutil.rmtree(folder)
    return outcome


def _left_of(life: Life, ran: Ran) -> list[Path]:
    """Sockets that are still there once `gputrace list` has looked, of a program that has ended."""
    words = [sys.executable, "-m", "gputrace", "list"]
    subprocess.run(words, env=life.environment(), check=True, capture_output=True)
    return [*life.folder.glob("arm/*/*.socket")] if ran.code is not None else []


_BOTH: Final = ("plain", "recorded")


def in_parallel(lives: Sequence[Life]) -> list[Ran]:
    with ThreadPoolExecutor(len(lives)) as pool:
        return list(pool.map(Life.run, lives))


class _Disk:
    """A small file system in a folder, for as long as this is open; none where it has no size."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder if size else None
        if size:
            run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(folder)])

    def close(self) -> None:
        if self._folder:
            run(["umount", "-l", str(self._folder)])


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


# ---- the program ----


def _compare(fault: Fault, truth: Ran, recorded: Ran, outcome: Outcome) -> None:
    tell = outcome.changed.append
    for ran, name in ((truth, "alone"), (recorded, "recorded")):
        if ran.code is None:
            tell(f"{name} it did not end")
    if not fault.recorder_dies and truth.code != recorded.code:
        tell(f"exit code {recorded.code} for {truth.code}")
    for name, mine, theirs in (
        ("stdout", truth.out, recorded.out),
        ("stderr", truth.err, recorded.err),
    ):
        if _plain(mine, fault) != _plain(theirs, fault):
            tell(f"{name} {theirs[-2000:]!r} for {mine[-2000:]!r}")
    if b"Traceback" in recorded.err and b"Traceback" not in truth.err:
        tell("a traceback")
    told = [ledger.read(ran.folder / "ledger") for ran in (truth, recorded)]
    if fault.recorder_dies and [bool(t and t.ended) for t in told].count(True) == 1:
        tell("it came to its end one time of two")


def _plain(text: bytes, fault: Fault) -> bytes:
    """Addresses differ from run to run, and where a signal from outside finds a program: Python
    marks the head of a function with an empty line.
    """
    text = re.sub(rb"0x[0-9a-f]+", b"0x", text)
    return re.sub(rb"(?m)^(  .*)?\n", b"", text) if fault.strikes else text


def _compare_folders(lives: Sequence[Life], outcome: Outcome) -> None:
    """The files of the program are the same, and nothing else is left."""
    alone, recorded = (_files(life.folder / "work") for life in lives)
    kept = {name for name in recorded if name.startswith(("t.sqlite", "inner.sqlite"))}
    for name in alone.keys() ^ (recorded.keys() - kept):
        outcome.changed.append(f"{name}: a file of one of both")
    for name in alone.keys() & recorded.keys():
        if alone[name] != recorded[name]:
            outcome.changed.append(f"{name}: not the same")
    left = [*(lives[1].folder / "temporary").iterdir(), *lives[1].output.parent.glob(".t.sqlite*")]
    if lives[1].fault.recorder_dies:
        # Killed while it removed the folder of a trace that is made: the next recorder goes on.
        left = [path for path in left if not path.name.startswith(".t.sqlite.spool.")]
    left += lives[1].folder.glob("orphan.*")
    outcome.broken += [f"{path.name} is left" for path in left]
    if (spool := Path(f"{lives[1].output}.spool")).exists():
        outcome.broken.append(
            f"{spool.name} is left, with {sorted(p.name for p in spool.iterdir())}"
        )


def _files(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else b""
        for name, path in found.items()
        if ".spool" not in name
    }
