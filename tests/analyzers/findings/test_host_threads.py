"""Why the host was late: no core for its threads, a quota, page faults, or a wait for something."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import gputrace
from gputrace.analyzers.findings.growing_steps import _HELD
from gputrace.api import Report
from gputrace.collectors.spool.host_events import counts
from gputrace.model.results import Finding
from tests.helpers import command
from tests.helpers.exports import SAMPLE, STEP, Export, global_id
from tests.helpers.handmade import MS, US, Run, analyze, ids
from tests.helpers.programs import Program
from tests.helpers.sentences import words_of
from tests.synthetic.late_hosts import COMPUTE, PLANTS, Plant

# ---- counters, made by hand ----

PID: Final = 100
STEPS: Final = 40
PERIOD: Final = 10 * MS
COUNTERS: Final = "GPUTRACE_HOST_COUNTER"


def with_counters(export: Export | None = None) -> Export:
    export = (export or Export()).give("GPUTRACE_META", "name", "value")
    return export.give(COUNTERS, "start", "end", "globalTid", "nameId", "value")


def counted(
    export: Export,
    per_step: dict[str, int],
    others: dict[int, tuple[int, int]],
    pid: int = PID,
    runnable: int = 3,
    cores: int = 2,
) -> None:
    """Steps of 10 ms with counters of the thread that marks them, and of other threads."""
    export.rows.setdefault("GPUTRACE_META", [])
    name = export.string("gputrace.step")

    def count(thread: int, what: str, start: int, end: int, value: int) -> None:
        who = {"globalTid": global_id(pid, thread=thread), "nameId": export.string(what)}
        export.add(COUNTERS, start=start, end=end, value=value, **who)

    for number in range(STEPS):
        start, end = number * PERIOD + 1, (number + 1) * PERIOD + 1
        row = {"globalTid": global_id(pid, thread=pid), "nameId": name, "step": number}
        export.add(STEP, start=start, end=end, **row)
        for what, value in {"process on core": per_step.get("on core", 0), **per_step}.items():
            count(pid, what, start, end, value)
    end = STEPS * PERIOD
    for what, value in {"cores": cores, "runnable": runnable}.items():
        count(pid, what, 1, end, value)
    for thread, times in others.items():
        for what, value in zip(("on core", "queued"), times, strict=True):
            if value * STEPS >= MS:  # Less is not recorded.
                count(thread, what, 1, end, value * STEPS)


def of_host(
    per_step: dict[str, int],
    folder: Path,
    libraries: tuple[str, ...] = (),
    **others: tuple[int, int],
) -> Report:
    export = with_counters()
    threads = {200 + index: own for index, own in enumerate(others.values())}
    counted(export, per_step, threads)
    for library in libraries:
        who = {"globalTid": global_id(PID, thread=PID), "nameId": export.string(library)}
        export.add(COUNTERS, start=STEPS * MS, end=STEPS * MS, value=1, **who)
    return analyze(export, folder)


def the(report: Report, id: str) -> Finding:
    (found,) = (finding for finding in report.findings if finding.id == id)
    return found


def test_time_is_on_a_core_queued_or_blocked(tmp_path: Path) -> None:
    report = of_host({"on core": 5 * MS, "queued": 3 * MS, "minor faults": 7}, tmp_path)
    (load,) = report.host_load
    step = load.covered_ns / load.steps
    assert step == pytest.approx(PERIOD, rel=0.001)
    times = load.on_core_ns, load.queued_ns, load.blocked_ns
    assert sum(times) == load.covered_ns
    assert [time / load.steps for time in times] == pytest.approx([5 * MS, 3 * MS, 2 * MS], abs=US)
    assert load.minor_faults == 7 * load.steps
    assert (load.cores, load.threads, load.quota_cores) == (2, 1, None)


def test_steps_that_grow_by_waits_for_a_core_are_not_blamed_on_what_the_program_keeps(
    tmp_path: Path,
) -> None:
    export, name = with_counters(), "gputrace.step"
    export.rows.setdefault("GPUTRACE_META", [])
    now = 1
    for step in range(60):
        queued = step * MS // 10
        start, now = now, now + 10 * MS + queued
        who = {"globalTid": global_id(PID, thread=PID)}
        export.add(STEP, start=start, end=now, nameId=export.string(name), step=step, **who)
        held = {"Python blocks": 10**6 + 30_000 * step}
        for what, value in {
            "process on core": 8 * MS, "on core": 8 * MS, "queued": queued, **held
        }.items():  # fmt: skip
            counted = {"start": start, "end": now, "value": value, **who}
            export.add(COUNTERS, nameId=export.string(what), **counted)
    found = the(analyze(export, tmp_path), "steps-grow")
    assert found.evidence["row"] == "cpu-starved"
    assert found.details == ("what grew most is waiting for a core (5.03 ms)",)
    assert "what the program keeps" not in found.advice


def test_a_queued_thread_is_said_to_lack_a_core(tmp_path: Path) -> None:
    report = of_host({"on core": 6 * MS, "queued": 4 * MS}, tmp_path)
    found = the(report, "cpu-starved")
    assert found.severity == "high"
    assert found.impact_ns == pytest.approx(4 * MS, rel=0.01)
    said = "too few cores cost 40% of each step (4.00 of 10.0 ms): 3 threads share 2 cores"
    assert found.message == said
    assert "1 of these threads is in the training process" in words_of(found)
    assert "fewer" not in found.advice


@pytest.mark.parametrize(("queued", "waits"), [(2, 8), (6, 4), (9, 1)])
def test_a_wait_for_data_in_which_the_thread_is_certain_to_be_queued_is_charged_once(
    tmp_path: Path, queued: int, waits: int
) -> None:
    """It waits for 8 of 10 ms, with room for 2 ms in the queue beside that."""
    export = with_counters()
    export.give("GPUTRACE_HOST_RANGE", "start", "end", "globalTid", "nameId", "kind")
    counted(export, {"on core": MS, "queued": queued * MS}, {})
    for step in range(STEPS):
        row = {"start": step * PERIOD + 1, "end": step * PERIOD + 1 + 8 * MS, "kind": 1}
        who = {"globalTid": global_id(PID, thread=PID), "nameId": export.string("DataLoader")}
        export.add("GPUTRACE_HOST_RANGE", **row, **who)
    report = analyze(export, tmp_path)
    found = {found.id: found.impact_ns for found in report.findings}
    assert found["cpu-starved"] == pytest.approx(queued * MS, rel=0.01)
    assert found["data-feeding"] == pytest.approx(waits * MS, rel=0.01)
    assert found["cpu-starved"] + found["data-feeding"] <= 10 * MS
    assert report.breakdown[0].host_data_ns == report.breakdown[0].steps * 8 * MS
    gains = re.findall(r"Expected gain: (.*?)\.\s+What", report.render("text"), re.DOTALL)
    second = ["of which some may be in the gain above" in " ".join(gain.split()) for gain in gains]
    assert second == [False, True]


@pytest.mark.parametrize(("cores", "says"), [(2, "2 cores"), (0, "cores")])
def test_a_queued_thread_whose_rivals_were_not_met_is_not_counted_among_too_few(
    tmp_path: Path, cores: int, says: str
) -> None:
    export = with_counters()
    counted(export, {"on core": 6 * MS, "queued": 4 * MS}, {}, runnable=1, cores=cores)
    found = the(analyze(export, tmp_path), "cpu-starved")
    assert found.message.endswith(f": other threads occupy the {says}")
    assert "share" not in words_of(found)


def test_the_line_of_a_wait_is_where_the_thread_sleeps_and_not_where_it_computes_for_longer(
    tmp_path: Path,
) -> None:
    export = with_counters()
    counted(export, {"on core": 7 * MS}, {})
    who = {"globalTid": global_id(PID, thread=PID)}
    for start in range(1, STEPS * PERIOD, PERIOD):
        for at, place in enumerate(["train.py:3 compute"] * 2 + ["train.py:9 wait_for_peer"]):
            name, moment = export.string(place), start + (1 + 3 * at) * MS
            row = {"start": moment, "nameId": name, "innerNameId": name, "waitedNs": 3 * MS}
            export.add(SAMPLE, **row, **who)
        name = export.string("asleep")
        export.add(COUNTERS, start=start + 7 * MS, end=start + 9 * MS, value=1, nameId=name, **who)
    found = the(analyze(export, tmp_path), "host-blocked")
    assert found.evidence["line"] == "train.py:9 wait_for_peer"


def test_no_line_is_named_where_another_thread_was_sampled_than_the_one_that_trains(
    tmp_path: Path,
) -> None:
    export = with_counters()
    counted(export, {"on core": 3 * MS}, {})
    name = export.string("worker.py:323 main_loop")
    who = {"globalTid": global_id(PID, thread=PID + 1), "nameId": name, "innerNameId": name}
    for start in range(1, STEPS * PERIOD, MS):
        export.add(SAMPLE, start=start, waitedNs=MS, **who)
    found = the(analyze(export, tmp_path), "host-blocked")
    assert "line" not in found.evidence
    assert found.advice == "check what it waits for"
    assert "not for a core, nor for data that is marked" in found.message
    assert "gputrace.annotate('data')" in words_of(found)


@pytest.mark.parametrize("computes", [5, 7])
def test_a_thread_that_waits_while_others_of_its_process_compute_needs_no_cure(
    tmp_path: Path, computes: int
) -> None:
    times = {"on core": 4 * MS, "process on core": (4 + computes) * MS}
    found = the(of_host(times, tmp_path), "host-blocked")
    assert found.severity == ("high" if computes < 6 else "low")
    assert ("while other threads of its process compute" in words_of(found)) == (computes > 6)


@pytest.mark.parametrize("updates_at", [2, 7])
def test_a_wait_between_the_passes_of_an_update_may_be_for_a_device(
    tmp_path: Path, updates_at: int
) -> None:
    """Without GPU activity, a host whose device computes looks like one that waits there."""
    export = with_counters()
    export.give("GPUTRACE_HOST_RANGE", "start", "end", "globalTid", "nameId", "kind")
    counted(export, {"on core": 3 * MS}, {})
    who = {"globalTid": global_id(PID, thread=PID), "kind": 4}
    passes = {"forward": (0, 1), "backward": (1, 2), "optimizer": (updates_at, 8)}
    for step in range(STEPS):
        for name, (start, end) in passes.items():
            span = {"start": step * PERIOD + start * MS, "end": step * PERIOD + end * MS}
            export.add("GPUTRACE_HOST_RANGE", **span, **who, nameId=export.string(name))
    report = analyze(export, tmp_path)
    blocked = [found for found in report.findings if found.id == "host-blocked"]
    unseen = words_of(the(report, "no-gpu-activity"))
    assert [round(found.impact_ns / MS) for found in blocked] == [{2: 7, 7: 2}[updates_at]]
    said = "waits 50% of each step (5.00 of 10.0 ms) between the passes of an update"
    assert (said in unseen) == (updates_at == 7)


def test_the_line_of_a_wait_is_of_the_thread_that_trains_and_not_of_idle_workers(
    tmp_path: Path,
) -> None:
    """Forked workers that wait for work are at the line that started them."""
    export = with_counters()
    counted(export, {"on core": 3 * MS}, {})
    for start in range(1, STEPS * PERIOD, PERIOD):
        for pid, place in (
            (PID, "train.py:9 wait"),
            *((PID + k, "train.py:2 start") for k in (1, 2)),
        ):
            name = export.string(place)
            row = {"start": start + MS, "nameId": name, "innerNameId": name, "waitedNs": 3 * MS}
            export.add(SAMPLE, **row, globalTid=global_id(pid, thread=pid))
    found = the(analyze(export, tmp_path), "host-blocked")
    assert found.message.endswith("waits 70% of each step (7.00 of 10.0 ms) at train.py:9 wait")


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_there_are_several_ranks_a_thread_may_wait_for_another(
    tmp_path: Path, ranks: int
) -> None:
    export = with_counters()
    for rank in range(ranks):
        counted(export, {"on core": 4 * MS}, {}, pid=PID + rank)
    found = the(analyze(export, tmp_path), "host-blocked")
    assert ("that may be another rank, a lock" in words_of(found)) == (ranks > 1)


def test_a_thread_that_spins_while_another_is_queued_lacks_a_core_too(tmp_path: Path) -> None:
    report = of_host({"on core": 10 * MS}, tmp_path, openmp=(3 * MS, 7 * MS))
    found = the(report, "cpu-starved")
    assert found.impact_ns == pytest.approx(7 * MS, rel=0.01)
    assert "OMP_NUM_THREADS=1" in found.advice


def test_threads_that_take_turns_wait_for_all_that_each_is_queued(tmp_path: Path) -> None:
    """As those of the forward and the backward pass beside a burner on their core."""
    times = {"on core": 25 * MS // 10, "queued": 25 * MS // 10}
    report = of_host(times, tmp_path, backward=(25 * MS // 10, 25 * MS // 10))
    assert the(report, "cpu-starved").impact_ns == pytest.approx(5 * MS, rel=0.01)


def test_threads_of_openmp_that_never_wait_spin_and_fewer_of_them_take_what_all_have_at_once(
    tmp_path: Path,
) -> None:
    """Three threads want two cores. Two of them have one for 0.4 of the time each, both for 0.16:
    they get on for 3.2 of 10 ms, which one thread beside one other does in as long.
    """
    times = {"on core": 4 * MS, "queued": 6 * MS}
    report = of_host(times, tmp_path, libraries=("libgomp",), openmp=(4 * MS, 6 * MS))
    found = the(report, "cpu-starved")
    assert "the 2 OpenMP threads (libgomp) spin" in words_of(found)
    assert "with 1 thread, a step may take about 3.20 ms" in words_of(found)
    assert found.impact_ns == pytest.approx(6.8 * MS, rel=0.01)
    assert "OMP_WAIT_POLICY=passive" in found.advice
    (load,) = report.host_load
    assert load.spinning == 2
    assert load.at_once == pytest.approx(0.16, rel=0.01)


@pytest.mark.parametrize(
    ("libraries", "thread"),
    [
        ((), (4 * MS, 6 * MS)),  # no OpenMP
        (("libgomp",), (2 * MS, 3 * MS)),  # waits for half of the time
        (("libgomp",), (9 * MS, MS)),  # does something else, for twice as long
    ],
)
def test_other_threads_are_not_said_to_spin(
    tmp_path: Path, libraries: tuple[str, ...], thread: tuple[int, int]
) -> None:
    times = {"on core": 4 * MS, "queued": 6 * MS}
    report = of_host(times, tmp_path, libraries=libraries, other=thread)
    assert "spin" not in words_of(the(report, "cpu-starved"))
    assert report.host_load[0].openmp is None


def test_a_thread_with_little_to_do_may_wait(tmp_path: Path) -> None:
    report = of_host({"on core": 10 * MS}, tmp_path, writer=(US, 100 * US))
    assert not {"cpu-starved", "cpu-throttled", "page-faults", "host-blocked"} & set(ids(report))


def test_a_thread_of_which_only_its_waits_are_worth_recording_starves_nobody(
    tmp_path: Path,
) -> None:
    report = of_host({"on core": 10 * MS}, tmp_path, idle=(0, 100 * US))
    assert "cpu-starved" not in ids(report)
    assert report.host_load[0].threads == 1


def clocked(folder: Path, *kilohertz: int) -> Report:
    """Steps of 10 ms on a core, whose clock was read so often in equal parts of the time."""
    export = with_counters()
    counted(export, {"on core": 10 * MS}, {})
    part = STEPS * PERIOD // len(kilohertz)
    for index, clock in enumerate(kilohertz):
        who = {"globalTid": global_id(PID, thread=PID), "nameId": export.string("core kHz")}
        export.add(COUNTERS, start=index * part, end=(index + 1) * part, value=clock, **who)
    return analyze(export, folder)


def test_a_core_whose_clock_fell_takes_longer(tmp_path: Path) -> None:
    report = clocked(tmp_path, 4_000_000, 2_000_000, 2_000_000, 2_000_000)
    (load,) = report.host_load
    found = the(report, "slow-cores")
    assert load.core_mhz is not None
    assert found.impact_ns == pytest.approx((1 - load.core_mhz / 4000) * PERIOD, rel=0.01)
    assert "GHz, other cores at up to 4.0 GHz in the same run" in words_of(found)


def test_the_clock_is_that_of_the_core_that_the_thread_is_on(tmp_path: Path) -> None:
    program, core = Program(tmp_path), min(os.sched_getaffinity(0))
    program.write({f"clock{core}": "1800000\n", f"clock{core + 1}": "2400000\n"})
    program.quietly(
        "import os, gputrace\nfrom _gputrace_hooks import load\n"
        f"os.sched_setaffinity(0, {{{core}}})\n"
        f"load._CLOCK_OF = {str(program.modules)!r} + '/clock{{}}'\n"
        "for _ in range(3): gputrace.step()\n"
    )
    events = program.events()
    counters = events.records["counter"]
    mine = [events.names[int(name)] == "core kHz" for name in counters["name"]]
    assert set(counts(counters[mine]).tolist()) == {1_800_000}


def test_what_a_process_holds_ever_more_of_is_counted(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.quietly(
        "import gputrace, time\nfrom _gputrace_hooks import load\n"
        "load._BETWEEN_SCANS = load._PATIENCE = 0\nkept = []\n"
        "for _ in range(8):\n"
        "    kept += [bytearray(4 << 20), [[n] for n in range(20_000)], open('/dev/null')]\n"
        "    time.sleep(0.02)\n"
        "    gputrace.step()\n"
    )
    events, held = program.events(), dict[str, list[int]]()
    counters = events.records["counter"]
    for row, value in zip(counters, counts(counters).tolist(), strict=True):
        held.setdefault(events.names[int(row["name"])], []).append(value)
    grown = {name: held[name][-1] - held[name][0] for name in _HELD}
    more = len(held["open files"]) - 1
    assert grown["open files"] == more > 1
    assert grown["resident memory"] >= more * (4 << 20)
    assert more * 20_000 <= grown["Python blocks"] <= 3.2 * more * 20_000


COUNTS: Final = """
import os, threading, time
import gputrace

