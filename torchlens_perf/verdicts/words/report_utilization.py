"""Types for utilization in `report --json`. See report.py.

FLOPs are per mean step, and rates are over the mean duration of a step after the warm-up.
"""

from __future__ import annotations

from msgspec import Struct


class RankUtilization(Struct, frozen=True):
    """Utilization of one rank."""

    rank: int
    tokens_per_s: float | None
    model_flops: float | None
    hardware_flops: float | None
    mfu: float | None
    hfu: float | None
    counted_share: float | None
    not_measured: str | None
    """Reason why FLOPs are not measured; None if they are."""


class UncountedOperator(Struct, frozen=True):
    """An operator that has no formula."""

    operator: str
    calls_per_step: float
    share: float
    """Its share of the host time of all operators."""


class ModuleUtilization(Struct, frozen=True):
    """FLOPs of one module, and its place under the roofline of its device."""

    name: str
    """"" for operators outside of all timed modules."""
    flops: float
    """Of all passes."""
    share: float
    """Share of the FLOPs of a step."""
    flops_per_byte: float | None
    """FLOPs per byte of operands and results in the forward pass."""
    forward_flops_per_s: float | None
    """FLOPs of the forward pass over the module's own device time; None on CPUs."""
    roofline_flops_per_s: float | None
    """What the device's peak and its memory allow; None without a known peak."""
    bound: str | None
    """compute or memory; None if the device's peak is not known."""
    roofline_share: float | None


class Utilization(Struct, frozen=True):
    """Utilization of a job. FLOPs are sums over its ranks."""

    not_measured: str | None
    """Reason why FLOPs of at least one rank are not measured; None if they are."""
    convention: str
    """How attention is counted in `model_flops` and thus in `mfu`."""
    counted_steps: int
    step_s: float | None
    tokens_per_s: float | None
    """None if the job does not report tokens and its batches are not token ids."""
    samples_per_s: float | None
    model_flops: float | None
    """FLOPs of forward and backward pass, without recomputation."""
    hardware_flops: float | None
    """All counted FLOPs, with recomputation and the optimizer's."""
    attention_flops: float | None
    """Part of model_flops in fused attention operators."""
    causal_attention_flops: float | None
    """The part of attention_flops with causal masks."""
    precisions: dict[str, float]
    """Share of each precision in hardware_flops."""
    mfu: float | None
    """Model FLOPs utilization; None without FLOPs or without a known peak."""
    hfu: float | None
    mfu_causal_half: float | None
    """mfu with half of the causal attention, as Megatron-LM counts it."""
    peak_flops_per_s: float | None
    """Dense peak of all ranks, in the precisions that ran."""
    peak_source: str | None
    counted_share: float | None
    """Share of the operators' host time in operators with a formula."""
    uncounted: list[UncountedOperator]
    ranks: list[RankUtilization]
    modules: list[ModuleUtilization]
