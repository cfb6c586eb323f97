"""The C files of the collector: uses go one way, as imports do in Python."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

from tests.native.build import COLLECTOR

_NOT_CODE: Final = re.compile(
    r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL
)
_INCLUDE: Final = re.compile(r'^#include "(\w+)\.h"', re.MULTILINE)
_DEFINITION: Final = re.compile(
    r"^(?!static|typedef|enum|extern)\w[\w *]*\b(\w+)(?:\([^;{]*\) \{|(?:\[\w+\])*(?: =[^;]*)?;)",
    re.MULTILINE,
)
"""A function or variable that other files may use: it begins a line, and is not static."""


def _uses(folder: Path) -> dict[str, set[str]]:
    """Return which files each one uses: it includes their headers, or names what they define."""
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.c"))}
    headers = {path.stem: path.read_text() for path in sorted(folder.glob("*.h"))}
    code = {stem: _NOT_CODE.sub(" ", text) for stem, text in sources.items()}
    owner = {name: stem for stem, text in code.items() for name in _DEFINITION.findall(text)}
    uses = {}
    for stem in sources | headers:
        included = _INCLUDE.findall(sources.get(stem, "") + headers.get(stem, ""))
        named = {owner[word] for word in re.findall(r"\w+", code.get(stem, "")) if word in owner}
        uses[stem] = {*included, *named} - {stem}
    return uses


def test_no_c_file_of_the_collector_uses_one_that_uses_it() -> None:
    uses = _uses(COLLECTOR)
    assert {"buffers", "decode", "subscriber"} <= uses["capture"]
    TopologicalSorter(uses).prepare()


def test_the_layers_in_the_header_are_those_of_the_code() -> None:
    """collector.h lists the files from top to bottom; those in one line do not use each other."""
    text = (COLLECTOR / "collector.h").read_text()
    table = re.search(r"uses only ones further down:\n \*\n(.*?)\n \*\n", text, re.DOTALL)
    assert table is not None
    lines = [re.split(r"  +", line.strip(" *"))[0] for line in table[1].splitlines()]
    layer = {name: number for number, line in enumerate(lines) for name in line.split(", ")}
    uses = _uses(COLLECTOR)
    assert layer.keys() == uses.keys()
    for stem, used in uses.items():
        for name in used:
            assert layer[stem] < layer[name], (stem, name)


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text(
        '#include "b.h"\nint a_count;\nint a_start(int x) {\n    return x;\n}\n'
    )
    (tmp_path / "b.c").write_text(
        "int a_start(int);\nint b_end(void) {\n    return a_start(1);\n}\n"
    )
    (tmp_path / "b.h").write_text("int b_end(void);\n")
    assert _uses(tmp_path) == {"a": {"b"}, "b": {"a"}}
    with pytest.raises(CycleError):
        TopologicalSorter(_uses(tmp_path)).prepare()
