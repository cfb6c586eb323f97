"""What a worker process does: opens the files that it is told of, and sends their traces back."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path


def serve() -> None:
    """Answers each order on stdin on stdout, until there are no more: `parcels` says how."""
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from gputrace.traces.parcels import receive, send

    while True:
        try:
            order = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(_carry_out(order), answers)
        except BrokenPipeError:
            os._exit(1)  # Nobody is there any more.


def _carry_out(raw: bytes) -> bytes:
    """The answer to an order."""
    import msgspec

    from gputrace.traces import parcels, workers

    order = msgspec.msgpack.decode(raw, type=parcels.Order)
    try:
        path = Path(os.fsdecode(order.path))
        return parcels.pack(workers.open_here(path, order.keep_going, order.windows))
    except Exception:
        return msgspec.msgpack.encode(parcels.Answer(bug=traceback.format_exc()))
