"""NVML in traces: cards, samples and links, from one file or several."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import gputrace
from gputrace.collectors.nvml import queries
from gputrace.collectors.nvml.queries import SAMPLE
from gputrace.model.nvml import ACTIVITY, VALUES, Card, Nvml, Samples, merge_nvml
from gputrace.readers.open import open_traces
from gputrace.readers.registry import open_trace
from gputrace.store.redact import RedactedTrace
from tests.helpers.rank_files import Node, write_parts, write_whole
from tests.synthetic import NvmlCard, Plan, Recording, simulate, write_nsys, write_nvml

SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def recording() -> Recording:
    return simulate(Plan(steps=5, ranks=2, kernels_per_step=20))


@pytest.fixture
def path(recording: Recording, tmp_path: Path) -> Path:
    path = tmp_path / "run.sqlite"
    write_nsys(recording, path)
    write_nvml(recording, path, {1: NvmlCard({"memoryClockMax": 3000}, {"smClock": 1500})})
    return path


def test_what_the_collector_samples_is_what_a_trace_may_say() -> None:
    assert ["timeNs", *VALUES] == list(SAMPLE)
    assert ["timeNs", *ACTIVITY] == list(queries.ACTIVITY)


def test_cards_samples_and_links_are_read_from_the_file(path: Path) -> None:
    with open_trace(path) as trace:
        nvml = trace.nvml
    assert [(card.host, card.gpu) for card in nvml.cards] == [(1, 0), (1, 1)]
    card = nvml.card(1, 1)
    assert card is not None
    assert (card.memory_clock_max, card.sm_clock_max, card.pci) == (3000, 1980, "0000:00:07.0")
    assert card.sm_clock_application is None
    assert {(link.gpu, link.peer): link.link for link in nvml.links} == {
        (0, 0): "X", (0, 1): "NV18", (1, 0): "NV18", (1, 1): "X"
    }  # fmt: skip
    assert set(nvml.samples.of(1, 1)["smClock"].tolist()) == {1500.0, 345.0}
    assert (np.diff(nvml.samples.time) >= 0).all()


def test_what_was_not_said_is_not_a_number(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE GPUTRACE_NVML_SAMPLE SET power = NULL WHERE gpu = 0")
        database.execute("UPDATE GPUTRACE_NVML_SAMPLE SET power = 'much' WHERE gpu = 1")
        database.execute("ALTER TABLE GPUTRACE_NVML_SAMPLE DROP COLUMN temperature")
    with open_trace(path) as trace:
        samples = trace.nvml.samples
    assert np.isnan(samples["power"]).all()
    assert np.isnan(samples["temperature"]).all()
    with pytest.raises(KeyError):
        samples["colour"]


def test_numbers_that_make_no_sense_are_not_believed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "UPDATE GPUTRACE_NVML_SAMPLE SET clocksEventReasons = 9e999, power = 1e300"
        )
        database.execute("UPDATE GPUTRACE_NVML_SAMPLE SET timeNs = ? WHERE gpu = 1", (2**63 - 1,))
        database.execute("INSERT INTO GPUTRACE_NVML_SAMPLE (gpu, timeNs) VALUES (9e18, 1)")
    with gputrace.open(path) as trace:
        report = trace.analyze()
    assert [card.gpu for card in report.cards] == [0]
    assert report.cards[0].power_mw is None


def test_a_trace_without_any_says_nothing(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    write_nsys(recording, path)
    with open_trace(path) as trace:
        assert not trace.nvml
        assert len(trace.nvml.samples) == 0
        assert trace.nvml.samples["smClock"].shape == (0,)


def test_the_cards_of_several_machines_are_told_apart(recording: Recording, tmp_path: Path) -> None:
    """Each machine counts from 0, and samples on the clock of its own session."""
    nodes = [Node("node0", (0,)), Node("node1", (1,), began_ns=SECOND)]
    paths = write_parts(recording, tmp_path / "parts", nodes, first_gpus=[0, 1])
    for path, clock in zip(paths, (1980, 1500), strict=True):
        alone = simulate(Plan(steps=5, kernels_per_step=20))
        write_nvml(alone, path, {0: NvmlCard(busy={"smClock": clock})})
    with open_traces(paths) as trace:
        nvml = trace.nvml
        trace.events([0], ["start", "process"])  # type: ignore[list-item]
        hosts = {process.host_name: process.host for process in trace.processes}
    for name, clock in (("node0", 1980), ("node1", 1500)):
        assert nvml.samples.of(hosts[name], 0)["smClock"].max() == clock
    first, second = (nvml.samples.of(hosts[name], 0).time[0] for name in ("node0", "node1"))
    assert second - first == SECOND


def test_cards_keep_the_numbers_that_nvml_gives_them(recording: Recording, tmp_path: Path) -> None:
    """A program that sees cards 2 and 3 alone calls them 0 and 1, and so does what lists them."""
    path = tmp_path / "run.sqlite"
    write_whole(recording, path)
    write_nvml(recording, path)
    with closing(sqlite3.connect(path)) as database, database:
        for table in ("GPUTRACE_NVML_DEVICE", "GPUTRACE_NVML_SAMPLE"):
            database.execute(f"UPDATE {table} SET gpu = gpu + 2")
    with open_trace(path) as trace:
        trace.events([0], ["start", "process"])  # type: ignore[list-item]
        assert [trace.device(0, ordinal).gpu for ordinal in (0, 1)] == [2, 3]


def test_a_redacted_trace_keeps_what_cards_do_and_not_which_they_are(path: Path) -> None:
    with open_trace(path) as trace:
        shown, plain = RedactedTrace(trace).nvml, trace.nvml
    assert np.array_equal(shown.samples["smClock"], plain.samples["smClock"])
    assert shown.cards[0].uuid == "GPU-00000000-0000-0000-0000-000000000001"
    assert shown.cards[1].pci != plain.cards[1].pci


def test_of_several_sources_the_first_that_knows_a_card_is_believed() -> None:
    first = Nvml((Card(0, name="H200", sm_clock_max=1980),))
    second = Nvml((Card(0, name="other", power_limit_mw=700_000), Card(1)))
    cards = merge_nvml([first, Nvml(), second]).cards
    assert cards == (Card(0, name="H200", sm_clock_max=1980, power_limit_mw=700_000), Card(1))


def test_samples_of_several_sources_are_in_order_of_time() -> None:
    def rows(times: list[int], **values: list[float]) -> Nvml:
        zeros = np.zeros(len(times), np.int64)
        columns = {name: np.array(column) for name, column in values.items()}
        return Nvml(samples=Samples(np.array(times), zeros, zeros, columns))

    found = merge_nvml([rows([10, 30], power=[1.0, 3.0]), rows([20], smClock=[2.0])]).samples
    assert found.time.tolist() == [10, 20, 30]
    assert [None if math.isnan(v) else v for v in found["power"].tolist()] == [1.0, None, 3.0]
    assert [None if math.isnan(v) else v for v in found["smClock"].tolist()] == [None, 2.0, None]
