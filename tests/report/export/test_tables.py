"""`gputrace export --to parquet` and `--to csv`: a folder of tables."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

import gputrace
from gputrace.errors import MissingError
from tests.helpers import command
from tests.helpers.handmade import MS, Run, train

NAMES = ("events", "steps", "gaps", "breakdown", "findings")


@pytest.fixture
def training(tmp_path: Path) -> Path:
    run = Run()
    train(run, 12, wait=5 * MS)
    return run.export.write(tmp_path / "whole.sqlite")


def run(form: str, whole: Path, target: Path, *options: str) -> command.Ran:
    return command.gputrace("export", whole, "--to", form, "-o", target, *options)


def test_parquet_has_the_report_and_every_event(training: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("parquet", training, out).code == 0
    assert {path.name for path in out.iterdir()} == {f"{name}.parquet" for name in NAMES}
    with gputrace.open(training) as trace:
        report = trace.analyze()
    tables = {name: parquet.read_table(out / f"{name}.parquet") for name in NAMES}
    kinds = tables["events"]["kind"].to_pylist()
    assert (kinds.count("kernel"), kinds.count("copy_h2d"), kinds.count("api")) == (516, 12, 540)
    assert tables["breakdown"].to_pylist()[0]["data_feeding_ns"] == report.breakdown[0].of(
        "data_feeding"
    )
    assert tables["steps"].num_rows == len(report.step_list)
    assert tables["gaps"]["start_ns"].to_pylist() == [g.start_ns for g in report.gaps.largest]
    first = tables["findings"].to_pylist()[0]
    assert (first["id"], json.loads(first["gpus"])) == ("data-feeding", [0])


def test_what_is_not_known_is_null(training: Path, tmp_path: Path) -> None:
    run("parquet", training, tmp_path / "out")
    rows = parquet.read_table(tmp_path / "out" / "events.parquet").to_pylist()
    copy = next(row for row in rows if row["kind"] == "copy_h2d")
    call = next(row for row in rows if row["kind"] == "api")
    assert (copy["bytes"], copy["thread"], copy["name"]) == (38_000_000, None, None)
    assert (call["name"], call["bytes"], call["thread"]) == ("cudaMemcpyAsync", None, 100)


def test_csv_has_the_same_rows(training: Path, tmp_path: Path) -> None:
    for form in ("csv", "parquet"):
        assert run(form, training, tmp_path / form, "--time", "20ms:60ms").code == 0
    for name in NAMES:
        table = parquet.read_table(tmp_path / "parquet" / f"{name}.parquet")
        with (tmp_path / "csv" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert rows[0] == table.column_names
        assert len(rows) - 1 == table.num_rows
        for index, column in enumerate(table.column_names):
            if column.endswith("_ns") or column in ("start", "end", "name"):
                known = ["" if v is None else str(v) for v in table[column].to_pylist()]
                assert [row[index] for row in rows[1:]] == known


def test_without_pyarrow_csv_is_written_and_others_say_what_they_need(
    training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with gputrace.open(training) as trace:
        trace.export("csv", tmp_path / "csv")
        with pytest.raises(MissingError, match=r"install gputrace\[arrow\], or write --to csv"):
            trace.export("parquet", tmp_path / "parquet")
        with pytest.raises(MissingError, match=r"to_arrow.*install gputrace\[arrow\]"):
            trace.analyze().to_arrow()
    assert {path.name for path in (tmp_path / "csv").iterdir()} == {f"{name}.csv" for name in NAMES}
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "CUPTI_ACTIVITY_KIND_KERNEL.parquet").touch()
    with pytest.raises(MissingError, match=r"gputrace\[arrow\], or export with --type sqlite"):
        gputrace.open(tables)


def test_a_folder_with_other_files_is_not_replaced(training: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    command.assert_refused(run("csv", training, out), 2, "exists", "--force")
    command.assert_refused(run("csv", training, out, "--force"), 2, "holds other files")
    assert (out / "thesis.tex").read_text() == "mine"


def test_force_replaces_tables_of_before(training: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("csv", training, out).code == 0
    assert run("csv", training, out, "--force", "--time", "20ms:60ms").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole.sqlite"}


def test_no_gpu_activity_in_the_window_is_told(training: Path, tmp_path: Path) -> None:
    ran = run("csv", training, tmp_path / "out", "--time", "5s:6s")
    command.assert_refused(ran, 2, "no GPU activity in that window")
    assert list(tmp_path.iterdir()) == [training]


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_text("no trace")
    ran = run("perfetto", path, tmp_path / "out.json")
    command.assert_refused(ran, command.UNREADABLE, str(path))


@pytest.mark.parametrize("form", ["csv", "parquet", "perfetto"])
def test_what_could_not_be_written_is_named_and_nothing_is_left(
    training: Path, tmp_path: Path, form: str
) -> None:
    """Files may have a kilobyte here, as on a full disk."""
    words = ["-m", "gputrace", "export", str(training), "--to", form, "-o", "out"]
    ran = subprocess.run(
        ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", sys.executable, *words],
        env=command.environment(command.NO_BYTECODE),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = "gputrace: out: cannot be written (File too large); name another with -o\n"
    assert (ran.returncode, ran.stderr) == (4, said)
    assert not [path for path in tmp_path.iterdir() if path != training]
