"""`gputrace record --python`: samples say where a program spends its time, unnoticed."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.helpers import command
from tests.helpers.lookups import rows

PYTHONS: Final = ("3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13")

KNOWN: Final = """
import time
def compute():
    end = time.perf_counter() + 0.004
    while time.perf_counter() < end: pass
def call(data):
    return sorted(data)
def wait():
    time.sleep(0.0005)
spent = {compute: 0, call: 0, wait: 0}
data = [str(n * 7919 % 100003) for n in range(4000)]
def turn(function, *arguments):
    begin = time.perf_counter()
    function(*arguments)
    spent[function] += time.perf_counter() - begin
while sum(spent.values()) < 0.7:
    turn(compute); turn(call, data); turn(wait)
print(*[time / sum(spent.values()) for time in spent.values()])
"""
TRIES: Final = 3
"""A busy machine may hold the sampler up for long while the program goes on; not each time."""


@dataclass(frozen=True)
class Samples:
    """Samples of a program: (pid, user's line, innermost line) of each."""

    ran: command.Ran
    rows: list[tuple[int, str, str]]

    @property
    def lines(self) -> Counter[str]:
        """Samples by line of the user's program, without the folder."""
        return Counter(line.rsplit("/", 1)[-1] for _, line, _ in self.rows)

    @property
    def functions(self) -> Counter[str]:
        return Counter(line.rsplit(" ", 1)[-1] for _, line, _ in self.rows)


def record(folder: Path, source: str, *options: str, python: str = sys.executable) -> Samples:
    """Records a program with its samples; it has to end well."""
    program, trace = folder / "train.py", folder / "t.sqlite"
    program.write_text(source, encoding="utf-8")
    words = ["record", "--force", "-o", str(trace), "--no-nvml", "--backend", "host", "--python"]
    ran = command.gputrace(*words, "--", python, *options, str(program))
    assert ran.code == 0, ran.err
    return Samples(ran, samples(trace))


def samples(trace: Path) -> list[tuple[int, str, str]]:
    sql = """SELECT globalTid >> 24 & 0xffffff, users.value, innermost.value
        FROM GPUTRACE_PYTHON_SAMPLE
        JOIN StringIds users ON users.id = nameId
        JOIN StringIds innermost ON innermost.id = innerNameId
        ORDER BY start"""
    there = rows(trace, "SELECT 1 FROM sqlite_master WHERE name LIKE '%SAMPLE'")
    return rows(trace, sql) if there else []


def own_messages(err: str) -> list[str]:
    """Return the program's stderr, without the line that parts it from ours."""
    return [line for line in err.splitlines() if line and not line.startswith("gputrace: ")]


def find_python(version: str) -> str:
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    python = str(homes[0]) if homes else shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"no Python {version} is here")
    return python


@pytest.mark.parametrize("version", PYTHONS)
def test_functions_have_samples_by_the_time_they_take(tmp_path: Path, version: str) -> None:
    """Be it in Python, in C that keeps the interpreter's lock, or in C that lets go of it."""
    for _ in range(TRIES):
        found = record(tmp_path, KNOWN, python=find_python(version))
        times = [float(part) for part in found.ran.out.split()]
        told = dict(zip(("compute", "call", "wait"), times, strict=True))
        total = found.functions.total()
        shares = {name: found.functions[name] / max(total, 1) for name in told}
        if shares == pytest.approx(told, abs=0.2):
            break
    # Of 70; a machine under load loses some.
    assert total > 20
    assert shares == pytest.approx(told, abs=0.2)


@pytest.mark.parametrize("version", PYTHONS)
def test_a_program_whose_exit_handlers_take_long_ends_as_without(
    tmp_path: Path, version: str
) -> None:
    found = record(
        tmp_path,
        "import atexit, time\n"
        "def work():\n"
        "    end = time.perf_counter() + 0.3\n"
        "    while time.perf_counter() < end: pass\n"
        "atexit.register(work)\n"
        "work()\n",
        python=find_python(version),
    )
    assert own_messages(found.ran.err) == []
    assert found.rows


def test_a_sample_has_the_users_line_and_the_innermost_one(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        "import json, gputrace\n"
        "def work():\n"
        "    for _ in range(40):\n"
        "        json.dumps(list(range(160000)))\n"
        "        gputrace.step()\n"
        "work()\n",
    )
    assert "40 steps" in found.ran.err
    assert found.lines.most_common(1)[0][0] == "train.py:4 work"
    inner = Counter(inner.rsplit("/", 1)[-1] for _, line, inner in found.rows if ":4 " in line)
    assert inner.most_common(1)[0][0].startswith("encoder.py:")
    assert {pid for pid, *_ in found.rows if pid != found.rows[0][0]} == set()


