"""Sampling GPUs through a libnvidia-ml.so.1 of our own, tests/native/fake_nvml.c.

`python -m tests.collectors.nvml.test_sampling [real]` measures what sampling costs, with
eight GPUs of that library or with those of this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest

from gputrace.collectors.finalize import write_nvml
from gputrace.collectors.nvml.log import NvmlLog, read_nvml, tables
from gputrace.collectors.nvml.queries import DEVICE, FIELDS, NULL, SAMPLE
from gputrace.store.writer import TraceWriter
from tests.helpers.command import ROOT, Ran, environment, python

NATIVE: Final = ROOT / "tests" / "native" / "fake_nvml.c"

RECORD: Final = """
import sys, time
from pathlib import Path
from gputrace.collectors.nvml import Sampler

folder, ticks, hz = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
sampler = Sampler(*map(float, sys.argv[4:]))
sampler.start(folder, hz)
end = time.monotonic() + 30
def lines():
    return max([path.read_bytes().count(b"\\n") for path in folder.glob("*.nvml.jsonl")] or [0])
while lines() <= ticks and sampler._process.poll() is None and time.monotonic() < end:
    time.sleep(0.005)
sampler.stop()
sys.stdout.write(sampler.notice)
"""

SAMPLING: Final = (sys.executable, "-P", "-m", "gputrace.collectors.nvml.sampling")

COST: Final = """
import sys, time
from pathlib import Path
from gputrace.collectors.nvml import Sampler
from gputrace.collectors.nvml.log import read_nvml

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
sampler = Sampler()
sampler.start(folder)
time.sleep(seconds)
sampler.stop()
if sampler.notice:
    sys.exit(sampler.notice)
log = read_nvml(next(folder.glob("*.nvml.jsonl")))
share = log.cpu_ns / 1e9 / seconds
filled = (log.samples["energy"] >= 0).mean() if len(log.samples["energy"]) else 0
sys.stdout.write(
    f"{len(log.devices)} GPUs at 4 Hz: {100 * share:.3f} % of a core; "
    f"{100 * filled:.0f} % of the rows have counters; {log.cpu_ns / 1e6:.1f} ms in all\\n"
    f"links {sorted({str(pair[2]) for pair in log.topology})}\\n"
)
"""

Record = Callable[..., NvmlLog]
Scripted = Callable[[str], dict[str, str]]


def build(folder: Path, *options: str) -> Path:
    """A folder for LD_LIBRARY_PATH."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", *options, "-o", str(library), str(NATIVE)],
        check=True,
        timeout=60,
    )
    return folder


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def scripted(tmp_path: Path, library: Path) -> Scripted:
    """Return the variables that have the fake library do as the text says."""

    def write(text: str) -> dict[str, str]:
        path = tmp_path / "script"
        path.write_text(text, encoding="utf-8")
        calls = str(tmp_path / "calls")
        paths = {"FAKE_NVML": str(path), "FAKE_NVML_CALLS": calls}
        return {"LD_LIBRARY_PATH": str(library), **paths}

    return write


@pytest.fixture
def record(tmp_path: Path, scripted: Scripted) -> Record:
    """Records some ticks of the fake library and reads them."""

    def run(text: str, ticks: int = 3, hz: float = 100, share: float = 9, **env: str) -> NvmlLog:
        ran = sample(tmp_path, ticks, hz, scripted(text) | env, share)
        assert (ran.code, ran.out, ran.err) == (0, "", "")
        return read_nvml(written(tmp_path))

    return run


def sample(folder: Path, ticks: int, hz: float, env: dict[str, str], share: float = 9) -> Ran:
    return python("-c", RECORD, str(folder), str(ticks), str(hz), str(share), env=env)


def written(folder: Path) -> Path:
    (path,) = folder.glob("*.nvml.jsonl")
    return path


def of_gpu(log: NvmlLog, gpu: int, column: str) -> list[Any]:
    values: list[Any] = log.samples[column][log.samples["gpu"] == gpu].tolist()
    return values


