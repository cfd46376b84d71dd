"""`tpi` as the last of MindSpeed's features: its options, and which of the others it goes with."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_tpi import envs
from mindspeed_tpi.patches.megatron_core.support import outside
from mindspeed_tpi.patches.mindspeed._versions import VERSIONS
from mindspeed_tpi.patching import Patch


@dataclass(frozen=True)
class Settled:
    """How one of MindSpeed's features goes with the contract.

    Attributes:
        verdict: `ours` (it replaces functions that this package puts its own on top of), `kept` (it decides no bit of a
            covered module) or `refused`.
        why: for `refused` what to do.
        used: whether it does anything with these arguments, beyond what `is_need_apply` says.
    """

    verdict: Literal["ours", "kept", "refused"]
    why: str
    used: Callable[[Namespace], bool] = lambda args: True


def _ours(why: str) -> Settled:
    return Settled("ours", why)


def _kept(why: str) -> Settled:
    return Settled("kept", why)


def _refused(remedy: str, used: Callable[[Namespace], bool] = lambda args: True) -> Settled:
    return Settled("refused", remedy, used)


def _not(name: str, neutral: Any) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name, neutral) not in (neutral, None)


def _context_parallel(args: Namespace) -> bool:
    return int(getattr(args, "context_parallel_size", 1) or 1) > 1


SETTLED: dict[str, Settled] = {
    "RequirementsBasicFeature": _kept(
        "stand-ins for apex and TransformerEngine, none of which a covered module calls; its all_reduce casts float64, which "
        "exact sums of this package do not use"
    ),
    "MegatronBasicFeature": _ours("norms and gradient synchronisation"),
    "TransformerEngineBasicFeature": _ours("classes of TransformerEngine specs"),
    "ContextParallelFeature": _refused(
        "drop --context-parallel-algo: the contract's own context parallelism serves megatron_cp_algo's layouts "
        "(cp_comm_type p2p, all_gather, a2a) through Megatron-core's DotProductAttention",
        _context_parallel,
    ),
    "UlyssesContextParallelFeature": _refused(
        "use cp_comm_type=a2a of Megatron-core instead of --context-parallel-algo", _context_parallel
    ),
    "ContextParallelKvCacheFeature": _refused("drop --context-parallel-kv-cache-policy"),
    "AdaptiveContextParallelFeature": _refused(
        "drop --context-parallel-algo hybrid_adaptive_cp_algo", _context_parallel
    ),
    "GDNFeature": _kept("gated delta nets, which are refused where a model holds them"),
    "AsyncLogAllreduceFeature": _kept("the loss that is logged"),
    "GroupedMatmulFeature": _ours("grouped products"),
    "FusedSwigluFeature": _ours("SwiGLU: MLP.forward calls the contract's"),
    "FusedSoftmaxFeature": _ours("softmax: attention calls the contract's"),
    "FusedRoPEFeature": _ours("rotary embedding"),
    "FusedMoEPermuteFeature": _refused(
        "drop --moe-permute-fusion and --use-fused-moe-token-permute-and-unpermute",
        lambda args: bool(
            getattr(args, "moe_permute_fusion", False)
            or getattr(args, "use_fused_moe_token_permute_and_unpermute", False)
        ),
    ),
    "AffinityFeature": _ours("cross entropy: the loss calls the contract's"),
    "ProfilerDefaultFeature": _kept("profiling"),
    "NPUDeterministicFeature": _kept("asks the device for fixed orders"),
    "TflopsCalculateFeature": _kept("counts operations"),
    "ProfileFeature": _kept("profiling"),
    "RecomputeActivationFeature": _refused("drop --recompute-activation-function; --recompute-granularity is served"),
    "RecomputeNormFeature": _refused("drop --recompute-norm; --recompute-granularity is served"),
    "EnableRecomputeLayersPerPPRank": _kept("which layers are recomputed"),
    "RecomputeMethodFeature": _kept("which layers are recomputed"),
    "UnalignedLinearFeature": _refused("drop --unaligned-linear: uneven shards are no subtrees of the sum"),
    "MC2Feature": _refused("drop --use-ascend-mc2: it sums inside the collective"),
    "CoCFeature": _refused("drop --use-ascend-coc: it sums inside the collective"),
    "TP2dFeature": _refused("drop --tp-2d"),
    "ReplaceIndexPutFeature": _ours("vocabulary-parallel embedding"),
    "RiPipeSchedulesBubbleFeature": _refused("drop --recompute-in-bubble"),
    "RiPipeSchedulesAdvanceFeature": _refused("drop --recompute-in-advance"),
    "NoopLayersFeature": _refused("drop --noop-layers"),
    "OptimizeP2PCommFeature": _kept("transport between stages"),
    "VariableSequenceLengthFeature": _kept("transport between stages"),
    "MultiParameterFeature": _refused("drop --use-multiparameter-pipeline-model-parallel"),
    "OptimizeSendRecvCommFeature": _refused("drop --optimize-send-recv-comm"),
    "UnalignedPipelineFeature": _kept("how many layers a stage holds"),
    "DualpipeVFeature": _refused("drop --schedules-method"),
    "MoEGmmFeature": _refused("drop --moe-grouped-gemm: SequentialMLP runs on the contract's grouped product anyway"),
    "MoETpExtendEpFeature": _refused("drop --moe-tp-extend-ep; --expert-tensor-parallel-size is served"),
    "MoESharedExpertsFeature": _kept("the size of the shared expert"),
    "MoEAllGatherOverLapFeature": _refused("drop --moe-allgather-overlap-comm"),
    "MoEAlltoAllOverLapFeature": _refused("drop --moe-alltoall-overlap-comm"),
    "MoEZeroMemoryFeature": _refused("drop --moe-zero-memory", _not("moe_zero_memory", "disable")),
    "MoEFwdBwdOverlapFeature": _refused("drop --moe-fb-overlap"),
    "BalancedMoEFeature": _refused("drop --balanced-moe-experts"),
    "ExpertsPlacementFeature": _refused("drop --enable-expert-placement"),
    "HcclBufferSetFeature": _kept("sizes of communication buffers"),
    "HcclBufferAdaptiveFeature": _kept("sizes of communication buffers"),
    "HcclOpModeSetFeature": _kept("how collectives are launched"),
    "FusedEmaAdamwFeature": _refused(
        "use --optimizer-selection fused_torch_adamw or fused_adamw",
        lambda args: getattr(args, "optimizer_selection", None) == "fused_ema_adamw",
    ),
    "VirtualOptimizerFeature": _refused("drop --virtual-optimizer"),
    "LowPrecisionOptimizerFeature": _refused(
        "drop --quant-states and --quant-grads",
        lambda args: bool(getattr(args, "quant_states", None) or getattr(args, "quant_grads", None)),
    ),
    "LlavaModel": _kept("multimodal models, which are refused where a model holds them"),
    "DistTrainFeature": _refused("drop --dist-train"),
    "BuildTokenizerFeature": _kept("the tokenizer"),
    "BufferPadFeature": _refused("drop --param-and-grad-buffer-pad"),
    "LayerZeroFeature": _refused("drop --layerzero"),
    "TorchFullyShardedDataParallelFeature": _refused("drop --use-torch-fsdp2"),
    "CustomFSDPFeature": _refused("drop --use-megatron-fsdp"),
    "ResetBucketGroupOrderFeature": _kept("the order of parameter gathers"),
    "ReuseFP32Param": _refused("drop --reuse-fp32-param"),
    "SmartSwapFeature": _refused("drop --smart-swap"),
    "SwapAttentionFeature": _refused("drop --swap-attention"),
    "AnsCompressTensorFeature": _refused("drop --compress-dense", _not("compress_dense", "disable")),
    "DisableGlooGroupFeature": _kept("which library gathers optimizer states for a checkpoint"),
    "SwapOptimizerFeature": _refused("drop --swap-optimizer"),
    "FusionAttentionFeature": _ours("attention"),
    "FusionAttentionV2Feature": _ours("attention"),
    "AlibiFeature": _refused("use --position-embedding-type rope"),
    "GenerateMaskFeature": _ours("attention, which needs no mask to be causal"),
    "ResetAttentionMaskFeature": _refused("drop --reset-attention-mask; packed sequences (PackedSeqParams) are served"),
    "MLAFeature": _refused("drop --multi-latent-attention"),
    "MegatronMcoreRearrangeFeature": _kept("how attention modules are built"),
    "DeepSeekSparseAttention": _kept("sparse attention, which is refused where a model holds it"),
    "MindSporePatchFeature": _refused(
        "use --ai-framework pytorch", lambda args: getattr(args, "ai_framework", "pytorch") not in ("pytorch", None)
    ),
    "AutoSettingsFeature": _kept("a search for settings, in jobs of its own"),
    "BridgePackFeature": _refused("drop --pack-sequences-in-batch"),
    "BatchInvariantFeature": _refused(
        "drop --use-batch-invariant-ops and --use-flash-attn-npu-batch-invariant: the contract's operators are batch-invariant"
    ),
}
"""Class name of each feature of `mindspeed.features_manager.create_features_list` → how it was settled."""


def check(features: list[Any], args: Namespace) -> None:
    """Refuse the features in use that the contract does not go with, and those that nobody has looked at.

    Raises:
        ParityError: strict mode; names each feature and what to do. Otherwise one warning.
    """
    clauses = []
    for feature in features:
        name = type(feature).__name__
        if name == FEATURE or not feature.is_need_apply(args):
            continue
        settled = SETTLED.get(name)
        if settled is None:
            clauses.append(f"{name} ({feature.feature_name}), which this package does not know; drop its option")
        elif settled.verdict == "refused" and settled.used(args):
            clauses.append(f"{name} ({settled.why})")
    if clauses:
        outside(f"MindSpeed's {'; '.join(clauses)}")


FEATURE = "TrainingInferenceParityFeature"


def feature() -> Any:
    """The feature `tpi`, made from MindSpeed's base class."""
    from mindspeed.features_manager.feature import MindSpeedFeature

    class TrainingInferenceParityFeature(MindSpeedFeature):  # type: ignore[misc]
        """Options `--tpi` and `--tpi-strict`; applies always, since importing mindspeed_tpi asked for it."""

        def __init__(self) -> None:
            super().__init__("tpi", optimization_level=0)

        def register_args(self, parser: ArgumentParser) -> None:
            group = parser.add_argument_group(title="training-inference parity (mindspeed_tpi)")
            group.add_argument(
                "--tpi", action="store_true", help="as MINDSPEED_TPI=1; needs `import mindspeed_tpi` first"
            )
            group.add_argument("--tpi-strict", action="store_true", help="as MINDSPEED_TPI=strict")

        def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
            if getattr(args, "tpi_strict", False):
                os.environ[envs.MODE.name] = "strict"  # before Megatron-core is imported, and for every child process

        def register_patches(self, patch_manager: Any, args: Namespace) -> None:
            check(_features(), args)

        def validate_args(self, args: Namespace) -> None:
            check(_features(), args)

    return TrainingInferenceParityFeature()


def _features() -> list[Any]:
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

    found: list[Any] = MindSpeedFeaturesManager.FEATURES_LIST
    return found


def set_features_list(original: Any) -> Any:
    """`MindSpeedFeaturesManager.set_features_list`: `tpi` comes last, whoever sets the list."""
    upstream = original.__func__

    def set_with_ours(cls: type, features_list: list[Any]) -> None:
        upstream(cls, [*(f for f in features_list if type(f).__name__ != FEATURE), feature()])

    return classmethod(set_with_ours)


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="mindspeed.features_manager.features_manager:MindSpeedFeaturesManager.set_features_list",
        factory=set_features_list,
        reason="a feature of its own takes part in MindSpeed's options and sees those of the others",
        versions=VERSIONS,
        parameters=("cls", "features_list"),
        until="MindSpeed finds features by entry points",
        kind="wrap",
    ),
)