def ours():
    return [n for n in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{n}")
            and os.readlink(f"/proc/self/fd/{n}").endswith("/schedstat")]

def step():
    end = time.thread_time() + 0.012
    while time.thread_time() < end:
        pass
    gputrace.step()

for _ in range(4): step()
"""


def on_core_ms(program: Program) -> dict[int, list[float]]:
    """What was counted of each thread that marked steps, in milliseconds."""
    events = program.events()
    found: dict[int, list[float]] = {}
    for row in events.records["counter"]:
        if events.names[int(row["name"])] == "on core":
            value = float(counts(np.array([row]))[0]) / MS
            found.setdefault(int(row["thread"]), []).append(value)
    return found


def test_what_is_counted_of_a_thread_is_what_it_has_used(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.quietly(COUNTS + "assert len(ours()) == 1\nfor _ in range(10): step()")
    [used] = on_core_ms(program).values()
    # From the end of the first step to that of the last but a few.
    assert 12 * 8 <= sum(used) <= 14 * 14
    assert min(used) >= 12


def test_a_program_that_closes_all_files_keeps_its_own_and_is_counted_on(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.quietly(
        COUNTS + "mine = ours()\n"
        "os.closerange(3, 400)\n"
        "opened = [os.open('/proc/self/stat', os.O_RDONLY) for _ in range(397)]\n"
        "assert int(mine[0]) in opened\n"
        "for _ in range(8): step()\n"
        "for number in opened: os.fstat(number)\n"
        "print(os.getpid())"
    )
    [used] = on_core_ms(program).values()
    assert sum(used) >= 12 * 6


def test_a_forked_child_keeps_no_file_of_its_parents(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.quietly(
        COUNTS + "child = os.fork()\n"
        "if not child: os._exit(len(ours()))\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert len(ours()) == 1"
    )


def test_each_thread_that_marks_steps_is_counted_by_itself(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.quietly(
        COUNTS + "def spin():\n    for _ in range(6): step()\n"
        "thread = threading.Thread(target=spin)\nthread.start(); thread.join()\n"
        "assert len(ours()) == 1\n"
    )
    first, second = on_core_ms(program).values()
    assert 12 <= sum(first) <= 4 * 14
    assert 12 <= sum(second) <= 6 * 14


def test_threads_that_sleep_are_read_where_they_can_have_run(tmp_path: Path) -> None:
    program = Program(tmp_path)
    out = program.quietly(
        "import threading, time, gputrace\nfrom _gputrace_hooks import load\n"
        "load._BETWEEN_SCANS = load._PATIENCE = 0\n"
        "read, scheduled, wake, done = [], load.scheduled, threading.Event(), threading.Event()\n"
        "load.scheduled = lambda path: (read.append(path), scheduled(path))[1]\n"
        "def work():\n"
        "    wake.wait()\n"
        "    end = time.thread_time() + 0.05\n"
        "    while time.thread_time() < end: pass\n"
        "    done.set(); threading.Event().wait()\n"
        "def scan():\n"
        "    del read[:]\n"
        "    load.scan()\n"
        "    return len(read)\n"
        "for _ in range(40): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "worker = threading.Thread(target=work, daemon=True)\n"
        "worker.start(); time.sleep(0.1)\n"
        "gputrace.step()\n"
        "first, *later = [scan() for _ in range(12)]\n"
        "wake.set(); done.wait(); scan()\n"
        "print(first, max(later[2:]), worker.native_id)"
    )
    first, later, worker = map(int, out.split())
    assert first >= 42
    assert later <= 8
    assert sum(on_core_ms(program)[worker]) >= 45


def test_a_clock_that_takes_long_to_read_is_read_once(tmp_path: Path) -> None:
    """Some kernels sleep for 10 ms to measure it, while the step waits."""
    out = Program(tmp_path).quietly(
        "import time, gputrace\nfrom _gputrace_hooks import load\nreads = []\n"
        "def read():\n    reads.append(time.sleep(0.01))\n    return 2000000\n"
        "load._core_kilohertz = read\n"
        "load._BETWEEN_SCANS = load._PATIENCE = 0\n"
        "for _ in range(5): gputrace.step(); time.sleep(0.02)\n"
        "print(len(reads))"
    )
    assert out == "1\n"


def test_a_clock_that_stays_is_nothing_to_report(tmp_path: Path) -> None:
    assert "slow-cores" not in ids(clocked(tmp_path, 2_000_000, 2_100_000))


def test_page_faults_count_with_the_least_that_one_takes(tmp_path: Path) -> None:
    report = of_host({"on core": 10 * MS, "minor faults": 4_000}, tmp_path)
    found = the(report, "page-faults")
    assert found.impact_ns == pytest.approx(2 * MS, rel=0.01)
    assert "4,000 a step" in words_of(found)


def test_with_a_gpu_no_more_is_lost_than_its_waits_for_the_host(tmp_path: Path) -> None:
    """The GPU is busy for 9 of 10 ms."""
    run = Run(pid=PID)
    for step in range(STEPS):
        run.now = step * PERIOD
        run.kernel(9 * MS, "gemm")
    counted(with_counters(run.export), {"on core": 5 * MS, "queued": 5 * MS}, {})
    report = analyze(run, tmp_path)
    assert the(report, "cpu-starved").impact_ns <= 1.1 * MS


# ---- real processes ----

SPIN: Final = f"""
import hashlib, mmap, os, sys, threading, time
import gputrace

