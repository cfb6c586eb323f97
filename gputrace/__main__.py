"""Entry point of the command, and of ``python -m gputrace``."""

# ruff: noqa: PTH100, PTH120 (nothing more is imported at first: it could be the program's)
import os
import sys


def main() -> None:
    """Run the command; exits with its code."""
    _put_callers_modules_last()
    from gputrace.cli import main as run

    run()


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
