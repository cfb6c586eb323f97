"""Names of kernels in the tables of a comparison."""

from __future__ import annotations

import pytest

from gputrace.report.comparison import short_kernel, short_kernels


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("gemm", "gemm"),
        ("void at::native::foreach_copy<float, (int)4>(T1, T2)", "foreach_copy"),
        ("void at::native::<unnamed>::reduce_kernel<(int)512>(T1)", "reduce_kernel"),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
        (
            "void at::native::elementwise_kernel<(int)128, at::native::MulFunctor<float>>(int)",
            "elementwise: MulFunctor",
        ),
    ],
)
def test_a_name_is_the_function_and_what_it_is_given(name: str, short: str) -> None:
    assert short_kernel(name, 40) == short


def test_a_long_name_is_cut() -> None:
    assert short_kernel("a" * 50, 20) == "a" * 19 + "…"


def test_names_that_would_look_the_same_show_where_they_part() -> None:
    names = [f"void implicit_sgemm<float, (int){n}>(T1)" for n in (128, 512)]
    assert short_kernels(names, 30) == ["implicit_sgemm…128>(T1)", "implicit_sgemm…512>(T1)"]
    tiles = [f"sm90_xmma_wgrad_indexed_tile{n}x64" for n in (64, 128)]
    assert len(set(short_kernels(tiles, 24))) == 2