def spin(ms):
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass
{COMPUTE}
def steps(count, work):
    gputrace.step()
    for _ in range(count):
        work()
        gputrace.step()
"""


def recorded(folder: Path, program: str, *options: str, before: tuple[str, ...] = ()) -> Report:
    script, trace = folder / "train.py", folder / "t.sqlite"
    script.write_text(SPIN + program, encoding="utf-8")
    record = ["record", "--backend", "host", "--no-nvml", "-o", str(trace), *options, "--"]
    ran = command.gputrace(*record, *before, sys.executable, str(script))
    assert ran.code == 0, ran.err
    (folder / "said").write_text(ran.out, encoding="utf-8")
    with gputrace.open(trace) as opened:
        return opened.analyze()


def test_a_burner_on_the_same_core_is_measured_as_the_program_itself_measures_it(
    tmp_path: Path,
) -> None:
    """What else runs on the machine comes and goes: any part of the run as long may be counted."""
    report = recorded(
        tmp_path,
        """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
burner = os.fork()
if not burner:
    hash_for(60)
    os._exit(0)
def work():
    hash_for(0.02)
    print(time.perf_counter_ns(), time.thread_time_ns())
steps(60, work)
os.kill(burner, 9); os.wait()
""",
    )
    (load,) = report.host_load
    lines = (tmp_path / "said").read_text().splitlines()
    clocks = np.array([line.split() for line in lines], np.int64)
    assert len(clocks) == 60
    parts = [end - begin for begin, end in combinations(clocks, 2)]
    queued = [1 - used / wall for wall, used in parts if wall >= 0.9 * load.covered_ns]
    assert 0.9 * min(queued) <= load.queued_ns / load.covered_ns <= 1.1 * max(queued)
    # The words depend on what else runs.
    assert the(report, "cpu-starved").evidence["cores"] == 1


def test_more_threads_than_cores_are_counted(tmp_path: Path) -> None:
    report = recorded(
        tmp_path,
        """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(3):
    threading.Thread(target=hash_for, args=(600,), daemon=True).start()
