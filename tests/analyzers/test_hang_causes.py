"""A hang: which rank the others wait for, where, told from outside of the processes."""

from __future__ import annotations

import json
import os
import pickle
import sys
from contextlib import chdir, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gputrace.analyzers.hang_causes import Hang, find_cause
from gputrace.collectors.hang_watch import Hangs, read_ring
from gputrace.errors import InputError
from gputrace.readers.flight_recorder import Collective, RankState, read_ranks
from gputrace.readers.plain_pickle import plain_pickle
from tests.helpers import command
from tests.helpers.programs import Program, torch_python

LOOP: Final = (("all_reduce", "train.py:10 step"), ("all_gather", "train.py:12 step"))
LIBRARY: Final = "/x/site-packages/torch/distributed/distributed_c10d.py:1 all_reduce"


def lockstep(ranks: int, steps: int) -> list[list[Collective]]:
    """Ranks that have ended so many steps of the loop, with two collectives each, and no fault."""
    return [
        [
            Collective("default", tuple(range(ranks)), name, number + 1, number // 2, line, 1, True)
            for number, (name, line) in enumerate(LOOP * steps)
        ]
        for _ in range(ranks)
    ]


def waiting(entries: list[Collective], at: int) -> None:
    """Enter the collective of a number, counted from 0, and stay in it."""
    last = entries[-1]
    name, line = LOOP[at % 2]
    entries.append(Collective("default", last.members, name, at + 1, at // 2, line, 1, False))


def state(rank: int, entries: list[Collective], stack: str = LIBRARY, **other: Any) -> RankState:
    values: dict[str, Any] = {"host": "h", "pid": 100 + rank, "is_alive": True, "steps": 1}
    return RankState(rank, **values | other, stack=(stack,), collectives=tuple(entries))


@given(st.integers(2, 16), st.integers(1, 20), st.booleans(), st.data())
def test_the_rank_that_has_not_come_is_named_with_its_line(
    ranks: int, steps: int, second: bool, data: st.DataObject
) -> None:
    late = data.draw(st.integers(0, ranks - 1))
    entered = lockstep(ranks, steps)
    for rank, entries in enumerate(entered):
        if rank != late and second:
            waiting(entries, 2 * steps)
    states = [
        state(rank, entries, "train.py:99 load" if rank == late else LIBRARY)
        for rank, entries in enumerate(entered)
    ]
    hang = find_cause(states)
    assert hang.ranks == (late,)
    assert hang.line == "train.py:99 load"
    assert hang.cause == ("absent" if second else "stuck")


@given(st.integers(2, 16), st.integers(1, 20), st.integers(1, 3), st.data())
def test_the_rank_that_has_not_come_is_named_where_calls_return_at_once(
    ranks: int, steps: int, ahead: int, data: st.DataObject
) -> None:
    """As NCCL's do; the others are at a line of theirs, where they wait for the GPU."""
    late = data.draw(st.integers(0, ranks - 1))
    entered = lockstep(ranks, steps)
    for rank, entries in enumerate(entered):
        for number in range(2 * steps, 2 * steps + ahead if rank != late else 0):
            waiting(entries, number)
            entries[-1] = replace(entries[-1], is_done=True)
    states = [
        state(rank, entries, "train.py:99 load" if rank == late else "train.py:50 train")
        for rank, entries in enumerate(entered)
    ]
    hang = find_cause(states)
    assert (hang.cause, hang.ranks, hang.line) == ("absent", (late,), "train.py:99 load")
    assert hang.operation == LOOP[0][0]


@given(st.integers(2, 16), st.integers(3, 20), st.data())
def test_the_rank_that_left_a_collective_out_is_named_with_the_line_that_it_came_to(
    ranks: int, steps: int, data: st.DataObject
) -> None:
    odd = data.draw(st.integers(0, ranks - 1))
    entered = lockstep(ranks, steps)
    for rank, entries in enumerate(entered):
        # All went on with the shift, as gloo does where sizes agree, to a collective that does not.
        waiting(entries, 2 * steps + (rank == odd))
        if rank == odd:
            last = entries[-1]
            entries[-1] = Collective(
                "default", last.members, last.operation, 2 * steps + 1, steps, last.line, 1, False
            )
    hang = find_cause([state(rank, entries) for rank, entries in enumerate(entered)])
    assert (hang.cause, hang.ranks) == ("mismatch", (odd,))
    assert (hang.operation, hang.line) == (LOOP[0][0], LOOP[1][1])


@given(st.integers(2, 16), st.integers(1, 20), st.data())
def test_a_process_that_is_gone_is_named_with_its_last_collective(
    ranks: int, steps: int, data: st.DataObject
) -> None:
    dead = data.draw(st.integers(0, ranks - 1))
    entered = lockstep(ranks, steps)
    for rank, entries in enumerate(entered):
        if rank != dead:
            waiting(entries, 2 * steps)
    states = [state(r, entries, is_alive=r != dead) for r, entries in enumerate(entered)]
    hang = find_cause(states)
    assert (hang.cause, hang.ranks, hang.line) == ("ended", (dead,), LOOP[1][1])


@given(st.integers(2, 16), st.integers(1, 20))
def test_ranks_in_lockstep_are_not_accused(ranks: int, steps: int) -> None:
    states = [state(rank, entries) for rank, entries in enumerate(lockstep(ranks, steps))]
    assert find_cause(states).ranks == ()


def test_ranks_that_wait_for_each_other_in_two_groups_are_both_named() -> None:
    def within(group: str, members: tuple[int, ...], line: str, number: int = 1) -> Collective:
        return Collective(group, members, "all_reduce", number, 0, line, 1, False)

    states = [
        state(0, [within("a", (0, 1), "train.py:5 f")]),
        state(1, [within("b", (0, 1), "train.py:7 f")]),
    ]
    hang = find_cause(states)
    assert (hang.cause, hang.ranks) == ("mismatch", (0, 1))
    assert "train.py:5 f" in hang.message
    assert "train.py:7 f" in hang.message


def dump(last: int, line: int = 20) -> dict[str, Any]:
    """A flight recorder's dump of a rank that has entered so many all-reduces."""
    entries = [
        {
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_700_000_000_000_000_000 + number,
            "input_sizes": ((4,),),
            "state": "completed" if number < last else "scheduled",
            "retired": number < last,
            "frames": [{"filename": "train.py", "line": line, "name": "step"}],
        }
        for number in range(1, last + 1)
    ]
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": groups, "entries": entries}


@pytest.mark.parametrize("protocol", [None, 2, 4])
def test_dumps_of_the_flight_recorder_alone_are_analyzed(
    tmp_path: Path, protocol: int | None
) -> None:
    for rank, last in enumerate((7, 6)):
        content = dump(last)
        data = json.dumps(content).encode() if protocol is None else pickle.dumps(content, protocol)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    files = sorted(tmp_path.iterdir())
    ran = command.gputrace("analyze", *files)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("rank 1 has not reached all_reduce (number 7 of default_pg")
    told = json.loads(command.gputrace("analyze", "--json", *files).out)
    assert (told["cause"], told["ranks"], told["operation"]) == ("absent", [1], "all_reduce")


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo never",)


@pytest.mark.parametrize("members", ["0-" + "9" * 30, "0-1000000," * 9, "0-5/0", "x"])
def test_a_report_of_no_possible_group_is_an_error_of_input(tmp_path: Path, members: str) -> None:
    entry = {"group": "g", "members": members, "operation": "x", "number": 1, "step": 0}
    entry |= {"line": "", "start_ns": 1, "end_ns": None}
    row = {"rank": 0, "pid": 1, "steps": 1, "alive": True, "threads": [], "collectives": [entry]}
    path = tmp_path / "t.hang1.json"
    path.write_text(json.dumps({"gputrace_hang": 1, "ranks": [row]}))
    with pytest.raises(InputError, match="not a flight recorder dump"):
        read_ranks([path])


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump(1) | {"x": Harmful()}))
    with pytest.raises(InputError, match="more than plain values"):
        read_ranks([path])


def test_a_pickle_that_grows_without_bound_as_text_is_read_at_once(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested, nested]
    content = dump(1)
    content["entries"][0]["input_sizes"] = nested
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(content, 2))
    assert len(read_ranks([path])[0].collectives[0].size) < 1000