STEPS: Final = """
import time, gputrace
def prepare(end):
    while time.perf_counter() < end: pass
def train(end):
    while time.perf_counter() < end: pass
prepare(time.perf_counter() + 0.3)
for _ in range(20):
    train(time.perf_counter() + 0.03)
    gputrace.step()
"""
FRAMEWORK: Final = "import accelerate.optimizer\n"


@pytest.mark.parametrize(
    ("source", "options", "is_sampled"),
    [
        (FRAMEWORK + STEPS, (), True),
        (FRAMEWORK + STEPS, ("--no-python",), False),
        (STEPS, (), True),
        (STEPS, ("--no-python",), False),
    ],
    ids=["a framework", "not wanted", "own marks", "own marks, not wanted"],
)
def test_steps_are_sampled_without_being_asked(
    tmp_path: Path, source: str, options: tuple[str, ...], is_sampled: bool
) -> None:
    """Less often than with the option, and nothing before them."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "optimizer.py").write_text("class AcceleratedOptimizer: pass\n")
    (tmp_path / "train.py").write_text(source)
    trace, program = tmp_path / "t.sqlite", tmp_path / "train.py"
    words = ["record", "-o", str(trace), "--no-nvml", "--backend", "host", *options]
    ran = command.gputrace(*words, "--", sys.executable, str(program))
    assert "20 steps" in ran.err, ran.err
    lines = [line for _, line, _ in samples(trace)]
    assert not [line for line in lines if line.endswith(" prepare")]
    assert bool(lines) == is_sampled
    # 0.6 s, 20 times a second.
    assert len(lines) < 30


CUDA: Final = """
_queued = []
def _lazy_call(call): _queued.append(call)
def init():
    for call in _queued: call()
"""
INFERS: Final = """
import sys, time
import torch.cuda
def prepare():
    time.sleep(0.2)
def infer():
    for _ in range(30): time.sleep(0.02)
