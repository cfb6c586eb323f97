"""Reports: their content before it is laid out, their formats, imported on demand, plugins' views,
and the files that they are written to, which appear only when complete and replace none without
consent.

Those for other programs are here: JSON, CSV, and tables for pandas, polars and Arrow. Names in them
are those of the result dataclasses.
"""

from __future__ import annotations

import io
import json
import os
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from errno import EIO
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins
from msgspec.structs import force_setattr

from gputrace.errors import MissingError, UsageError
from gputrace.model import results
from gputrace.model.cards import CardUse
from gputrace.model.kernels import KernelOnGpu, KernelUse
from gputrace.model.struct import UNKNOWN, Column, Columns, Struct
from gputrace.plugins import call, expect, load_function, named, names
from gputrace.sanitize import cell, json_text, sentence

TEXT_COLUMNS: Final = ("evidence", "not done")
"""Columns that hold sentences."""
_SILENT: Final = frozenset(("", "?", UNKNOWN))


class Table(Struct, frozen=True):
    """Title, column names, and rows of cells.

    The first column and `TEXT_COLUMNS` hold text, all others numbers. Columns that say nothing in
    any row are left out.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] = ()
    """Full names of the rows, whose first cells are short ones; empty where they are not."""

    def __post_init__(self) -> None:
        """Sanitize all cells: they never contain control sequences."""
        force_setattr(self, "title", sentence(self.title))
        first, *others = zip(self.header, *self.rows, strict=True)
        kept = [first, *(c for c in others if not self.rows or not _SILENT.issuperset(c[1:]))]
        header, *rows = zip(*(map(sentence, column) for column in kept), strict=True)
        force_setattr(self, "header", header)
        force_setattr(self, "rows", tuple(rows))


def tabulate(
    title: str,
    columns: Columns,
    rows: Iterable[Any],
    last: Iterable[tuple[str, ...]] = (),
    names: tuple[str, ...] = (),
) -> Table:
    """Return a table with a row for each object, and the rows ``last`` under them."""
    body = [tuple(column.cell(row) for column in columns) for row in rows]
    return Table(title, tuple(column.title for column in columns), (*body, *last), names)


def declared(title: str, rows: Sequence[Any], *first: Column) -> Table:
    """Return a table of results with the columns that they declare, after some of its own."""
    return tabulate(title, (*first, *rows[0].COLUMNS) if rows else (Column("", ""),), rows)


def present(tables: Iterable[Table | None]) -> tuple[Table, ...]:
    """Return the tables that say anything: have rows, and more columns than their names."""
    return tuple(table for table in tables if table and table.rows and len(table.header) > 1)


Records = tuple[Sequence[str], Iterable[Sequence[Any]]]
"""Names of columns, and rows of values, for CSV."""


def attributes(rows: Iterable[object], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the named attributes of each row."""
    return (tuple(getattr(row, name) for name in names) for row in rows)


STYLES: Final = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}
"""Styles of the severities of findings in 16 colours."""


class Line(Struct, frozen=True):
    """Sentence of a report."""

    text: str
    style: str = ""
    """Style in a terminal, in rich's words."""
    name: str = ""
    """Its beginning: the id of a finding, ``What to do``, ``note``, the label of a run."""
    below: tuple[Line, ...] = ()
    """Lines below it: the evidence of a finding, the gain to expect, and advice."""

    @property
    def sentence(self) -> str:
        """Return the name and the text."""
        return f"{self.name}: {self.text}" if self.name else self.text


class Document(Struct, frozen=True):
    """Content of a report, in the order in which it is read."""

    head: tuple[Line, ...]
    """Verdict, and what else is known at once."""
    lead: tuple[Line, ...] = ()
    """The compared runs."""
    tables: tuple[Table, ...] = ()
    findings: tuple[Line, ...] = ()
    sections: Mapping[str, tuple[Table, ...]] = {}
    """Tables after the findings, by what they are about."""
    notes: tuple[Line, ...] = ()


_LEAST_NAME: Final = 24


def room_for_names(width: int, beside: int) -> int:
    """Return how long names may be: what figures leave, or a line where they leave too little."""
    return width - beside if width - beside >= _LEAST_NAME else max(width - 2, _LEAST_NAME)


class Limits(Struct, frozen=True):
    """Limits on what a format shows."""

    gpus_across: int = 4
    """Largest number of GPUs shown as columns of the first tables; more are shown as rows, or as
    their mean."""
    gaps: int = 0
    links: int = 8
    kernels: int = 8
    causes: int = 12
    """Causes of lost time with a row of their own."""
    parallel: int | None = 2
    """Pipelines, and groups of experts, with a table of their own."""
    width: int | None = None
    """Columns of a terminal, which leave no room for the columns that are needed least."""


FORMATS: Final = ("text", "json", "markdown", "csv")


def render(analysis: results.Analysis, form: str, width: int = 80, color: bool = False) -> str:
    """Render an analysis in one of `FORMATS` or by a plugin; raise UsageError for other forms."""
    plugin = None if form in FORMATS else named("views", form)
    if plugin is None:
        others = names("views") if form not in FORMATS else ()
        return render_as(analysis, form, "gputrace.report.tables", width, color, others)
    rendered: str = expect(plugin, call(plugin, load_function(plugin), analysis), str)
    return rendered