def calls(folder: Path, function: str, gpu: int = 0) -> int:
    """How often the library was asked."""
    lines = (folder / "calls").read_text(encoding="utf-8").splitlines()
    return lines.count(f"{function} {gpu}")


NVLINKED: Final = """
link 0 0 1
link 0 1 1
link 1 0 0
link 1 1 0
ancestor 0 1 40
field 83 * 1000 250
field 138 0 4 2
field 197 * 7000 0
say DeviceGetPowerUsage 1 100000 200000 300000
"""


def test_each_card_is_described_once(record: Record) -> None:
    log = record(NVLINKED)
    assert log.driver == "580.159.03"
    assert log.interval_ns == 10_000_000
    assert log.devices[0] == {
        "gpu": 0,
        "uuid": "GPU-0000-0",
        "name": "Fake H200",
        "pciBusId": "0000:a6:00.0",
        "memoryTotal": 1000,
        "smClockMax": 1980,
        "memoryClockMax": 3201,
        "smClockApplication": 1830,
        "memoryClockApplication": 3201,
        "pcieGenMax": 5,
        "pcieWidthMax": 16,
        "powerLimit": 700_000,
        "migMode": 0,
        "cpuAffinity": [0, 1, 2, 8, 64],
        "numaNode": 1,
        "lostNs": None,
    }


def test_each_tick_has_a_row_for_each_card(record: Record) -> None:
    log = record(NVLINKED)
    assert len(log.clocks) >= 3
    assert log.samples["gpu"].tolist() == [0, 1] * len(log.clocks)
    assert of_gpu(log, 0, "timeNs") == sorted(set(of_gpu(log, 0, "timeNs")))
    for column, value in {
        "memoryUsed": 500,
        "smClock": 1755,
        "memoryClock": 2619,
        "power": 250_000,
        "temperature": 41,
        "clocksEventReasons": 4,
        "pcieGen": 4,
        "pcieWidth": 8,
    }.items():
        assert set(of_gpu(log, 0, column)) == {value}, column
    assert of_gpu(log, 1, "power")[:4] == [100_000, 200_000, 300_000, 300_000]
    assert log.cpu_ns is not None
    assert log.skipped == 0


def test_utilization_is_the_mean_of_the_drivers_own_samples(record: Record) -> None:
    log = record(NVLINKED)
    assert set(of_gpu(log, 0, "utilization")) == {50.0}
    assert set(of_gpu(log, 0, "utilizationSamples")) == {2}


def test_counters_are_read_with_one_call(record: Record, tmp_path: Path) -> None:
    log = record(NVLINKED)
    ticks = len(log.clocks)
    assert of_gpu(log, 0, "energy") == [1250 + 250 * tick for tick in range(ticks)]
    assert of_gpu(log, 0, "nvlinkTx") == [(6 + 2 * tick) * 1024 for tick in range(ticks)]
    assert set(of_gpu(log, 0, "pcieTx")) == {7000}
    assert set(of_gpu(log, 1, "nvlinkTx")) == {NULL}
    assert set(of_gpu(log, 1, "pcieRx")) == {NULL}
    # Each field, and NVLink's first for all links, was tried once before.
    assert calls(tmp_path, "DeviceGetFieldValues") == ticks + len(FIELDS) + 1
    assert calls(tmp_path, "DeviceGetPcieThroughput") == 0


def test_nvlink_counters_by_link_are_added_up(record: Record) -> None:
    log = record(NVLINKED + "perlink\n")
    assert of_gpu(log, 0, "nvlinkTx")[0] == 2 * 6 * 1024


