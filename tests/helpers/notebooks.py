"""Notebooks without a browser: cells run one after the other in a process of their own.

The shell is IPython's, or one that has just what `gputrace.notebook_magic` uses of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.helpers.command import ROOT
from tests.helpers.programs import TORCH

_RUNNER: Final = Path(__file__)


@dataclass(frozen=True, slots=True)
class Cell:
    """Outcome of a cell: texts displayed, its own output, messages, and its error."""

    shown: list[str]
    html: list[str]
    out: str
    messages: str
    error: str
    traceback: str


def run_notebook(
    folder: Path, shell: str, cells: Sequence[str], env: Mapping[str, str] | None = None
) -> list[Cell]:
    """Runs cells; modules that stand for torch can be imported."""
    for name, source in TORCH.items():
        path = folder / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUTRACE")}
    paths = os.pathsep.join([str(ROOT), str(folder / "modules")])
    done = subprocess.run(
        [sys.executable, str(_RUNNER), shell, json.dumps(cells)],
        env=kept
        | {"PYTHONPATH": paths, "TMPDIR": str(temporary), "IPYTHONDIR": str(folder / "ipython")}
        | dict(env or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Nothing stays behind once the notebook has ended.
    assert not list(temporary.iterdir())
    return [Cell(**cell) for cell in json.loads(done.stdout.splitlines()[-1])]


RUNNER: Final = """
import ast, contextlib, io, json, sys, traceback, types

class Compiler:
    def cache(self, source, number, raw_code=None): return f"<cell {number}>"
    def ast_parse(self, source, filename): return ast.parse(source, filename)
    def __call__(self, tree, name, mode): return compile(tree, name, mode)

class Shell:
    def __init__(self):
        self.user_ns = self.user_global_ns = {"In": [""]}
        self.compile, self.magics = Compiler(), {}
        self.display_pub = types.SimpleNamespace(publish=None)
    def transform_cell(self, cell): return cell
    def transform_ast(self, tree): return tree
    def register_magic_function(self, function, magic_kind, magic_name):
        self.magics["%%" + magic_name] = function
    def run_cell(self, cell):
        self.user_ns["In"].append(cell)
        first, _, rest = cell.partition("\\n")
        name, _, line = first.partition(" ")
        error = None
        try:
            if first == "%load_ext gputrace": __import__("gputrace").load_ipython_extension(self)
            elif name in self.magics: self.magics[name](line, rest)
            else: exec(cell, self.user_ns)
        except BaseException as raised:
            error = raised
            lines = getattr(error, "_render_traceback_", traceback.format_exc().splitlines)()
            print("\\n".join(lines))
        return types.SimpleNamespace(error_before_exec=None, error_in_exec=error)

def make(kind):
    if kind == "fake": return Shell()
    from IPython.core.interactiveshell import InteractiveShell
    return InteractiveShell.instance()
"""


def _run(kind: str, cells: Sequence[str]) -> None:
    """In the process of the notebook."""
    import contextlib
    import io
    from typing import Any

    names: dict[str, Any] = {}
    exec(RUNNER, names)
    shell = names["make"](kind)
    results = []
    for cell in cells:
        published: list[dict[str, str]] = []
        shell.display_pub.publish = lambda data, to=published, **_: to.append(data)
        out, messages = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(messages):
            result = shell.run_cell(cell)
        error = result.error_before_exec or result.error_in_exec
        results.append(
            {
                "shown": [data["text/plain"] for data in published],
                "html": [data["text/html"] for data in published],
                "out": out.getvalue(),
                "messages": messages.getvalue(),
                "error": f"{type(error).__name__}: {error}" if error else "",
                "traceback": re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) if error else "",
            }
        )
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    _run(sys.argv[1], json.loads(sys.argv[2]))
