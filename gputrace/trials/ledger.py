"""Ledger of predicted and measured gains of cures; a SQLite file that only grows."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from gputrace.analyzers.whatif import FEWEST_OWN_PAIRS, Pair, calibrate, pairs
from gputrace.errors import InputError
from gputrace.store import sqlite_security
from gputrace.trials.cures import Candidate, Prediction, all_cures
from gputrace.trials.statistics import WORTH

if TYPE_CHECKING:
    from sqlite_utils import Database

VERSION: Final = 1
_APPLICATION: Final = 0x6770746C  # "gptl", in the header of the file


_Ratio = Annotated[float, msgspec.Meta(gt=0)]
"""Ratio that was measured: no step takes no time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Cure that was tried on a program. Ratios are of the step with it to the step without."""

    time_ns: int
    """Moment of the answer, nanoseconds of CLOCK_REALTIME."""
    program: str
    """Command line, without what looks secret."""
    host: str
    gpu: str
    """Name of the first rank's card; empty without one."""
    ranks: int
    versions: str
    """Frameworks that the program had loaded, as ``torch 2.13.0``."""
    cure: str
    """Cures with their values, joined by ``+``."""
    verdict: str
    why: str
    """Reason where the cure failed or changed nothing."""
    ratio: _Ratio | None
    """Without bounds, of too few rounds for an answer."""
    low: _Ratio | None
    high: _Ratio | None
    rounds: int
    steps: int
    """Steps measured in each run."""
    bare_ns: float | None
    """Mean step as it is."""
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    numerics: bool
    """True if the cure changes results of the training."""
    loss_differs: bool | None
    """True if losses differ beyond what runs differ by; None where they were not seen."""

    @property
    def error(self) -> float | None:
        """Return the predicted ratio less the measured one."""
        known = self.predicted is not None and self.low is not None
        return self.predicted - self.ratio if known else None  # type: ignore[operator]

    @property
    def gains_little(self) -> bool:
        """Return whether the cure is known to gain less than `WORTH`."""
        if self.low is None:
            return self.verdict == "changes nothing"
        return self.verdict != "faster" and self.low > 1 / WORTH

    @property
    def within(self) -> bool | None:
        """Return whether the measured ratio lies in the predicted range."""
        if self.low is None or self.predicted_low is None or self.predicted_high is None:
            return None
        return self.predicted_low <= (self.ratio or 0.0) <= self.predicted_high


def default_ledger() -> Path:
    """Return the ledger in the user's data folder."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "gputrace" / "ledger.sqlite"


def append(path: Path, entries: Sequence[Entry]) -> None:
    """Add entries; raises InputError where the file is none of ours or cannot be written."""
    with _opened(path, create=True) as database:
        # Also without entries, to know whether some could be added.
        database.execute("BEGIN IMMEDIATE")
        database.table("trials").insert_all(
            {name: _stored(value) for name, value in asdict(entry).items()} for entry in entries
        )
        database.commit()


def _stored(value: Any) -> Any:
    """Return a value as SQLite takes it: a path may have bytes that are no UTF-8."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def read(path: Path) -> list[Entry]:
    """Return all entries, the oldest first; none where there is no file yet.

    Raises InputError where the file is none of ours.
    """
    if not path.exists():
        return []
    with _opened(path, create=False) as database:
        rows = list(database.query("SELECT * FROM trials ORDER BY id"))
    try:
        return msgspec.convert(rows, list[Entry], strict=False)
    except msgspec.ValidationError as error:
        raise InputError(path, f"holds a row that no trial leaves ({error})") from None


