"""`gputrace k8s patch`: programs of a Kubernetes manifest are armed or recorded."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gputrace.version import __version__
from tests.helpers import command
from tests.helpers.lookups import rows

pytest.importorskip("ruamel.yaml")

POD: Final = """
spec:
  containers:
  - name: pytorch
    image: registry.example/train:1
    command: [python, train.py]  # the program
    args: ["--epochs", "3"]
    env:
    - name: PIP_INDEX_URL
      value: https://pypi.example/simple
  - name: logger
    image: busybox
"""
HEAD: Final = "# mine\napiVersion: {}\nkind: {}\nmetadata:\n  name: train\nspec:\n"


def under(indent: int) -> str:
    return POD.replace("\n", "\n" + " " * indent).rstrip() + "\n"


MANIFESTS: Final = {
    "Pod": HEAD.format("v1", "Pod").removesuffix("spec:\n") + POD.lstrip(),
    "Job": HEAD.format("batch/v1", "Job") + "  template:" + under(4),
    "CronJob": HEAD.format("batch/v1", "CronJob")
    + "  jobTemplate:\n    spec:\n      template:"
    + under(8),
    "JobSet": HEAD.format("jobset.x-k8s.io/v1alpha2", "JobSet")
    + "  replicatedJobs:\n  - name: workers\n    template:\n      spec:\n        template:"
    + under(10),
    "PyTorchJob": HEAD.format("kubeflow.org/v1", "PyTorchJob")
    + "  pytorchReplicaSpecs:\n    Master:\n      template: &pod"
    + under(8)
    + "    Worker:\n      replicas: 3\n      template: *pod\n",
}
TRAIN_JOB: Final = (
    HEAD.format("trainer.kubeflow.org/v1alpha1", "TrainJob")
    + "  runtimeRef: {name: torch-distributed}\n"
    "  trainer:\n    numNodes: 4\n    command: [torchrun, train.py]  # the program\n"
)
EVERY: Final = MANIFESTS | {"TrainJob": TRAIN_JOB}
RECORD: Final = ("--with", "record --steps 50:70", "--claim", "traces")


def patch(folder: Path, text: str, *words: str) -> str:
    manifest = folder / "job.yaml"
    manifest.write_text(text, encoding="utf-8")
    ran = command.gputrace("k8s", "patch", manifest, *words)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """The first spec of a pod in a manifest."""
    spec: Any = document["spec"]
    while "containers" not in spec:
        inner = ("template", "jobTemplate", "replicatedJobs", "pytorchReplicaSpecs", "Master")
        spec = next(spec[name] for name in (*inner, "spec") if name in spec)
        spec = spec[0] if isinstance(spec, list) else spec
    found: dict[str, Any] = spec
    return found


@pytest.mark.parametrize("kind", MANIFESTS)
def test_an_init_container_installs_gputrace_and_the_command_runs_under_it(
    kind: str, tmp_path: Path
) -> None:
    text = patch(tmp_path, MANIFESTS[kind])
    pod = pod_of(yaml.safe_load(text))
    trainer, logger = pod["containers"]
    started = ["python3", "/gputrace/_gputrace_start.py", "arm", "--", "python", "train.py"]
    assert (trainer["command"], trainer["args"]) == (started, ["--epochs", "3"])
    assert trainer["volumeMounts"] == [{"name": "gputrace", "mountPath": "/gputrace"}]
    assert logger == {"name": "logger", "image": "busybox"}
    (init,) = pod["initContainers"]
    assert init["image"] == "registry.example/train:1"
    assert init["command"][:4] == ["python3", "-m", "pip", "install"]
    assert init["command"][-3:] == ["--target", "/gputrace", f"gputrace=={__version__}"]
    assert (init["env"], init["volumeMounts"]) == (trainer["env"], trainer["volumeMounts"])
    assert pod["volumes"] == [{"name": "gputrace", "emptyDir": {}}]
    # In the words of the manifest, but for what is new.
    assert "# mine\n" in text
    assert "train.py] # the program\n" in text


@pytest.mark.parametrize("kind", MANIFESTS)
def test_traces_of_a_recording_go_to_a_claim(kind: str, tmp_path: Path) -> None:
    pod = pod_of(yaml.safe_load(patch(tmp_path, MANIFESTS[kind], *RECORD)))
    trainer = pod["containers"][0]
    options = ["--steps", "50:70", "--force", "-o", "/gputrace-results/%h.sqlite", "--"]
    assert trainer["command"][2:] == ["record", *options, "python", "train.py"]
    mounted = {each["mountPath"]: each["name"] for each in trainer["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    claim = volumes[mounted["/gputrace-results"]]["persistentVolumeClaim"]
    assert claim == {"claimName": "traces"}


def test_a_train_job_installs_gputrace_as_it_starts(tmp_path: Path) -> None:
    spec = yaml.safe_load(patch(tmp_path, TRAIN_JOB, *RECORD))["spec"]
    shell, flag, script, name, *program = spec["trainer"]["command"]
    assert (shell, flag, name, program) == ("sh", "-c", "gputrace", ["torchrun", "train.py"])
    install, start = script.split(" && exec ")
    assert shlex.split(install)[-3:] == ["--target", "/tmp/gputrace", f"gputrace=={__version__}"]
    assert shlex.split(start)[:3] == ["python3", "/tmp/gputrace/_gputrace_start.py", "record"]
    (runtime,) = spec["runtimePatches"]
    (job,) = runtime["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    mount = {"name": "gputrace-results", "mountPath": "/gputrace-results"}
    assert (job["name"], container) == ("node", {"name": "node", "volumeMounts": [mount]})
    assert "runtimePatches" not in yaml.safe_load(patch(tmp_path, TRAIN_JOB))["spec"]


@pytest.mark.parametrize("kind", EVERY)
def test_a_patched_manifest_is_patched_to_what_is_asked_for_now(kind: str, tmp_path: Path) -> None:
    armed = patch(tmp_path, EVERY[kind])
    recorded = patch(tmp_path, EVERY[kind], *RECORD)
    assert patch(tmp_path, armed) == armed
    assert patch(tmp_path, recorded, *RECORD) == recorded
    # Where a comment stands behind a command, it may stand in another column.
    for before, words, after in ((armed, RECORD, recorded), (recorded, (), armed)):
        assert yaml.safe_load(patch(tmp_path, before, *words)) == yaml.safe_load(after)


def test_what_a_manifest_has_besides_stays_as_it_is(tmp_path: Path) -> None:
    other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  mode: 0644 # kept\n"
    block = MANIFESTS["Pod"].replace(
        "    command: [python, train.py]  # the program\n",
        "    command:\n    - python # interpreter\n    # the script\n    - train.py\n",
    )
    text = patch(tmp_path, f"{other}---\n{block}---\n{other}")
    first, pod, last = text.split("---\n")
    assert first == last == other
    assert "    - python # interpreter\n    # the script\n    - train.py\n" in pod


def test_steps_are_no_number_for_a_reader_of_yaml_1_1(tmp_path: Path) -> None:
    pod = patch(tmp_path, MANIFESTS["Pod"], "--with", "record --steps 5:9", "--claim", "traces")
    assert "5:9" in yaml.safe_load(pod)["spec"]["containers"][0]["command"]


def test_the_container_image_and_package_can_be_named(tmp_path: Path) -> None:
    words = ("--image", "python:3.12", "--package", "/wheels/g.whl", "--container", "logger")
    text = MANIFESTS["Pod"].replace("busybox", "busybox\n    command: [python, log.py]")
    pod = yaml.safe_load(patch(tmp_path, text, *words))["spec"]
    assert "volumeMounts" not in pod["containers"][0]
    assert pod["containers"][1]["command"][-3:] == ["--", "python", "log.py"]
    (init,) = pod["initContainers"]
    assert (init["image"], init["command"][-1]) == ("python:3.12", "/wheels/g.whl")
    assert "env" not in init


@pytest.mark.parametrize(
    ("text", "words", "code", "problem"),
    [
        ("kind: Service\n", (), 3, "Service is none of the kinds that can be patched: Pod, Job"),
        ("", (), 3, "there is none of the kinds that can be patched"),
        ("- a\n", (), 3, "there is none of the kinds"),
        ("a: [", (), 3, "not YAML: "),
        ("kind: Pod\n", (), 3, "not a Pod: a field is missing, or of another kind"),
        ("kind: Pod\nspec:\n  containers: [1]\n", (), 3, "not a Pod"),
        ("kind: TrainJob\nspec: {}\n", (), 3, "spec.trainer.command is not given"),
        (
            MANIFESTS["Pod"].replace("command: [python, train.py]", ""),
            (),
            3,
            "container pytorch has no command, and that of its image is not known",
        ),
        (MANIFESTS["Pod"], ("--container", "x"), 3, "no container x; there is pytorch, logger"),
        (MANIFESTS["Pod"], ("--with", "record"), 2, "record needs --claim"),
        (MANIFESTS["Pod"], ("--with", "run"), 2, "--with 'run': give arm, or record"),
        (MANIFESTS["Pod"], ("--with", "arm 'x"), 2, '--with "arm \'x": '),
        ("a: " + "[" * 500, (), 3, "nested too deeply"),
    ],
)
def test_what_cannot_be_patched_is_said_in_one_line(
    text: str, words: tuple[str, ...], code: int, problem: str, tmp_path: Path
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(text)
    ran = command.gputrace("k8s", "patch", manifest, *words)
    assert (ran.code, ran.err.count("\n"), ran.out) == (code, 1, "")
    assert problem in ran.err


def test_an_output_is_replaced_only_if_asked(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(MANIFESTS["Job"])
    words = ("k8s", "patch", tmp_path / "job.yaml", "-o", tmp_path / "job.yaml")
    ran = command.gputrace(*words)
    assert (ran.code, "exists; name another with -o" in ran.err) == (2, True)
    assert command.gputrace(*words, "--force").code == 0
    assert "initContainers" in (tmp_path / "job.yaml").read_text()


@pytest.mark.parametrize("kind", ["Pod", "TrainJob"])
def test_the_command_of_a_container_records_its_program(kind: str, tmp_path: Path) -> None:
    """With the folder of this package in place of the one that pip would fill."""
    script = "import gputrace, os, sys\nfor _ in range(5): gputrace.step()\nprint(sys.argv[1:])"
    (tmp_path / "train.py").write_text(script)
    text = EVERY[kind].replace("torchrun, ", "python, ")
    document = yaml.safe_load(patch(tmp_path, text, "--with", "record", "--claim", "traces"))
    results = tmp_path / "results"
    results.mkdir()
    if kind == "Pod":
        words = document["spec"]["containers"][0]["command"]
        words = [word.replace("/gputrace/", f"{command.ROOT}/") for word in words]
    else:
        words = document["spec"]["trainer"]["command"]
        words[2] = words[2].partition(" && ")[2].replace("/tmp/gputrace/", f"{command.ROOT}/")
    words = [word.replace("/gputrace-results", str(results)) for word in words]
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o700)
    env = command.environment({"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    ran = subprocess.run(
        [*words, "--epochs", "3"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (0, "['--epochs', '3']\n"), ran.stderr
    (trace,) = results.glob("*.sqlite")
    assert rows(trace, "SELECT count(*) FROM GPUTRACE_STEP") == [(5,)]
