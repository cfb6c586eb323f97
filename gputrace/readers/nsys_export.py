"""Conversion of nsys's reports (.nsys-rep, .qdrep) and table folders to SQLite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from gputrace.errors import InputError, MissingError
from gputrace.store.cache import cache_folder, cached_file
from gputrace.tools import ask_tool, find_tool

_INSTALLED: Final = (
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-x64/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)
"""The last is the one inside Nsight Compute."""


def is_report(path: Path) -> bool:
    """Return True for a report, by its suffix: reports have no magic number in common."""
    return path.suffix.lower() in (".nsys-rep", ".qdrep")


def export_report(path: Path) -> Path:
    """Return the report as an SQLite file in the cache; raise what `run_export` raises."""

    def export(target: Path) -> None:
        if (nsys := find_nsys()) is None:
            raise MissingError(
                f"{path}: only nsys can export a report, and it is not installed here; install "
                f"Nsight Systems, or run `nsys export -t sqlite {path.name}` on the machine that "
                "recorded it"
            )
        run_export(nsys, path, target)

    status = path.stat()
    return cached_file("nsys", f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}", export)


def run_export(nsys: str, report: Path, target: Path) -> None:
    """Let nsys export a report; raise MissingError if it cannot be run, InputError if it fails."""
    command = [nsys, "export", "--type", "sqlite", "-o", str(target), str(report.absolute())]
    # NCCL's messages are in blobs, which versions before 2024.6 did not export.
    for options in (["--include-blobs=true"], []):
        try:
            run = ask_tool([*command[:2], *options, *command[2:]])
        except OSError as error:
            raise MissingError(f"{nsys}: cannot be run ({error.strerror})") from error
        if run.returncode == 0 or "include-blobs" not in run.stdout + run.stderr:
            break
    if run.returncode != 0 or not target.exists():
        output = f"{run.stdout}\n{run.stderr}".splitlines()
        lines = [line.strip() for line in output if line.strip()] or [
            f"signal {-run.returncode} ended it" if run.returncode < 0 else "it said nothing"
        ]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1])
        problem = f"nsys {nsys_version(nsys)} could not export it ({reason})"
        hint = "a report needs the nsys that recorded it, or a newer one"
        raise InputError(report, f"{problem}; {hint}")
    from gputrace.store.sqlite_reader import check_file

    try:
        check_file(target)
    except InputError as error:
        raise InputError(report, f"the export made by nsys is broken: {error.problem}") from None


def find_nsys() -> str | None:
    """Return the nsys of GPUTRACE_NSYS, of the PATH, or the newest in the usual folders."""
    return find_tool("nsys", _INSTALLED)


def nsys_version(nsys: str) -> str:
    """Return the version number that `nsys --version` prints."""
    words = ask_tool([nsys, "--version"]).stdout.split()
    return next((word for word in words if word[:1].isdigit()), "of unknown version")


_PRIVATE: Final = {"TARGET_INFO_SYSTEM_ENV", "ProcessStreams"}
"""The environment of the recorded program, and its output."""
_ROWS_AT_ONCE: Final = 1 << 16


def is_table_folder(path: Path) -> bool:
    """Return True for a folder with tables of nsys's names in it."""
    if not os.path.isdir(path):  # noqa: PTH112 - what cannot be looked at is its reader's to refuse
        return False
    from gputrace.readers.nsys_schema import TABLES

    known = {table.name for table in TABLES} | {"StringIds"}
    try:
        return any(table.stem in known for table in _tables(path))
    except OSError:
        return False


def _tables(folder: Path) -> list[Path]:
    """Return one file for each table, in order of the names."""
    files = [file for file in folder.iterdir() if file.suffix in (".parquet", ".arrow")]
    by_name = {file.stem: file for file in sorted(files, reverse=True) if file.is_file()}
    return list(by_name.values())[::-1]


def convert_folder(folder: Path) -> Path:
    """Return the tables of a folder as an SQLite file in the cache."""
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _tables(folder)]
    return cached_file("nsys", f"{folder.resolve()}\0{states}", partial(_convert, folder))


def _convert(folder: Path, target: Path) -> None:
    try:
        import adbc_driver_manager as adbc
        import adbc_driver_sqlite
        import pyarrow  # noqa: F401
    except ImportError:
        hint = "install gputrace[arrow], or export with --type sqlite"
        raise MissingError(f"{folder}: Parquet and Arrow tables need pyarrow; {hint}") from None

    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with (
        adbc.AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=str(target)) as database,
        adbc.AdbcConnection(database) as connection,
    ):
        for pragma in ("journal_mode = OFF", "synchronous = OFF"):
            with adbc.AdbcStatement(connection) as statement:
                statement.set_sql_query(f"PRAGMA {pragma}")
                statement.execute_query()
        for table in _tables(folder):
            if table.stem not in _PRIVATE:
                _copy(connection, table)


def _copy(connection: Any, table: Path) -> None:
    """Make a table of a file, a batch of rows at a time."""
    import adbc_driver_manager as adbc
    import pyarrow

    try:
        with closing(_reader(table)) as reader, adbc.AdbcStatement(connection) as statement:
            statement.set_options(**{"adbc.ingest.target_table": table.stem})
            statement.bind_stream(reader)
            statement.execute_update()
    except (adbc.Error, pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, adbc.Error) and "full" in str(error):
            problem = f"{cache_folder()}: the disk is full; make room for {table}"
            raise MissingError(problem) from None
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        reason = reason.partition(". Detail: ")[0]  # Where in Arrow it was noticed.
        raise InputError(table, f"broken ({reason}); copy or export it again") from None


def _reader(table: Path) -> Any:
    """Read the columns of a file that SQLite can hold, as Arrow batches."""
    import pyarrow

    from gputrace.readers.compressed import check_ratio

    schema, batches = _batches(table)
    kept = [field for field in schema if not pyarrow.types.is_nested(field.type)]
    if not kept:
        raise ValueError("no columns")
    fields = [field.with_type(_storable(field.type)) for field in kept]
    plain = pyarrow.schema(fields)

    def rows() -> Iterator[Any]:
        size, unpacked = table.stat().st_size, 0
        for batch in batches:
            unpacked += batch.nbytes
            check_ratio(table, unpacked, size)
            columns = [batch.column(field.name) for field in kept]
            # Ids of 64 bits without a sign are stored with one, as in the SQLite export.
            cast = [c.cast(f.type, safe=False) for c, f in zip(columns, fields, strict=True)]
            yield pyarrow.RecordBatch.from_arrays(cast, schema=plain)

    return pyarrow.RecordBatchReader.from_batches(plain, rows())


def _storable(kind: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        return _storable(kind.value_type)
    if pyarrow.types.is_unsigned_integer(kind) or pyarrow.types.is_temporal(kind):
        return pyarrow.int64()
    return kind


def _batches(table: Path) -> tuple[Any, Iterator[Any]]:
    """Return schema and record batches of a Parquet file, or of a file or stream of Arrow."""
    import pyarrow

    if table.suffix == ".parquet":
        from pyarrow import parquet

        columns = parquet.ParquetFile(table)
        return columns.schema_arrow, columns.iter_batches(_ROWS_AT_ONCE)
    # Not mapped: a file that is cut meanwhile would end the process.
    source = pyarrow.OSFile(str(table))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema, iter(stream)
    file = pyarrow.ipc.open_file(source)
    return file.schema, map(file.get_batch, range(file.num_record_batches))
