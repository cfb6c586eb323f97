"""Exports with ``--redact`` name no person, no machine, no program."""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.store.redact import Redaction
from tests.helpers import command
from tests.helpers.exports import NVTX, PUSH_POP_RANGE, RUNTIME, global_id
from tests.helpers.handmade import Run, train

UUID: Final = "GPU-3fa85f64-5717-4562-b3fc-2c963f66afa6"
BUS: Final = "0000:c1:00.0"
PLANTED: Final = (
    "alice", "node0473", "acme", "mammoth", "trainer.py", "loader.py", "hunter2", "10.1.2.3",
    UUID[4:], BUS, "bob",
)  # fmt: skip
"""Nothing of a person may be found in any form; a kernel's name is not one."""
KERNEL_NAME: Final = "void acme_kernels::gemm<float>"
FORMS: Final = ("trace", "perfetto", "csv", "parquet")


def secret_trace(path: Path) -> Path:
    run = Run()
    train(run, 8)
    run.wait_at(*["/home/alice/mammoth/loader.py:48 load_batch"] * 3)
    train(run, 4)
    made, thread = run.export, global_id(100, thread=100)
    made.kernel(run.now, run.now + 10, KERNEL_NAME)
    run.range(5, 10, "saving /scratch/bob/acme/model.pt on node0473")
    run.range(15, 20, "MAMMOTH epoch, user Alice")
    made.give("PROCESSES", "globalPid", "pid", "name").give("ThreadNames", "nameId", "globalTid")
    made.add("PROCESSES", globalPid=global_id(100), pid=100, name="/home/alice/bin/mammoth")
    made.add("ThreadNames", nameId=made.string("mammoth"), globalTid=thread)
    made.give("GPUTRACE_META", "name", "value")
    told = {
        "format": "1",
        "backend": "cupti",
        "hostname": "node0473.cluster",
        "job": "acme-42",
        "command": json.dumps(["python", "/home/alice/trainer.py", "--key", "hunter2"]),
    }
    for name, value in told.items():
        made.add("GPUTRACE_META", name=name, value=value)
    made.give("GPUTRACE_PROCESS", "globalPid", "pid", "host", "rank", "worldSize", "note")
    who = {"globalPid": global_id(100), "pid": 100, "rank": 0, "worldSize": 1}
    made.add("GPUTRACE_PROCESS", **who, host="node0473.cluster", note="see 10.1.2.3")
    made.give("GPUTRACE_LOSS", "records", "reason")
    made.add("GPUTRACE_LOSS", records=3, reason="the disk of node0473 was full")
    made.give("TARGET_INFO_GPU", "uuid").card(0, BUS)
    made.rows["TARGET_INFO_GPU"][0]["uuid"] = UUID
    made.ordinal(100, 0, 0)
    made.give("TARGET_INFO_SYSTEM_ENV", "name", "value")
    made.add("TARGET_INFO_SYSTEM_ENV", name="Environment", value="SECRET=hunter2")
    made.give("ANYTHING_ELSE", "value").add("ANYTHING_ELSE", value="hunter2")
    return made.write(path)


