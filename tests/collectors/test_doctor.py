"""`gputrace doctor`: what works on a machine, and what to do about what does not."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.doctor import container, how_to_get_gpus, missing_capabilities
from tests.collectors.nvml.test_sampling import build
from tests.helpers.command import Ran, gputrace, python
from tests.helpers.installed_packages import install
from tests.native.build import Machine

EXAMINE: Final = """
import sys
from gputrace import cli
from gputrace.collectors import doctor
doctor.has_driver = lambda: {driver}
doctor.container = lambda: {container!r}
sys.exit(cli.run(["doctor"]))
"""
"""The command on a machine with or without a driver, in a container or not."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def examine(env: dict[str, str], driver: bool = True, container: str | None = None) -> Ran:
    """Without an nsys or nvprof that this machine may have."""
    source = EXAMINE.format(driver=driver, container=container)
    return python("-c", source, env={"PATH": "/nowhere"} | env)


def line(ran: Ran, what: str) -> str:
    (found,) = [text for text in ran.out.splitlines() if text[8:].startswith(f"{what}: ")]
    return found


def with_cards(library: Path, tmp_path: Path, script: str) -> dict[str, str]:
    (tmp_path / "script").write_text(script)
    return {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(tmp_path / "script")}


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(("option", "said"), [("", False), ("-E", True)])
def test_a_python_that_starts_without_the_hooks_is_said(
    tmp_path: Path, option: str, said: bool
) -> None:
    executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} {option} "$@"\n')
    ran = examine({"PATH": f"{tmp_path}:/bin"})
    assert (f"host hooks: {tmp_path}/python starts without them" in ran.out) is said


def test_cards_are_counted_with_their_compute_capability(library: Path, tmp_path: Path) -> None:
    script = "gpus 3\nsay DeviceGetCudaComputeCapability 2 7\n"
    ran = examine(with_cards(library, tmp_path, script))
    assert line(ran, "GPUs") == (
        "ok      GPUs: 2 x Fake H200 (compute capability 9.0), "
        "1 x Fake H200 (compute capability 7.0)"
    )


def test_a_card_that_does_not_tell_is_there_all_the_same(library: Path, tmp_path: Path) -> None:
    script = "gpus 1\nfail DeviceGetCudaComputeCapability * 3\nsay DeviceGetMigMode 0 1\n"
    ran = examine(with_cards(library, tmp_path, script))
    assert line(ran, "GPUs") == "ok      GPUs: 1 x Fake H200"
    assert line(ran, "MIG").startswith("note    MIG: on; ")


def test_it_says_whether_the_cards_count_what_kernels_do_inside(
    library: Path, tmp_path: Path
) -> None:
    ran = examine(with_cards(library, tmp_path, "gpus 2\ngpm 0 100\ngpm 1 100\n"))
    assert line(ran, "GPM").startswith("ok      GPM: ")
    ran = examine(with_cards(library, tmp_path, "gpus 2\ngpm 0 100\n"))
    assert line(ran, "GPM").startswith("note    GPM: not here")


def test_processes_that_compute_on_a_card_are_a_note(library: Path, tmp_path: Path) -> None:
    script = "gpus 2\nprocess 1 4000001 5 compute\nprocess 0 4000002 5 compute\nuse 1 4000001 60\n"
    ran = examine(with_cards(library, tmp_path, script))
    assert line(ran, "in use").startswith("note    in use: GPU 1 60% (pid 4000001); ")
    assert "in use" not in examine(with_cards(library, tmp_path, "gpus 2\n")).out


def test_nvml_that_fails_is_a_note(library: Path, tmp_path: Path) -> None:
    ran = examine(with_cards(library, tmp_path, "init 9\n"))
    assert line(ran, "NVML").startswith("note    NVML: Driver Not Loaded; clocks and power")


NVPROF: Final = "#!/bin/sh\necho 'nvprof: NVIDIA (R)'; echo 'Release version 12.4.127 (21)'\n"


@pytest.mark.parametrize(
    ("capability", "found", "start", "end"),
    [
        (9, True, "note    nvprof: 12.4.127 (", ": none here"),
        (7, True, "ok      nvprof: 12.4.127 (", "below 8.0 only"),
        (7, False, "note    nvprof: not found; ", "CUDA 12 and older have it"),
    ],
)
def test_nvprof_is_for_cards_below_8_0(
    library: Path, tmp_path: Path, capability: int, found: bool, start: str, end: str
) -> None:
    script = f"gpus 1\nsay DeviceGetCudaComputeCapability 0 {capability}\n"
    env = with_cards(library, tmp_path, script)
    if found:
        executable(tmp_path / "nvprof", NVPROF)
        env["PATH"] = f"{tmp_path}:/bin"
    told = line(examine(env), "nvprof")
    assert told.startswith(start)
    assert told.endswith(end)


