"""Files of text are decoded in several processes; nothing but the time depends on how many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gputrace
from gputrace.errors import GputraceError, InputError
from gputrace.model.trace import Trace
from gputrace.readers import decode_pool, registry
from gputrace.readers.decode_pool import open_each
from gputrace.readers.registry import open_trace
from tests import command
from tests.synthetic import Plan, simulate, write_kineto


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    plan = Plan(steps=4, ranks=3, kernels_per_step=20, allreduces=1)
    return write_kineto(simulate(plan), tmp_path)


def children() -> set[int]:
    """Ids of the processes that this one has started and that live."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = status.read_text().partition(" (")
        except OSError:
            continue
        state, parent = rest.rpartition(") ")[2].split()[:2]
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(pid))
    return found


@pytest.fixture(autouse=True)
def earlier() -> set[int]:
    """Processes that are none of a test's: other tests' libraries may keep one."""
    return children()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is slow to decode its first file, so that others get their share."""
    real, patience = registry.try_open, [1.5, 0, 0]

    def try_open(file: Path, *how: bool) -> Trace | GputraceError:
        time.sleep(patience.pop(0) if patience else 0)
        return real(file, *how)

    monkeypatch.setattr(decode_pool, "try_open", try_open)


@pytest.mark.parametrize("keep_going", [False, True])
def test_the_report_does_not_depend_on_their_number(
    late: None, ranks: list[Path], keep_going: bool
) -> None:
    if keep_going:
        ranks[1].write_bytes(ranks[1].read_bytes()[:-2000])
    reports = []
    for number in (3, 2, 1):
        with gputrace.open(ranks[0].parent, keep_going=keep_going, workers=number) as trace:
            reports.append(trace.analyze().render("json"))
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_first_broken_file_is_the_one_that_is_told_of(
    ranks: list[Path], number: int, earlier: set[int]
) -> None:
    for path in ranks[1:]:
        path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(InputError, match="cut off") as refused:
        gputrace.open(*ranks, workers=number)
    assert refused.value.path == ranks[1]
    assert children() <= earlier


DIES = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gputrace.readers import decode_pool as workers; real = workers.try_open; "
    "workers.try_open = lambda file, *how: os.kill(os.getpid(), 9) if 'rank1' in str(file) "
    "else real(file, *how); workers.serve()"
)


def test_a_worker_that_dies_is_one_file_s_loss(
    ranks: list[Path], monkeypatch: pytest.MonkeyPatch, earlier: set[int]
) -> None:
    monkeypatch.setattr(decode_pool, "_PROGRAM", DIES)
    worker = decode_pool.Worker()
    first, lost, last = (worker.open(path, False) for path in ranks)
    worker.kill()
    assert isinstance(first, Trace)
    assert isinstance(last, Trace)
    assert isinstance(lost, InputError)
    assert lost.path == ranks[1]
    assert lost.problem.startswith("the process that read it died (signal SIGKILL)")
    assert children() <= earlier


def test_few_bytes_are_decoded_here(
    late: None, ranks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pool, "_PROGRAM", "raise SystemExit(1)")
    assert all(isinstance(found, Trace) for found in open_each(ranks))
    monkeypatch.setattr(decode_pool, "_WORTH", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)

    def slowly(file: Path, *_: bool) -> Trace:
        time.sleep(1)
        return open_trace(file)

    monkeypatch.setattr(decode_pool, "try_open", slowly)
    told = [str(found) for found in open_each(ranks) if isinstance(found, InputError)]
    assert len(told) == 1
    assert "died (exit status 1)" in told[0]


def test_a_script_without_a_main_guard_may_open_a_run(ranks: list[Path], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, gputrace\nprint(len(gputrace.open(sys.argv[1], workers=2).analyze().gpus))\n"
    )
    ran = command.python(str(script), str(ranks[0].parent))
    assert (ran.out, ran.err) == ("3\n", "")


@pytest.fixture
def slow(ranks: list[Path], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose two workers decode for ever; it has started them."""
    program, script = tmp_path / "program.py", tmp_path / "script.py"
    program.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
        "time.sleep(60)\n"
    )
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom gputrace.readers import decode_pool\n"
        "import time\ndecode_pool._PROGRAM = Path(sys.argv[1]).read_text()\n"
        "decode_pool.try_open = lambda file, *how: time.sleep(60)\n"
        "list(decode_pool.open_each(list(map(Path, sys.argv[2:])), workers=3))\n"
    )
    with subprocess.Popen(
        [sys.executable, *map(str, (script, program, *ranks))],
        env=command.environment(),
        stderr=subprocess.DEVNULL,
    ) as running:
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert running.poll() is None
            time.sleep(0.01)
        yield running
        running.kill()


def test_ctrl_c_leaves_no_worker(slow: subprocess.Popen[bytes], tmp_path: Path) -> None:
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    slow.send_signal(signal.SIGINT)
    assert slow.wait(timeout=50) != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_a_worker_sends_is_what_reading_here_gives(ranks: list[Path]) -> None:
    worker = decode_pool.Worker()
    for path in ranks:
        found = worker.open(path, False)
        assert isinstance(found, Trace)
        with open_trace(path) as here:
            assert found.session == here.session
            assert found.processes == here.processes
            for kind in here.kinds:
                columns = ("start", "end", "name", "thread", "correlation")
                mine, theirs = (trace.events([kind], columns) for trace in (found, here))
                assert all((getattr(mine, c) == getattr(theirs, c)).all() for c in columns)
    worker.kill()