@pytest.mark.parametrize(
    ("script", "links"),
    [
        (NVLINKED, [["X", "NV2"], ["NV2", "X"]]),
        ("".join(f"link {a} {b} -1\n" for a in (0, 1) for b in range(18)), [["X", "NV18"]]),
        ("ancestor 0 1 10\n", [["X", "PIX"], ["PIX", "X"]]),
        ("ancestor 0 1 20\n", [["X", "PXB"]]),
        ("gpus 3\nancestor 0 1 10\nancestor 0 2 30\nancestor 1 2 40\n", [["X", "PIX", "PHB"]]),
        ("link 0 0 -1\nlink 1 0 0\n", [["X", "SYS"], ["NV1", "X"]]),
        ("fail DeviceGetTopologyCommonAncestor * 3\n", [["X", "None"]]),
    ],
)
def test_cards_hang_together_as_nvidia_smi_says(
    record: Record, script: str, links: list[list[str]]
) -> None:
    log = record(script, ticks=1)
    count = len(log.devices)
    shown = [str(pair[2]) for pair in log.topology]
    assert len(shown) == count**2
    for gpu, row in enumerate(links):
        assert shown[gpu * count : (gpu + 1) * count] == row


def test_peer_access_is_told_for_each_pair(record: Record) -> None:
    assert record(NVLINKED).topology[1] == (0, 1, "NV2", "NODE", 2, "OK", "OK", "OK")


def test_peer_access_without_nvlink(record: Record) -> None:
    log = record("ancestor 0 1 30\nfail DeviceGetNvLinkState * 3\n", ticks=1)
    assert log.topology[1] == (0, 1, "PHB", "PHB", None, "OK", "OK", "NS")


def test_mig_leaves_null_what_it_does_not_permit(record: Record, tmp_path: Path) -> None:
    log = record(
        "gpus 1\nsay DeviceGetMigMode 0 1\nfail DeviceGetMemoryInfo * 4\n"
        "fail DeviceGetMemoryInfo_v2 * 4\nfail DeviceGetSamples * 3\n"
        "fail DeviceGetUtilizationRates * 3\n"
    )
    assert log.devices[0]["migMode"] == 1
    assert log.devices[0]["memoryTotal"] is None
    for column in ("memoryUsed", "utilization", "utilizationSamples"):
        assert set(of_gpu(log, 0, column)) == {NULL}, column
    assert set(of_gpu(log, 0, "power")) == {250_000}
    assert calls(tmp_path, "DeviceGetUtilizationRates") == 1


def test_what_is_not_supported_is_null_and_not_asked_again(record: Record, tmp_path: Path) -> None:
    log = record("fail * * 3\nfail DeviceGetHandleByIndex_v2 * 0\n")
    assert len(log.clocks) >= 3
    for column in [name for name in SAMPLE if name != "timeNs"]:
        assert set(log.samples[column].tolist()) == {NULL}, column
    unknown = set(log.devices[0]) - {"gpu"}
    assert [log.devices[0][name] for name in unknown] == [None] * len(unknown)
    assert log.topology[1] == (0, 1, *[None] * 6)
    for function in ("DeviceGetPowerUsage", "DeviceGetTemperature", "DeviceGetSamples"):
        assert calls(tmp_path, function) == 1


def test_without_a_ring_the_latest_period_stands_in(record: Record) -> None:
    log = record("fail DeviceGetSamples * 3\n")
    assert set(of_gpu(log, 0, "utilization")) == {77.0}
    assert set(of_gpu(log, 0, "utilizationSamples")) == {NULL}


def test_an_empty_ring_is_no_utilization_of_zero(record: Record) -> None:
    log = record("fail DeviceGetSamples * 6\n")
    assert set(of_gpu(log, 0, "utilization")) == {NULL}
    assert set(of_gpu(log, 0, "utilizationSamples")) == {0}


def test_a_failure_that_passes_is_one_null(record: Record) -> None:
    log = record("fail DeviceGetPowerUsage 0 999 2\nfail DeviceGetPowerUsage 0 0 3\n")
    assert of_gpu(log, 0, "power")[:3] == [250_000, NULL, 250_000]


