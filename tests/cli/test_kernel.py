"""``gputrace kernel``: a kernel of a trace, and Nsight Compute over the launch that matters.

A script of our own stands for ncu, and a module for ncu-report.
"""

from __future__ import annotations

import json
import re
import sqlite3
import stat
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.analyzers.kernels import pattern_of
from gputrace.cli import run
from gputrace.data import unpacked
from gputrace.model.names import demangle_all
from tests.helpers import command
from tests.helpers.command import Ran, assert_refused
from tests.helpers.handmade import MS, Run, train
from tests.helpers.recordings import unpack

DONE, USAGE, UNREADABLE, MISSING = 0, 2, 3, 4
NCU: Final = f"""#!{sys.executable}
import json, pathlib, subprocess, sys
words = sys.argv[1:]
if words[0] == "--import":
    print("ncu's own words")
    sys.exit()
at = words.index("--export") + 1
(pathlib.Path(__file__).parent / "log").write_text(json.dumps(words))
code = subprocess.call(words[at + 1:])
if not code:
    pathlib.Path(words[at]).write_text("a report")
sys.exit(code)
"""
REPORT: Final = """
import pathlib
class Metric:
    def __init__(self, value, unit): self._value, self._unit = value, unit
    def as_double(self): return self._value
    def unit(self): return self._unit
class Action:
    FIGURES = {figures}
    def name(self): return "gemm"
    def metric_names(self): return tuple(self.FIGURES)
    def metric_by_name(self, name): return Metric(*self.FIGURES[name])
class Range:
    def num_actions(self): return 1
    def action_by_idx(self, i): return Action()
class Context:
    def num_ranges(self): return {ranges}
    def range_by_idx(self, i): return Range()
def load_report(path):
    assert pathlib.Path(path).read_text() == "a report"
    return Context()
"""
NAMES: Final = r"""
SELECT DISTINCT m.value, d.value FROM CUPTI_ACTIVITY_KIND_KERNEL k
JOIN StringIds m ON m.id = k.mangledName JOIN StringIds d ON d.id = k.demangledName
WHERE m.value LIKE '\_Z%' ESCAPE '\'
"""
LONG: Final = (
    "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock"
    "22ImplicitGemmMultistageINS_4gemm9GemmShapeILi64ELi128ELi32EEENS4_52Conv2dWgradOutputGra"
    "dientTileAccessIteratorOptimizedINS_11MatrixShapeILi64ELi32EEENS_10bfloat16_tENS_9transf"
    "orm29PitchLinearWarpRakedThreadMapINS_16PitchLinearShapeILi64ELi32EEELi128ENSF_ILi8ELi4E"
    "EELi8EEENS_12AlignedArrayISC_Li8ELi16EEEEENSD_11threadblock25RegularTileAccessIteratorIS"
    "B_SC_NS_6layout40ColumnMajorTensorOpMultiplicandCongruousILi16ELi64EEELi1ESI_Li16EEELNS_"
    "4arch14CacheOperation4KindE0ENS4_48Conv2dWgradActivationTileAccessIteratorOptimizedINSA_"
    "ILi32ELi128EEESC_NSE_INSF_ILi128ELi32EEELi128ESH_Li8EEESK_EENSN_ISW_SC_NSO_37RowMajorTen"
    "sorOpMultiplicandCongruousILi16ELi64EEELi0ESY_Li16EEELSU_0ENS6_11threadblock9MmaPolicyIN"
    "S6_4warp11MmaTensorOpINS7_ILi32ELi64ELi32EEESC_SQ_SC_S11_fNSO_8RowMajorENS15_17MmaTensor"
    "OpPolicyINSS_3MmaINS7_ILi16ELi8ELi16EEELi32ESC_S18_SC_NSO_11ColumnMajorEfS18_NSS_13OpMul"
    "tiplyAddEEENSA_ILi1ELi1EEEEELi1ELb0EbEENSA_ILi0ELi0EEES1I_Li1EEELi6EbEENS_8epilogue11thr"
    "eadblock8EpilogueIS8_S1H_Li1ENS1M_22PredicatedTileIteratorINS1M_26OutputTileOptimalThrea"
    "dMapINS1M_15OutputTileShapeILi128ELi8ELi2ELi1ELi1EEENS1Q_ILi1ELi4ELi1ELi1ELi4EEELi128ELi"
    "4ELi32EEEfLb0ENSO_9NoPermuteELb0EEENS1L_4warp24FragmentIteratorTensorOpIS17_S1B_fNS_5Arr"
    "ayIfLi4ELb1EEES18_EENS1W_20TileIteratorTensorOpIS17_S1B_fS18_EENS1M_18SharedLoadIterator"
    "INS1T_18CompactedThreadMapEfLi16EEENS1L_6thread17LinearCombinationIfLi4EffLNS26_9ScaleTy"
    "pe4KindE0ELNS_15FloatRoundStyleE2EEENSA_ILi0ELi8EEELi2ELi1EEENS13_30GemmIdentityThreadbl"
    "ockSwizzleILi4EEELNS1_8OperatorE2ENS1_17Conv2dProblemSizeELNS1_9GroupModeE0EEEEEvNT_6Par"
    "amsE"
)
"""A kernel of cuDNN 9, as CUPTI names it: too long for libstdc++ to make it readable."""
LONG_IN_NCU: Final = (
    "void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::conv::kernel::ImplicitGemmConvolution<"
    "cutlass__5x_cudnn::conv::threadblock::ImplicitGemmMultistage<cutlass__5x_cudnn::gemm::Ge"
    "mmShape<(int)64, (int)128, (int)32>, cutlass__5x_cudnn::conv::threadblock::Conv2dWgradOu"
    "tputGradientTileAccessIteratorOptimized<cutlass__5x_cudnn::MatrixShape<(int)64, (int)32>"
    ", cutlass__5x_cudnn::bfloat16_t,"
)
"""How the name begins that ncu 2025.3 gives it."""
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slow steps, then twenty, each with 40 kernels of ten names, and the optimizer's."""
    made = Run()
    for _ in range(2):
        made.wait(100 * MS)
        train(made, 1)
    train(made, 20)
    return made.export.write(tmp_path_factory.mktemp("kernel") / "t.sqlite")


