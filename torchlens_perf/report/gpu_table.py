"""GPUs and network ports in the report, over the whole run: rows of the JSON, and the tables of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from torchlens_perf.analysis.statistics.hardware import LINK_ERRORS
from torchlens_perf.analysis.statistics.quantities import percent, printable
from torchlens_perf.report.tables import Column, FittingTable, in_bytes, note_on_rest, or_dash
from torchlens_perf.run.place.node import host_of
from torchlens_perf.run.rank_ranges import ranges
from torchlens_perf.verdicts.node_state import NodeState, ProcessState

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report_hardware import Gpu, Link

_MEANS = (
    "sm_clock_hz", "memory_clock_hz", "power_w", "temperature_c", "busy", "sm_active", "sm_occupancy", "tensor_active",
    "dram_active",
)  # fmt: skip
_MAXIMA = (
    "sm_clock_max_hz", "power_limit_w", "memory_temperature_c", "memory_used_bytes", "memory_total_bytes",
)  # fmt: skip
_GROWN = (
    "energy_j", "xids", "ecc_corrected", "ecc_uncorrected", "remapped_rows", "pcie_replays", "pcie_transmitted_bytes",
    "pcie_received_bytes", "nvlink_replays", "nvlink_recoveries", "nvlink_errors", "nvlink_transmitted_bytes",
    "nvlink_received_bytes",
)  # fmt: skip


def gpu_rows(nodes: list[NodeState], processes: dict[int, ProcessState]) -> list[Gpu]:
    """GPUs that there are samples of, by rank: means, the most there was, and growth; None is what was not measured."""
    rows: list[Gpu] = []
    for node in nodes:
        telemetry = node.telemetry
        for uuid, totals in telemetry.gpus.items():
            ranks = [rank for rank in sorted(processes) if uuid in [gpu["uuid"] for gpu in processes[rank].gpus]]
            known = telemetry.facts.get(uuid)
            row = {
                "uuid": uuid,
                "name": known and known.name,
                "pci_bus_id": known and known.pci_bus_id,
                "host": host_of(node.host),
                "ranks": ranks,
                "samples": totals.samples,
                "measured_s": totals.measured_ns / 1e9,
                "losses": telemetry.losses.get(uuid, 0),
                "slow_samples": telemetry.slow_samples.get(uuid, 0),
                **{name: totals.mean(name) for name in _MEANS},
                **{name: totals.most.get(name) for name in _MAXIMA},
                "temperature_max_c": totals.most.get("temperature_c"),
                "power_max_w": totals.most.get("power_w"),
                "throttled": totals.throttled(),
                **{name: totals.grown.get(name) for name in _GROWN},
                **{name: totals.last.get(name) for name in ("last_xid", "remapping_pending", "recovery_action")},
                "signals": totals.signals(),
            }
            rows.append(cast("Gpu", row))
    return sorted(rows, key=lambda row: (row["ranks"] or [1 << 31], row["host"], row["uuid"]))


def link_rows(nodes: list[NodeState]) -> list[Link]:
    """Ports of InfiniBand or RoCE adapters, with what they counted during the run."""
    rows: list[Link] = []
    for node in nodes:
        for name, totals in sorted(node.telemetry.links.items()):
            rows.append(
                {
                    "port": name,
                    "host": host_of(node.host),
                    "layer": totals.layer,
                    "rate_bits": totals.rate_bits,
                    "samples": totals.samples,
                    "measured_s": totals.measured_ns / 1e9,
                    "errors": {kind: totals.grown[kind] for kind in LINK_ERRORS if totals.grown.get(kind)},
                    "signals": totals.signals(),
                }
            )
    return rows


def telemetry_notes(nodes: list[NodeState]) -> list[str]:
    """What of it was lost."""
    notes = []
    lost = sum(node.telemetry.lost_samples for node in nodes)
    dropped = sum(node.telemetry.dropped_files for node in nodes)
    if lost:
        notes.append(f"{lost} samples of GPUs and ports could not be written to the run directory; totals hold them")
    if dropped:
        notes.append(f"{dropped} oldest files of telemetry were removed to stay below disk_bytes; totals hold them")
    return notes


_MAX_ROWS = 16
_WORDS = {"hw_slowdown": "hardware", "sync_boost": "sync boost", "board_limit": "board limit"}
_RECOVERY = {1: "needs a reset", 2: "needs a reboot"}
_MIN_SHARE = 0.005  # of the time, for a reason to be named
_Activity = Literal["sm_active", "tensor_active", "dram_active"]
_Counter = Literal[
    "xids", "ecc_uncorrected", "remapped_rows", "pcie_replays", "nvlink_errors", "nvlink_replays", "nvlink_recoveries"
]
_ERRORS: tuple[tuple[str, tuple[_Counter, ...]], ...] = (
    ("XID", ("xids",)),
    ("uncorrected ECC", ("ecc_uncorrected",)),
    ("remapped rows", ("remapped_rows",)),
    ("PCIe replays", ("pcie_replays",)),
    ("NVLink", ("nvlink_errors", "nvlink_replays", "nvlink_recoveries")),
)


def gpu_table(gpus: Sequence[Gpu]) -> FittingTable:
    """A row for each GPU; of many, those whose clocks were lowest. gpus: the report's."""
    by_clock = sorted(gpus, key=lambda gpu: gpu["signals"].get("sm_clock_share", 1.0))
    shown = [gpu for gpu in gpus if gpu in by_clock[:_MAX_ROWS]]
    columns = [
        Column("rank", [ranges(gpu["ranks"]) or "-" for gpu in shown], left=True),
        Column("SM clock", [or_dash(gpu["sm_clock_hz"], lambda hz: f"{hz / 1e6:.0f} MHz") for gpu in shown]),
        Column("of max", [or_dash(gpu["signals"].get("sm_clock_share"), percent) for gpu in shown]),
        Column("throttled", [_throttled(gpu["throttled"]) for gpu in shown], left=True),
        Column("errors", [_errors(gpu) for gpu in shown], left=True),
        Column("power", [or_dash(gpu["power_w"], "{:.0f} W".format) for gpu in shown], 0.8),
        Column("hottest", [or_dash(gpu["temperature_max_c"], "{:.0f} C".format) for gpu in shown], 0.8),
        Column("memory", [or_dash(gpu["memory_used_bytes"], in_bytes) for gpu in shown], 0.5),
        *(Column(header, [or_dash(gpu[field], percent) for gpu in shown], 0.6) for header, field in _activity(shown)),
    ]

    def notes(headers: Sequence[str]) -> list[str]:
        return [
            *note_on_rest(shown, gpus, "GPUs whose clocks were lowest"),
            "means over the run; throttled: share of the time, by reason; errors: of those that a GPU tells",
        ]

    return FittingTable("GPUs", columns, notes)