steps(60, lambda: hash_for(0.04))
""",
    )
    (load,) = report.host_load
    assert (load.threads, load.cores) == (4, 1)
    found = the(report, "cpu-starved")
    assert found.severity == "high"
    assert "OMP_NUM_THREADS=1" in found.advice


@pytest.mark.parametrize(
    "plant",
    [plant for plant in PLANTS if plant.finding in ("host-blocked", "gil-wait")],
    ids=lambda p: p.name,
)
def test_a_thread_that_waits_is_named_with_its_line(tmp_path: Path, plant: Plant) -> None:
    report = recorded(tmp_path, plant.program, *plant.options)
    found = the(report, plant.finding)
    assert found.severity in ("high", "medium")
    assert plant.says in words_of(found)
    # A wait for Python's lock is no wait for something else, and the other way round.
    others = {"host-blocked", "gil-wait"} - {plant.finding}
    assert not others & set(ids(report))


def test_memory_that_is_taken_anew_shows_as_page_faults(tmp_path: Path) -> None:
    report = recorded(
        tmp_path,
        """
text = b"x" * 40_000_000
def touch():
    with mmap.mmap(-1, 40_000_000) as memory: memory.write(text)
steps(40, touch)
""",
    )
    # They take 5 ms of a step, which others on the cores make longer.
    assert report.steps.mean_ns is not None
    share = 40_000_000 / 4096 * 500 / report.steps.mean_ns
    if abs(share - 0.05) > 0.01:
        assert ("page-faults" in ids(report)) == (share > 0.05)
    (load,) = report.host_load
    assert load.minor_faults / load.steps == pytest.approx(40_000_000 / 4096, rel=0.1)


@pytest.fixture
def tenth_of_a_core() -> Iterator[Path]:
    """A control group with a quota that is used up however busy the machine is."""
    folder = Path("/sys/fs/cgroup/cpu/gputrace-test")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group may be made: {error}")
    (folder / "cpu.cfs_quota_us").write_text("10000")
    yield folder
    with suppress(OSError):
        folder.rmdir()


def test_a_quota_is_named(tmp_path: Path, tenth_of_a_core: Path) -> None:
    enter = ("sh", "-c", f'echo $$ > {tenth_of_a_core}/cgroup.procs && exec "$@"', "sh")
    report = recorded(tmp_path, "steps(40, lambda: hash_for(0.1))", before=enter)
    (load,) = report.host_load
    assert load.quota_cores == 0.1
    found = the(report, "cpu-throttled")
    assert found.severity == "high"
    assert "its quota of 0.1 cores" in words_of(found)
    assert "cpu-starved" not in ids(report)


def test_collections_of_garbage_are_named_with_their_length(tmp_path: Path) -> None:
    report = recorded(
        tmp_path,
        """