class Machine:
    """A folder with an ncu and, if wanted, ncu-report."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self._patch, self._capsys = folder, patch, capsys
        self.ncu, self.output = folder / "ncu", folder / "k.ncu-rep"
        self.ncu.write_text(NCU)
        self.ncu.chmod(self.ncu.stat().st_mode | stat.S_IXUSR)
        patch.setenv("GPUTRACE_NCU", str(self.ncu))
        patch.setitem(sys.modules, "ncu_report", None)

    def install_report(self, figures: dict[str, tuple[float, str]], ranges: int = 1) -> None:
        text = REPORT.format(figures=figures, ranges=ranges)
        (self.folder / "ncu_report.py").write_text(text)
        self._patch.delitem(sys.modules, "ncu_report")
        self._patch.syspath_prepend(self.folder)

    def break_report(self) -> None:
        """ncu-report that takes Python with it, as has been seen."""
        (self.folder / "ncu_report.py").write_text("import os\nos.abort()\n")
        self._patch.delitem(sys.modules, "ncu_report")
        self._patch.syspath_prepend(self.folder)

    def run(self, *words: str | Path) -> Ran:
        """Runs the command in this process; of programs, only stdout of ours is caught."""
        self._capsys.readouterr()
        code = run(["kernel", *map(str, words)])
        return Ran(code, *self._capsys.readouterr())

    def profile(self, trace: Path, *program: str) -> Ran:
        return self.run(trace, "1", "-o", self.output, "--", *(program or ("true",)))

    @property
    def asked(self) -> dict[str, str]:
        """The options that ncu got."""
        words = json.loads((self.folder / "log").read_text())
        return dict(zip(words[::2], words[1::2], strict=False))


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Machine:
    return Machine(tmp_path, monkeypatch, capsys)


def test_a_kernel_is_named_or_counted(trace: Path, machine: Machine) -> None:
    top = json.loads(command.gputrace("analyze", trace, "--json").out)["kernels"]["top"]
    for which in ("2", top[1]["name"]):
        found = json.loads(machine.run(trace, which, "--json").out)["launches"]
        assert (found["kernel"]["name"], found["place"]) == (top[1]["name"], 2)
    assert_refused(machine.run(trace, "99"), USAGE, "no kernel '99' among the")


def test_a_name_that_a_table_cuts_is_a_pattern(trace: Path, machine: Machine) -> None:
    found = json.loads(machine.run(trace, "GEMM_ba…rd_1", "--json").out)["launches"]
    assert found["kernel"]["short"] == "gemm_backward_1"
    assert_refused(machine.run(trace, "rd_1…nowhere"), USAGE, "no kernel 'rd_1…nowhere' among")


def test_launches_before_a_steady_step_are_left_out(trace: Path, machine: Machine) -> None:
    found = json.loads(machine.run(trace, "1", "--json").out)["launches"]
    assert found["kernel"]["short"] == "gemm_backward_0"
    assert (found["step"], found["skip"], found["alike"]) == (2, 2 * 4, 1)
    assert found["from_start"]


def test_a_launch_in_a_step_of_usual_length_is_profiled(tmp_path: Path, machine: Machine) -> None:
    """The first step begins with its copy: it lacks the wait before it."""
    made = Run()
    train(made, 20, wait=10 * MS)
    path = made.export.write(tmp_path / "t.sqlite")
    first, second, *_ = gputrace.open(path).analyze().step_list
    assert first.phase == second.phase == "steady"
    assert 2 * (first.end_ns - first.start_ns) < second.end_ns - second.start_ns
    found = json.loads(machine.run(path, "1", "--json").out)["launches"]
    assert (found["step"], found["skip"]) == (1, 4)


def test_the_longest_launch_is_offered_beside_the_usual_one(
    tmp_path: Path, machine: Machine
) -> None:
    made = Run()
    train(made, 10)
    made.input_copy()
    made.kernel(MS // 10, "void at::native::gemm_backward_0")
    made.model(40)
    made.optimizer()
    made.synchronize()
    train(made, 10)
    path = made.export.write(tmp_path / "t.sqlite")
    found = json.loads(machine.run(path, "gemm_backward_0", "--json").out)["launches"]
    assert found["longest"]["duration_ns"] == MS // 10
    assert (found["skip"], found["longest_skip"], found["is_usual"]) == (0, 10 * 4, True)
    shown = " ".join(machine.run(path, "gemm_backward_0").out.split())
    assert "Its longest launch after warm-up: 100 µs at " in shown
    assert "(to profile it: --skip 40)." in shown
    assert "in step 0 (one of usual length), after 0 others of it." in shown


def test_without_a_program_the_command_is_printed(trace: Path, machine: Machine) -> None:
    ran = machine.run(trace, "1")
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.out.splitlines()[-1].startswith("ncu --target-processes all --devices 0 ")
    assert not (machine.folder / "log").exists()


def test_ncu_gets_the_launch_and_its_report_is_told(trace: Path, machine: Machine) -> None:
    time = {"gpu__time_duration.sum": (31872.0, "ns")}
    machine.install_report(time | {COMPUTE: (77.7, "%"), MEMORY: (46.4, "%")})
    ran = machine.profile(trace)
    assert ran.code == DONE, ran.err
    assert "gemm: bound by computing\n  duration              31.9 µs\n" in ran.out
    found = json.loads(machine.run(trace, "1", "--json").out)["launches"]
    assert machine.asked["--kernel-name"] == f"regex:{found['pattern']}"
    assert machine.asked["--kernel-name-base"] == "demangled"
    assert machine.asked["--launch-skip"] == str(found["skip"])
    assert (machine.asked["--launch-count"], machine.asked["--devices"]) == ("1", "0")
    assert ran.err == f"gputrace: wrote {machine.output}\n"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({COMPUTE: (22.6, "%"), MEMORY: (90.2, "%")}, "bound by memory"),
        ({COMPUTE: (22.6, "%"), MEMORY: (50.2, "%")}, "bound by latency"),
        ({COMPUTE: (22.6, "%")}, "does not say what bounds it"),
    ],
)
def test_the_figures_say_what_bounds_a_kernel(
    figures: dict[str, tuple[float, str]], words: str, trace: Path, machine: Machine
) -> None:
    machine.install_report(figures)
    assert words in machine.profile(trace).out


def test_without_ncu_report_ncu_shows_its_report(trace: Path, machine: Machine) -> None:
    assert machine.profile(trace).out.endswith("ncu's own words\n")


def test_where_ncu_report_crashes_ncu_shows_its_report(trace: Path, machine: Machine) -> None:
    machine.break_report()
    ran = machine.profile(trace)
    assert ran.code == DONE
    assert ran.out.endswith("ncu's own words\n")
    assert ran.err == f"gputrace: wrote {machine.output}\n"


def test_why_ncu_cannot_show_its_report_is_told_in_its_words(trace: Path, machine: Machine) -> None:
    words = 'print("==ERROR== it is broken\\nsee above"); sys.exit(1)'
    machine.ncu.write_text(NCU.replace('print("ncu\'s own words")', words))
    ran = machine.profile(trace)
    assert ran.code == MISSING
    assert ran.err.endswith("k.ncu-rep: ncu cannot show it (==ERROR== it is broken)\n")


def test_what_goes_wrong_is_one_line(
    trace: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = machine.profile(trace, "false")
    assert (failed.code, failed.err.count("\n")) == (MISSING, 1)
    assert "ncu wrote no report (exit code 1" in failed.err
    machine.install_report({}, ranges=0)
    empty = machine.profile(trace)
    assert (empty.code, empty.err.count("\n")) == (UNREADABLE, 1)
    assert "holds no launch of a kernel" in empty.err
    assert_refused(machine.profile(trace), USAGE, "exists; name another with -o, or give --force")
    machine.output.unlink()
    monkeypatch.delenv("GPUTRACE_NCU")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("gputrace.collectors.ncu._INSTALLED", ())
    missing = machine.profile(trace)
    assert missing.code == MISSING
    assert missing.err.startswith("gputrace: ncu is not installed here; install Nsight Compute")


def test_words_that_lack_or_are_in_the_wrong_order_are_named(trace: Path, machine: Machine) -> None:
    assert_refused(machine.run(trace), USAGE, "name a kernel: 1 for the one that takes most time")
    swapped = command.gputrace("kernel", "longest", trace)
    assert f"write the trace first: gputrace kernel {trace} longest" in swapped.err


def test_the_launch_has_its_call_thread_and_hint(trace: Path) -> None:
    text = " ".join(command.gputrace("kernel", trace, "longest").out.split())
    assert re.search(r"Issued by cudaLaunchKernel at [\d.]+ s \(thread \d+\)", text)
    assert "record with --python to name the line." in text


def test_collectives_are_not_profiled_alone(machine: Machine) -> None:
    made = Run()
    for _ in range(5):
        made.kernel(MS, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)")
    trace = made.export.write(machine.folder / "t.sqlite")
    assert_refused(machine.profile(trace), USAGE, "nccl", "cannot be profiled alone")
    shown = machine.run(trace, "nccl")
    said = " ".join(shown.out.split())
    assert "It waits for other GPUs and cannot be profiled alone: ncu would hang; " in said
    assert "gputrace analyze says which rank it waits for." in said
    assert "ncu --" not in shown.out


def test_where_the_longest_launch_communicates_the_next_command_is_told(machine: Machine) -> None:
    made = Run()
    for _ in range(5):
        made.kernel(2 * MS, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)")
        made.kernel(MS, "gemm")
    trace = made.export.write(machine.folder / "t.sqlite")
    shown = machine.run(trace, "longest").out
    said = " ".join(shown.split())
    assert "The longest launch that computes: gemm, " in said
    assert said.endswith(f"It is number 2 by time; to see it: gputrace kernel {trace} 2")
    assert machine.run(trace, "2").out.startswith("gemm (gemm)")


def test_what_a_kernel_waits_for_or_lacks_is_told_with_what_to_do() -> None:
    with unpacked("demo.sqlite.xz") as demo:
        shown = " ".join(command.gputrace("kernel", demo, "longest").out.split())
        compute = " ".join(command.gputrace("kernel", demo, "batch_norm_collect").out.split())
    late = "The other GPU loses 4% of the time (2.03 of 49.0 ms a step) to rank 1, which has a late"
    assert f"{late} host. What to do: give the DataLoader more workers" in shown
    assert "What to do" not in compute


@pytest.mark.parametrize(
    ("ours", "ncus"),
    [
        (
            "void Sobel<float>(uchar4*, uchar4*, int, int)",
            "void Sobel<float>(uchar4 *, uchar4 *, int, int)",
        ),
        (
            "void a::k<8, a::F<c10::BFloat16>, true>(int)",
            "void a::k<(int)8, a::F<c10::BFloat16>, (bool)1>(int)",
        ),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        (LONG, LONG_IN_NCU),
        ("void k<(anonymous namespace)::F>(long)", "void k<<unnamed>::F>(long)"),
        (
            "void at::native::k<at::native::Var, c10::BFloat16, float, 4>(c10::BFloat16 const*, "
            "float*, float volatile*, int*, int)",
            "void at::native::k<at::native::Var, c10::BFloat16, float, (int)4>(const T2 *, T3 *, "
            "volatile T3 *, int *, int)",
        ),
    ],
)
def test_a_kernel_is_found_by_whatever_name_ncu_gives_it(ours: str, ncus: str) -> None:
    assert re.search(pattern_of(ours), ncus)
    other = ncus.replace("k<", "kk<").replace("obel", "obol").replace("::Kernel", "::Colonel")
    assert not re.search(pattern_of(ours), other + "0")


def test_a_kernel_whose_name_stays_mangled_is_counted_too(machine: Machine) -> None:
    made = Run()
    for _ in range(6):
        made.kernel(MS, LONG.replace("ILi64E", "ILi96E", 1))
        made.kernel(2 * MS, LONG)
    ran = machine.run(made.export.write(machine.folder / "t.sqlite"), "Wgrad", "--json")
    found = json.loads(ran.out)["launches"]
    assert (found["kernel"]["name"], found["kernel"]["count"]) == (LONG, 6)
    assert (found["alike"], found["skip"]) == (1, 0)


@pytest.mark.parametrize(
    "recording", ["nsys-ai-mfu_2gpu_after.sqlite", "nsys-ai-h100_2gpu_1s.sqlite"]
)
def test_names_in_clear_find_those_that_nvidia_writes(recording: str, tmp_path: Path) -> None:
    """nsys writes a kernel's name as ncu does; from the mangled one we write it our way."""
    with closing(sqlite3.connect(unpack(recording, tmp_path))) as export:
        names = export.execute(NAMES).fetchall()
    clear = demangle_all([mangled for mangled, _ in names])
    assert len(names) > 20
    assert [one for one in names if not re.search(pattern_of(one[0]), one[1])] == []
    assert [one for one in names if not re.search(pattern_of(clear[one[0]]), one[1])] == []
