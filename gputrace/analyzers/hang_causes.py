"""Cause of a hang: which rank the others wait for, at which collective, and where it is instead."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from gputrace.model.struct import Struct
from gputrace.readers.flight_recorder import Collective, RankState, is_of_program


class RankAtHang(Struct, frozen=True):
    """One rank for a person to read.

    Attributes:
        last: the collective that it entered last, with its number in its group.
        waits: whether it is in that collective still, as far as is known.
        line: of the program, where its main thread is.
    """

    rank: int
    host: str
    pid: int | None
    is_alive: bool | None
    steps: int | None
    last: str
    waits: bool
    line: str


class Hang(Struct, frozen=True):
    """Cause of a hang.

    Attributes:
        cause: ``ended`` (a process is gone), ``absent`` (a rank has not reached a collective),
            ``mismatch`` (ranks have entered different ones), ``stuck`` (no collective is known, and
            a rank is elsewhere), ``unknown``.
        ranks: those that it comes from.
        operation: the collective that is waited for; empty where none is known.
        line: of the program, where the first of the ranks is, or went wrong.
        message: all that in a sentence.
    """

    cause: str
    ranks: tuple[int, ...]
    operation: str
    line: str
    message: str
    states: tuple[RankAtHang, ...] = ()


def find_cause(ranks: Sequence[RankState]) -> Hang:
    """Find the cause of a hang; ``unknown`` if the states do not show it.

    Of ranks in reports of `gputrace record`, dumps of the flight recorder count where the reports
    leave open what the ranks wait for.
    """
    states = tuple(state for state in ranks if state.pid is not None) or tuple(ranks)
    hang = _find(states)
    dumped = {state.rank: state.collectives for state in ranks if state.pid is None}
    if dumped and (hang is None or hang.cause == "stuck"):
        joined = [replace(s, collectives=dumped.get(s.rank, s.collectives)) for s in states]
        hang = _find(joined) or hang
    if hang is None:
        message = "no rank differs from the others in its collectives or in where it is"
        hang = _caused("unknown", (), "", "", message)
    at_hang = []
    for state in states:
        last = state.collectives[-1] if state.collectives else None
        text = f"{last.operation} {last.number} of {last.group}" if last else ""
        here = (state.rank, state.host, state.pid, state.is_alive, state.steps)
        waits = last is not None and not last.is_done
        at_hang.append(RankAtHang(*here, text, waits, _line(state)))
    return replace(hang, states=tuple(at_hang))


def _caused(cause: str, by: Sequence[RankState], operation: str, line: str, message: str) -> Hang:
    return Hang(cause, tuple(state.rank for state in by), operation, line, message)


def _find(ranks: Sequence[RankState]) -> Hang | None:
    ways = (_gone, _diverged, _absent, _behind, _elsewhere, _slowest)
    return next(filter(None, (way(ranks) for way in ways)), None)


def _line(state: RankState) -> str:
    """Return the program's line at which a rank is; else that of its last collective."""
    line = next(filter(is_of_program, state.stack), "")
    if not line and state.collectives:
        line = state.collectives[-1].line
    return line


def _gone(ranks: Sequence[RankState]) -> Hang | None:
    gone = [state for state in ranks if state.is_alive is False]
    if not gone or len(gone) == len(ranks):
        return None
    last = gone[0].collectives[-1] if gone[0].collectives else None
    text = f"; it entered {last.operation} last, at {last.line}" if last else ""
    line, operation = (last.line, last.operation) if last else ("", "")
    message = f"the process of {_named(gone)} has ended{text}; the others wait for it"
    return _caused("ended", gone, operation, line, message)