def render_as(
    result: object,
    form: str,
    module: str,
    width: int = 80,
    color: bool = False,
    others: Iterable[str] = (),
) -> str:
    """Render a result in one of `FORMATS`; raise UsageError for an unknown one.

    ``module`` has its ``document`` and its ``records``; only what the format needs is imported.
    Text is ``width`` columns wide, and has escape sequences if ``color``. ``others`` are formats to
    name in the error.
    """
    if form not in FORMATS:
        there = ", ".join((*FORMATS, *others))
        raise UsageError(f"no format is called {form!r}; there are {there}")
    if form == "json":
        return to_json(result)
    of = import_module(module)
    if form == "csv":
        return render_csv(*of.records(result))
    if form == "markdown":
        from gputrace.report import markdown_html

        return markdown_html.render_markdown(of.document(result, markdown_html.MARKDOWN))
    from gputrace.report import text

    return text.render(of.document(result, text.limits(width)), width, color)


def to_json(value: object) -> str:
    """Render a result as one line of JSON, text as UTF-8."""
    line = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))
    return json_text(line) + "\n"


def plain(value: object) -> object:
    """Convert structs and dataclasses to dictionaries, recursively."""
    return to_builtins(value, enc_hook=dict)  # Mappings of other types.


def render_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Render RFC 4180 CSV with a header line; unknown values are empty."""
    import csv

    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(cell, row) for row in (columns, *rows))
    return out.getvalue()


_TABLES: Final[dict[str, type]] = {
    "breakdown": results.Breakdown,
    "gpus": results.GpuTotals,
    "step_list": results.Step,
    "phases": results.Phase,
    "gaps": results.Gap,
    "findings": results.Finding,
    "cards": CardUse,
    "kernels": KernelUse,
    "ledger": results.LedgerRow,
}


def frame(analysis: results.Analysis, table: str, library: str) -> Any:
    """Return one table, a column per field, as ``pandas``, ``polars`` or ``pyarrow`` has tables.

    Raises UsageError for an unknown table, MissingError without the library.
    """
    if table not in _TABLES:
        raise UsageError(f"no table is called {table!r}; there are {', '.join(_TABLES)}")
    try:
        module = import_module(library)
    except ImportError:
        method = f"to_{library.removeprefix('py')}()"
        extra = library.removeprefix("py")
        raise MissingError(f"{method} needs {library}; install gputrace[{extra}]") from None
    columns, types = _columns(analysis, table)
    if library == "pandas":
        return module.DataFrame(columns)
    # These take no column of objects.
    for name in [name for name, type_ in types.items() if type_ is None]:
        types[name] = str
        columns[name] = [to_json(value).rstrip() for value in columns[name]]
    if library == "polars":
        return module.DataFrame(columns, schema=types)
    arrow = {int: "int64", float: "float64", bool: "bool", str: "string"}
    schema = module.schema([(name, arrow[type_]) for name, type_ in types.items()])
    return module.table(columns, schema=schema)


def _columns(analysis: results.Analysis, table: str) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return the values and the type of each column; no type for other than numbers and text."""
    kinds, rows = [_TABLES[table]], getattr(analysis, table)
    if table == "gaps":
        rows = analysis.gaps.largest
    if table == "kernels":
        # A row per kernel and GPU that runs it; the GPU's figures hide those of all GPUs.
        kinds.append(KernelOnGpu)
        top = analysis.kernels.top if analysis.kernels else ()
        rows = [ChainMap(_row(on_gpu), _row(use)) for use in top for on_gpu in use.by_gpu]
    else:
        rows = list(map(_row, rows))
    annotations = {field.name: str(field.type) for kind in kinds for field in fields(kind)}
    types = {
        name: _TYPES.get(annotation.partition(" ")[0])
        for name, annotation in annotations.items()
        if table != "kernels" or name not in ("by_gpu", "share")
    }
    return {name: [row[name] for row in rows] for name in types}, types


def _row(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


_TYPES: Final[dict[str, type]] = {"int": int, "float": float, "bool": bool, "str": str}


def check_target(target: Path, inputs: Sequence[Path], force: bool) -> Path:
    """Return the target; raise UsageError where it cannot be written.

    ``force`` permits replacing a file, but never an input or anything else than a file or folder.
    """
    if any(target.resolve() == path.resolve() for path in inputs):
        raise UsageError(f"{target}: is the trace itself; name another file with -o")
    if target.exists() and not target.is_file() and not target.is_dir():
        raise UsageError(f"{target}: not a regular file, and not replaced; name another with -o")
    if target.exists() and not force:
        raise UsageError(f"{target}: exists; name another with -o, or give --force")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target}: its folder does not exist; make it, or name another with -o")
    return target


@contextmanager
def unfinished_file(target: Path, mode: int = 0o600) -> Iterator[Path]:
    """Yield a temporary file that replaces the target on success; by default its owner's alone."""
    if target.is_dir():
        raise UsageError(f"{target}: is a folder; name a file with -o")
    path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with _named(target):
            path.unlink(missing_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            yield path
            path.replace(target)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_for_people(target: Path, text: str) -> None:
    """Write a file to be shown, such as a page, with the mode of the umask."""
    with unfinished_file(target, 0o666) as path:
        path.write_text(text, encoding="utf-8")


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """Name the target in an error of what is written, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        names = [name for name in (error.filename, error.filename2) if name]
        if names and not any(Path(name).is_relative_to(target.parent) for name in names):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = f"cannot be written ({reason}); name another with -o"
        raise OSError(error.errno or EIO, hint, str(target)) from None


@contextmanager
def unfinished_folder(target: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary folder for files of these names; it replaces the target on success.

    An existing folder is replaced only if it holds no other files.
    """
    import shutil

    if target.exists():
        others = {path.name for path in target.iterdir()} - set(names) if target.is_dir() else {""}
        if others:
            raise UsageError(f"{target}: holds other files, and is not replaced; name another")
    path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(path, ignore_errors=True)
    try:
        with _named(target):
            path.mkdir(mode=0o700)
            yield path
            if target.exists():
                shutil.rmtree(target)
            path.replace(target)
    finally:
        shutil.rmtree(path, ignore_errors=True)