def _activity(gpus: Sequence[Gpu]) -> list[tuple[str, _Activity]]:
    """The columns of what GPM tells; none where no GPU has it."""
    columns: list[tuple[str, _Activity]] = [
        ("SMs", "sm_active"), ("tensor", "tensor_active"), ("DRAM", "dram_active"),
    ]  # fmt: skip
    return [(header, field) for header, field in columns if any(gpu[field] is not None for gpu in gpus)]


def _throttled(shares: dict[str, float]) -> str:
    if not shares:
        return "-"
    named = sorted((item for item in shares.items() if item[1] >= _MIN_SHARE), key=lambda item: -item[1])
    return ", ".join(f"{_WORDS.get(reason, reason)} {percent(share)}" for reason, share in named) or "no"


def _errors(gpu: Gpu) -> str:
    """During the run; "-" for a GPU that tells of none of them."""
    counts = {words: [count for field in fields if (count := gpu[field]) is not None] for words, fields in _ERRORS}
    if not any(counts.values()):
        return "-"
    named = [f"{sum(known):.0f} {words}" for words, known in counts.items() if sum(known)]
    if gpu["last_xid"] and sum(counts["XID"]):
        named[0] += f" (last {gpu['last_xid']})"
    if gpu["recovery_action"]:
        named.append(_RECOVERY.get(gpu["recovery_action"], "needs recovery"))
    return ", ".join(named) or "none"


def link_table(links: Sequence[Link]) -> FittingTable:
    """The ports that counted errors during the run, most first. links: the report's."""
    faulty = sorted((link for link in links if link["errors"]), key=lambda link: -sum(link["errors"].values()))
    shown = faulty[:_MAX_ROWS]

    def words(link: Link) -> str:
        return ", ".join(f"{kind.replace('_', ' ')} {count:.0f}" for kind, count in link["errors"].items())

    columns = [
        Column("node", [printable(link["host"]) for link in shown], left=True),
        Column("port", [printable(link["port"]) for link in shown], left=True),
        Column("errors during the run", [words(link) for link in shown], left=True),
    ]
    return FittingTable("network ports with errors", columns)
