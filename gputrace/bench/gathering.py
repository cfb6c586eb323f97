"""Results of the jobs of an array, put together in the folder that they are parts of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gputrace.bench.database import FILE, Database, Run
from gputrace.bench.folder import PARTS, Folder
from gputrace.errors import UsageError


def gather(folder: Folder, tell: Callable[[str], None]) -> None:
    """Takes over what the parts have that is newer; one whose job still runs is left for later."""
    parts = sorted(path for path in (folder.path / PARTS).glob("*") if (path / FILE).exists())
    if not parts:
        return
    folder.make()
    with folder.held(), Database(folder.path, create=True) as whole:
        for path in parts:
            try:
                with Folder(path).held(), Database(path) as part:
                    _take(part, whole)
            except UsageError:
                tell(f"{path.name} is not over; its results are left for later")


def _take(part: Database, whole: Database) -> None:
    """Every job plans the whole study, so any of them can say what it is."""
    whole.set_study(part.study(), part.configurations())
    known = {run.place: run for run in whole.runs()}
    figures = part.measures()
    for run in part.runs():
        if _is_newer(run, known.get(run.place)):
            moved = replace(
                run,
                trace=_move(run.trace, part.folder, whole.folder),
                log=_move(run.log, part.folder, whole.folder),
                id=None,
            )
            saved = whole.save(moved)
            if run.id is not None and run.id in figures:
                whole.save_measures(saved, figures[run.id])


def _is_newer(run: Run, old: Run | None) -> bool:
    if old is None or old.state == "skipped":
        return True
    return (run.ended_ns or 0) > (old.ended_ns or 0)


def _move(name: str | None, old: Path, new: Path) -> str | None:
    if name is None or not (old / name).exists():
        return None
    (new / name).parent.mkdir(parents=True, exist_ok=True)
    (old / name).replace(new / name)
    return name
