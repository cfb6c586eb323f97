"""``gputrace bench --slurm``: the script, submitted to stand-ins that run it here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace.errors import ExitCode
from gputrace.studies.database import Configuration, Folder
from gputrace.studies.framework_environments import Framework
from gputrace.studies.plan import Nodes, PlannedRun
from tests.helpers import command, slurm
from tests.helpers.study_scripts import Bench

STUDY: Final = """
[options]
device = "cpu"
[matrix]
framework = ["stub"]
batch = [8, 16]
"""
OF_MPI: Final = """
rank, world = (int(os.environ.get(name, 0)) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
gpus = max(gpus, world)
if rank: sys.exit()
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path).framework("stub").write(STUDY)


def ask(bench: Bench, *options: str, tools: bool = True) -> command.Ran:
    """`gputrace bench --slurm` in the folder of the study."""
    path = str(slurm.install(bench.folder / "bin")) if tools else str(bench.folder / "none")
    env = {"RUNS": str(bench.ran), "PATH": f"{path}{os.pathsep}{os.defpath}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(bench.folder)
        return bench.run("--slurm", *options, env=env)


def script(bench: Bench) -> str:
    return (bench.folder / "study.sbatch").read_text()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--array"],
        ["--nodes", "2", "--gpus-per-node", "4", "--mpi", "mpiexec"],
        ["--partition", "gpu", "--time", "02:00:00", "--account", "some-one", "--backend", "host"],
    ],
    ids=lambda options: " ".join(options),
)
def test_the_script_is_good_bash(bench: Bench, options: list[str]) -> None:
    assert ask(bench, *options).code == ExitCode.DONE
    tools = [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
    for tool in tools:
        ran = subprocess.run([*tool, bench.folder / "study.sbatch"], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (0, "")


def test_what_is_asked_of_slurm_is_in_the_script(bench: Bench) -> None:
    asked = ("--partition", "gpu", "--time", "02:00:00", "--account", "some-one")
    ask(bench, *asked, "--nodes", "2", "--gpus-per-node", "4")
    directives = [line for line in script(bench).splitlines() if line.startswith("#SBATCH")]
    for line in ("nodes=2", "partition=gpu", "time=02:00:00", "account=some-one", "exclusive"):
        assert f"#SBATCH --{line}" in directives
    assert "gpus-per-node" not in "\n".join(directives)  # a study of the CPU needs none


def test_gpus_are_asked_for_where_runs_take_them(bench: Bench) -> None:
    bench.write('[matrix]\nframework = ["stub"]\ngpus = [1, 4]\n')
    ask(bench)
    assert "#SBATCH --gpus-per-node=4\n" in script(bench)


def test_nothing_is_run_or_submitted_unless_asked(bench: Bench) -> None:
    ask(bench)
    assert bench.started() == []


def test_one_job_runs_the_whole_study(bench: Bench) -> None:
    ran = ask(bench, "--submit")
    assert (ran.code, ran.out) == (ExitCode.DONE, "Submitted batch job 71\n")
    assert [each["batch"] for each in bench.started()] == ["8", "16"]
    assert [run.state for run in bench.runs()] == ["done", "done"]


def test_jobs_of_an_array_are_put_together_and_one_that_still_runs_is_left_for_later(
    bench: Bench,
) -> None:
    ask(bench, "--array", "--submit")
    first, _ = (bench.results / "parts").iterdir()
    with Folder(first).held():
        shown = bench.run("--show", "--format", "csv")
    assert f"{first.name} is not over" in shown.err
    assert len(bench.runs()) == 1
    shown = bench.run("--show", "--format", "csv")
    assert shown.code == ExitCode.DONE
    assert [line.split(",")[1] for line in shown.out.splitlines()] == ["framework", "stub", "stub"]
    assert len(bench.runs()) == 2
    assert len(list((bench.results / "logs").iterdir())) == 2
    assert bench.run().code == ExitCode.DONE
    assert len(bench.started()) == 2  # nothing was left to run


def test_ranks_of_mpi_are_started_on_all_nodes(bench: Bench) -> None:
    bench.framework("mpi", OF_MPI, updates=["horovod"])
    bench.write('[options]\ndevice = "cpu"\n[matrix]\nframework = ["mpi"]\ngpus = [2, 4]\n')
    ask(bench, "--submit", "--nodes", "2", "--gpus-per-node", "2")
    # Two fit on one node, and are the script's business; four are ranks on both.
    assert len(bench.started()) == 1 + 4
    assert [run.state for run in bench.runs()] == ["done", "done"]


def test_what_each_node_recorded_is_kept_as_one_trace(bench: Bench) -> None:
    bench.framework("mpi", OF_MPI, updates=["horovod"])
    settings = 'framework = "mpi"\ngpus = 4\ndevice = "cpu"'
    bench.write(f"record = true\n[options]\n{settings}")
    asked = ("--backend", "host", "--nodes", "2", "--gpus-per-node", "2")
    ask(bench, "--submit", *asked)
    (run,) = bench.runs()
    assert (run.state, run.trace is None) == ("done", False)
    assert list((bench.results / str(run.trace)).glob("*.sqlite"))


def planned(gpus: int, update: str = "ddp", **settings: Any) -> PlannedRun:
    own = {"framework": "torch", "gpus": gpus, "update": update, **settings}
    framework = Framework("torch", "PyTorch", Path("torch_ddp.py"), updates=("single", "ddp"))
    return PlannedRun(Configuration("abc", "torch", gpus, own), framework, 1, True)


def test_torchrun_runs_once_on_each_node() -> None:
    words = Nodes(4, 8).command(planned(16), ["record", "--"], ["python", "torch_ddp.py", "--x"])
    assert words[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert words.index("record") < words.index("python") < words.index("torch.distributed.run")
    assert {"--nnodes=2", "--nproc-per-node=8"} <= set(words)
    assert words[-2:] == ["torch_ddp.py", "--x"]


def test_cores_of_a_node_are_shared_by_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "32")
    assert "--cpus-per-task=4" in Nodes(2, 8).command(planned(16, "horovod"), [], ["python"])
    assert "--cpus-per-task=32" in Nodes(2, 8).command(planned(16), [], ["python"])


def test_mpiexec_starts_ranks_where_srun_cannot() -> None:
    words = Nodes(2, 8, "mpiexec").command(planned(16, "horovod"), [], ["python", "x.py"])
    assert words == ["mpiexec", "-n", "16", "python", "x.py"]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (planned(12), "not whole nodes of 8"),
        (planned(64), "4 nodes have 32"),
        (planned(16, "dataparallel"), "no placement that spans several nodes"),
    ],
)
def test_what_does_not_fit_the_nodes_is_skipped_with_a_reason(run: PlannedRun, why: str) -> None:
    nodes = Nodes(4, 8)
    assert nodes.spreads(run)
    assert why in nodes.why_not(run)
    assert not nodes.spreads(planned(8))


def test_without_sbatch_one_line_says_so(bench: Bench) -> None:
    ran = ask(bench, "--submit", tools=False)
    assert ran.code == ExitCode.MISSING_HERE
    assert ran.err.splitlines()[-1].startswith("gputrace: there is no sbatch here; submit ")


def test_a_script_is_not_replaced_unless_asked(bench: Bench) -> None:
    assert ask(bench).code == ExitCode.DONE
    assert ask(bench).code == ExitCode.USAGE
    assert ask(bench, "--force").code == ExitCode.DONE


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--submit"], "needs --slurm"),
        (["--array"], "needs --slurm"),
        (["--partition", "gpu"], "needs --slurm"),
        (["--nodes", "2"], "--gpus-per-node"),
        (["--slurm", "--partition", "two words"], "without spaces"),
    ],
)
def test_options_that_make_no_sense(bench: Bench, options: list[str], said: str) -> None:
    ran = bench.run(*options)
    assert (ran.code, len(ran.err.splitlines())) == (ExitCode.USAGE, 1)
    assert said in ran.err