plain: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=8,
)


@given(plain, st.integers(2, 5))
def test_plain_pickles_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert plain_pickle(pickle.dumps(value, protocol)) == value


@given(st.binary(max_size=200))
def test_what_is_no_dump_is_an_error_of_input(data: bytes) -> None:
    with suppress(ValueError, LookupError, TypeError):
        plain_pickle(b"\x80\x02" + data)


@pytest.mark.parametrize("data", [b"S'\\\xaf'\n.", b"I1\n.", b"cos\nsystem\n(S'x'\ntR."])
def test_opcodes_of_old_protocols_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="more than plain values"):
        plain_pickle(b"\x80\x02" + data)


LAUNCH: Final = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "train.py"], env=os.environ | {"RANK": str(rank)})
    for rank in range(2)
]
sys.exit(sum(process.wait() for process in ranks))
"""
DISTRIBUTED: Final = """
import os, threading, time
def _dump_when_asked():
    # As PyTorch does of NCCL's collectives.
    pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{get_rank()}.pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR), "rb") as asked:
        asked.read(1)
    with open(f"{os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE']}{get_rank()}", "w") as file:
        file.write('{"entries": []}')
def is_initialized(): return True
def get_rank(): return int(os.environ["RANK"])
def get_world_size(): return 2
_calls = []
def all_reduce(tensor, op=None, group=None, async_op=False):
    if not _calls:
        threading.Thread(target=_dump_when_asked, daemon=True).start()
    _calls.append(tensor)
    open(f"{len(_calls)}.{get_rank()}", "w").close()
    while not os.path.exists(f"{len(_calls)}.{1 - get_rank()}"):
        time.sleep(0.01)
