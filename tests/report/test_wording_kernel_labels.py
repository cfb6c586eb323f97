"""Names of kernels in tables."""

from __future__ import annotations

import pytest

from gputrace.report.wording import kernel_labels, labels_of


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("gemm", "gemm"),
        ("void at::native::foreach_copy<float, (int)4>(T1, T2)", "foreach_copy"),
        ("void at::native::<unnamed>::reduce_kernel<(int)512>(T1)", "reduce_kernel"),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
        (
            "void xmma_cudnn::gemm::kernel<xmma_cudnn::implicit_gemm::dgrad::Kernel_traits<int>>()",
            "implicit_gemm::dgrad",
        ),
        (
            "void at::native::elementwise_kernel<(int)128, at::native::MulFunctor<float>>(int)",
            "elementwise: MulFunctor",
        ),
    ],
)
def test_a_name_is_the_function_and_what_it_is_given(name: str, short: str) -> None:
    assert kernel_labels([name], 40) == [short]


def test_a_long_name_loses_its_middle() -> None:
    assert kernel_labels(["gemm_" + "a" * 50 + "_64x64"], 20) == ["gemm_aaaaa…aaa_64x64"]


def test_names_that_would_look_the_same_show_where_they_part() -> None:
    names = [f"void implicit_sgemm<float, (int){n}>(T1)" for n in (128, 512)]
    assert kernel_labels(names, 30) == ["implicit_sgemm…128>(T1)", "implicit_sgemm…512>(T1)"]
    tiles = [f"sm90_xmma_wgrad_indexed_tile{n}x64_{'x' * 40}" for n in (64, 128)]
    assert kernel_labels(tiles, 24) == ["sm90_xmma_wg…tile64x64_…", "sm90_xmma_wg…tile128x64…"]


@pytest.mark.parametrize("longest", [24, 30, 56, 70])
def test_many_names_alike_stay_different_at_any_width(longest: int) -> None:
    tail = "_" + "y" * 80
    names = [f"gemm_{'x' * 40}_MT{m}x{n}{tail}" for m in (16, 32, 64) for n in (16, 32, 64)]
    names += [f"void kernel_of<{'int, ' * 30}Functor{n}<float>{', int' * 30}>(T1)" for n in "abc"]
    labels = kernel_labels(names, longest)
    assert len(set(labels)) == len(names)
    assert max(map(len, labels)) <= longest


def test_parts_of_a_loader_that_differ_in_the_middle_stay_different() -> None:
    names = [f"torchvision.transforms.{'v2.' * 9}{name}.{'forward' * 4}" for name in ("A", "Bc")]
    labels = labels_of({name: name for name in names}, 40)
    assert len(set(labels.values())) == 2
    assert max(map(len, labels.values())) <= 40