@contextmanager
def _opened(path: Path, create: bool) -> Iterator[Database]:
    """Open a ledger, for whose errors InputError is raised."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        database, application, version = sqlite_security.open_own(path)
        with closing(database):
            if create and not path.stat().st_size:
                # Columns of bytes keep each value as it is given.
                names = [field.name for field in fields(Entry)]
                with database.atomic():
                    database.table("trials").create(
                        {"id": int} | dict.fromkeys(names, bytes), pk="id", if_not_exists=True
                    )
                    database.execute(f"PRAGMA application_id = {_APPLICATION}")
                    database.execute(f"PRAGMA user_version = {VERSION}")
            elif application != _APPLICATION:
                raise InputError(path, "not a ledger of `gputrace try`; name another with --ledger")
            elif version != VERSION:
                problem = f"has version {version}, this gputrace knows {VERSION}"
                raise InputError(path, f"{problem}; name another with --ledger")
            yield database
    except sqlite_security.ERRORS as error:
        problem = f"cannot be used as a ledger ({error}); name another with --ledger"
        raise InputError(path, problem) from None
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); name another with --ledger"
        raise InputError(path, problem) from None


@dataclass(frozen=True, slots=True)
class Record:
    """Trials of one cure, and its predictions beside what was measured."""

    program: str
    """Empty for all programs."""
    cure: str
    """Id, without a value."""
    trials: int
    faster: int
    """Trials in which it made steps faster."""
    predicted: int
    """Trials with a prediction from a recording and a measured ratio."""
    mean_error: float | None
    """Mean of the predicted ratio less the measured one."""
    mean_size: float | None
    """Mean size of that error."""
    ranged: int
    """Trials whose prediction has a range."""
    within: int
    """Trials in which the measured ratio lay in that range."""
    ratio: float | None
    """Median of the measured ratios that have an interval."""


def _id(entry: Entry) -> str:
    """Return the cure of an entry without values; of a set, all of them."""
    return "+".join(word.partition("=")[0] for word in entry.cure.split("+"))


def records(entries: Sequence[Entry], *, by_program: bool = False) -> list[Record]:
    """Return how each cure did, and how well it was predicted, of all programs or of each."""
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.program if by_program else "", _id(entry)].append(entry)
    return [
        _record(
            *key,
            [entry.verdict == "faster" for entry in group],
            [entry.error for entry in group],
            [entry.within for entry in group],
            [entry.ratio for entry in group if entry.ratio is not None and entry.low is not None],
        )
        for key, group in sorted(groups.items())
    ]


def pairs_of(entries: Sequence[Entry]) -> list[Pair]:
    """Return the predictions of single cures beside what was measured, each by the cure's id."""
    return [
        Pair(
            cure=_id(entry),
            program=f"{entry.gpu or entry.host}: {entry.program}",
            now_ms=entry.bare_ns / 1e6,
            predicted_ms=entry.bare_ns * entry.predicted / 1e6,
            low_ms=entry.predicted_low and entry.bare_ns * entry.predicted_low / 1e6,
            high_ms=entry.predicted_high and entry.bare_ns * entry.predicted_high / 1e6,
            measured_ms=entry.bare_ns * entry.ratio / 1e6,
            counts=True,
            source=f"gputrace try {date.fromtimestamp(entry.time_ns / 1e9)}",
        )
        for entry in entries
        if entry.predicted and entry.ratio and entry.low and entry.bare_ns and "+" not in entry.cure
    ]


def learn(candidate: Candidate, prediction: Prediction, known: Sequence[Pair]) -> Prediction:
    """Return a prediction with the range in which this cure's earlier ones came true, if there are
    enough of them.
    """
    same = [pair for pair in known if pair.cure == candidate.settings[0].cure.id]
    if len(same) < FEWEST_OWN_PAIRS:
        return prediction
    factors = calibrate(same[0].cure, same)
    ratio = prediction.ratio
    return replace(prediction, low=ratio * factors.below, high=ratio * factors.above)


def export(path: Path, entries: Sequence[Entry]) -> int:
    """Write predicted and measured steps as CSV, by the ids of predictions, as those that ship with
    gputrace; return how many. Raises InputError where the file cannot be written.
    """
    found = pairs_of(entries)
    cures = {id: next(iter(cure.predictions), id) for id, cure in all_cures().items()}
    rows = [
        {**msgspec.structs.asdict(pair), "cure": cures.get(pair.cure, pair.cure)} for pair in found
    ]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, Pair.__struct_fields__, lineterminator="\n")
            writer.writeheader()
            writer.writerows({**row, "counts": "yes"} for row in rows)
    except OSError as error:
        raise InputError(path, f"cannot be written ({error.strerror})") from None
    return len(rows)


def shipped() -> list[Record]:
    """Return how well predictions, by their id, came true in the pairs that ship with gputrace.

    Pairs by earlier rules, and those of an unknown step or cause, are left out.
    """
    counted = [pair for pair in pairs() if pair.counts and pair.cure and pair.now_ms]
    return [
        _record(
            "",
            id,
            [pair.measured_ms < (pair.now_ms or 0.0) for pair in same],
            [(pair.predicted_ms - pair.measured_ms) / (pair.now_ms or 1.0) for pair in same],
            [pair.within for pair in same],
            [pair.measured_ms / (pair.now_ms or 1.0) for pair in same],
        )
        for id in sorted({pair.cure for pair in counted})
        for same in ([pair for pair in counted if pair.cure == id],)
    ]


def _record(
    program: str,
    cure: str,
    faster: Sequence[bool],
    errors: Sequence[float | None],
    within: Sequence[bool | None],
    ratios: Sequence[float],
) -> Record:
    known = [error for error in errors if error is not None]
    return Record(
        program,
        cure,
        len(faster),
        sum(faster),
        len(known),
        sum(known) / len(known) if known else None,
        sum(map(abs, known)) / len(known) if known else None,
        sum(each is not None for each in within),
        sum(each is True for each in within),
        median(ratios) if ratios else None,
    )