"""
TRAIN: Final = """
import sys, time
sys.path.insert(0, "modules")
import torch.distributed.distributed_c10d as dist
import gputrace
for step in range(8):
    if step == 4 and dist.get_rank() == 1:
        time.sleep(5)  # planted
    dist.all_reduce(step)
    gputrace.step()
"""


def test_a_hang_under_record_is_reported_while_the_program_is_left_alone(tmp_path: Path) -> None:
    modules = tmp_path / "modules" / "torch" / "distributed"
    modules.mkdir(parents=True)
    for package in (modules, modules.parent):
        (package / "__init__.py").touch()
    (modules / "distributed_c10d.py").write_text(DISTRIBUTED)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "launch.py").write_text(LAUNCH)
    options = "--backend", "host", "--no-nvml", "--hang", "2s", "-o", "t.sqlite"
    dumps = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "dump_")}
    with chdir(tmp_path):
        ran = command.gputrace("record", *options, "--", sys.executable, "launch.py", env=dumps)
    assert ran.code == 0, ran.err
    report = json.loads((tmp_path / "t.hang1.json").read_text())
    assert report["flight_recorder"] == [str(tmp_path / f"dump_{rank}") for rank in range(2)]
    hang: Hang = find_cause(read_ranks([tmp_path / "t.hang1.json"]))
    line = 1 + TRAIN.splitlines().index("        time.sleep(5)  # planted")
    assert (hang.cause, hang.ranks, hang.operation) == ("absent", (1,), "all_reduce")
    assert hang.line == f"{tmp_path}/train.py:{line} <module>"
    assert f"gputrace: {hang.message}" in ran.err
    assert "gputrace: it continued after" in ran.err
    assert not (tmp_path / "t.hang2.json").exists()


KEPT: Final = """
import os, shutil, sys
sys.path.insert(0, "modules")
import torch.distributed.distributed_c10d as dist
import gputrace
class Group:
    group_name = "data parallel"