def _diverged(ranks: Sequence[RankState]) -> Hang | None:
    """Find the first collective of a group that ranks have entered as different ones.

    Ranks may call one from different lines (a broadcast's source); after a mistake they differ to
    the end.
    """
    for group, entered in _by_group(ranks).items():
        if len(entered) < 2:
            continue
        common = sorted(set.intersection(*(set(entries) for _, entries in entered)))
        signatures = {
            number: [_signature(entries, number, common[0]) for _, entries in entered]
            for number in common
        }
        agreed = max((n for n in common if len(set(signatures[n])) == 1), default=-1)
        different = [number for number in common if number > agreed]
        if not different:
            continue
        number, last = different[0], different[-1]
        if number == common[0] and len({(kind, steps) for kind, _, steps in signatures[last]}) == 1:
            # They have never agreed: two places of the program that belong together.
            continue
        usual, most = Counter(signatures[number]).most_common(1)[0]
        each = zip(entered, signatures[number], strict=True)
        odd = [state for (state, _), signature in each if signature != usual]
        if 2 * most == len(entered):
            odd = [state for state, entries in entered if _is_new(entries, number)] or odd
            odd = odd if len(odd) < len(entered) else odd[-1:]
        apart = set(map(id, odd))
        theirs = next(entries[number] for s, entries in entered if s is odd[0])
        others = next(entries[number] for s, entries in entered if id(s) not in apart)
        message = (
            f"{_named(odd)} entered {theirs.operation} at {theirs.line}, where the others entered "
            f"{others.operation} at {others.line} (number {number} of {group})"
        )
        return _caused("mismatch", odd, others.operation, theirs.line, message)
    return None


def _signature(entries: dict[int, Collective], number: int, first: int) -> tuple[str, str, int]:
    entry, begin = entries[number], entries[first]
    steps = 0 if entry.step is None or begin.step is None else entry.step - begin.step
    return entry.operation, entry.line, steps


def _is_new(entries: dict[int, Collective], number: int) -> bool:
    """Return whether a rank came from one collective to this one for the first time."""
    if number - 1 not in entries:
        return False

    def turn(at: int) -> tuple[str, str, int]:
        before, after = entries[at - 1], entries[at]
        return before.line, after.line, (after.step or 0) - (before.step or 0)

    earlier = [at for at in entries if at < number and at - 1 in entries]
    return turn(number) not in {turn(at) for at in earlier}


def _absent(ranks: Sequence[RankState]) -> Hang | None:
    """Find the rank that has not reached a collective in which others wait, and waits for none."""
    by_rank = {state.rank: state for state in ranks}
    entered = {
        group: {state.rank: max(entries) for state, entries in rows}
        for group, rows in _by_group(ranks).items()
    }
    waiting: dict[int, tuple[Collective, list[int]]] = {}
    not_come: dict[
        tuple[tuple[int, ...], str, int], list[int]
    ] = {}  # Thousands may wait in one collective.
    for state in ranks:
        last = state.collectives[-1] if state.collectives else None
        if last is None or (last.is_done and not _is_in_library(state)):
            continue
        key = last.members, last.group, last.number
        if key not in not_come:
            come = entered[last.group]
            members = dict.fromkeys(last.members or by_rank)
            not_come[key] = [
                rank for rank in members if rank in by_rank and come.get(rank, 0) < last.number
            ]
        if not_come[key]:
            waiting[state.rank] = last, not_come[key]
    for first in waiting:
        at, seen = first, [first]
        while at in waiting and (following := waiting[at][1][0]) not in seen:
            at = following
            seen.append(at)
        if at in waiting:
            circle = [by_rank[rank] for rank in sorted(seen)]
            last = waiting[first][0]
            text = ", ".join(
                f"rank {state.rank} in {waiting[state.rank][0].operation} at "
                f"{waiting[state.rank][0].line}"
                for state in circle
                if state.rank in waiting
            )
            message = f"ranks wait for each other in different groups: {text}"
            return _caused("mismatch", circle, last.operation, last.line, message)
        last, missing = waiting[seen[-2]]
        late = [by_rank[rank] for rank in missing if rank not in waiting] or [by_rank[at]]
        line = _line(late[0])
        message = (
            f"{_named(late)} has not reached {_described(last)}, in which the others "
            f"wait{_it_is_at(line)}"
        )
        return _caused("absent", late, last.operation, line, message)
    return None


