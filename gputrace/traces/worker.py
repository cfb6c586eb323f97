"""What a worker process does: opens the files that it is told of, and sends their traces back."""

from __future__ import annotations

import os
import pickle
import signal
import sys


def serve() -> None:
    """Answers each pickled file on stdin with one pickle on stdout, until there are no more.

    The answer is a trace whose columns are in memory, or an error.
    """
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from gputrace.traces.workers import open_here

    while True:
        try:
            file, keep_going, windows = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found: object = open_here(file, keep_going, windows)
        except Exception as error:
            found = error
        try:
            pickle.dump(found, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # Nobody is there any more.
        del found
