"""Python imports this at its start, in every process under ``gputrace record`` or ``arm``.

The folder it lies in comes first on PYTHONPATH. It puts the hooks in place and then runs the
sitecustomize that the program would have had without it. Nothing that goes wrong with the hooks
reaches the program; what its own sitecustomize raises does, as it would have.

This file may be read by any Python, old ones too, which then get no hooks.
"""

import os
import sys


def _start_hooks():
    # type: () -> None
    is_recorded = os.path.isdir(os.environ.get("GPUTRACE_DIR", ""))
    if sys.version_info < (3, 6) or not (is_recorded or os.environ.get("GPUTRACE_ARM")):
        return
    try:
        __import__("_gputrace_hooks.imports").imports.install()
    except Exception:
        try:
            __import__("_gputrace_hooks.recorder").recorder.note_failure("starting")
        except Exception:
            pass


def _run_next():
    # type: () -> None
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    if sys.version_info < (3, 6):
        imp = __import__("imp")
        try:
            description = imp.find_module("sitecustomize", others)
        except ImportError:
            return
        imp.load_module("sitecustomize", *description)
        return
    # Loaded in every Python; importlib.machinery would cost each process milliseconds.
    finder = __import__("_frozen_importlib_external").PathFinder
    spec = finder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        # As without this file, and so that the program may still import one of its folder.
        raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")
    from importlib.util import module_from_spec

    # The import under way hands out what stands here at its end.
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


_start_hooks()
_run_next()
