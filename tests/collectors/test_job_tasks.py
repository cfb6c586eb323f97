"""Which task of which job a recorder is, and what its trace is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.collectors.job_tasks import (
    Name,
    Task,
    find_task,
    name_output,
    of_task,
    spans_nodes,
    tasks_on_node,
)
from gputrace.errors import UsageError

BATCH = {
    "SLURM_JOB_ID": "9", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
"""As in a script of sbatch: the allocation, and one process."""
STEP = {**BATCH, "SLURM_STEP_ID": "2", "SLURM_PROCID": "6", "SLURM_LOCALID": "2",
        "SLURM_NODEID": "1"}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_NAMESPACE": "prterun-17@1",
}  # fmt: skip
HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}  # fmt: skip


class TestTheTask:
    @pytest.mark.parametrize(
        ("environment", "task"),
        [
            (STEP, Task("slurm 9.2", 6, 8, 2, 4)),
            (STEP | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3"},
             Task("slurm 9.2", 6, 7, 2, 3)),
            (MPIRUN, Task("mpi prterun-17@1", 5, 8, 1, 4)),
            (HYDRA, Task("", 3, 8, 3, 4)),
            (HYDRA | {"PBS_JOBID": "12.head"}, Task("mpi 12.head", 3, 8, 3, 4)),
            (TORCHRUN, Task("torchrun abc", 5, 8, 1, 4)),
            (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, Task("", 5, 8, 1, 4)),
        ],
    )  # fmt: skip
    def test_is_what_the_launcher_says(self, environment: dict[str, str], task: Task) -> None:
        assert find_task(environment) == task

    def test_of_the_innermost_launcher_counts(self) -> None:
        assert find_task(STEP | MPIRUN) == find_task(MPIRUN)
        assert find_task(STEP | TORCHRUN) == find_task(TORCHRUN)
        # srun --mpi=pmi2 sets these too, without a count of its node's tasks.
        assert find_task(STEP | {"PMI_RANK": "6", "PMI_SIZE": "8"}) == find_task(STEP)

    @pytest.mark.parametrize(
        "environment",
        [
            {},
            BATCH,
            BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
            STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            STEP | {"SLURM_PROCID": "8"},
            STEP | {"SLURM_PROCID": "x"},
            STEP | {"SLURM_STEP_ID": ""},
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            {"PMI_RANK": "0", "PMI_SIZE": "1"},
        ],
    )
    def test_is_none_where_one_process_was_started(self, environment: dict[str, str]) -> None:
        assert find_task(environment) is None

    def test_of_a_node_that_does_not_say_its_tasks_waits_for_nobody(self) -> None:
        broken = STEP | {"SLURM_TASKS_PER_NODE": "many"}
        assert find_task(broken) == Task("slurm 9.2", 6, 8, 2, 1)


Counts = st.lists(st.tuples(st.integers(0, 999), st.integers(1, 9)), min_size=1, max_size=9)


@given(Counts)
def test_slurms_counts_are_read_as_it_writes_them(counts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in counts)
    every = [tasks for tasks, nodes in counts for _ in range(nodes)]
    assert [tasks_on_node(text, node) for node in range(len(every))] == every
    assert tasks_on_node(text, len(every)) is None


@given(st.text(max_size=20), st.integers(0, 99))
def test_counts_of_any_text_are_a_number_or_none(text: str, node: int) -> None:
    found = tasks_on_node(text, node)
    assert found is None or 0 <= found < 10_000_000


def name(text: str, task: Task | None = None, *command: str, **environment: str) -> Name:
    return name_output(text, task, command or ("python", "t.py"), environment, "node7", 42)


TASK = Task("slurm 9.2", 6, 8, 2, 4)


class TestTheName:
    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("t.sqlite", "t.sqlite"),
            ("%h-%p.sqlite", "node7-42.sqlite"),
            ("out/%q{JOB}.sqlite", "out/j1.sqlite"),
            ("100%%.sqlite", "100%.sqlite"),
            ("%%h.sqlite", "%h.sqlite"),
            ("%q{SLASHES}.sqlite", "a_b.sqlite"),
        ],
    )
    def test_has_the_words_replaced(self, text: str, path: str) -> None:
        found = name(text, JOB="j1", SLASHES="a/b")
        assert found == Name(Path(path), path, is_tasks_own=False)

    @pytest.mark.parametrize("text", ["%x", "a%", "%q{A", "50% of it/t"])
    def test_keeps_any_other_percent_sign(self, text: str) -> None:
        assert str(name(text).path) == text

    @pytest.mark.parametrize(
        ("text", "word"), [("%q{NO}.x", "'NO' is not set"), ("", "does not name a file")]
    )
    def test_that_cannot_be_made_is_wrong_usage(self, text: str, word: str) -> None:
        with pytest.raises(UsageError, match=word):
            name(text)

    @pytest.mark.parametrize(
        ("text", "path", "pattern", "own"),
        [
            ("run.sqlite", "run.node7.sqlite", "run.*.sqlite", False),
            ("d/run", "d/run.node7", "d/run.*", False),
            ("run-%h.sqlite", "run-node7.sqlite", "run-*.sqlite", False),
            ("run-%q{SLURM_NODEID}.sqlite", "run-1.sqlite", "run-*.sqlite", False),
            ("%q{JOB}.sqlite", "j1.node7.sqlite", "j1.*.sqlite", False),
            ("r%q{SLURM_PROCID}.sqlite", "r6.sqlite", "r*.sqlite", True),
            ("r%q{SLURM_LOCALID}.sqlite", "r2.node7.sqlite", "r*.*.sqlite", True),
            ("%h-%p.sqlite", "node7-42.sqlite", "*-*.sqlite", True),
        ],
    )
    def test_tells_hosts_and_tasks_apart(
        self, text: str, path: str, pattern: str, own: bool
    ) -> None:
        assert name(text, TASK, JOB="j1", **STEP) == Name(Path(path), pattern, own)

    @pytest.mark.parametrize(
        ("command", "several"),
        [
            ("torchrun --nnodes 2 train.py", True),
            ("torchrun --nnodes=1:4 train.py", True),
            ("python -m torch.distributed.run --nnodes=2 train.py", True),
            ("accelerate launch --num_machines 2 train.py", True),
            ("torchrun --nnodes=1 --nproc-per-node 8 train.py", False),
            ("torchrun --standalone --nproc-per-node 8 train.py", False),
            ("torchrun --nnodes", False),
            ("torchrun --nnodes $N", False),
            ("python train.py --nodes 2", False),
        ],
    )
    def test_tells_hosts_apart_where_the_program_spans_some(
        self, command: str, several: bool
    ) -> None:
        words = command.split()
        assert spans_nodes(words, {}) == several
        found = name("run.sqlite", None, *words)
        assert found.path == Path("run.node7.sqlite" if several else "run.sqlite")
        assert found.pattern == ("run.*.sqlite" if several else "run.sqlite")

    def test_tells_hosts_apart_where_the_environment_says_nodes(self) -> None:
        assert name("run.sqlite", None, "torchrun", "t.py", PET_NNODES="2").path == Path(
            "run.node7.sqlite"
        )

    def test_of_a_task_that_is_alone_says_which_it_is(self) -> None:
        assert of_task(Path("d/run.node7.sqlite"), TASK) == Path("d/run.node7.task6.sqlite")