def _behind(ranks: Sequence[RankState]) -> Hang | None:
    """Find ranks that have entered fewer collectives of a group than others, and of none more.

    NCCL's calls return before the GPU has done them: the others are where the host waits for it.
    """
    fewer: dict[int, tuple[RankState, Collective]] = {}
    more: set[int] = set()
    for entered in _by_group(ranks).values():
        reached = [max(its) for _, its in entered]
        fewest, most = min(reached), max(reached)
        entries = entered[reached.index(most)][1]
        numbers = sorted(entries)
        for (state, _), last in zip(entered, reached, strict=True):
            if last < most:
                following = entries[numbers[bisect_right(numbers, last)]]
                fewer.setdefault(state.rank, (state, following))
            elif fewest < most:
                more.add(state.rank)
    late = [row for rank, row in fewer.items() if rank not in more]
    late = [row for row in late if not _is_in_library(row[0])] or late
    if not late:
        return None
    states = [state for state, _ in late]
    missed, line = late[0][1], _line(states[0])
    message = (
        f"{_named(states)} has not reached {_described(missed)}, which the others have "
        f"entered{_it_is_at(line)}"
    )
    return _caused("absent", states, missed.operation, line, message)


_WAITING: Final = ("/torch/", "/nccl", "/deepspeed/comm/", "/megatron/core/parallel")


def _is_in_library(state: RankState) -> bool:
    """Return whether the main thread is inside of the framework: it may wait there for others."""
    return bool(state.stack) and any(part in state.stack[0] for part in _WAITING)


def _elsewhere(ranks: Sequence[RankState]) -> Hang | None:
    """Find ranks that are at a line of their own while the others are in the framework."""
    known = [state for state in ranks if state.stack]
    apart = [state for state in known if not _is_in_library(state)]
    if len(known) == 1:
        line = _line(known[0])
        return _caused("stuck", known, "", line, f"{_named(known)} is at {line}")
    if not apart or len(apart) == len(known):
        lines = Counter(_line(state) for state in known)
        usual, most = (lines.most_common(1) or [("", 0)])[0]
        apart = [state for state in known if _line(state) != usual] if 2 * most > len(known) else []
    if not apart:
        return None
    line, ids = _line(apart[0]), set(map(id, apart))
    others = _line(next(state for state in known if id(state) not in ids))
    message = f"{_named(apart)} is at {line}, the others wait at {others}"
    return _caused("stuck", apart, "", line, message)


def _slowest(ranks: Sequence[RankState]) -> Hang | None:
    """Find ranks that have ended fewer steps, if nothing else distinguishes them."""
    known = [state for state in ranks if state.stack and state.steps is not None]
    fewest = min((state.steps or 0 for state in known), default=0)
    late = [state for state in known if state.steps == fewest]
    if len(late) == len(known):
        return None
    others = next(state for state in known if state not in late)
    message = (
        f"{_named(late)} is at {_line(late[0])}, in an earlier step than the others at "
        f"{_line(others)}"
    )
    return _caused("stuck", late, "", _line(late[0]), message)


def _by_group(
    ranks: Sequence[RankState],
) -> dict[str, list[tuple[RankState, dict[int, Collective]]]]:
    """Collect, of each group, what each of its ranks has entered by number."""
    groups: dict[str, list[tuple[RankState, dict[int, Collective]]]] = defaultdict(list)
    for state in ranks:
        mine: dict[str, dict[int, Collective]] = defaultdict(dict)
        for entry in state.collectives:
            mine[entry.group][entry.number] = entry
        for group, entries in mine.items():
            groups[group].append((state, entries))
    return dict(groups)


def _described(entry: Collective) -> str:
    at = f", at {entry.line}" if entry.line else ""
    return f"{entry.operation} (number {entry.number} of {entry.group}{at})"


def _it_is_at(line: str) -> str:
    return f"; it is at {line}" if line else ""


def _named(states: Sequence[RankState]) -> str:
    numbers = ", ".join(str(state.rank) for state in states)
    return f"rank{'s' if len(states) > 1 else ''} {numbers}"
