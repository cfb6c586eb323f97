"""When a process was recorded: the GPUs, and the CUDA calls."""

from __future__ import annotations

from collections.abc import Sequence

from gputrace.collectors.files.spool import Spool


def windows_of(spool: Spool) -> list[tuple[int, int]]:
    """The stretches in which the GPUs were recorded, in order; the last may reach to the end.

    The first begins at 0 where it began with the process's use of CUDA: nothing is missing before.
    A moment that says what is known already is one that a further file begins with.
    """
    windows = _stretches(spool.captures, _latest(spool))
    if windows and not spool.continues and spool.info.get("capture_from") == "start":
        windows[0] = 0, windows[0][1]
    return windows


def call_windows_of(spool: Spool) -> list[tuple[int, int]] | None:
    """The parts of these stretches in which all CUDA calls were recorded; None where they all were.

    Where none were, one without length.
    """
    if all(on for _, on in spool.calls):
        return None
    windows = windows_of(spool)
    # Without a word before anything is recorded, they are too.
    began = next((moment for moment, _ in spool.captures), 0)
    at_first = [(0, True)] if spool.calls[0][0] > began else []
    with_calls = _stretches([*at_first, *spool.calls], _latest(spool))
    parts = [(max(a, c), min(b, d)) for a, b in windows for c, d in with_calls]
    moment = spool.calls[0][0]
    return [(begin, end) for begin, end in parts if begin < end] or [(moment, moment)]


def _stretches(moments: Sequence[tuple[int, bool]], latest: int) -> list[tuple[int, int]]:
    """From each moment at which something was on to the next at which it was off."""
    found: list[tuple[int, int]] = []
    began = None
    for moment, on in moments:
        if on and began is None:
            began = moment
        elif not on and began is not None:
            found.append((began, max(moment, began)))
            began = None
    if began is not None:
        found.append((began, max(began, latest)))
    return found


def _latest(spool: Spool) -> int:
    """The last moment that is in a process's records."""
    ends = [rows["end"] for rows in spool.records.values() if "end" in (rows.dtype.names or ())]
    return max(spool.seen_until, *(int(of.max(initial=0)) for of in ends))
