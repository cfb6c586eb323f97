"""Packages as pip would leave them: modules, and what tells of their entry points."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.helpers import command

EXAMPLE: Final = command.ROOT / "examples" / "gputrace-example"


def install(
    folder: Path,
    name: str,
    entries: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    version: str = "1.0",
) -> dict[str, str]:
    """A package in a folder: entry points by group, modules by name; what finds it there."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in own.items())
        for group, own in entries.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module, text in (modules or {}).items():
        (folder / f"{module}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(command.ROOT), str(folder)])}


def install_example(folder: Path) -> dict[str, str]:
    """The package of `examples`, as its pyproject.toml has it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    env = install(folder, project["name"], project["entry-points"], version=project["version"])
    (folder / "gputrace_example").symlink_to(EXAMPLE / "gputrace_example")
    return env
