"""The report's tables of GPUs, and of network ports with errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchlens_perf.rank_ranges import ranges
from torchlens_perf.report.quantities import amount, percent, printable
from torchlens_perf.report.tables import Column, FittingTable

_MOST_ROWS = 16
_WORDS = {"hw_slowdown": "hardware", "sync_boost": "sync boost", "board_limit": "board limit"}
_RECOVERY = {1: "needs a reset", 2: "needs a reboot"}
_LEAST_SHARE = 0.005  # of the time, for a reason to be named
_ERRORS = (
    ("XID", ("xids",)),
    ("uncorrected ECC", ("ecc_uncorrected",)),
    ("remapped rows", ("remapped_rows",)),
    ("PCIe replays", ("pcie_replays",)),
    ("NVLink", ("nvlink_errors", "nvlink_replays", "nvlink_recoveries")),
)


def gpu_table(gpus: Sequence[dict[str, Any]]) -> FittingTable:
    """A row for each GPU; of many, those whose clocks were lowest. gpus: the report's."""
    by_clock = sorted(gpus, key=lambda gpu: gpu["signals"].get("sm_clock_share", 1.0))
    shown = [gpu for gpu in gpus if gpu in by_clock[:_MOST_ROWS]]
    columns = [
        Column("rank", [ranges(gpu["ranks"]) or "-" for gpu in shown], left=True),
        Column("SM clock", [_clock(gpu) for gpu in shown]),
        Column("of max", [_share(gpu["signals"].get("sm_clock_share")) for gpu in shown]),
        Column("throttled", [_throttled(gpu["throttled"]) for gpu in shown], left=True),
        Column("errors", [_errors(gpu) for gpu in shown], left=True),
        Column("power", [_with_unit(gpu["power_w"], "W") for gpu in shown], 0.8),
        Column("hottest", [_with_unit(gpu["temperature_max_c"], "C") for gpu in shown], 0.8),
        Column("memory", [_memory(gpu) for gpu in shown], 0.5),
        *(Column(header, [_share(gpu[field]) for gpu in shown], 0.6) for header, field in _activity(shown)),
    ]

    def notes(headers: Sequence[str]) -> list[str]:
        lines = [f"the {len(shown)} of {len(gpus)} GPUs whose clocks were lowest"] * (len(gpus) > len(shown))
        lines.append("means over the run; throttled: share of the time, by reason; errors: of those that a GPU tells")
        return lines

    return FittingTable("GPUs", columns, notes)


def _activity(gpus: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The columns of what GPM tells; none where no GPU has it."""
    columns = [("SMs", "sm_active"), ("tensor", "tensor_active"), ("DRAM", "dram_active")]
    return [(header, field) for header, field in columns if any(gpu[field] is not None for gpu in gpus)]


def _clock(gpu: dict[str, Any]) -> str:
    return "-" if gpu["sm_clock_hz"] is None else f"{gpu['sm_clock_hz'] / 1e6:.0f} MHz"


def _throttled(shares: dict[str, float]) -> str:
    if not shares:
        return "-"
    named = sorted((item for item in shares.items() if item[1] >= _LEAST_SHARE), key=lambda item: -item[1])
    return ", ".join(f"{_WORDS.get(reason, reason)} {percent(share)}" for reason, share in named) or "no"


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _with_unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f} {unit}"


def _memory(gpu: dict[str, Any]) -> str:
    return "-" if gpu["memory_used_bytes"] is None else amount(gpu["memory_used_bytes"], "B")


def _errors(gpu: dict[str, Any]) -> str:
    """During the run; "-" for a GPU that tells of none of them."""
    counts = {words: [gpu[field] for field in fields if gpu[field] is not None] for words, fields in _ERRORS}
    if not any(counts.values()):
        return "-"
    named = [f"{sum(known):.0f} {words}" for words, known in counts.items() if sum(known)]
    if gpu["last_xid"] and sum(counts["XID"]):
        named[0] += f" (last {gpu['last_xid']})"
    if gpu["recovery_action"]:
        named.append(_RECOVERY.get(gpu["recovery_action"], "needs recovery"))
    return ", ".join(named) or "none"


def link_table(links: Sequence[dict[str, Any]]) -> FittingTable:
    """The ports that counted errors during the run, most first. links: the report's."""
    faulty = sorted((link for link in links if link["errors"]), key=lambda link: -sum(link["errors"].values()))
    shown = faulty[:_MOST_ROWS]

    def words(link: dict[str, Any]) -> str:
        return ", ".join(f"{kind.replace('_', ' ')} {count:.0f}" for kind, count in link["errors"].items())

    columns = [
        Column("node", [printable(link["host"]) for link in shown], left=True),
        Column("port", [printable(link["port"]) for link in shown], left=True),
        Column("errors during the run", [words(link) for link in shown], left=True),
    ]
    return FittingTable("network ports with errors", columns, lambda headers: [])
