"""Causes: why ranks are slow, what speaks for it, and what was looked at and what could not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.analysis.statistics.quantities import percent
from torchlens_perf.page.gather.hardware_series import NO_CPU_TITLE
from torchlens_perf.page.markup import Child, Element, tag
from torchlens_perf.page.sections.section import details, section, table
from torchlens_perf.page.sections.telemetry import series_chart, series_table

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, Series

_NO_CPU = (NO_CPU_TITLE,)
# By a cause's kind, the quantities over time that show it.
_OVER_TIME = {
    "no_cpu": _NO_CPU, "busy_neighbour": _NO_CPU, "cpu_quota": _NO_CPU, "own_threads": _NO_CPU,
    "gpu_throttled": (
        "Throttled by heat", "Throttled by heat, by the hardware", "Throttled by the power limit",
        "Throttled by the power brake", "SM clock",
    ),
    "gpu_clock": ("SM clock",),
    "gpu_errors": ("XID errors", "Uncorrected ECC errors"),
    "pcie": ("PCIe replays",),
    "nvlink": ("NVLink errors",),
    "alloc_retries": ("Device memory reserved",),
}  # fmt: skip


def causes(contents: Contents) -> Element | None:
    found = [
        (index, verdict["rank"], diagnosis)
        for index, verdict in enumerate(contents["report"]["verdicts"])
        if (diagnosis := _diagnosis(verdict["evidence"])) is not None
    ]
    if not found:
        return None
    series = contents["telemetry"]
    return section("causes", "Causes", [_one(index, rank, diagnosis, series) for index, rank, diagnosis in found])


def _diagnosis(evidence: Any) -> Mapping[str, Any] | None:
    return evidence.get("diagnosis") if isinstance(evidence, dict) else None


def _one(index: int, rank: int | None, diagnosis: Mapping[str, Any], series: Sequence[Series]) -> Element:
    causes = diagnosis["causes"]
    title = tag("h3", f"Why rank {rank} is slow ", tag("a", "verdict", href=f"#verdict-{index + 1}"))
    parts: list[Child] = [title]
    if causes:
        parts.append(
            tag(
                "ol",
                [
                    tag(
                        "li",
                        tag("b", f"{each['text'][:1].upper()}{each['text'][1:]}"),
                        _explains(each),
                        f" Next: {each['action']}",
                    )
                    for each in causes
                ],
            )
        )
    else:
        parts.append(tag("p", "No cause was found in what was measured."))
    looked, missing = diagnosis["looked_at"], diagnosis["not_measured"]
    parts.append(
        tag("p", f"Looked at: {', '.join(looked) or 'nothing'}. Not measured: {', '.join(missing) or 'nothing'}.")
    )
    signals, others = diagnosis["signals"], diagnosis["others_signals"]
    if signals:
        rows = [
            [key.replace("_", " "), f"{value:.4g}", f"{others[key]:.4g}" if key in others else "not measured"]
            for key, value in signals.items()
        ]
        caption = f"What was measured of rank {rank} while it is slow, and the median of the other ranks"
        parts.append(details("The evidence", table(caption, ["signal", f"rank {rank}", "others"], rows)))
    for quantity in dict.fromkeys(title for each in causes for title in _OVER_TIME.get(each["kind"], ())):
        of = [each for each in series if each["title"] == quantity]
        if of:
            named = [rank] if rank is not None else []
            parts += [series_chart(quantity, of), details("As a table", series_table(quantity, of, named))]
    return tag("div", parts)


def _explains(cause: Mapping[str, Any]) -> str:
    share = cause["explains"]
    return "." if share is None else f": explains {percent(share)} of what the rank loses."
