"""Families of kernels by name: names of real recordings, and those of other cards."""

from __future__ import annotations

import lzma

import pytest

from gputrace.analyzers.kernel_names import (
    FAMILIES,
    converts_layout,
    family_of,
    generation,
    is_communication,
    is_optimizer,
    is_unaligned,
    on_tensor_cores,
    precision_of,
    short_name,
)
from gputrace.sanitize import LONGEST_NAME
from tests.helpers.recordings import DATA

AT = "void at::native::"
XMMA = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
CUTLASS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_64x64_64x6_nt_align8>(T1::Params)"
)
IMPLICIT = (
    "void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::conv::kernel::ImplicitGemmConvolution<"
)
ADD = "vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, std::array<char*>>"
FFMA = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_warpsize1x4x1_ffma_aligna4"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)",
            "communication",
        ),
        (f"{AT}<unnamed>::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>(T1)", "optimizer"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(T1)", "layout"),
        ("void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16>(T1)", "layout"),
        ("void tensorflow::functor::SwapDimension1And2InTensor3UsingTiles<float>(T1)", "layout"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(T1)", "attention"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512>(T1)", "normalisation"),
        (f"{AT}batch_norm_backward_reduce_channels_last_kernel<4>(T1)", "normalisation"),
        (f"{XMMA}_warpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn", "convolution"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "convolution"),
        (f"{IMPLICIT}cutlass::layout::TensorNHWC, Transpose::kNone>>(T1)", "convolution"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(T1)", "convolution"),
        (CUTLASS, "gemm"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("ampere_sgemm_32x128_nt", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(T1)", "gemm"),
        ("sm50_xmma_pooling_fw_4d_FP16FP32NHWC_Average_FastDiv_execute_kernel_trt", "reduction"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1", "gemm"),
        ("triton_poi_fused_clone_transpose_21", "layout"),
        ("triton_poi_fused__unsafe_view_clone_transpose_4", "layout"),
        ("triton_poi_fused_addmm_gelu_transpose_7", "elementwise"),
        ("triton_red_fused_amax_mean_transpose_view_2", "reduction"),
        ("void transformer_engine::cast_transpose_fused_kernel<false, float>(T1)", "quantisation"),
        ("triton_red_fused_mean_3", "reduction"),
        (f"{AT}reduce_kernel<512, 1, at::native::ReduceOp<float>>(T1)", "reduction"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 5>(T1)", "reduction"),
        (f"{AT}{ADD}(int, T2, T3)", "elementwise"),
        ("triton_poi_fused_add_0", "elementwise"),
        ("loop_add_fusion", "elementwise"),
        ("saxpy(double *, double *, int)", "other"),
        ("void reduction_kernel<double>(double*, int)", "reduction"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)", "communication"),
        ("void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)", "routing"),
        ("void per_channel_cast_and_transpose<7168>(T1)", "quantisation"),
        ("all_gather_gemm_kernel", "gemm"),
        ("moeA2APrepareDispatchKernel", "routing"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168, 2048>(float*)", "gemm"),
        ("fused_moe_kernel", "gemm"),
        ("kernel_cutlass_flash_attncute_flash_fwd_sm90_FlashAttentionForwardSm90", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_tem_fused_mm_3", "gemm"),
        ("triton_for_fused_0", "optimizer"),
        ("triton_poi_fused_add_addcdiv_lerp_mul_sqrt_2", "optimizer"),
        ("triton_poi_fused_all_gather_into_tensor_view_wait_tensor_5", "elementwise"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_1", "normalisation"),
        ("void transformer_engine::HadamardTransformKernel<16>(T1)", "quantisation"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1", "convolution"),
        ("miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_f2x3_stride1", "convolution"),
    ],
)
def test_the_family_is_told_by_the_name(name: str, family: str) -> None:
    assert family in FAMILIES
    assert family_of(name) == family


def test_thousands_of_real_names_have_the_family_and_precision_of_the_reviewed_table() -> None:
    table = lzma.decompress((DATA / "kernel-names.tsv.xz").read_bytes())
    rows = [line.split("\t") for line in table.decode().splitlines()]
    assert len(rows) > 2500
    for family, precision, name in rows:
        assert family_of(name) == family, name
        if precision != "-":
            assert precision_of(name) == precision, name


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)",
        "void deep_ep::internode::notify_dispatch<false, 1>(int const*)",
        "void deep_ep::internode_ll::dispatch<true, 7168>(void*)",
        "_ZN7deep_ep9intranode8dispatchILi8ELi768ELi8192EEEvP4int4",
        "void dpsk::ep::internode::cached_notify<1>(int)",
        "void uccl::internode_ll::dispatch<true>(void*)",
        "moeA2ADispatchKernel",
        "a2a_combine_recv_kernel",
        "userbuffers_fp16_sum_inplace_gpu_rw_ag<2>(int)",
        "kuserbuffers_pushrecv(int, int, int*)",
        "triton_symm_mem_barrier",
        "nvshmemi_transfer_rma_kernel",
        "mscclppAllReduce6",
        "EpDispatchIntraNodeKernel<__hip_bfloat16>(T1)",
    ],
)
def test_collectives_that_are_not_nccls_are_communication(name: str) -> None:
    assert is_communication(name)


def test_a_hadamard_transform_ends_no_step() -> None:
    assert not is_optimizer("void transformer_engine::HadamardTransformKernel<16>(T1)")
    gathers = "multi_tensor_apply_kernel<UnaryOpFunctor<T, 2>, at::native::Copy<T, float>>"
    assert not is_optimizer(f"{AT}<unnamed>::{gathers}(T1)")


@pytest.mark.parametrize(
    ("name", "is_so"),
    [
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1", True),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg2_f2f_nn", True),
        (CUTLASS, False),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_nn", False),
        ("cutlass_tensorop_s1688dgrad_optimized_tf32_256x64_16x4_nhwc_align4", False),
        ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", False),
    ],
)
def test_products_in_16_bits_need_rows_of_multiples_of_8(name: str, is_so: bool) -> None:
    assert is_unaligned(name, precision_of(name)) == is_so


@pytest.mark.parametrize(
    ("name", "cores", "precision"),
    [
        (f"{XMMA}_warpgroupsize1x1x1_g1_execute_kernel__5x_cudnn", "yes", "bf16"),
        (CUTLASS, "yes", "bf16"),
        ("cutlass_tensorop_s1688dgrad_optimized_tf32_256x64_16x4_nhwc_align4", "yes", "tf32"),
        ("volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", "yes", "fp16"),
        ("turing_h1688gemm_256x128_ldg8_stages_32x1_nn", "yes", "fp16"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_nn", "yes", "fp16"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "yes", "bf16"),
        ("void flash::flash_fwd_kernel<cutlass::bfloat16_t>(T1)", "yes", "bf16"),
        (f"{FFMA}_alignc4_execute_kernel__5x_cublas", "no", "fp32"),
        ("volta_sgemm_128x64_nn", "no", "fp32"),
        ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", "no", "fp32"),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3>(T1)", "no", "fp32"),
        ("void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 1024>(T1)", "no", "bf16"),
        ("cutlass_80_simt_dgemm_128x32_8x5_nn_align1", "no", "fp64"),
        ("my_own_matmul", "unknown", "unknown"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(T1)", None, "fp32"),
        ("void gemv2T_kernel_val<int, int, float, float>(T1)", None, "fp32"),
        (f"{AT}{ADD}(int, T2, T3)", None, "fp32"),
    ],
)
def test_the_name_says_whether_the_tensor_cores_multiply_and_what(
    name: str, cores: str | None, precision: str
) -> None:
    assert on_tensor_cores(name, family_of(name)) == cores
    assert precision_of(name) == precision


@pytest.mark.parametrize(
    ("card", "told"),
    [
        ("Tesla K80", 0),
        ("Tesla P100-PCIE-16GB", 0),
        ("Quadro P6000", 0),
        ("NVIDIA GeForce GTX 1080 Ti", 0),
        ("NVIDIA GeForce GTX 1660", 0),
        ("Tesla V100-SXM2-16GB", 7),
        ("Tesla T4", 7),
        ("NVIDIA GeForce RTX 2080 Ti", 7),
        ("Quadro RTX 6000", 7),
        ("NVIDIA A100-SXM4-80GB", 8),
        ("NVIDIA RTX A6000", 8),
        ("NVIDIA GeForce RTX 4090", 8),
        ("NVIDIA L40S", 8),
        ("NVIDIA H200", 8),
        ("NVIDIA GB200", 8),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_the_model_of_a_card_tells_of_its_tensor_cores(card: str, told: int | None) -> None:
    assert generation(card) == told


def test_kernels_built_for_newer_cards_tell_of_a_card_without_a_name() -> None:
    assert generation("", ["maxwell_sgemm_128x64_nn", "saxpy(int)"]) is None
    assert generation("", ["volta_sgemm_128x64_nn"]) == 7
    assert generation("", ["volta_sgemm_128x64_nn", "ampere_sgemm_32x128_nt"]) == 8
    assert generation("Tesla P100", ["ampere_sgemm_32x128_nt"]) == 0


@pytest.mark.parametrize(
    "name",
    [
        f"{IMPLICIT}cutlass::layout::TensorNHWC, Transpose::kNone>>(T1)",
        "cudnn_conv_transpose2d",
        "void nhwcAddPaddingKernel<__half, __half, float>(T1)",
        f"{AT}max_pool_forward_nhwc<float>(T1)",
    ],
)
def test_kernels_that_do_more_than_turn_a_layout_are_no_conversions(name: str) -> None:
    assert not converts_layout(name)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (f"{AT}{ADD}(int, T2, T3)", "vectorized_elementwise: CUDAFunctor_add"),
        (CUTLASS, "cutlass_80_tensorop_s16816gemm_bf16_64x64_64x6_nt_align8"),
        (f"{IMPLICIT}cutlass::conv::Mma<int>>>(T1)", "ImplicitGemmConvolution"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 5>(T1)", "softmax_warp_forward"),
        ("input_transpose_fusion_1.kd", "input_transpose_fusion_1"),
        ("volta_sgemm_128x64_nn", "volta_sgemm_128x64_nn"),
        ("saxpy(double *, double *, int)", "saxpy"),
        ("", ""),
    ],
)
def test_a_short_name_is_what_people_call_it(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize(
    ("part", "family"),
    [
        ("triton_poi_fused_addcmul", "elementwise"),
        ("triton_red_fused_abs_", "reduction"),
        ("fp8", "other"),
        ("cutlass_", "gemm"),
        ("cijk_", "gemm"),
    ],
)
def test_a_name_without_end_is_read_at_its_beginning(part: str, family: str) -> None:
    """Rules that look for one word after another take minutes where there are thousands."""
    name = part * (LONGEST_NAME // len(part))
    inside = f"cutlass::Kernel<{name}>"
    assert family_of(name) == family
    assert not is_optimizer(name)
    assert short_name(name) == name[:200]
    assert short_name(inside) == inside[:200]
    assert precision_of(name) in ("unknown", "fp8")
