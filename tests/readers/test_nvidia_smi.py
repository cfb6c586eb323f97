"""Logs of nvidia-smi beside a trace, written as nvidia-smi writes them."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gputrace
from gputrace.errors import InputError
from gputrace.model.nvml import Nvml
from gputrace.readers.open import open_traces
from tests.helpers import command
from tests.helpers.rank_files import Node, write_parts
from tests.helpers.sentences import words_of
from tests.synthetic import Plan, simulate, write_kineto, write_nsys
from tests.synthetic.nsys_info import UTC_EPOCH_NS
from tests.synthetic.nvml import MIB

SECOND = 1_000_000_000
BEGAN = datetime.fromtimestamp(UTC_EPOCH_NS // SECOND, UTC)
PLAN = Plan(steps=8, ranks=2, allreduces=2, kernel_ns=1_000_000)
"""Its GPUs work for about 1.2 s from the first second on."""

QUERY = (
    "timestamp, index, utilization.gpu [%], memory.used [MiB], memory.total [MiB], "
    "clocks.current.sm [MHz], clocks.current.memory [MHz], power.draw [W], temperature.gpu, "
    "clocks_event_reasons.active"
)
VALUES = "{use} %, 40000 MiB, 143771 MiB, {sm} MHz, 3201 MHz, 512.34 W, 61, 0x0000000000000000"

ODD = (
    "9999/12/31 23:59:59.999", "0001/01/01 00:00:00", "2026/02/30 00:00:00", "9" * 400, "-1",
    "0x" + "f" * 40, "1e999", "99999999999 MiB", "GPU-", "index", "timestamp", "[N/A]", "#",
)  # fmt: skip

Log = Callable[..., Path]


def when(milliseconds: int, zone_hours: float = 0) -> str:
    """A moment after the session began, as nvidia-smi writes local time."""
    moment = BEGAN + timedelta(milliseconds=milliseconds, hours=zone_hours)
    return f"{moment:%Y/%m/%d %H:%M:%S}.{moment.microsecond // 1000:03}"


def rounds(form: str, gpus: int = 2, zone_hours: float = 0, every: int = 100) -> list[str]:
    """Five seconds; GPU 1 at 1500 MHz, each GPU asked 4 ms after the one before it."""
    return [
        form.format(
            time=when(at + 4 * gpu, zone_hours), gpu=gpu, use=95 - gpu, sm=1500 if gpu else 1980
        )
        for at in range(0, 5_000, every)
        for gpu in range(gpus)
    ]


INDEXED = "{time}, {gpu}, " + VALUES


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.sqlite"
    write_nsys(simulate(PLAN), path)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Log:
    def write(lines: Iterable[str], name: str = "smi.csv") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def joined(*paths: Path) -> tuple[Nvml, list[str]]:
    """Return what NVML says of a run, and the notes."""
    with open_traces(paths) as trace:
        trace.events([0], ["start", "process"])  # type: ignore[list-item]
        hosts = {process.host for process in trace.processes}
        nvml = trace.nvml
        assert {host for host, _ in nvml.places} <= hosts
        return nvml, trace.quality.notes


def clocks(nvml: Nvml) -> dict[int, float]:
    """The highest SM clock of each GPU."""
    gpus = sorted({gpu for _, gpu in nvml.places})
    return {gpu: float(np.nanmax(nvml.samples["smClock"][nvml.samples.gpu == gpu])) for gpu in gpus}


class TestQuery:
    def test_gives_samples_on_the_clock_of_the_trace(self, run: Path, log: Log) -> None:
        nvml, notes = joined(run, log([QUERY, *rounds(INDEXED)]))
        assert clocks(nvml) == {0: 1980, 1: 1500}
        assert nvml.samples.time[:4].tolist() == [0, 4_000_000, 100_000_000, 104_000_000]
        first = {name: nvml.samples[name][0] for name in nvml.samples.values}
        assert first == {
            "utilization": 95, "memoryUsed": 40_000 * MIB, "smClock": 1980, "memoryClock": 3201,
            "power": 512_340, "temperature": 61, "clocksEventReasons": 0,
        }  # fmt: skip
        assert [card.memory_bytes for card in nvml.cards] == [143_771 * MIB] * 2
        assert "smi.csv: 100 samples of GPUs 0-1, its times taken as UTC+00:00" in notes

    def test_without_units_means_the_same(self, run: Path, log: Log) -> None:
        plain = [re.sub(r" (%|MiB|MHz|W)(?=,|$)", "", line) for line in rounds(INDEXED)]
        assert "%" not in plain[0]
        with_units, _ = joined(run, log([QUERY, *rounds(INDEXED)], "a.csv"))
        without, _ = joined(run, log([QUERY, *plain], "b.csv"))
        for name in with_units.samples.values:
            assert np.array_equal(with_units.samples[name], without.samples[name])

    def test_takes_a_header_that_a_person_has_written(self, run: Path, log: Log) -> None:
        """The names of --query-gpu, above what noheader,nounits prints."""
        names = "timestamp,index,utilization.gpu,clocks.sm,clocks.mem,power.draw"
        rows = rounds("{time}, {gpu}, {use}, {sm}, 3201, 512.34")
        nvml, _ = joined(run, log([names, *rows]))
        assert clocks(nvml) == {0: 1980, 1: 1500}
        assert nvml.samples["power"][0] == 512_340

    def test_what_is_not_available_is_not_a_number(self, run: Path, log: Log) -> None:
        for cell in ("[N/A]", "[Not Supported]", "N/A", "[Unknown Error]", "[GPU is lost]"):
            rows = rounds("{time}, {gpu}, " + VALUES.replace("{use} %", cell))
            nvml, notes = joined(run, log([QUERY, *rows]))
            assert np.isnan(nvml.samples["utilization"]).all()
            assert len(nvml.samples) == 100
            assert not any("left out" in note for note in notes)

    def test_reasons_that_have_a_column_each_are_bits(self, run: Path, log: Log) -> None:
        header = (
            "timestamp, index, clocks_throttle_reasons.sw_power_cap, "
            "clocks_throttle_reasons.hw_slowdown, clocks_throttle_reasons.sw_thermal_slowdown"
        )
        nvml, _ = joined(run, log([header, *rounds("{time}, {gpu}, Active, Not Active, Active")]))
        assert set(nvml.samples["clocksEventReasons"].tolist()) == {0x24}

    def test_what_the_card_can_do_is_taken_too(self, run: Path, log: Log) -> None:
        header = (
            "timestamp, index, name, uuid, pci.bus_id, clocks.current.sm [MHz], "
            "clocks.max.sm [MHz], clocks.max.memory [MHz], clocks.applications.graphics [MHz], "
            "pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.max, power.limit [W]"
        )
        form = (
            "{time}, {gpu}, NVIDIA H200, GPU-{gpu:08x}-1b03-36ec-9b21-6a0c3eb7c873, "
            "00000000:00:0{gpu}.0, {sm} MHz, 1980 MHz, 3201 MHz, 1830 MHz, 4, 5, 16, 700.00 W"
        )
        nvml, _ = joined(run, log([header, *rounds(form)]))
        card = nvml.cards[1]
        assert (card.name, card.sm_clock_max, card.sm_clock_application) == (
            "NVIDIA H200", 1980, 1830
        )  # fmt: skip
        assert (card.pcie_gen_max, card.pcie_width_max, card.power_limit_mw) == (5, 16, 700_000)
        assert nvml.samples["pcieGen"][0] == 4

    def test_lines_that_are_no_samples_are_counted(self, run: Path, log: Log) -> None:
        lines = [QUERY, *rounds(INDEXED)]
        lines[20] = "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost."
        lines[30] = lines[30].replace("1980 MHz", "fast MHz").replace("1500 MHz", "fast MHz")
        lines[-1] = lines[-1][:40]
        nvml, notes = joined(run, log(lines))
        assert len(nvml.samples) == 97
        assert "3 lines of smi.csv left out: no whole sample" in notes

    def test_a_header_in_the_middle_is_of_another_log_after_the_first(
        self, run: Path, log: Log
    ) -> None:
        half = rounds(INDEXED)
        nvml, notes = joined(run, log([QUERY, *half[:50], "", QUERY, *half[50:]]))
        assert len(nvml.samples) == 100
        assert not any("left out" in note for note in notes)

    @pytest.mark.parametrize("line", ["timestamp, index, name", "a, b, c"])
    def test_what_has_nothing_to_say_is_refused(self, run: Path, log: Log, line: str) -> None:
        path = log([line, *rounds("{time}, {gpu}, NVIDIA H200")])
        command.assert_refused(command.gputrace("analyze", run, path), 3, "smi.csv", "no header")

    def test_without_times_is_refused(self, run: Path, log: Log) -> None:
        path = log(["index, utilization.gpu [%]", *rounds("{gpu}, {use} %")])
        command.assert_refused(command.gputrace("analyze", run, path), 3, "smi.csv", "timestamp")


class TestNoHeader:
    def test_units_tell_the_columns_that_they_can(self, run: Path, log: Log) -> None:
        nvml, notes = joined(run, log(rounds(INDEXED)))
        assert set(nvml.samples.values) == {
            "utilization", "memoryUsed", "power", "clocksEventReasons"
        }  # fmt: skip
        assert nvml.samples["memoryUsed"][0] == 40_000 * MIB
        assert nvml.cards[0].memory_bytes == 143_771 * MIB
        assert any(note.startswith("smi.csv has no header") for note in notes)

    def test_of_one_gpu_the_index_need_not_be_told(self, tmp_path: Path, log: Log) -> None:
        path = tmp_path / "one.sqlite"
        write_nsys(simulate(Plan(steps=8, first_gpu=3)), path)
        nvml, _ = joined(path, log(rounds("{time}, {use} %", gpus=1)))
        assert {gpu for _, gpu in nvml.places} == {3}

    def test_numbers_without_units_could_be_anything(self, run: Path, log: Log) -> None:
        path = log(rounds("{time}, {gpu}, {use}, 40000, {sm}"))
        ran = command.gputrace("analyze", run, path)
        command.assert_refused(ran, 3, "smi.csv", "no header", "--query-gpu")


class TestGpusWithoutIndex:
    HEADER = "timestamp, utilization.gpu [%], clocks.current.sm [MHz]"

    def test_are_told_by_the_order_inside_a_round(self, run: Path, log: Log) -> None:
        rows = rounds("{time}, {use} %, {sm} MHz")
        nvml, notes = joined(run, log([self.HEADER, *rows]))
        assert clocks(nvml) == {0: 1980, 1: 1500}
        assert any("numbered by the order of rows" in note for note in notes)

    def test_a_round_that_is_not_whole_is_left_out(self, run: Path, log: Log) -> None:
        rows = rounds("{time}, {use} %, {sm} MHz")
        nvml, notes = joined(run, log([self.HEADER, *rows[1:]]))
        assert clocks(nvml) == {0: 1980, 1: 1500}
        assert "1 line of smi.csv left out: no whole sample" in notes

    @pytest.mark.parametrize(
        ("name", "form"),
        [("uuid", "GPU-{gpu:08x}-1b03-36ec-9b21-6a0c3eb7c873"), ("pci.bus_id", "0000:0{gpu}:00.0")],
    )
    def test_are_told_by_what_names_them(self, run: Path, log: Log, name: str, form: str) -> None:
        header = f"timestamp, {name}, clocks.current.sm [MHz]"
        nvml, _ = joined(run, log([header, *rounds("{time}, " + form + ", {sm} MHz")]))
        assert clocks(nvml) == {0: 1980, 1: 1500}

    def test_a_uuid_that_the_trace_knows_wins_over_the_index(self, run: Path, log: Log) -> None:
        """Cards are numbered from 0 here, as in a container that counts its own."""
        header = "timestamp, index, uuid, clocks.current.sm [MHz]"
        form = "{time}, 0, GPU-00000001-1b03-36ec-9b21-6a0c3eb7c873, 1500 MHz"
        nvml, _ = joined(run, log([header, *rounds(form, gpus=1)]))
        assert clocks(nvml) == {1: 1500}

    def test_that_cannot_be_told_are_refused(self, run: Path, log: Log) -> None:
        rows = rounds("{time}, {use} %, {sm} MHz", gpus=3)
        rows = [row for number, row in enumerate(rows) if number % 7]
        path = log([self.HEADER, *rows])
        ran = command.gputrace("analyze", run, path)
        command.assert_refused(ran, 3, "smi.csv", "which GPU", "index or uuid")


class TestLocalTime:
    @pytest.mark.parametrize(("hours", "shown"), [(2, "+02:00"), (-7, "-07:00"), (5.75, "+05:45")])
    def test_is_taken_as_what_puts_the_log_over_the_trace(
        self, run: Path, log: Log, hours: float, shown: str
    ) -> None:
        nvml, notes = joined(run, log([QUERY, *rounds(INDEXED, zone_hours=hours)]))
        assert nvml.samples.time[0] == 0
        assert any(note.endswith(f"its times taken as UTC{shown}") for note in notes)

    def test_of_a_log_of_the_whole_day_is_that_of_the_trace(self, run: Path, log: Log) -> None:
        """The log would cover the run in other zones too; only what is around the run is taken."""
        early = [line.replace(when(0)[:10], "2026/11/20") for line in rounds(INDEXED)[:2]]
        nvml, notes = joined(run, log([QUERY, *early, *rounds(INDEXED)]))
        assert len(nvml.samples) == 100
        assert any(note.endswith("UTC+00:00") for note in notes)

    def test_of_a_long_log_is_that_of_the_machine_where_the_trace_tells_it(
        self, run: Path, log: Log, tmp_path: Path
    ) -> None:
        """Nine hours of samples lie over the run in many zones."""
        path = Path(shutil.copy(run, tmp_path / "zoned.sqlite"))
        with closing(sqlite3.connect(path)) as database, database:
            sql = "UPDATE TARGET_INFO_SESSION_START_TIME SET localTime = ?"
            database.execute(sql, (f"{BEGAN + timedelta(hours=-3.5):%Y-%m-%dT%H:%M:%S}",))
        rows = [
            INDEXED.format(time=when(at, -3.5), gpu=gpu, use=95, sm=1980)
            for at in range(-16_200_000, 16_200_000, 60_000)
            for gpu in range(2)
        ]
        _, notes = joined(path, log([QUERY, *rows]))
        assert any(note.endswith("UTC-03:30") for note in notes)

    def test_of_another_run_is_told_and_not_joined(self, run: Path, log: Log) -> None:
        rows = [line.replace("2026/", "2025/") for line in rounds(INDEXED)]
        nvml, notes = joined(run, log([QUERY, *rows]))
        assert not nvml
        assert "smi.csv cannot be joined: none of its times is within this run" in notes

    def test_that_the_trace_cannot_be_brought_to_is_told(
        self, run: Path, log: Log, tmp_path: Path
    ) -> None:
        path = Path(shutil.copy(run, tmp_path / "timeless.sqlite"))
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("DELETE FROM TARGET_INFO_SESSION_START_TIME")
        nvml, notes = joined(path, log([QUERY, *rounds(INDEXED)]))
        assert not nvml
        assert any("does not say when it was recorded" in note for note in notes)


class TestDmon:
    NAMES = "#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem     fb   mclk   pclk "
    UNITS = "#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %     MB    MHz    MHz "

    def rows(self, dated: bool = True, gpus: int = 2) -> list[str]:
        return [
            f" {BEGAN + timedelta(seconds=at):{'%Y%m%d   ' if dated else ''}%H:%M:%S}"
            f"      {gpu}    512     61      -     {95 - gpu}     40  40000   3201   "
            f"{1500 if gpu else 1980} "
            for at in range(5)
            for gpu in range(gpus)
        ]

    def test_with_date_and_time_is_joined(self, run: Path, log: Log) -> None:
        lines = [self.NAMES, self.UNITS, *self.rows()[:4], "", self.NAMES, self.UNITS]
        nvml, _ = joined(run, log([*lines, *self.rows()[4:]], "dmon.log"))
        assert clocks(nvml) == {0: 1980, 1: 1500}
        assert len(nvml.samples) == 10
        first = {name: nvml.samples[name][0] for name in nvml.samples.values}
        assert first == {
            "power": 512_000, "temperature": 61, "utilization": 95, "memoryUsed": 40_000 * MIB,
            "memoryClock": 3201, "smClock": 1980,
        }  # fmt: skip

    def test_with_the_time_alone_is_of_the_day_of_the_trace(self, run: Path, log: Log) -> None:
        names, units = self.NAMES.replace("Date       ", ""), self.UNITS.replace("YYYYMMDD   ", "")
        nvml, notes = joined(run, log([names, units, *self.rows(dated=False)]))
        assert nvml.samples.time[0] == 0
        assert any(note.endswith("UTC+00:00") for note in notes)

    def test_without_times_is_refused(self, run: Path, log: Log) -> None:
        lines = [
            "# gpu    pwr  gtemp     sm   mclk   pclk ",
            "# Idx      W      C      %    MHz    MHz ",
        ]
        path = log([*lines, "    0    512     61     95   3201   1980 "])
        command.assert_refused(command.gputrace("analyze", run, path), 3, "dmon -o DT")


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_log_holds_it_is_read_or_refused(
    run: Path, log: Log, data: st.DataObject
) -> None:
    """Cells of other kinds, lines of others, lines cut short."""
    lines = [QUERY, *rounds(INDEXED)[:20]]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        cells = lines[at].split(", ")
        place = data.draw(st.integers(0, len(cells) - 1))
        cells[place] = data.draw(st.sampled_from(ODD) | st.text(max_size=8))
        lines[at] = ", ".join(cells)[: data.draw(st.integers(0, 200))]
    path = log(lines)
    with suppress(InputError):
        nvml, _ = joined(run, path)
        assert len(nvml.samples) <= len(lines)


class TestGivenTogether:
    def test_the_report_has_the_cards_and_says_where_they_are_from(
        self, run: Path, log: Log
    ) -> None:
        ran = command.gputrace("analyze", run, log([QUERY, *rounds(INDEXED)]))
        assert (ran.code, ran.err) == (0, "")
        assert "The cards in these steps" in ran.out
        assert "note: smi.csv: 100 samples of GPUs 0-1" in " ".join(ran.out.split())

    def test_the_order_does_not_matter(self, run: Path, log: Log) -> None:
        path = log([QUERY, *rounds(INDEXED)])
        with gputrace.open(run, path) as first, gputrace.open(path, run) as second:
            assert first.analyze() == second.analyze()

    def test_a_folder_has_its_logs_beside_its_traces(self, run: Path, tmp_path: Path) -> None:
        shutil.copy(run, tmp_path / "run.sqlite")
        (tmp_path / "smi.csv").write_text("\n".join([QUERY, *rounds(INDEXED)]))
        (tmp_path / "notes.txt").write_text("2026/11/21 00:39:58, started\n")
        (tmp_path / "losses.csv").write_text("timestamp, loss\n1, 0.5\n")
        with gputrace.open(tmp_path) as trace:
            report = trace.analyze()
        assert [card.sm_clock_mhz for card in report.cards] == [1980, 1500]

    def test_a_trace_of_a_profiler_has_ordinals_instead_of_cards(
        self, tmp_path: Path, log: Log
    ) -> None:
        recording = simulate(Plan(steps=8, ranks=1, kernel_ns=1_000_000))
        write_kineto(recording, tmp_path)
        path = next(tmp_path.glob("*.pt.trace.json"))
        with open_traces([path]) as trace:
            epoch = trace.session.epoch_ns
        assert epoch is not None
        shift = timedelta(milliseconds=(epoch - UTC_EPOCH_NS) / 1e6) / timedelta(hours=1)
        rows = rounds(INDEXED, gpus=1, zone_hours=shift)
        _, notes = joined(path, log([QUERY, *rows]))
        assert "the GPU indices of smi.csv are taken as the CUDA ordinals of the trace" in notes

    def test_of_several_machines_a_uuid_tells_whose_it_is(self, tmp_path: Path, log: Log) -> None:
        nodes = [Node("node0", (0,)), Node("node1", (1,))]
        paths = write_parts(simulate(PLAN), tmp_path / "parts", nodes)
        nvml, notes = joined(*paths, log([QUERY, *rounds(INDEXED)]))
        assert not nvml
        assert "smi.csv cannot be joined: it does not say which machine it is from" in notes
        header = "timestamp, uuid, clocks.current.sm [MHz]"
        form = "{time}, GPU-00000001-1b03-36ec-9b21-6a0c3eb7c873, 1500 MHz"
        nvml, _ = joined(*paths, log([header, *rounds(form, gpus=1)]))
        assert nvml.places == {(1, 1)}


# ---- a log alone ----


def log_of(path: Path, rows: Callable[[int, int], tuple[int, int, int]]) -> Path:
    """Two minutes of four cards; ``rows`` gives use, MHz and MiB of a second and a card."""
    lines = ["timestamp, index, utilization.gpu [%], clocks.sm [MHz], memory.used [MiB]"]
    for second in range(120):
        for card in range(4):
            use, clock, memory = rows(second, card)
            at = f"2026/11/20 10:{second // 60:02}:{second % 60:02}.000"
            lines.append(f"{at}, {card}, {use} %, {clock} MHz, {memory} MiB")
    path.write_text("\n".join(lines) + "\n")
    return path


def findings_of(path: Path) -> dict[str, str]:
    with gputrace.open(path) as trace:
        return {finding.id: words_of(finding) for finding in trace.analyze().findings}


def test_alone_it_says_how_much_the_cards_are_used_and_when_they_stand_still(
    tmp_path: Path,
) -> None:
    log = log_of(
        tmp_path / "smi.csv", lambda second, _: (0 if 40 <= second < 52 else 50, 1500, 9000)
    )
    found = findings_of(log)
    assert list(found) == ["low-utilization"]
    assert "GPUs 0-3 run a kernel 45% of 119 s" in found["low-utilization"]
    assert "stand still once for 2 s or more, 12.0 s in all" in found["low-utilization"]


def test_alone_it_shows_a_card_that_does_more_and_one_that_is_slower(tmp_path: Path) -> None:
    log = log_of(
        tmp_path / "smi.csv",
        lambda _, card: (95 if card == 0 else 40, 1300 if card == 2 else 1500, 9000),
    )
    found = findings_of(log)
    assert next(iter(found)) == "uneven-utilization"
    assert "GPU 0 runs kernels 95% of the time, the others 40%" in found["uneven-utilization"]
    assert "GPU 2 runs with the SM clock at 1,300 MHz" in found["clock-mismatch"]
    shown = command.gputrace("analyze", log)
    assert shown.code == 0
    assert "The cards while they work" in shown.out


def test_cards_that_work_all_the_time_are_nothing_to_complain_of(tmp_path: Path) -> None:
    log = log_of(tmp_path / "smi.csv", lambda *_: (99, 1500, 9000))
    with gputrace.open(log) as trace:
        (finding,) = trace.analyze().findings
    assert finding.severity == "info"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_one_card_without_an_index_may_be_asked_late_now_and_then(
    tmp_path: Path, encoding: str
) -> None:
    """A row a second, and after each 32 rows a pause of 4 s, as in a log of 32 cards."""
    lines = ["timestamp, name, utilization.gpu [%], power.draw [W]"]
    times = (1000 * row + 3000 * (row // 32) for row in range(200))
    lines += [f"{when(time)}, NVIDIA GeForce RTX 4090, 40 %, 200.00 W" for time in times]
    log = tmp_path / "smi.csv"
    log.write_text("\n".join(lines), encoding=encoding)
    assert "GPU 0 runs a kernel 40% of 217 s" in findings_of(log)["low-utilization"]


def test_of_a_card_in_mig_mode_utilization_is_unknown_and_the_rest_is_not(tmp_path: Path) -> None:
    lines = ["timestamp, index, mig.mode.current, utilization.gpu [%], clocks.sm [MHz]"]
    lines += [f"{when(1000 * row)}, 0, Enabled, [N/A], 1410 MHz" for row in range(5)]
    log = tmp_path / "smi.csv"
    log.write_text("\n".join(lines))
    with gputrace.open(log) as trace:
        analysis = trace.analyze()
    assert "low-utilization" not in [finding.id for finding in analysis.findings]
    (card,) = analysis.cards
    assert (card.samples, card.sm_clock_mhz, card.utilization_percent) == (5, 1410, None)
    shown = command.gputrace("analyze", log).out
    assert "No verdict: how much the GPUs work was not measured." in shown
    assert "Utilization of GPU 0 is unknown: the driver gives none of a card in MIG" in shown


def test_a_log_alone_has_no_steps_to_compare_or_draw(tmp_path: Path) -> None:
    log = log_of(tmp_path / "smi.csv", lambda *_: (50, 1500, 9000))
    command.assert_refused(command.gputrace("compare", log, log), 3, "no steps to compare")
    command.assert_refused(command.gputrace("report", log), 3, "a log of nvidia-smi")
