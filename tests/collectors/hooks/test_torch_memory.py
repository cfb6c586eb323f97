"""What torch's allocator counts, and what it takes segments for."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Final

import numpy as np
import pytest

from gputrace.collectors.spool.host_events import HostEvents, counts
from tests.helpers.handmade import MS
from tests.helpers.programs import LOOP, TORCH, Program

CUDA: Final = {
    "torch/cuda/memory.py": """
reads = []
counts = dict.fromkeys(("num_alloc_retries", "peak", "segments", "reserved", "freed", "split"), 0)
begun = [True]
def memory_stats_as_nested_dict(device=None):
    if not begun[0]: return {}
    reads.append(device)
    return {
        "num_alloc_retries": counts["num_alloc_retries"],
        "segment": {"all": {"allocated": counts["segments"], "freed": counts["freed"]}},
        "reserved_bytes": {"all": {"current": 5000, "allocated": counts["reserved"]}},
        "allocated_bytes": {"all": {"current": 3000, "peak": counts["peak"]}},
        "inactive_split_bytes": {"all": {"current": counts["split"]}},
    }
def empty_cache():
    "Give it back."
    counts["freed"] += 1
""",
    "torch/autograd/__init__.py": """
from torch.cuda.memory import counts
def backward(peak=0): counts["peak"] = max(counts["peak"], peak)
""",
}

STEP: Final = f"""
import time
{LOOP}
from torch.cuda.memory import counts, begun, reads, empty_cache
from torch.autograd import backward
optimizer = Optimizer()
"""


@pytest.fixture
def torch(program: Program) -> Program:
    program.write(TORCH | CUDA)
    return program


def rows(events: HostEvents, name: str) -> list[tuple[int, int, int]]:
    """Start, end and value of the counters of a name."""
    counters = events.records["counter"]
    mine = np.array([events.names[int(id)] == name for id in counters["name"]], bool)
    own = counters[mine]
    times = own["start"].tolist(), own["end"].tolist()
    return list(zip(*times, counts(own).tolist(), strict=True))


def test_what_the_allocator_counts_adds_up_whichever_steps_are_read(torch: Program) -> None:
    torch.quietly(
        STEP + "optimizer.step()\n"
        "for n in range(200):\n"
        "    counts['segments'] += 2; counts['reserved'] += 7000\n"
        "    counts['num_alloc_retries'] += 1\n"
        "    time.sleep(0.0005)\n"
        "    optimizer.step()\n"
        "    assert len(reads) <= 4 * (n + 2)\n"
    )
    events = torch.events()
    last = events.records["step"]["end"].max()
    for name, each in {"segments": 2, "segment bytes": 7000, "allocation retries": 1}.items():
        found = rows(events, name)
        # What came after the last read is not recorded.
        assert sum(value for *_, value in found) % each == 0
        assert each <= sum(value for *_, value in found) <= 200 * each
        assert found[-1][1] <= last
        # Each begins where the one before it ends.
        assert all(a[1] == b[0] for a, b in pairwise(found))
    assert rows(events, "memory reserved")[0][2] == 5000
    assert rows(events, "memory split") == []


def test_a_peak_belongs_to_the_phase_in_which_it_rises(torch: Program) -> None:
    torch.quietly(
        STEP + "counts['peak'] = 100\noptimizer.step()\n"
        "time.sleep(0.001)\nbackward(900)\ntime.sleep(0.001)\noptimizer.step()\n"
    )
    events = torch.events()
    ((start, end, peak),) = rows(events, "memory peak")
    (backward,) = (
        row for row in events.records["phase"] if events.names[int(row["name"])] == "backward"
    )
    assert peak == 900
    assert start <= backward["start"] < backward["end"] <= end
    assert end - start < int(backward["end"] - backward["start"]) + MS


def test_calls_that_empty_the_cache_are_counted(torch: Program) -> None:
    out = torch.quietly(
        STEP + "optimizer.step()\nempty_cache()\nprint(counts['freed'], empty_cache.__doc__)\n"
        "optimizer.step()\n"
    )
    assert out == "1 Give it back.\n"
    ((start, end, calls),) = rows(torch.events(), "cache emptied")
    assert (calls, end >= start) == (1, True)


def test_nothing_is_read_before_torch_has_begun_with_cuda(torch: Program) -> None:
    torch.quietly(STEP + "begun[0] = False\nfor _ in range(5): backward(5); optimizer.step()\n")
    assert not rows(torch.events(), "memory reserved")


def test_counts_that_cannot_be_read_are_noted_once(torch: Program) -> None:
    torch.write(
        {
            "torch/cuda/memory.py": CUDA["torch/cuda/memory.py"].replace(
                "return {\n", "return 1/0, {"
            )
        }
    )
    torch.quietly(STEP + "for _ in range(5): optimizer.step()\nprint(len(reads))")
    events = torch.events()
    notes = [events.names[int(row["name"])] for row in events.records["note"]]
    assert len([text for text in notes if "allocator" in text]) == 1


HISTORY: Final = """
calls, entries = [], []
def _record_memory_history(enabled="all", context="all", max_entries=0):
    calls.append((enabled, context)); entries.clear()
