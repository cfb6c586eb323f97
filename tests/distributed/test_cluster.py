"""Files read by the workers of a Dask cluster: the result is that of one process, to the byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import ssl
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.pipeline import analyze
from gputrace.cli import run
from gputrace.distributed import Cluster, scheduler, spread, worker
from gputrace.distributed.scheduler import connected
from gputrace.errors import ExitCode, InputError, MissingError, UsageError
from gputrace.readers.open import open_traces
from gputrace.store.cache import cache_folder
from tests.collectors.spool.test_activity_sampled_calls import (
    LAUNCH_BOUND,
    sample_calls,
    write_plan,
)
from tests.helpers.rank_files import Node, write_parts
from tests.helpers.recordings import unpack as unpack_recording
from tests.synthetic import Plan, simulate, write_kineto

distributed: Any = pytest.importorskip("distributed")

pytestmark = pytest.mark.filterwarnings("default")
"""What Dask and its parts warn of is theirs."""

DEADLY = "deadly"
"""The worker that opens a file of such a name dies."""
PLAN = Plan(
    steps=8, ranks=3, kernels_per_step=30, allreduces=3, data_wait_ns=2_000_000, slow_rank=1,
    slow_factor=1.3, isolated=True,
)  # fmt: skip


QUIET = {
    "distributed.admin.system-monitor.interval": "30s",
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.memory.monitor-interval": "1s",
    "distributed.worker.profile.enabled": False,
}
"""Settings of Dask with which a cluster that waits for the next test costs next to nothing."""

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


class Deadly(distributed.WorkerPlugin):  # type: ignore[misc]
    """Makes `DEADLY` files what they are, in every worker, those started anew too."""

    def setup(self, worker: Any) -> None:
        ours: Any = import_module("gputrace.distributed.worker")
        real = ours.open_trace

        def open_trace(path: Path, *how: bool) -> Any:
            if path.name.startswith(DEADLY):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(path, *how)

        ours.open_trace = open_trace


class Mortal(distributed.WorkerPlugin):  # type: ignore[misc]
    """Makes the first worker die that is asked something for the so many-th time."""

    def __init__(self, questions: int, died: Path) -> None:
        self.questions, self.died = questions, died

    def setup(self, worker: Any) -> None:
        ours: Any = import_module("gputrace.distributed.worker")
        real, asked = ours.run_batches, []

        def work(*how: Any) -> Any:
            asked.append(how)
            if len(asked) == self.questions and not self.died.exists():
                self.died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*how)

        ours.run_batches = work


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two processes; one death is enough for Dask to give up a task."""
    import dask

    with (
        dask.config.set(QUIET | {"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file a rank, two of them a machine, whose clocks differ."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    nodes = [Node(f"node{n // 2}", (n,), began_ns=n // 2 * 1_000_003) for n in range(PLAN.ranks)]
    write_parts(simulate(PLAN), folder, nodes)
    return folder


@pytest.fixture(scope="module")
def expected(whole: Path) -> str:
    """The report of one process."""
    return report(whole)


@pytest.fixture
def ranks(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def report(*paths: Path, **how: Any) -> str:
    with gputrace.open(*paths, **how) as trace:
        return trace.analyze().render("json")


def is_dropped(stranger: socket.socket) -> bool:
    """Return true if a scheduler ends the connection when it gets something."""
    with stranger:
        try:
            stranger.sendall(bytes(64))
            return not stranger.recv(64)
        except OSError:
            return True


class TestTheResultIsThatOfOneProcess:
    def test_of_a_file_for_each_rank(self, cluster: Any, whole: Path, expected: str) -> None:
        assert report(whole, scheduler=cluster.scheduler_address) == expected

    def test_of_files_of_text(self, cluster: Any, tmp_path: Path) -> None:
        write_kineto(simulate(PLAN), tmp_path)
        assert report(tmp_path, scheduler=cluster.scheduler_address) == report(tmp_path)

    @pytest.mark.parametrize(
        "name", ["h200x2-ddp-validation-12-19.sqlite", "h200x4-dataparallel-7-9.sqlite"]
    )
    def test_of_a_recording_with_samples_of_nvml(
        self, cluster: Any, tmp_path: Path, name: str
    ) -> None:
        path = unpack_recording(name, tmp_path)
        assert report(path, scheduler=cluster.scheduler_address) == report(path)

    def test_of_a_recording_that_has_some_of_its_calls(self, cluster: Any, tmp_path: Path) -> None:
        path = sample_calls(write_plan(LAUNCH_BOUND, tmp_path / "some.sqlite"))
        told = report(path, scheduler=cluster.scheduler_address)
        assert json.loads(told)["recorded_calls"]
        assert told == report(path)

    def test_of_a_window(self, cluster: Any, whole: Path) -> None:
        with (
            gputrace.open(whole, scheduler=cluster.scheduler_address) as there,
            gputrace.open(whole) as here,
        ):
            one, other = (trace.analyze(time="1010ms:1030ms") for trace in (there, here))
        assert one.render("json") == other.render("json")

    def test_of_a_window_of_large_files(
        self, cluster: Any, whole: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gputrace.store.slice.LARGE", 1000)
        with (
            gputrace.open(whole, scheduler=cluster.scheduler_address) as there,
            gputrace.open(whole) as here,
        ):
            one, other = (trace.analyze(time="1010ms:1030ms") for trace in (there, here))
        assert "of this large trace is read" in " ".join(one.warnings)
        assert one.render("json") == other.render("json")

    def test_whatever_numbers_a_worker_gives(
        self, cluster: Any, whole: Path, expected: str
    ) -> None:
        """Whoever takes over from a dead worker reads other rows first."""
        with gputrace.open(whole, scheduler=cluster.scheduler_address) as trace:
            with distributed.Client(cluster, set_as_default=False) as client:
                first = next(iter(client.run(os.getpid).values()))
            os.kill(first, signal.SIGKILL)
            assert trace.analyze().render("json") == expected

    def test_where_all_workers_die_meanwhile(
        self, whole: Path, expected: str, tmp_path: Path
    ) -> None:
        """Files that a dead worker had read are read again by its successor."""
        died = tmp_path / "died"
        with (
            distributed.LocalCluster(
                n_workers=1, threads_per_worker=1, dashboard_address=None, silence_logs=50
            ) as mortal,
            distributed.Client(mortal, set_as_default=False) as client,
        ):
            client.register_plugin(Mortal(9, died))
            assert report(whole, scheduler=mortal.scheduler_address) == expected
        assert died.exists()

    def test_where_columns_are_on_disk(
        self, cluster: Any, whole: Path, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gputrace.store.spill_file.LARGE", 1000)
        assert report(whole, scheduler=cluster.scheduler_address) == expected

    def test_of_a_file_without_calls_beside_others(self, cluster: Any, ranks: Path) -> None:
        with closing(sqlite3.connect(ranks / "run.2.sqlite")) as database, database:
            database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME")
        assert report(ranks, scheduler=cluster.scheduler_address) == report(ranks)

    def test_of_a_file_without_gpus_beside_others(self, cluster: Any, ranks: Path) -> None:
        with closing(sqlite3.connect(ranks / "run.1.sqlite")) as database, database:
            for kind in ("KERNEL", "MEMCPY", "MEMSET"):
                database.execute(f"DELETE FROM CUPTI_ACTIVITY_KIND_{kind}")
        assert report(ranks, scheduler=cluster.scheduler_address) == report(ranks)

    def test_of_rows_that_make_no_sense(self, cluster: Any, ranks: Path) -> None:
        """Rows that workers leave out are a finding, as here, in the order of the files."""
        for number, kind in ((0, "RUNTIME"), (1, "KERNEL"), (2, "RUNTIME")):
            path = ranks / f"run.{number}.sqlite"
            with closing(sqlite3.connect(path)) as database, database:
                table = f"CUPTI_ACTIVITY_KIND_{kind}"
                three = f"SELECT rowid FROM {table} LIMIT 3"
                database.execute(f"UPDATE {table} SET end = start - 5 WHERE rowid IN ({three})")
        told = report(ranks, scheduler=cluster.scheduler_address)
        assert "lost-records" in {finding["id"] for finding in json.loads(told)["findings"]}
        assert told == report(ranks)

    def test_where_the_last_steps_have_no_calls(self, cluster: Any, ranks: Path) -> None:
        for path in ranks.iterdir():
            with closing(sqlite3.connect(path)) as database, database:
                table = "CUPTI_ACTIVITY_KIND_RUNTIME"
                early = f"SELECT min(start) + 10000 FROM {table}"
                database.execute(f"DELETE FROM {table} WHERE start > ({early})")
        assert report(ranks, scheduler=cluster.scheduler_address) == report(ranks)

    def test_with_progress_told(self, cluster: Any, whole: Path, expected: str) -> None:
        with gputrace.open(whole, scheduler=cluster.scheduler_address) as trace:
            found = trace.analyze(progress=lambda done, of: None)
        assert found.render("json") == expected

    def test_of_one_gpu_in_two_files(self, cluster: Any, tmp_path: Path) -> None:
        """Its rows come together, as no file has all of them."""
        nodes = [Node("node0", (rank,)) for rank in range(2)]
        run = simulate(replace(PLAN, ranks=2, isolated=False, slow_rank=1))
        files = write_parts(run, tmp_path / "run", nodes)
        with closing(sqlite3.connect(files[1])) as database, database:
            for kind in ("KERNEL", "MEMCPY", "MEMSET"):
                database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_{kind} SET deviceId = 0")
        told = report(tmp_path / "run", scheduler=cluster.scheduler_address)
        assert {gpu["gpu"] for gpu in json.loads(told)["gpus"]} == {0}
        assert told == report(tmp_path / "run")

    def test_for_plugins_that_want_rows(
        self, cluster: Any, whole: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        def find_plugged(facts: Any) -> Any:
            seen.append(sum(map(len, facts.operations)))
            return (), ()

        monkeypatch.setattr("gputrace.analyzers.pipeline.plugins", lambda _: [object()])
        monkeypatch.setattr("gputrace.analyzers.pipeline.run_plugins", find_plugged)
        report(whole, scheduler=cluster.scheduler_address)
        assert seen[0] > 3 * 8 * 30


class TestWhatTravels:
    def test_is_less_than_a_byte_a_kernel_once_steps_repeat(
        self, cluster: Any, tmp_path: Path
    ) -> None:
        """Each further step adds its own times and its collectives, and no rows."""
        received = []
        for steps in (60, 120):
            plan = replace(PLAN, steps=steps, kernels_per_step=500, ranks=2)
            nodes = [Node("node0", (rank,)) for rank in range(2)]
            write_parts(simulate(plan), tmp_path / f"{steps}", nodes)
            with Cluster(cluster.scheduler_address) as own:
                analyze(open_traces([tmp_path / f"{steps}"], opening=own.open_each), spread=spread)
                received.append(own.received)
        assert received[1] - received[0] < 60 * 500 * 2


class TestARankThatCannotBeRead:
    def test_costs_that_rank_alone(
        self, cluster: Any, ranks: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        broken = ranks / "run.1.sqlite"
        broken.write_bytes(broken.read_bytes()[:5000])
        where = ["--scheduler", cluster.scheduler_address]
        assert run(["analyze", str(ranks), "--json", "--keep-going", *where]) == (
            ExitCode.DONE_IN_PART
        )
        there = capsys.readouterr()
        assert run(["analyze", str(ranks), "--json", "--keep-going"]) == ExitCode.DONE_IN_PART
        assert capsys.readouterr() == there
        assert str(broken) in there.err

    def test_ends_the_command_without_keep_going(
        self, cluster: Any, ranks: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (ranks / "run.1.sqlite").write_bytes(b"SQLite format 3\0 and nothing more")
        where = ["--scheduler", cluster.scheduler_address]
        assert run(["analyze", str(ranks), *where]) == ExitCode.UNREADABLE_INPUT
        told = capsys.readouterr().err
        assert "run.1.sqlite" in told
        assert told.count("\n") == 1

    def test_where_it_kills_its_workers(self, cluster: Any, ranks: Path) -> None:
        (ranks / "run.2.sqlite").rename(ranks / f"{DEADLY}.sqlite")
        with distributed.Client(cluster, set_as_default=False) as client:
            client.register_plugin(Deadly())
            with gputrace.open(
                ranks, keep_going=True, scheduler=cluster.scheduler_address
            ) as trace:
                (left_out,) = trace.left_out
                found = trace.analyze()
        assert DEADLY in left_out.path
        assert "died" in left_out.problem
        assert {gpu.rank for gpu in found.gpus} == {0, 1}


class TestACluster:
    def test_whose_workers_are_gone_for_good_is_not_waited_for(
        self, whole: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gputrace.distributed._LOOKED_AFTER_S", 0.1)
        monkeypatch.setattr("gputrace.distributed._WORKERS_GONE_S", 0.2)
        options = {"n_workers": 1, "processes": False, "dashboard_address": None}
        with (
            distributed.LocalCluster(**options, silence_logs=50) as small,
            gputrace.open(whole, scheduler=small.scheduler_address) as trace,
        ):
            small.scale(0)
            while small.scheduler.workers:
                sleep(0.01)
            with pytest.raises(MissingError, match="has no worker left: start some"):
                trace.analyze()

    def test_that_does_not_answer(
        self, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(scheduler, "_PATIENCE_S", 0.3)
        code = run(["analyze", str(whole), "--scheduler", "tcp://127.0.0.1:9"])
        assert code == ExitCode.MISSING_HERE
        told = capsys.readouterr().err
        assert "tcp://127.0.0.1:9" in told
        assert told.count("\n") == 1

    @pytest.mark.parametrize("where", ["local", "local:none", "local:0", "nonsense"])
    def test_that_is_none(self, whole: Path, where: str) -> None:
        assert run(["analyze", str(whole), "--scheduler", where]) == ExitCode.USAGE

    @pytest.mark.parametrize(
        ("where", "lacking"), [("local:2", "distributed"), ("slurm:2", "dask_jobqueue")]
    )
    def test_without_the_extra(
        self,
        whole: Path,
        where: str,
        lacking: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setitem(sys.modules, lacking, None)
        assert run(["analyze", str(whole), "--scheduler", where]) == ExitCode.MISSING_HERE
        assert "gputrace[cluster]" in capsys.readouterr().err

    def test_of_slurm_where_none_is(
        self,
        whole: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setitem(sys.modules, "dask_jobqueue", SimpleNamespace(SLURMCluster=None))
        monkeypatch.setenv("PATH", "")
        assert run(["analyze", str(whole), "--scheduler", "slurm:2"]) == ExitCode.MISSING_HERE
        assert "no sbatch" in capsys.readouterr().err

    def test_that_slurm_starts(
        self, whole: Path, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Jobs of the fake dask-jobqueue are processes of this machine."""
        asked = []

        class Jobs(distributed.LocalCluster):  # type: ignore[misc]
            def __init__(self, security: Any, **of_a_job: object) -> None:
                asked.append(of_a_job)
                assert security.require_encryption
                super().__init__(
                    n_workers=0, processes=False, dashboard_address=None, security=security
                )

            def scale(self, count: int) -> None:
                asked.append({"workers": count})
                super().scale(count)

        monkeypatch.setitem(sys.modules, "dask_jobqueue", SimpleNamespace(SLURMCluster=Jobs))
        monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/sbatch")
        assert report(whole, scheduler="slurm:2") == expected
        job = {"cores": 1, "memory": "4GB", "processes": 1}
        folder = str(cache_folder() / "slurm")
        assert asked[:2] == [job | {"shared_temp_directory": folder}, {"workers": 2}]
        assert Path(folder).stat().st_mode & 0o777 == 0o700

    def test_lets_nobody_in_without_its_certificate(self) -> None:
        """Who reaches a scheduler runs code as its user."""
        with connected("local:1") as client:
            kind, host, port = client.scheduler.address.replace("//", "").split(":")
            assert (kind, host) == ("tls", "127.0.0.1")
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            for encrypt in (lambda plain: plain, context.wrap_socket):
                with socket.create_connection((host, int(port)), 5) as plain:
                    assert is_dropped(encrypt(plain))

    def test_keeps_files_open_to_the_end_and_nothing_that_was_made_of_the_rows(
        self, cluster: Any, whole: Path
    ) -> None:
        with distributed.Client(cluster, set_as_default=False) as client:
            with gputrace.open(whole, scheduler=cluster.scheduler_address) as trace:
                trace.analyze()
                with pytest.raises(UsageError):
                    trace.analyze(time="500s:600s")
                assert sum(client.run(_shards).values()) == 0
                assert sum(client.run(_files_open).values()) == PLAN.ranks
            assert set(client.run(_files_open).values()) == {0}

    def test_counts_what_it_receives(self, cluster: Any, whole: Path) -> None:
        with Cluster(cluster.scheduler_address) as own:
            found = list(own.open_each([whole / "nothing", whole / "run.0.sqlite"], True))
            assert isinstance(found[0], InputError)
            assert own.received > 0


def _shards() -> int:
    return sum(own.shard is not None for own in worker._open.values())


def _files_open() -> int:
    return len(worker._open)
