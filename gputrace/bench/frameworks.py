"""The workload scripts, one for each framework, and what each needs of a Python."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from gputrace.bench.toml import check_keys, convert, nearest, read_toml
from gputrace.errors import InputError, UsageError

FILE: Final = "frameworks.toml"


class _Entry(msgspec.Struct):
    """A table of frameworks.toml."""

    title: str
    script: str
    arguments: list[str] = []
    modules: list[str] = []
    libraries: list[str] = []
    requires: list[str] = []
    updates: list[str] = []


@dataclass(frozen=True, slots=True)
class Framework:
    """One entry of frameworks.toml.

    Attributes:
        arguments: of the script, before those of a study.
        modules: that a Python must have to run it.
        libraries: of the machine, that it loads.
        requires: requirements beyond those that the script names.
        updates: the placements it can do; empty where that is not said.
    """

    name: str
    title: str
    script: Path
    arguments: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()


class Needs(NamedTuple):
    """What a script asks for in its own header (PEP 723).

    Attributes:
        python: as ``>=3.8,<3.12``; empty for any.
        constraints: on what packages are built with.
        unbuilt: packages of which only wheels are taken.
    """

    dependencies: tuple[str, ...] = ()
    python: str = ""
    constraints: tuple[str, ...] = ()
    unbuilt: tuple[str, ...] = ()


def find_workloads(study: Path, named: Path | None) -> Path:
    """The frameworks.toml of the folder that is named; else that above the study, or beside it.

    Above comes first: a folder of studies may have one of that name.
    """
    folders = [named] if named is not None else [study.absolute().parent.parent, study.parent]
    for folder in folders:
        if (folder / FILE).is_file():
            return folder / FILE
    raise InputError(
        folders[-1], f"holds no {FILE}; name the folder of the scripts with --workloads"
    )


def read_frameworks(path: Path) -> dict[str, Framework]:
    """The entries of a frameworks.toml; scripts lie beside it."""
    found = {}
    for name, table in read_toml(path).items():
        if isinstance(table, dict):
            check_keys(path, f"[{name}]", table, _Entry.__struct_fields__)
        entry: _Entry = convert(path, f"[{name}]", table, _Entry)
        found[name] = Framework(
            name,
            entry.title,
            path.parent / entry.script,
            *map(tuple, (entry.arguments, entry.modules, entry.libraries)),
            *map(tuple, (entry.requires, entry.updates)),
        )
    return found


def check_names(study: Path, names: Iterable[str], known: Mapping[str, Framework]) -> None:
    """Raises UsageError for a framework that has no entry, InputError where its script is gone."""
    for name in names:
        if name not in known:
            raise UsageError(f"{study}: no framework {name!r}; {nearest(name, known)}")
        if not known[name].script.is_file():
            raise InputError(known[name].script, f"is not there, and [{name}] names it")


def read_needs(script: Path) -> Needs:
    """The header of a script; raises InputError for one that makes no sense."""
    try:
        text = _header(script.read_text(encoding="utf-8"))
        table: dict[str, Any] = tomllib.loads(text)
    except OSError as error:
        raise InputError(script, f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(script, f"its header is not TOML: {error}") from None
    uv = table.get("tool", {}).get("uv", {})
    return Needs(
        tuple(table.get("dependencies", ())),
        table.get("requires-python", ""),
        tuple(uv.get("build-constraint-dependencies", ())),
        tuple(uv.get("no-build-package", ())),
    )


def _header(text: str) -> str:
    """The lines of a script between ``# /// script`` and ``# ///``, without their marks."""
    lines = text.splitlines()
    if "# /// script" not in lines:
        return ""
    after = lines[lines.index("# /// script") + 1 :]
    header = takewhile(lambda line: line.startswith("#") and line != "# ///", after)
    return "\n".join(line[2:] for line in header)