def _snapshot(device=None): return {"device_traces": [list(entries)]}
def take(size):
    counts["segments"] += 1
    for action, bytes in (("segment_alloc", 2 * size), ("alloc", size), ("alloc", 5)):
        entries.append({"action": action, "size": bytes})
"""


@pytest.fixture
def asked(torch: Program) -> Program:
    torch.write(
        {
            "torch/cuda/memory.py": CUDA["torch/cuda/memory.py"] + HISTORY,
            "torch/cuda/__init__.py": "def current_device(): return 0\n",
            "torch/_C.py": "def _cuda_isHistoryEnabled(): return False\n",
        }
    )
    return torch


TAKES: Final = (
    STEP + "import torch.cuda, torch._C\nfrom torch.cuda import memory\n"
    "for n in range(200):\n    memory.take(7000 if n else 1)\n    time.sleep(0.0005)\n"
)


def test_the_sizes_of_tensors_that_need_new_segments_are_recorded(asked: Program) -> None:
    out = asked.quietly(TAKES + "    optimizer.step()\nprint(memory.calls)\n")
    assert out == f"{[('all', None), (None, 'all')] * 3}\n"
    assert {size for *_, size in rows(asked.events(), "segment request")} == {7000}


def test_a_program_that_records_its_memory_does_so_alone(asked: Program) -> None:
    record = "    if n == 3: memory._record_memory_history('state')\n    optimizer.step()\n"
    assert asked.quietly(TAKES + record + "print(memory.calls)") == "[('state', 'all')]\n"
    assert rows(asked.events(), "segment request") == []


def test_a_history_that_cannot_be_read_is_switched_off(asked: Program) -> None:
    fails = (
        "import torch.cuda.memory as m\ndef m_fails(device=None): raise RuntimeError('planted')\n"
    )
    fails += "m._snapshot = m_fails\n"
    out = asked.quietly(fails + TAKES + "    optimizer.step()\nprint(memory.calls)\n")
    assert out == f"{[('all', None), (None, 'all')]}\n"


SNAPSHOTS: Final = {
    "torch/cuda/memory.py": CUDA["torch/cuda/memory.py"]
    + """
calls = []
def _record_memory_history(enabled="all", context="all", stacks="all", max_entries=0):
    calls.append((enabled, context, stacks, max_entries))
def _snapshot(device=None):
    calls.append("snapshot")
    return {"segments": [], "device_traces": [[{"peak": counts["peak"]}]]}
""",
    "torch/cuda/__init__.py": """
_queued = []
_lazy_call = _queued.append
def init():
    for call in _queued: call()
def refuse():
    from torch import _C
    for observer in _C.observers: observer(0, 1 << 30, 1 << 34, 0)
    raise MemoryError("CUDA out of memory")