def test_an_old_driver_tells_throttling_by_its_old_name(
    record: Record, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old = build(tmp_path_factory.mktemp("old"), "-DOLD_DRIVER")
    log = record("fail DeviceGetMemoryInfo_v2 * 13\n", LD_LIBRARY_PATH=str(old))
    assert set(of_gpu(log, 0, "clocksEventReasons")) == {8}
    assert set(of_gpu(log, 0, "memoryUsed")) == {600}


def test_a_lost_card_goes_on_as_nulls_beside_the_others(record: Record) -> None:
    log = record(NVLINKED + "lost 1 3\n", ticks=5)
    assert of_gpu(log, 1, "power")[:5] == [100_000, 200_000, NULL, NULL, NULL]
    assert of_gpu(log, 1, "energy")[:3] == [1250, 1500, NULL]
    assert NULL not in of_gpu(log, 0, "power")
    assert log.devices[0]["lostNs"] is None
    assert log.devices[1]["lostNs"] == log.clocks[2][0]
    assert of_gpu(log, 1, "timeNs")[2] == log.clocks[2][0]


def test_a_card_that_is_lost_from_the_start_keeps_its_index(record: Record) -> None:
    log = record("fail DeviceGetHandleByIndex_v2 0 15\n")
    assert [device["uuid"] for device in log.devices] == [None, "GPU-0000-1"]
    assert log.devices[0]["lostNs"] is not None
    assert set(of_gpu(log, 0, "power")) == {NULL}
    assert set(of_gpu(log, 1, "power")) == {250_000}


def test_a_slow_driver_is_asked_for_counters_less_often(record: Record) -> None:
    # 10 ms at a tick of 100 ms would be a tenth of a core: every 20th tick keeps to half a percent.
    log = record("gpus 1\nfield 83 0 0 1\nslow DeviceGetFieldValues 10000\n", 6, 10, 0.005)
    energy = of_gpu(log, 0, "energy")
    assert energy[0] != NULL
    assert energy[1:6] == [NULL] * 5
    assert energy[-1] != NULL, "the last sample has them all"
    assert NULL not in of_gpu(log, 0, "power")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("init 9", "the NVIDIA driver is not loaded"),
        ("init 18", "the NVIDIA driver was replaced while loaded; restart the machine"),
        ("init 999", "NVML says Unknown Error"),
        ("gpus 0", "the NVIDIA driver shows no GPU here"),
    ],
)
def test_without_a_driver_there_is_one_line(
    tmp_path: Path, scripted: Scripted, script: str, words: str
) -> None:
    ran = sample(tmp_path, 1, 100, scripted(script))
    assert ran == Ran(0, f"no GPU sampling: {words}", "")
    assert list(tmp_path.glob("*.jsonl")) == []


def test_without_a_library_there_is_one_line(tmp_path: Path) -> None:
    # An empty file, so that a library of this machine is not found behind it.
    (tmp_path / "libnvidia-ml.so.1").touch()
    ran = sample(tmp_path, 1, 100, {"LD_LIBRARY_PATH": str(tmp_path)})
    assert ran.out.startswith("no GPU sampling: libnvidia-ml.so.1 was not found; ")
    assert (ran.code, ran.err) == (0, "")
    assert list(tmp_path.glob("*.jsonl")) == []


def test_a_second_sampler_leaves_the_first_ones_file_alone(
    record: Record, tmp_path: Path, scripted: Scripted
) -> None:
    record(NVLINKED)
    before = written(tmp_path).read_bytes()
    (first,) = tmp_path.glob("*.jsonl")
    assert sample(tmp_path, 1, 100, scripted(NVLINKED)).out == ""
    assert first.read_bytes() == before
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_of_samplers_that_took_turns_the_cards_are_written_once(
    record: Record, tmp_path: Path, scripted: Scripted
) -> None:
    record(NVLINKED)
    sample(tmp_path, 1, 100, scripted(NVLINKED))
    logs = sorted(tmp_path.glob("*.jsonl"))
    with TraceWriter(tmp_path / "t.sqlite") as writer:
        write_nvml(writer, logs, 0)
    counts = {
        table: [len(tables(read_nvml(path))[table][1]) for path in logs]
        for table in ("GPUTRACE_NVML_DEVICE", "GPUTRACE_TOPOLOGY", "GPUTRACE_NVML_SAMPLE")
    }
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as database:
        found = {t: database.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in counts}
    (devices, _), (pairs, _), samples = counts.values()
    assert list(found.values()) == [devices, pairs, sum(samples)]
    assert min(devices, pairs, *samples) > 0