dist.all_reduce(0, group=Group())
dist.reduce_scatter_tensor(0, 0, "sum", Group())
gputrace.step()
ring = f"{os.environ['GPUTRACE_DIR']}/{os.getpid()}.hang"
print(os.stat(ring).st_blocks * 512 >= os.stat(ring).st_size)
shutil.copy(ring, "ring")
"""


def test_a_ring_holds_large_groups_and_has_its_space_on_disk(tmp_path: Path) -> None:
    modules = tmp_path / "modules" / "torch" / "distributed"
    modules.mkdir(parents=True)
    for package in (modules, modules.parent):
        (package / "__init__.py").touch()
    groups = "def get_process_group_ranks(group): return list(range(3, 4096, 8))\n"
    (modules / "distributed_c10d.py").write_text(
        "def all_reduce(tensor, group): pass\n"
        "def reduce_scatter_tensor(output, input, op=None, group=None): pass\n"
        "def is_initialized(): return True\n"
        "def get_rank(): return 3\n"
        "def get_world_size(): return 4096\n" + groups
    )
    (tmp_path / "train.py").write_text(KEPT)
    options = "--backend", "host", "--no-nvml", "--hang", "60s", "-o", "t.sqlite"
    with chdir(tmp_path):
        ran = command.gputrace("record", *options, "--", sys.executable, "train.py")
    assert ran.out == "True\n", ran.err
    ring = read_ring(tmp_path / "ring", whole=True)
    assert ring is not None
    entry, second = ring.collectives
    assert (second["operation"], second["group"]) == ("reduce_scatter_tensor", "data parallel")
    assert (entry["operation"], entry["members"]) == ("all_reduce", "3-4091/8")
    rank = asdict(ring) | {"alive": True, "threads": []}
    report = {"gputrace_hang": 1, "ranks": [rank]}
    (tmp_path / "hang.json").write_text(json.dumps(report, default=str))
    (state,) = read_ranks([tmp_path / "hang.json"])
    assert state.collectives[0].members == tuple(range(3, 4096, 8))
    assert state.collectives[0].line.endswith("train.py:8 <module>")


def test_a_group_that_torch_does_not_know_fails_where_the_program_has_it_fail(
    tmp_path: Path,
) -> None:
    modules = tmp_path / "modules" / "torch" / "distributed"
    modules.mkdir(parents=True)
    for package in (modules, modules.parent):
        (package / "__init__.py").touch()
    (modules / "distributed_c10d.py").write_text(
        "def all_reduce(tensor, group): print('reduced')\n"
        "def is_initialized(): return True\n"
        "def get_rank(): return 0\n"
        "def get_world_size(): return 2\n"
        "def get_process_group_ranks(group): raise ValueError('no such group')\n"
    )
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "sys.path.insert(0, 'modules')\n"
        "import torch.distributed.distributed_c10d as dist\n"
        "dist.all_reduce(0, group=object())\n"
    )
    options = "--backend", "host", "--no-nvml", "--hang", "60s", "-o", "t.sqlite"
    with chdir(tmp_path):
        ran = command.gputrace("record", *options, "--", sys.executable, "train.py")
    assert (ran.code, ran.out) == (0, "reduced\n"), ran.err


def test_descriptors_of_the_program_stay_its(tmp_path: Path) -> None:
    """It closes all that it has not opened itself, opens others, and forks."""
    (tmp_path / "train.py").write_text(
        "import os, gputrace\n"
        "gputrace.step()\n"
        "os.closerange(3, 1000)\n"
        "opened = [os.open('/dev/null', os.O_RDONLY) for _ in range(300)]\n"
        "child = os.fork()\n"
        "if child: os.wait()\n"
        "print(len([os.fstat(number) for number in opened]), flush=True)\n"
    )
    options = "--backend", "host", "--no-nvml", "--hang", "60s", "-o", "t.sqlite"
    with chdir(tmp_path):
        ran = command.gputrace("record", *options, "--", sys.executable, "train.py")
    assert (ran.code, ran.out) == (0, "300\n300\n"), ran.err
    assert "Error" not in ran.err


def test_a_file_that_a_ring_has_removed_does_not_end_the_watch(tmp_path: Path) -> None:
    (tmp_path / "gone.host").symlink_to(tmp_path / "nowhere")
    Hangs(tmp_path, tmp_path / "t.sqlite", 10**9, print, lambda _: []).look()


@pytest.mark.parametrize(
    ("version", "size"), [("2.2.1+cu121", "2000"), ("2.12.0", "2000"), ("2.13.0", None)]
)
@pytest.mark.parametrize("python", ["3.6", "3.8", None])
def test_pytorch_is_asked_for_a_pipe_in_any_python_and_for_records_where_it_makes_none(
    tmp_path: Path, python: str | None, version: str, size: str | None
) -> None:
    """From 2.13 on it records by itself, and warns of the variable by which it was asked to."""
    homes = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
    if python and not homes:
        pytest.skip(f"no Python {python} is here")
    program = Program(tmp_path)
    program.write({"torch/distributed/distributed_c10d.py": ""})
    (program.modules / "torch" / "__init__.py").write_text(f"__version__ = {version!r}")
    source = (
        "import os, torch.distributed.distributed_c10d\n"
        "stem = os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']\n"
        "print(os.path.dirname(stem), os.environ.get('TORCH_NCCL_TRACE_BUFFER_SIZE'))\n"
    )
    started = str(homes[0]) if homes else sys.executable
    out = program.quietly(source, python=started, GPUTRACE_HANG="60000000000")
    assert out == f"{program.spool} {size}\n"


GLOO: Final = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
def train(rank, store):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(6):
        weight.sum().backward()
        if step == 3 and rank == 1:
            dist.barrier()  # planted
        dist.all_reduce(weight.grad)
        dist.barrier()
        optimizer.step()
if __name__ == "__main__":
    context = mp.start_processes(train, (sys.argv[1],), 2, join=False, start_method="spawn")
    until = time.monotonic() + 60
    while not os.path.exists("t.hang1.json") and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    for process in context.processes:
        process.kill()
"""