from .memory import *
""",
    "torch/_C.py": "observers = []\n_cuda_attach_out_of_memory_observer = observers.append\n"
    "def _cuda_isHistoryEnabled(): return False\n",
}
KEPT: Final = ("all", "all", "python", 100_000)
PEAKS: Final = (
    STEP + "import torch.cuda, torch._C\nfrom torch.cuda import memory\ntorch.cuda.init()\n"
    "for n in range(40):\n    backward(min(n, 9) * 1000)\n    time.sleep(0.001)\n"
)


@pytest.fixture
def watched(torch: Program) -> Program:
    torch.write(SNAPSHOTS)
    return torch


def snapshots(program: Program) -> dict[str, int]:
    """Peaks that snapshots tell, by what they were written for."""
    found = {}
    for path in program.folder.glob("run.*"):
        _, pid, name, suffix = path.name.split(".")
        assert (pid.isdigit(), suffix) == (True, "pickle")
        found[name] = pickle.loads(path.read_bytes())["device_traces"][0][0]["peak"]
    return found


def test_snapshots_are_written_at_peaks_and_when_memory_runs_out(watched: Program) -> None:
    source = PEAKS + "    optimizer.step()\nprint(memory.calls[0], len(memory.calls))\n"
    source += "try: torch.cuda.refuse()\nexcept MemoryError as error: print(error)\n"
    out = watched.quietly(source, GPUTRACE_MEMORY=str(watched.folder / "run"))
    first, _, rest = out.partition(") ")
    assert f"{first})" == str(KEPT)
    assert int(rest.split()[0]) <= 5
    assert rest.endswith("CUDA out of memory\n")
    found = snapshots(watched)
    assert set(found) == {"peak", "oom"}
    assert 0 < found["peak"] <= found["oom"] == 9000


def test_no_history_is_kept_unasked_nor_before_cuda_begins(watched: Program) -> None:
    source = PEAKS + "    optimizer.step()\nprint(memory.calls)\n"
    assert str(KEPT) not in watched.quietly(source)
    source = source.replace("torch.cuda.init()", "")
    out = watched.quietly(source, GPUTRACE_MEMORY=str(watched.folder / "run"))
    assert str(KEPT) not in out
    assert snapshots(watched) == {}


def test_a_program_that_keeps_its_own_history_gets_no_snapshots(watched: Program) -> None:
    source = PEAKS.replace("for n", "memory._record_memory_history('state')\nfor n")
    source += "    optimizer.step()\nprint(memory.calls[-1])\n"
    out = watched.quietly(source, GPUTRACE_MEMORY=str(watched.folder / "run"))
    assert out == "('state', 'all', 'all', 0)\n"
    assert snapshots(watched) == {}


def test_a_folder_that_cannot_be_written_costs_the_snapshots_alone(watched: Program) -> None:
    source = PEAKS + "    optimizer.step()\nprint('done')\n"
    assert watched.quietly(source, GPUTRACE_MEMORY="/nowhere/run") == "done\n"


def test_a_child_that_is_the_one_to_begin_with_cuda_writes_its_own(watched: Program) -> None:
    child = "import os\nif os.fork():\n    os.wait(); os._exit(0)\ntorch.cuda.init()"
    source = (
        PEAKS.replace("torch.cuda.init()", child) + "    optimizer.step()\nprint(os.getpid())\n"
    )
    out = watched.quietly(source, GPUTRACE_MEMORY=str(watched.folder / "run"))
    assert (watched.folder / f"run.{out.strip()}.peak.pickle").exists()


def test_a_child_of_a_program_that_has_begun_with_cuda_writes_nothing(watched: Program) -> None:
    source = PEAKS + "    optimizer.step()\nimport os\nif not os.fork():\n"
    source += "    try: torch.cuda.refuse()\n    except MemoryError: os._exit(0)\nos.wait()\n"
    watched.quietly(source, GPUTRACE_MEMORY=str(watched.folder / "run"))
    assert set(snapshots(watched)) == {"peak"}