def everything(path: Path) -> str:
    """All bytes of a file or a folder, unpacked."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    content = b"".join(file.read_bytes() for file in files)
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        # Of the columns' names Arrow writes a copy in base64, in which anything may stand.
        content = re.sub(rb"[A-Za-z0-9+/=]{200,}", b"", content)
        tables = [parquet.read_table(file) for file in files]
        content += "".join(f"{table.schema}{table.to_pydict()}" for table in tables).encode()
    return content.decode("utf-8", "replace")


def exported(form: str, folder: Path, *options: str) -> Path:
    whole = secret_trace(folder / "whole.sqlite")
    target = folder / f"out.{'json.gz' if form == 'perfetto' else form}"
    ran = command.gputrace("export", whole, "--to", form, "-o", target, *options)
    assert ran.code == 0, ran.err
    return target


@pytest.mark.parametrize("form", FORMS)
def test_nothing_planted_is_left(form: str, tmp_path: Path) -> None:
    text = everything(exported(form, tmp_path, "--redact"))
    assert [word for word in PLANTED if re.search(word, text.replace(KERNEL_NAME, ""), re.I)] == []
    assert KERNEL_NAME in text
    assert "void at::native::gemm_forward_1" in text


@pytest.mark.parametrize("form", ["perfetto", "csv", "parquet"])
def test_without_it_the_same_names_are_there(form: str, tmp_path: Path) -> None:
    text = everything(exported(form, tmp_path))
    assert "/scratch/bob/acme/model.pt" in text
    assert "/home/alice/mammoth/loader.py:48" in text


def test_the_report_says_so_and_its_times_are_the_same(tmp_path: Path) -> None:
    part = exported("trace", tmp_path, "--redact")
    with gputrace.open(part) as trace:
        shown = trace.analyze()
    with gputrace.open(tmp_path / "whole.sqlite") as trace:
        whole = trace.analyze()
    assert "redacted: names of hosts, users, paths and programs are replaced" in shown.warnings
    assert shown.breakdown == whole.breakdown
    assert [(g.start_ns, g.cause) for g in shown.gaps.largest] == [
        (g.start_ns, g.cause) for g in whole.gaps.largest
    ]
    assert "host-1" in shown.gpus[0].host


def test_what_was_equal_stays_equal(tmp_path: Path) -> None:
    part = exported("trace", tmp_path, "--redact")
    with closing(sqlite3.connect(part)) as database:
        bus, uuid = database.execute("SELECT busLocation, uuid FROM TARGET_INFO_GPU").fetchone()
        names = database.execute(f"SELECT text FROM {NVTX} WHERE eventType = {PUSH_POP_RANGE}")
        texts = sorted(text for (text,) in names)
        calls = f"SELECT DISTINCT value FROM {RUNTIME} JOIN StringIds ON id = nameId"
        assert ("cudaLaunchKernel",) in database.execute(calls).fetchall()
    assert (bus, uuid) == ("0000:01:00.0", "GPU-00000000-0000-0000-0000-000000000001")
    assert texts == ["program-1 epoch, user user-1", texts[1]]
    assert re.fullmatch(r"saving path-\d+ on host-1", texts[1])


def test_cards_stay_in_the_order_of_their_addresses() -> None:
    redaction = Redaction()
    redaction.learn_addresses(["0000:C1:00.0", "0000:07:00.0"])
    assert redaction.text("0000:07:00.0 0000:c1:00.0") == "0000:01:00.0 0000:02:00.0"


def test_classes_of_modules_are_those_of_torch_or_get_numbers(tmp_path: Path) -> None:
    run = Run()
    train(run, 8)
    made = run.export
    made.give("GPUTRACE_HOST_RANGE", "start", "end", "globalTid", "nameId", "kind", "number")
    paths = ["MammothNet_0", "MammothNet_0/Block_0/Linear_0", "MammothNet_0/Block_1/Linear_1"]
    for at, path in enumerate(paths):
        who = {"globalTid": global_id(100, thread=100), "nameId": made.string(path)}
        made.add("GPUTRACE_HOST_RANGE", start=at, end=at + 1, **who, kind=7, number=0)
    who["nameId"] = made.string("MammothNet_0 at /home/ada/train.py:9 main")
    made.add("GPUTRACE_HOST_RANGE", start=9, end=9, **who, kind=8)
    whole, part = made.write(tmp_path / "whole.sqlite"), tmp_path / "part.sqlite"
    assert command.gputrace("export", whole, "--to", "trace", "--redact", "-o", part).code == 0
    with closing(sqlite3.connect(part)) as database:
        query = "SELECT value FROM GPUTRACE_HOST_RANGE JOIN StringIds ON id = nameId ORDER BY start"
        texts = [text for (text,) in database.execute(query)]
    assert texts == [
        "module-1_0",
        "module-1_0/module-2_0/Linear_0",
        "module-1_0/module-2_1/Linear_1",
        "module-1_0 at path-1:9 main",
    ]


@pytest.mark.parametrize(
    "text",
    ["cudaLaunchKernel", "aten::add", "nccl:all_reduce", "step 17", "ProfilerStep#3", "3.14 of 2"],
)
def test_what_tells_nothing_is_kept(text: str) -> None:
    assert Redaction().text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/usr/lib/x.so: not found", "path-1: not found"),
        ("~/run/train.py:12 load", "path-1:12 load"),
        ("C:\\Users\\eve\\a.py", "path-1"),
        ("s3://bucket/key", "url-1"),
        ("mail eve@example.org", "mail mail-1"),
        ("peer 192.168.0.7:29500", "peer address-1:29500"),
    ],
)
def test_what_looks_like_a_place_is_replaced(text: str, shown: str) -> None:
    assert Redaction().text(text) == shown