prepare()
if "cuda" in sys.argv: torch.cuda.init()
infer()
"""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_program_that_only_infers_is_sampled_once_it_uses_cuda(
    tmp_path: Path, device: str
) -> None:
    (tmp_path / "torch" / "cuda").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "cuda" / "__init__.py").write_text(CUDA)
    (tmp_path / "infer.py").write_text(INFERS)
    trace, program = tmp_path / "t.sqlite", tmp_path / "infer.py"
    words = ["record", "-o", str(trace), "--no-nvml", "--backend", "host"]
    command.gputrace(*words, "--", sys.executable, str(program), device)
    lines = Counter(line.rsplit(" ", 1)[-1] for _, line, _ in samples(trace))
    assert not lines["prepare"]
    assert (lines["infer"] > 3) is (device == "cuda")


def test_a_long_call_has_all_the_samples_of_its_time(tmp_path: Path) -> None:
    found = record(tmp_path, "import time\ntime.sleep(0.5)\nsorted(map(str, range(2000)))\n")
    assert 10 < found.lines["train.py:2 <module>"] < 120


def test_a_program_in_an_installed_package_is_named_by_its_own_outermost_line(
    tmp_path: Path,
) -> None:
    package = tmp_path / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text("import time\ndef run():\n    time.sleep(0.1)\nrun()\n")
    path = str(package.parent)
    words = [f"import sys; sys.path.insert(0, {path!r}); import runpy", "runpy.run_module"]
    source = f"{words[0]}\n{words[1]}('trainer.main')"
    trace = tmp_path / "t.sqlite"
    command.gputrace("record", "-o", trace, "--python", "--", sys.executable, "-c", source)
    assert {line for _, line, _ in samples(trace)} == {"<string>:2 <module>"}
    module = [sys.executable, "-m", "trainer.main"]
    env = {"PYTHONPATH": f"{path}:{command.ROOT}"}
    command.gputrace("record", "--force", "-o", trace, "--python", "--", *module, env=env)
    [line] = {line.rsplit("/", 1)[-1] for _, line, _ in samples(trace)}
    assert line == "main.py:4 <module>"


def test_no_value_or_text_of_the_program_is_in_the_trace(tmp_path: Path) -> None:
    source = "import time\ndef f(planted):\n    x = 'pla' + 'nted'; time.sleep(0.1)\nf('planted')\n"
    assert record(tmp_path, source).lines["train.py:3 f"]
    assert b"planted" not in (tmp_path / "t.sqlite").read_bytes()


def test_without_the_option_a_program_without_steps_is_not_sampled(tmp_path: Path) -> None:
    trace = tmp_path / "t.sqlite"
    source = "import os, time, gputrace; time.sleep(0.05)\n"
    source += "print(len(os.listdir('/proc/self/task')))"
    ran = command.gputrace("record", "-o", trace, "--", sys.executable, "-c", source)
    assert ran.out == "1\n"
    assert samples(trace) == []


# ---- the program does not notice ----


def test_threads_of_the_program_are_its_own_and_do_not_count(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        "import threading, time\n"
        "def spin():\n"
        "    while not over: sum(range(1000))\n"
        "over = False\n"
        "thread = threading.Thread(target=spin); thread.start()\n"
        "print(threading.active_count(), len(threading.enumerate()))\n"
        "for _ in range(30):\n"
        "    time.sleep(0.01)\n"
        "over = True; thread.join()\n",
    )
    assert found.ran.out == "2 2\n"
    assert "spin" not in found.functions
    assert found.lines.most_common(1)[0][0] == "train.py:8 <module>"


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_frames_that_were_looked_at_are_held_no_longer(tmp_path: Path, version: str) -> None:
    """What they hold would stay until garbage is collected: batches in pinned memory, which no
    forked worker may give back.
    """
    found = record(
        tmp_path,
        "import gc, threading, time\n"
        "gc.collect(); gc.disable(); gc.set_debug(gc.DEBUG_SAVEALL)\n"
        "def spin():\n"
        "    while not over: sum(range(1000))\n"
        "over = False\n"
        "threads = [threading.Thread(target=spin) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "end = time.monotonic() + 0.8\n"
        "while time.monotonic() < end: time.sleep(0.0001)\n"
        "over = True\n"
        "for thread in threads: thread.join()\n"
        "gc.collect()\n"
        "print([type(each).__name__ for each in gc.garbage if type(each).__name__ == 'frame'])\n",
        python=find_python(version),
    )
    assert found.ran.out == "[]\n"
    named = "SELECT value FROM StringIds WHERE value LIKE 'lock held: %'"
    assert rows(tmp_path / "t.sqlite", named)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("warnings", ["error", "always"])
def test_forking_warns_of_no_thread_and_sampling_goes_on(
    tmp_path: Path, version: str, warnings: str
) -> None:
    """A warning that is an error shows nowhere; logging has functions to be called after a fork."""
    found = record(
        tmp_path,
        "import logging, os, time\n"
        "for _ in range(50):\n"
        "    pid = os.fork()\n"
        "    if not pid: os._exit(len(os.listdir('/proc/self/task')) - 1)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "time.sleep(0.6)\n",
        "-W",
        warnings,
        python=find_python(version),
    )
    assert own_messages(found.ran.err) == []
    assert found.lines["train.py:6 <module>"] > 15
    assert len({pid for pid, *_ in found.rows}) == 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_are_sampled(tmp_path: Path, method: str) -> None:
    found = record(
        tmp_path,
        "import multiprocessing, os, time\n"
        "def work():\n"
        "    for _ in range(60): time.sleep(0.01)\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    workers = [context.Process(target=work) for _ in range(2)]\n"
        "    for worker in workers: worker.start()\n"
        "    for worker in workers: worker.join()\n",
        "-W",
        "error",
    )
    assert own_messages(found.ran.err) == []
    at_work = Counter(pid for pid, line, _ in found.rows if line.endswith("train.py:3 work"))
    assert set(at_work) == set(map(int, found.ran.out.split()))
    assert min(at_work.values()) > 10


def test_a_forked_child_that_records_something_is_sampled(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        "import gputrace, os, time\n"
        "pid = os.fork()\n"
        "if pid: os.waitpid(pid, 0); raise SystemExit\n"
        "gputrace.step()\n"
        "time.sleep(0.6)\n",
    )
    assert found.lines["train.py:5 <module>"] > 8


def test_a_signal_that_the_program_waits_for_reaches_it(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        "import os, signal, subprocess\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "for _ in range(20):\n"
        "    subprocess.Popen(['sh', '-c', f'sleep 0.01; kill -USR1 {os.getpid()}']).wait()\n"
        "    print(int(signal.sigwait({signal.SIGUSR1})))\n",
    )
    assert found.ran.out == "10\n" * 20


def test_every_exception_of_a_signal_handler_reaches_the_program(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        "import signal\n"
        "class Alarm(Exception): pass\n"
        "def handler(number, frame):\n"
        "    global rung\n"
        "    rung += 1\n"
        "    raise Alarm\n"
        "rung = caught = 0\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "while caught < 1500:\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.0003)\n"
        "        while True: pass\n"
        "    except Alarm: caught += 1\n"
        "print(rung - caught)\n",
    )
    assert found.ran.out == "0\n"
    assert own_messages(found.ran.err) == []


@pytest.mark.parametrize("version", ["3.8", "3.11", "3.12"])
def test_a_program_near_the_limit_of_recursion_meets_it_where_it_did(
    tmp_path: Path, version: str
) -> None:
    found = record(
        tmp_path,
        "import sys, time\n"
        "def work():\n"
        "    end = time.perf_counter() + 0.05\n"
        "    while time.perf_counter() < end: pass\n"
        "def descend(calls): descend(calls - 1) if calls else work()\n"
        "for left in range(2, 14): descend(sys.getrecursionlimit() - 3 - left)\n"
        "for _ in range(5): descend(100)\n"
        "def overflow():\n"
        "    work()\n"
        "    try: descend(100)\n"
        "    except RecursionError: print('met')\n"
        "def approach(calls): approach(calls - 1) if calls else overflow()\n"
        "approach(sys.getrecursionlimit() - 10)\n",
        python=find_python(version),
    )
    assert found.ran.out == "met\n"
    assert own_messages(found.ran.err) == []
    assert found.functions["work"]


def test_a_follower_of_calls_sees_those_of_the_program_alone(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        "import sys, time\n"
        "def work():\n"
        "    end = time.perf_counter() + 0.2\n"
        "    while time.perf_counter() < end: pass\n"
        "seen = set()\n"
        "def hear(event, _): seen.add(event) if 'frame' in event else None\n"
        "sys.addaudithook(hear); work()\n"
        "def follow(frame, *_): seen.add(frame.f_code.co_name)\n"
        "sys.setprofile(follow); work(); sys.setprofile(None)\n"
        "sys.settrace(follow); work(); sys.settrace(None)\n"
        "watch = getattr(sys, 'monitoring', None)\n"
        "if watch:\n"
        "    watch.use_tool_id(3, 'tool')\n"
        "    begins = watch.events.PY_START\n"
        "    watch.register_callback(3, begins, lambda code, _: seen.add(code.co_name))\n"
        "    watch.set_events(3, begins); work(); watch.set_events(3, 0); watch.free_tool_id(3)\n"
        "print(*seen - {'<module>'})\n"
        "work()\n",
        python=find_python("3.13"),
    )
    assert found.ran.out == "work\n"
    assert set(found.lines) & {"train.py:4 work"}


HOLDS_NAMES: Final = """
import faulthandler, sys
sys.path.insert(0, {hooks!r})
faulthandler.dump_traceback_later(20, exit=True)
from _gputrace_hooks import recorder, sampler
source = "with recorder._names_lock: sampler._look(1, 1, 1, 1, sys._getframe())"
known = dict(recorder=recorder, sampler=sampler, sys=sys)
exec(compile(source, recorder.__file__, "exec"), known)
print(recorder._events)
# A signal handler of the program's that came then.
exec(compile(source, "train.py", "exec"), known)
print(len(recorder._events) // 4)
"""


def test_a_tick_in_the_midst_of_the_recorder_waits_for_no_lock(tmp_path: Path) -> None:
    hooks = str(command.ROOT / "gputrace" / "collectors" / "hooks")
    (tmp_path / "train.py").write_text(HOLDS_NAMES.format(hooks=hooks))
    # Where hangs are looked for, samples wait in the list.
    env = {"GPUTRACE_DIR": str(tmp_path), "GPUTRACE_HANG": "1"}
    ran = command.python(str(tmp_path / "train.py"), env=env)
    assert ran.out == "[]\n3\n", ran.err


@pytest.mark.parametrize(
    ("ending", "code"),
    [("import sys; sys.exit(7)", 7), ("import os; os._exit(8)", 8), ("1 / 0", 1)],
)
def test_the_program_ends_as_it_does_unwatched(tmp_path: Path, ending: str, code: int) -> None:
    source = f"import time\nprint('out', flush=True)\ntime.sleep(0.05)\n{ending}\n"
    (tmp_path / "train.py").write_text(source)
    program = [sys.executable, str(tmp_path / "train.py")]
    ran = command.gputrace("record", "-o", tmp_path / "t.sqlite", "--python", "--", *program)
    plain = command.python(program[1])
    assert (ran.code, ran.out) == (code, "out\n") == (plain.code, plain.out)
    assert own_messages(ran.err) == plain.err.splitlines()