import gc
gc.disable()
kept = [[i] for i in range(400_000)]
took = []
def collect():
    spin(10)
    begin = time.perf_counter(); gc.collect(); took.append(time.perf_counter() - begin)
steps(50, collect)
print(min(took), max(took))
""",
    )
    found = the(report, "garbage-collection")
    assert found.severity == "high"
    least, most = (float(word) * 1e9 for word in (tmp_path / "said").read_text().split())
    assert 0.99 * least <= found.impact_ns <= 1.01 * most
    assert "generation 2" in words_of(found)
    assert re.search(r"the program collects garbage at \S+:\d+ collect ", words_of(found))
    assert "take gc.collect() out of the loop" in found.advice
    assert found.evidence["collections"] == pytest.approx(found.evidence["steps"], abs=2)


def test_collections_that_come_by_themselves_are_not_called(tmp_path: Path) -> None:
    report = recorded(
        tmp_path,
        """
kept = [[i] for i in range(400_000)]
more = []
def make():
    spin(2)
    more.extend([] for _ in range(40_000))
steps(30, make)
""",
    )
    found = the(report, "garbage-collection")
    assert not found.evidence["called"]
    assert "gc.freeze()" in found.advice


def test_young_collections_are_no_finding(tmp_path: Path) -> None:
    report = recorded(
        tmp_path,
        """
def make():
    spin(10)
    for _ in range(2_000): [[]]
steps(50, make)
""",
    )
    assert "garbage-collection" not in ids(report)
