"""Entry point of the command, and of ``python -m gputrace``."""

# ruff: noqa: PTH100, PTH120 (nothing more is imported at first: it could be the program's)
import gc
import os
import sys

READING = ("analyze", "browse", "check", "compare", "export", "report")
"""Commands that start no program of the user's, to which the environment would pass."""


def main() -> None:
    """Run the command; exits with its code."""
    _put_callers_modules_last()
    reads = sys.argv[1:2] and sys.argv[1] in READING
    if reads:
        # The threads of numpy's linear algebra would be started, and not used.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # Imports make many objects and no garbage, an analysis little.
        gc.set_threshold(500_000, 20, 20)
        _import_msgspec()
    from gputrace import cli

    try:
        cli.end(cli.run())
    except SystemExit as end:
        if reads and end.code == 0 and _is_alone():
            _end()
        raise


def _import_msgspec() -> None:
    """Import msgspec without `typing_extensions`: Python's `typing` has all that msgspec uses.

    Where the package is installed, its import and what it changes in `typing` take 0.01 s.
    """
    name = "typing_extensions"
    if name not in sys.modules:
        sys.modules[name] = None  # type: ignore[assignment]
        try:
            import msgspec  # noqa: F401
        finally:
            del sys.modules[name]


def _is_alone() -> bool:
    """Return True if the process ends with the command: no profiler, test or prompt goes on."""
    starters = "gputrace", "_gputrace_start.py", "__main__.py", "<frozen runpy>", "runpy.py"
    caller = sys._getframe(1).f_back
    while caller is not None and caller.f_code.co_filename.rpartition("/")[2] in starters:
        caller = caller.f_back
    return caller is None and not (sys.flags.inspect or sys.gettrace() or sys.getprofile())


def _end() -> None:
    """End this process, all done: Python would free each object first, which takes 0.02 s."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # to Python, which says so
    os._exit(0)


def _put_callers_modules_last() -> None:
    """Look for modules in the working directory and in PYTHONPATH after all other folders.

    These belong to the program that is recorded: its ``click.py`` or ``numpy.py`` is none of ours.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    theirs = {os.path.abspath(path) for path in ("", *paths)} - {package}
    sys.path.sort(key=lambda path: os.path.abspath(path) in theirs)


if __name__ == "__main__":
    main()