def test_a_kill_costs_the_last_line_at_most(tmp_path: Path, scripted: Scripted) -> None:
    arguments = [*SAMPLING, str(tmp_path), "500", "9"]
    env = environment(scripted(NVLINKED))
    with subprocess.Popen(arguments, env=env, stdin=subprocess.PIPE) as running:
        while not list(tmp_path.glob("*.jsonl")) or written(tmp_path).stat().st_size < 20_000:
            assert running.poll() is None
            time.sleep(0.005)
        running.send_signal(signal.SIGKILL)
    log = read_nvml(written(tmp_path))
    assert len(log.clocks) > 10
    assert log.skipped <= 1
    assert log.cpu_ns is None


def test_when_the_recorder_is_killed_the_sampling_ends_as_it_should(
    tmp_path: Path, scripted: Scripted
) -> None:
    arguments = [sys.executable, "-c", RECORD, str(tmp_path), "1000000", "100"]
    with subprocess.Popen(arguments, env=environment(scripted(NVLINKED))) as running:
        while not list(tmp_path.glob("*.jsonl")) or written(tmp_path).stat().st_size < 5_000:
            assert running.poll() is None
            time.sleep(0.005)
        running.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while read_nvml(written(tmp_path)).cpu_ns is None:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_crash_in_the_drivers_library_costs_the_recorder_nothing(
    tmp_path: Path, scripted: Scripted
) -> None:
    text = NVLINKED + "fail DeviceGetTemperature 0 -6 5\n"
    ran = sample(tmp_path, 1000, 100, scripted(text))
    told = "GPU sampling ended early: its process ended by SIGABRT"
    assert (ran.code, ran.out, ran.err) == (0, told, "")
    assert len(read_nvml(written(tmp_path)).clocks) == 4


FULL_DISK: Final = """
import resource, sys, time
from pathlib import Path
from gputrace.collectors.nvml import Sampler

sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
sampler = Sampler()
sampler.start(Path(sys.argv[1]), 100)
time.sleep(1.5)
sampler.stop()
sys.stdout.write(sampler.notice)
"""


def test_a_full_disk_is_told_and_ends_nothing(tmp_path: Path, scripted: Scripted) -> None:
    ran = python("-c", FULL_DISK, str(tmp_path), env=scripted(NVLINKED))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith(" GPU samples were not written: File too large")
    log = read_nvml(written(tmp_path))
    assert written(tmp_path).stat().st_size == 6000
    assert len(log.clocks) > 5
    assert log.skipped == 1


def test_the_beat_does_not_drift(record: Record) -> None:
    # Each answer takes 8 ms of a tick's 20: a sampler that waits 20 ms after each would be at 28.
    # One that a busy machine wakes late leaves beats out, and is on the beat again.
    log = record("gpus 1\nslow DeviceGetTemperature 8000\n", ticks=25, hz=50)
    beats = [later - sooner for (_, sooner), (_, later) in pairwise(log.clocks[:-1])]
    assert median(beats) > 16_000_000
    assert median(abs((beat + 10_000_000) % 20_000_000 - 10_000_000) for beat in beats) < 4_000_000


def test_any_part_of_a_file_can_be_read(record: Record, tmp_path: Path) -> None:
    record(NVLINKED + "lost 1 3\n", ticks=4)
    whole = written(tmp_path).read_bytes()
    part = tmp_path / "part"
    for size in range(len(whole)):
        part.write_bytes(whole[:size])
        log = read_nvml(part)
        assert log.skipped <= 1
        tables(log)


