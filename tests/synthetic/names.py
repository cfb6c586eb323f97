"""Names of kernels and calls, as PyTorch leaves them in a trace."""

from __future__ import annotations

_AT = "void at::native::"
_FORWARD = (
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x{n}x64",
    _AT + "batch_norm_collect_statistics_channels_last_kernel<at::native::Var, float, (int){n}>"
    "(T2 *, T3 *, const T1 *, int)",
    _AT + "vectorized_elementwise_kernel<(int){n}, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char *, (unsigned long)3>>(int, T2, T3)",
    "nvjet_sm90_tst_128x{n}_64x4_2x1_v_bz_coopA_NNT",
)
_BACKWARD = (
    "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x{n}x64",
    "sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x{n}x64",
    _AT + "batch_norm_backward_elemt_channels_last_kernel<(int){n}, c10::BFloat16, float, float>"
    "(const T2 *, const T2 *, const T3 *, int, int)",
    _AT + "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda, (int){n}>(int, T1, T2)",
)
_MULTI = _AT + "<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata"
OPTIMIZER = (
    _MULTI + "<(int)4>, at::native::<unnamed>::FusedAdamMathFunctor<float, (int)4, adam>>(T1, T2)",
    _MULTI + "<(int)1>, at::native::<unnamed>::BinaryOpScalarFunctor<float, std::multiplies>>(T1)",
)
UPDATE = (
    _AT + "vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, "
    "std::array<char *, (unsigned long)3>>(int, T2, T3)",
    _AT + "vectorized_elementwise_kernel<(int)4, at::native::AUnaryFunctor<float, float, float, "
    "at::native::MulFunctor<float>>, std::array<char *, (unsigned long)2>>(int, T2, T3)",
)
LOSS = (
    "void cunn_SoftMaxForward<(int)8, float, float, float, at::native::LogSoftMaxForwardEpilogue>"
    "(T4 *, const T2 *, int)",
    _AT + "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(T1 *, T1 *, const T1 *)",
)
AUTOTUNE = tuple(
    f"cudnn::cnn::implicit_convolve_sgemm<float, float, (int){n}, (int)5, (int)5>"
    "(int, int, const T1 *)"
    for n in (128, 512, 1024)
)
ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
COPY_BLOCKING = "cudaMemcpy_v3020"
LAUNCH = "cudaLaunchKernel_v7000"
LAUNCH_NCCL = "cuLaunchKernelEx"
LAUNCH_GRAPH = "cudaGraphLaunch_v10000"
COPY = "cudaMemcpyAsync_v3020"
COPY_PEER = "cudaMemcpyPeerAsync_v4000"
SET = "cudaMemsetAsync_v3020"
SYNC_STREAM = "cudaStreamSynchronize_v3020"
MALLOC = "cudaMalloc_v3020"
FREE = "cudaFree_v3020"
LOAD = "cuLibraryLoadData"


def forward(distinct: int) -> list[str]:
    return _variants(_FORWARD, max(1, distinct // 2))


def backward(distinct: int) -> list[str]:
    return _variants(_BACKWARD, max(1, distinct - distinct // 2))


def short(name: str) -> str:
    """The base name of a demangled kernel name."""
    bare = name.removeprefix("void ").split("(")[0].split("<(int)")[0]
    return bare.replace("<unnamed>::", "").split("<")[0].split("::")[-1] or name


def _variants(patterns: tuple[str, ...], count: int) -> list[str]:
    return [
        patterns[i % len(patterns)].format(n=8 * (1 + i // len(patterns))) for i in range(count)
    ]
