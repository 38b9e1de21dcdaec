"""Peak rates of devices, from their makers' data sheets.

All rates are dense: without 2:4 sparsity, which doubles the rates that tensor cores reach for TF32
and smaller types. Rates for bf16 and fp16 accumulate in float32. A device that is not listed has
no peak. No other device's peak is used in its place.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"


class DevicePeak(NamedTuple):
    """Peaks of one device."""

    name: str
    flops_per_s: dict[str, float]
    """By precision, see run.operators.PRECISIONS."""
    bytes_per_s: float
    """Bandwidth of the device's memory."""
    source: str
    """Address of the data sheet."""


def _row(
    name: str, terabytes: float, source: str, **tera: float
) -> tuple[re.Pattern[str], DevicePeak]:
    """name: a regular expression for the whole name that NVML or torch reports."""
    if "tf32" in tera:
        tera["bf16"] = tera["fp16"]  # Devices before Ampere have neither.
    rates = {precision: value * 1e12 for precision, value in tera.items()}
    return re.compile(rf"(NVIDIA |AMD |Tesla )*{name}"), DevicePeak(
        name, rates, terabytes * 1e12, source
    )


_HOPPER = {"fp64": 34, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_HOPPER_NVL = {"fp64": 30, "fp32": 60, "tf32": 417.5, "fp16": 835.5, "fp8": 1670.5, "int8": 1670.5}
_AMPERE = {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "fp16": 312, "int8": 624}
# Terabytes and tera-operations per second. The first matching row counts.
_DEVICES = (
    _row(r"GB200", 8.0, _NVIDIA + "gb200-nvl72/", fp32=80, tf32=1250, fp16=2500, fp8=5000, int8=5000, fp4=10000),
    _row(r"B200", 8.0, _NVIDIA + "hgx/", fp32=75, tf32=1125, fp16=2250, fp8=4500, int8=4500, fp4=9000),
    _row(r"GH200( 480GB)?", 4.0, _NVIDIA + "grace-hopper-superchip/", **_HOPPER),
    _row(r"H200 NVL", 4.8, _NVIDIA + "h200/", **_HOPPER_NVL),
    _row(r"H200", 4.8, _NVIDIA + "h200/", **_HOPPER),
    _row(r"H100 NVL", 3.9, _NVIDIA + "h100/", **_HOPPER_NVL),
    _row(r"H100 PCIe", 2.0, _NVIDIA + "h100/", fp64=26, fp32=51, tf32=378, fp16=756, fp8=1513, int8=1513),
    _row(r"H100( 80GB HBM3)?", 3.35, _NVIDIA + "h100/", **_HOPPER),
    _row(r"A100-(SXM4|PCIE|PCIe)-40GB", 1.555, _NVIDIA + "a100/", **_AMPERE),
    _row(r"A100-SXM4-80GB", 2.039, _NVIDIA + "a100/", **_AMPERE),
    _row(r"A100[- ](PCI[Ee][- ]80GB|80GB PCIe)", 1.935, _NVIDIA + "a100/", **_AMPERE),
    _row(r"L40S", 0.864, _NVIDIA + "l40s/", fp32=91.6, tf32=183, fp16=362, fp8=733, int8=733),
    _row(r"L40", 0.864, _NVIDIA + "l40/", fp32=90.5, tf32=90.5, fp16=181, fp8=362, int8=362),
    _row(r"L4", 0.3, _NVIDIA + "l4/", fp32=30.3, tf32=60, fp16=121, fp8=242.5, int8=242.5),
    _row(r"A40", 0.696, _NVIDIA + "a40/", fp32=37.4, tf32=74.8, fp16=149.7, int8=299.3),
    _row(r"A30", 0.933, _NVIDIA + "products/a30-gpu/", fp64=5.2, fp32=10.3, tf32=82, fp16=165, int8=330),
    _row(r"A10", 0.6, _NVIDIA + "products/a10-gpu/", fp32=31.2, tf32=62.5, fp16=125, int8=250),
    _row(r"V100-SXM2-(16|32)GB", 0.9, _NVIDIA + "v100/", fp64=7.8, fp32=15.7, fp16=125),
    _row(r"V100-PCIE-(16|32)GB", 0.9, _NVIDIA + "v100/", fp64=7, fp32=14, fp16=112),
    _row(r"T4", 0.32, _NVIDIA + "tesla-t4/", fp32=8.1, fp16=65, int8=130),
    _row(r"GeForce RTX 4090", 1.008, _ADA, fp32=82.6, tf32=82.6, fp16=165.2, fp8=330.3, int8=660.6),
    _row(r"(Instinct )?MI300X.*", 5.3, _AMD + "mi300/mi300x.html",
         fp64=81.7, fp32=163.4, tf32=653.7, fp16=1307.4, fp8=2614.9, int8=2614.9),
)  # fmt: skip


def find_device_peak(name: str) -> DevicePeak | None:
    """Return the peaks of a device; None if it is not listed.

    name: the name that NVML or torch reports, such as "NVIDIA H100 80GB HBM3".
    """
    found = next((peak for pattern, peak in _DEVICES if pattern.fullmatch(name)), None)
    return None if found is None else found._replace(name=name)