MEANINGLESS: Final = (
    b"[]",
    b"3",
    b"\xff\xfe",
    b'{"gpus":[[1,2]],"time_ns":1,"monotonic_ns":1}',
    b'{"gpus":[3],"time_ns":1,"monotonic_ns":1}',
    b'{"gpus":[],"time_ns":null,"monotonic_ns":1}',
    b'{"gpus":[],"time_ns":1,"monotonic_ns":1,"lost":{"7":"gone"}}',
    b'{"devices":[3]}',
    b'{"end":4}',
    b"[" * 100_000,
)


def test_a_line_that_means_nothing_is_skipped(record: Record, tmp_path: Path) -> None:
    log = record(NVLINKED)
    whole = written(tmp_path).read_bytes()
    for line in MEANINGLESS:
        written(tmp_path).write_bytes(whole + line + b"\n")
        again = read_nvml(written(tmp_path))
        assert again.skipped == 1, line
        assert len(again.samples["gpu"]) == len(log.samples["gpu"]), line
        assert again.devices == log.devices, line


def test_the_tables_have_null_for_what_is_not_known(record: Record) -> None:
    log = record(NVLINKED + "lost 1 2\n")
    made = tables(log)
    assert list(made) == [
        "GPUTRACE_NVML_DEVICE", "GPUTRACE_NVML_SAMPLE", "GPUTRACE_NVML_ACTIVITY",
        "GPUTRACE_TOPOLOGY", "GPUTRACE_PROCESS_USE",
    ]  # fmt: skip
    for columns, rows in made.values():
        assert {len(row) for row in rows} <= {len(columns)}
    columns, rows = made["GPUTRACE_NVML_DEVICE"]
    first = dict(zip(columns, rows[0], strict=True))
    assert (first["cpuAffinity"], first["driverVersion"]) == ("0-2,8,64", "580.159.03")
    columns, rows = made["GPUTRACE_NVML_SAMPLE"]
    first, second, _, fourth = (dict(zip(columns, row, strict=True)) for row in rows[:4])
    assert (first["gpu"], first["utilization"], first["energy"]) == (0, 50.0, 1250)
    assert (second["gpu"], second["power"], second["pcieRx"]) == (1, 100_000, None)
    assert (fourth["gpu"], fourth["timeNs"], fourth["power"]) == (1, log.clocks[1][0], None)
    assert made["GPUTRACE_TOPOLOGY"][1][0] == (0, 0, "X", "X", None, None, None, None)


def test_an_empty_file_makes_empty_tables(tmp_path: Path) -> None:
    path = tmp_path / "host.nvml.jsonl"
    path.touch()
    assert [rows for _, rows in tables(read_nvml(path)).values()] == [[]] * 5


def test_nothing_of_the_environment_is_written(record: Record, tmp_path: Path) -> None:
    record(NVLINKED, PLANTED_TOKEN="hunter2-hunter2")
    assert b"hunter2" not in written(tmp_path).read_bytes()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [(None, None), ([], None), ([3], "3"), ([64, 65, 0, 1, 2, 8], "0-2,8,64-65")],
)
def test_cpus_are_written_as_ranges(
    tmp_path: Path, numbers: list[int] | None, text: str | None
) -> None:
    path = tmp_path / "host.nvml.jsonl"
    path.touch()
    log = read_nvml(path)
    log.devices = [{**dict.fromkeys(DEVICE), "cpuAffinity": numbers, "lostNs": None}]
    columns, (row,) = tables(log)["GPUTRACE_NVML_DEVICE"]
    assert row[columns.index("cpuAffinity")] == text


def measure(real: bool, seconds: float = 10) -> None:
    """Prints what sampling at 4 Hz costs."""
    with tempfile.TemporaryDirectory() as name:
        folder, env = Path(name), dict(os.environ)
        if not real:
            (folder / "script").write_text("gpus 8\nfield 83 * 0 1\nfield 138 * 0 1\n")
            env |= {"LD_LIBRARY_PATH": str(build(folder)), "FAKE_NVML": str(folder / "script")}
        command = [sys.executable, "-c", COST, name, str(seconds)]
        subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, check=False)


if __name__ == "__main__":
    measure("real" in sys.argv[1:])
