"""The process that gives inputs: ``python -m tests.fuzz.worker``, as the runner starts it."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from functools import cache
from importlib import metadata
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Targets, folder, engine (``random`` or ``atheris``), seed, and inputs and seconds of each.

    The folder gets one for each target. atheris takes one target: it ends the process.
    """
    names, above, engine, seed, inputs, seconds = arguments
    folder = Path(above).resolve()
    # A module that is first needed by an input would be a file that the input wrote.
    sys.dont_write_bytecode = True
    # For readers of others gputrace asks a file of each package that is installed; here, once.
    metadata.entry_points = cache(metadata.entry_points)  # type: ignore[assignment]
    os.environ |= {"GPUTRACE_CACHE": "off", "XDG_CACHE_HOME": str(folder)}
    if engine == "atheris":
        from tests.fuzz import guided

        context, mutate = guided.instrumented(), guided.mutate_guided
    else:
        context, mutate = nullcontext(), None
    with context:
        # gputrace's modules come with these, and with the first inputs.
        from tests.fuzz.guard import Guard
        from tests.fuzz.session import Session, mutate_randomly
        from tests.fuzz.targets import target_of

        guard = Guard(folder)
        for name in names.split(","):
            session = Session(target_of(name), folder / name, guard)
            if mutate is None:
                mutate_randomly(session, int(seed), int(inputs), float(seconds))
    if mutate is not None:
        mutate(session, int(seed), int(inputs), float(seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