def test_ranks_of_gloo_in_different_collectives_are_told_apart(tmp_path: Path) -> None:
    python = torch_python()
    (tmp_path / "train.py").write_text(GLOO)
    options = "--backend", "host", "--no-nvml", "--hang", "3s", "-o", "t.sqlite"
    store = f"file://{tmp_path}/store"
    with chdir(tmp_path):
        command.gputrace("record", *options, "--", python, "train.py", store)
    hang = find_cause(read_ranks([tmp_path / "t.hang1.json"]))
    line = 1 + GLOO.splitlines().index("            dist.barrier()  # planted")
    assert (hang.cause, hang.ranks) == ("mismatch", (1,))
    assert hang.line.endswith(f"train.py:{line} train")


def test_dumps_tell_of_ranks_that_a_report_leaves_open(tmp_path: Path) -> None:
    """As under DistributedDataParallel, whose collectives are called in C++."""
    rows = [
        {"rank": rank, "pid": 7 + rank, "steps": 8, "alive": True, "collectives": []}
        | {"threads": [["train.py:5 train" if rank == 0 else "train.py:3 load"]]}
        for rank in range(2)
    ]
    report = tmp_path / "t.hang1.json"
    report.write_text(json.dumps({"gputrace_hang": 1, "ranks": rows}))
    assert find_cause(read_ranks([report])).cause == "unknown"
    paths = [tmp_path / f"nccl_trace_rank_{rank}" for rank in range(2)]
    for path, last in zip(paths, (7, 6), strict=True):
        path.write_bytes(pickle.dumps(dump(last)))
    hang = find_cause(read_ranks([report, *paths]))
    assert (hang.cause, hang.ranks, hang.line) == ("absent", (1,), "train.py:3 load")


def test_a_rank_in_an_earlier_step_is_named_where_nothing_else_differs() -> None:
    states = [
        state(0, [], "train.py:5 train", steps=9),
        state(1, [], "train.py:3 load", steps=8),
    ]
    hang = find_cause(states)
    assert (hang.cause, hang.ranks, hang.line) == ("stuck", (1,), "train.py:3 load")


def test_the_line_of_a_dump_is_the_programs_and_not_that_of_the_hooks(tmp_path: Path) -> None:
    content = dump(1)
    (entry,) = content["entries"]
    hook = {"filename": "/x/_gputrace_hooks/hangs.py", "line": 177, "name": "call"}
    entry["frames"] = [hook, *entry["frames"]]
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(content))
    (rank,) = read_ranks([path])
    assert rank.collectives[0].line == "train.py:20 step"
