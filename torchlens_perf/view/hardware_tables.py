"""The tables of GPUs and network ports. Pure."""

from __future__ import annotations

from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.verdicts.words.report_hardware import Gpu
from torchlens_perf.view.specs import Column, Quantity, Table

_FIRST_ROWS = 8
_REASONS = {"hw_slowdown": "hardware", "sync_boost": "sync boost", "board_limit": "board limit"}
_RECOVERY = {1: "needs a reset", 2: "needs a reboot"}
_MIN_SHARE = 0.005
"""Smallest share of the run for which a throttling reason is shown."""
_ERRORS = (
    ("XID", ("xids",)),
    ("uncorrected ECC", ("ecc_uncorrected",)),
    ("remapped rows", ("remapped_rows",)),
    ("PCIe replays", ("pcie_replays",)),
    ("NVLink", ("nvlink_errors", "nvlink_replays", "nvlink_recoveries")),
)

_ACTIVITY = (
    ("SM active", "sm_active"),
    ("tensor active", "tensor_active"),
    ("DRAM active", "dram_active"),
)


def build_gpu_table(report: Report) -> Table:
    """Return a row for each GPU with means over the run, lowest clock rate first."""
    gpus = sorted(report["gpus"], key=lambda gpu: gpu["signals"].get("sm_clock_share", 1.0))
    columns = [
        Column("rank", [format_ranges(gpu["ranks"]) or None for gpu in gpus], Quantity.TEXT),
        Column("SM MHz", [_round_to_unit(gpu["sm_clock_hz"], 1e6) for gpu in gpus], Quantity.NUMBER),
        Column("of max clock", [gpu["signals"].get("sm_clock_share") for gpu in gpus], Quantity.SHARE),
        Column("throttled", [_throttling_text(gpu["throttled"]) for gpu in gpus], Quantity.TEXT,
               help="Share of the run in which the GPU reduced its clocks, by reason."),
        Column("errors", [_gpu_errors_text(gpu) for gpu in gpus], Quantity.TEXT,
               help="Errors that the GPU counted during the run."),
        Column("power W", [_round_to_unit(gpu["power_w"]) for gpu in gpus], Quantity.NUMBER, 0.4),
        Column("max temp C", [_round_to_unit(gpu["temperature_max_c"]) for gpu in gpus], Quantity.NUMBER, 0.4),
        Column("memory used", [gpu["memory_used_bytes"] for gpu in gpus], Quantity.BYTES, 0.5),
        *(
            Column(title, [gpu[field] for gpu in gpus], Quantity.SHARE, 0.6)
            for title, field in _ACTIVITY
            if any(gpu[field] is not None for gpu in gpus)
        ),
    ]  # fmt: skip
    return Table("gpus", "GPUs", columns, first=_FIRST_ROWS, noun="GPU", ranged="of max clock")


def _round_to_unit(value: float | None, unit: float = 1.0) -> int | None:
    return None if value is None else round(value / unit)


def _throttling_text(shares: dict[str, float]) -> str | None:
    if not shares:
        return None
    shown = sorted(
        (item for item in shares.items() if item[1] >= _MIN_SHARE), key=lambda item: -item[1]
    )
    return (
        ", ".join(f"{_REASONS.get(reason, reason)} {share:.0%}" for reason, share in shown) or "no"
    )


def _gpu_errors_text(gpu: Gpu) -> str | None:
    """Return the GPU's errors during the run as text; None without error counters."""
    counts = {
        words: [count for field in fields if (count := gpu[field]) is not None]
        for words, fields in _ERRORS
    }
    if not any(counts.values()):
        return None
    found = [f"{sum(known):.0f} {words}" for words, known in counts.items() if sum(known)]
    if gpu["last_xid"] and sum(counts["XID"]):
        found[0] += f" (last {gpu['last_xid']})"
    if gpu["recovery_action"]:
        found.append(_RECOVERY.get(gpu["recovery_action"], "needs recovery"))
    return ", ".join(found) or "none"


def build_port_table(report: Report) -> Table:
    """Return the network ports that counted errors during the run, most errors first."""
    ports = sorted(
        (port for port in report["links"] if port["errors"]),
        key=lambda port: -sum(port["errors"].values()),
    )
    words = [
        ", ".join(f"{kind.replace('_', ' ')} {count:.0f}" for kind, count in port["errors"].items())
        for port in ports
    ]
    columns = [
        Column("node", [port["host"] for port in ports], Quantity.TEXT),
        Column("port", [port["port"] for port in ports], Quantity.TEXT),
        Column("errors", words, Quantity.TEXT, help="Errors that the port counted during the run."),
    ]
    return Table("ports", "Network ports with errors", columns, first=_FIRST_ROWS, noun="port")