def test_nvprof_goes_unsaid_where_there_is_none_and_no_need(library: Path, tmp_path: Path) -> None:
    assert "nvprof" not in examine(with_cards(library, tmp_path, "gpus 1\n")).out


def test_each_libcupti_has_its_version(machine: Machine, tmp_path: Path) -> None:
    broken = tmp_path / "libcupti.so.13"
    broken.write_text("no library")
    for library, version in ((machine.folder / "libcupti.so.13", "13.0.0"), (broken, "cannot be")):
        found = line(examine({"GPUTRACE_CUPTI": str(library)}), "libcupti")
        assert re.search(rf"{version}[^,]* \({re.escape(str(library))}\)", found)


def test_the_libcupti_that_programs_take_is_named_with_the_reason(
    machine: Machine, tmp_path: Path
) -> None:
    """Of two, that beside the CUDA runtime of the wheels, unless a variable names another."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name, source in (("libcudart.so.13", "libcuda.so.1"), ("libcupti.so.13", "old_cupti.so")):
        shutil.copy(machine.folder / source, folder / name)
    for env, taken, why in (
        ({}, folder / "libcupti.so.13", "it is beside the CUDA runtime of the program"),
        (
            {"GPUTRACE_CUPTI": str(machine.folder / "libcupti.so.13")},
            machine.folder / "libcupti.so.13",
            "GPUTRACE_CUPTI names it",
        ),
    ):
        found = line(examine({"PYTHONPATH": str(tmp_path), **env}), "libcupti")
        start = f"ok      libcupti: 13.0.0 ({taken}); programs of this Python take it, since {why}"
        assert found.startswith(start)


def test_an_nsys_that_cannot_be_run_is_a_note(tmp_path: Path) -> None:
    ran = gputrace("doctor", env={"GPUTRACE_NSYS": str(tmp_path / "nsys")})
    assert line(ran, "nsys").startswith(f"note    nsys: {tmp_path}/nsys cannot be run (No such")
    assert ran.err == ""


def test_without_a_driver_the_advice_is_the_containers() -> None:
    ran = examine({}, driver=False, container="Kubernetes")
    assert ran.code == 4
    assert line(ran, "NVIDIA driver") == (
        "missing NVIDIA driver: not loaded; ask for nvidia.com/gpu in the limits of the pod"
    )
    assert line(ran, "container") == "ok      container: Kubernetes"
    ran = examine({}, driver=False)
    assert line(ran, "NVIDIA driver").endswith("; on a machine with a GPU, install the driver")
    assert "container" not in ran.out


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        (".dockerenv", "", "Docker"),
        ("run/.containerenv", "", "Podman"),
        ("proc/1/cgroup", "0::/kubepods.slice/pod1/cri-containerd-2.scope\n", "Kubernetes"),
        ("proc/1/cgroup", "1:name=systemd:/docker/0123\n", "Docker"),
        ("proc/1/cgroup", "0::/init.scope\n", None),
    ],
)
def test_containers_are_known_by_their_marks(
    tmp_path: Path, file: str, text: str, name: str | None
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert container(tmp_path, {}) == name


def test_variables_tell_of_containers_too(tmp_path: Path) -> None:
    assert container(tmp_path, {}) is None
    assert container(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "Kubernetes"
    assert container(tmp_path, {"APPTAINER_CONTAINER": "/x.sif"}) == "Apptainer"
    assert how_to_get_gpus("Apptainer") == "start it with --nv"


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        (None, []),
        ("all", []),
        ("compute,utility", []),
        ("compute,video", ["utility"]),
        ("graphics", ["compute", "utility"]),
    ],
)
def test_capabilities_that_a_container_lacks_are_named(
    given: str | None, lacking: list[str]
) -> None:
    environment = {} if given is None else {"NVIDIA_DRIVER_CAPABILITIES": given}
    assert list(missing_capabilities(environment)) == lacking


def test_what_kernels_are_handed_to_is_named_where_it_is_there(tmp_path: Path) -> None:
    ncu = executable(tmp_path / "ncu", "#!/bin/sh\n")
    told = line(examine({"GPUTRACE_NCU": str(ncu)}), "ncu")
    assert told == f"ok      ncu: {ncu}, which gputrace kernel hands kernels to"


def test_plugins_are_named_without_being_imported(tmp_path: Path) -> None:
    entries = {"gputrace.views": {"odd": "odd:view"}}
    found = install(tmp_path / "site", "odd", entries, {"odd": "raise SystemExit"})
    told = line(examine(found), "plugins")
    assert told.startswith("ok      plugins: the view 'odd' of odd")
    assert told.endswith("; gputrace plugins --check says whether each works")
