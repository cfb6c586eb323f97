"""However a study is begun, ended, killed and changed: each run is there once, as it came out."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlite_utils.db import Table

from gputrace.studies.database import (
    Configuration,
    Database,
    Recording,
    Run,
    StudyHeader,
    StudyPlan,
)
from gputrace.studies.plan import key_of

BATCHES = (16, 32, 64)
STATES = ("done", "failed", "skipped")
Place = tuple[str, int, bool]


class PowerCut(Exception):
    """The process is gone in the middle of something."""


class Bench(RuleBasedStateMachine):
    """The results of a study, and what should be in them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="gputrace-states-"))
        self.database = Database(self.folder, create=True)
        self.runs: dict[Place, tuple[str, float | None]] = {}
        self.asked: list[Configuration] = []
        self.repeats = 1
        self.recording: Recording = "both"
        self.began = 0
        self.begin(list(BATCHES), 2, "both")

    def teardown(self) -> None:
        self.database.close()
        shutil.rmtree(self.folder)

    @rule(
        batches=st.lists(st.sampled_from(BATCHES), min_size=1, unique=True),
        repeats=st.integers(1, 3),
        recording=st.sampled_from(("both", "recorded", "bare")),
    )
    def begin(self, batches: list[int], repeats: int, recording: Recording) -> None:
        """Starts the study, as its file is now."""
        self.asked = [_configuration(batch) for batch in batches]
        self.repeats, self.recording = repeats, recording
        study = StudyHeader("t", "q", repeats, recording, "s.toml")
        self.database.set_plan(StudyPlan(study, tuple(self.asked)))

    def _run(self, data: st.DataObject) -> Run:
        self.began += 1
        return Run(
            data.draw(st.sampled_from(self.asked)).key,
            data.draw(st.integers(1, self.repeats)),
            data.draw(st.booleans()) if self.recording == "both" else self.recording == "recorded",
            data.draw(st.sampled_from(STATES)),
            started_ns=self.began,
            result={"samples_per_second": self.began},
        )

    @rule(data=st.data(), rate=st.none() | st.floats(0, 1e6))
    def finish_a_run(self, data: st.DataObject, rate: float | None) -> None:
        saved = self.database.save(self._run(data))
        if rate is not None:
            self.database.save_measure(saved, {"rate": rate, "source": "markers"})
        self.runs[saved.key] = (f"{saved.state} {saved.started_ns}", rate)

    @rule(data=st.data())
    def lose_power_while_a_run_is_saved(self, data: st.DataObject) -> None:
        """Keep what was there; the run is as if it had never ended."""
        run = self._run(data)
        disk = self.folder.with_name(f"{self.folder.name}.disk")
        real = Table.insert_chunk

        def insert(table: Table, *values: Any) -> None:
            with table.db.atomic():
                real(table, *values)
                shutil.copytree(self.folder, disk)
                raise PowerCut

        with patch.object(Table, "insert_chunk", insert), pytest.raises(PowerCut):
            self.database.save(run)
        self.database.close()
        shutil.rmtree(self.folder)
        disk.rename(self.folder)
        self.resume()

    @rule()
    def resume(self) -> None:
        """Another process opens the results."""
        self.database.close()
        self.database = Database(self.folder)

    @rule(data=st.data())
    def run_one_again(self, data: st.DataObject) -> None:
        over = self.database.runs()
        if over:
            run = data.draw(st.sampled_from(over))
            self.database.drop([run])
            del self.runs[run.key]

    @rule(data=st.data())
    def finish_one_again(self, data: st.DataObject) -> None:
        """A run that was over takes the key of the earlier try, whose measures go."""
        over = self.database.runs()
        if over:
            again = replace(data.draw(st.sampled_from(over)), state="done", id=None)
            self.database.save(again)
            self.runs[again.key] = (f"done {again.started_ns}", None)

    def _shown(self) -> set[Place]:
        keys = {one.key for one in self.asked}
        return {
            (key, repeat, recorded)
            for key, repeat, recorded in self.runs
            if key in keys
            and repeat <= self.repeats
            and self.recording in ("both", "recorded" if recorded else "bare")
        }

    @invariant()
    def each_run_is_there_once_as_it_came_out(self) -> None:
        found = self.database.runs()
        assert len(found) == len({run.key for run in found})
        assert {run.key for run in found} == self._shown()
        measures = self.database.measures()
        for run in found:
            state, rate = self.runs[run.key]
            assert f"{run.state} {run.started_ns}" == state
            assert run.result == {"samples_per_second": run.started_ns}
            assert run.id is not None
            expected = {} if rate is None else {"rate": rate, "source": "markers"}
            assert measures.get(run.id, {}) == expected

    @invariant()
    def the_study_is_as_its_file_said_last(self) -> None:
        study = StudyHeader("t", "q", self.repeats, self.recording, "s.toml")
        assert self.database.plan() == StudyPlan(study, tuple(self.asked))


def _configuration(batch: int) -> Configuration:
    own = {"framework": "torch", "gpus": 1, "batch": batch}
    return Configuration(key_of(own), "torch", 1, own)


TestBench = Bench.TestCase
TestBench.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
