"""Types for GPUs and network ports in `report --json`. See report.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from torchlens_perf.run.hardware_samples import GPUS, select_quantities

if TYPE_CHECKING:
    Gpu = dict[str, Any]
else:
    Gpu = TypedDict(
        "Gpu",
        {
            "uuid": str,
            "name": str | None,
            "pci_bus_id": str | None,
            "host": str,
            "ranks": list[int],
            "samples": int,
            "measured_s": float,
            "losses": int,
            "slow_samples": int,
            # Share of the median second in which a kernel of any process was running.
            "typical_busy": float | None,
            "temperature_max_c": float | None,
            # Share of the time in which clocks were lowered, for each reason.
            "throttled": dict[str, float],
            "signals": dict[str, float],
            **dict.fromkeys(select_quantities(GPUS, "mean", "max", "growth"), float | None),
            **dict.fromkeys(select_quantities(GPUS, "newest"), int | None),
        },
    )
    Gpu.__doc__ = "Means, extremes and counter increases of one GPU over the run."


class Link(TypedDict):
    """Means and errors of one network port over the run."""

    port: str
    host: str
    layer: str | None
    rate_bits: int | None
    samples: int
    measured_s: float
    errors: dict[str, float]
    signals: dict[str, float]
