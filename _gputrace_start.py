"""Command ``gputrace``, started without the modules of the caller's PYTHONPATH.

These belong to the program that is recorded: its ``gputrace.py``, ``pathlib.py`` or ``numpy.py`` is
none of ours. So Python starts anew without the variable, which then is set again for the program.
Folders named in it come last for gputrace itself, but for the one that it is installed in.

The first Python has the variable still: it imports the caller's ``sitecustomize``, as every Python
does, and may import ``re``, as scripts do that older versions of pip write for commands.
"""

import sys

# What Python itself imports before it looks at the variable.
from os import environ, execv, path, pathsep

MOVED = "GPUTRACE_CALLERS_PYTHONPATH"
HERE = path.dirname(path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib could be the program's)


def main() -> None:
    """Run the command; exits with its code."""
    if MOVED not in environ and environ.get("PYTHONPATH") and sys.executable:
        environ[MOVED] = environ.pop("PYTHONPATH")
        if HERE in _folders(environ[MOVED]):
            environ["PYTHONPATH"] = HERE
        execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    theirs = []
    if MOVED in environ:
        # Whatever starts Python may have set it meanwhile: the program is to have the caller's.
        environ["PYTHONPATH"] = environ.pop(MOVED)
        theirs = _folders(environ["PYTHONPATH"])
    sys.path.insert(0, HERE)
    from gputrace import __main__ as command

    del sys.path[0]
    # Processes of ours find the package there, before a `gputrace.py` of the caller's.
    sys.path += [HERE, *theirs]
    command.main()


def _folders(paths: str) -> list[str]:
    return [path.abspath(folder) for folder in paths.split(pathsep)]  # noqa: PTH100


if __name__ == "__main__":
    main()
