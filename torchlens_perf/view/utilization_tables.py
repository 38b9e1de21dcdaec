"""Tables of rates, utilization and the roofline of modules. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_percent, format_rounded
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.verdicts.words.report_utilization import Utilization
from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table, Value, columns_if

_FIRST_ROWS = 8


def format_flops(count: float, unit: str = "FLOP") -> str:
    """Format a number of operations, or operations per second, with a decimal prefix."""
    for prefix in ("", "K", "M", "G", "T", "P", "E"):
        if count < 1000 or prefix == "E":
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    raise AssertionError


def _flops(count: float | None, unit: str = "FLOP") -> str:
    return NOT_MEASURED if count is None else format_flops(count, unit)


def build_utilization_table(report: Report) -> Table | None:
    """Return rates, FLOPs and utilization of the job and of each rank."""
    job, step_s = report["utilization"], report["utilization"].step_s
    rates = job.tokens_per_s, job.samples_per_s
    if job.model_flops is None and rates == (None, None):
        return None
    rows = job.ranks if len(job.ranks) > 1 else []
    rate = job.model_flops / step_s if job.model_flops and step_s else None

    def values(of_job: Value, of_ranks: list[Value]) -> list[Value]:
        return [of_job, *(of_ranks if rows else [])]

    columns = [
        Column("of", values("job", [f"rank {each.rank}" for each in rows]), Quantity.TEXT),
        *columns_if(
            job.tokens_per_s is not None,
            Column("tokens/s", values(job.tokens_per_s, [each.tokens_per_s for each in rows]),
                   Quantity.NUMBER),
        ),
        *columns_if(
            job.samples_per_s is not None,
            Column("samples/s", values(job.samples_per_s, [None for _ in rows]), Quantity.NUMBER,
                   0.6),
        ),
        Column("FLOPs/step", values(_flops(job.model_flops), [_flops(each.model_flops) for each in rows]),
               Quantity.TEXT, help="Forward and backward pass, without recomputation."),
        Column("FLOP/s", values(_flops(rate, "FLOP/s"), [None for _ in rows]), Quantity.TEXT, 0.5),
        *columns_if(
            any(each.mfu is not None for each in job.ranks),
            Column("MFU", values(_or_unknown(job.mfu), [_or_unknown(each.mfu) for each in rows]),
                   Quantity.SHARE,
                   help="Share of the step that the model's operations would take at the peak."),
            Column("HFU", values(_or_unknown(job.hfu), [_or_unknown(each.hfu) for each in rows]),
                   Quantity.SHARE,
                   help="As MFU, with recomputation and the optimizer's products."),
        ),
        Column("covered", values(job.counted_share, [each.counted_share for each in rows]),
               Quantity.SHARE, 0.3,
               help="Share of the operators' host time in operators with a formula."),
    ]  # fmt: skip
    return Table(
        "utilization",
        "Utilization",
        columns,
        first=_FIRST_ROWS,
        note=_note(job),
        noun="row",
        ranged="MFU",
    )


def _or_unknown(share: float | None) -> Value:
    return NOT_MEASURED if share is None else share


def _note(job: Utilization) -> str:
    if job.not_measured:
        return f"FLOPs are not measured: {job.not_measured}."
    text = ""
    if job.causal_attention_flops and job.mfu_causal_half is not None:
        text = f"With half of the causal attention, MFU is {format_percent(job.mfu_causal_half)}. "
    if job.peak_flops_per_s is not None:
        text += f"Peak: {format_flops(job.peak_flops_per_s, 'FLOP/s')}, {job.peak_source}."
    else:
        precisions = ", ".join(job.precisions)
        text += f"MFU is not measured: no peak is known for {precisions} on this device."
    names = [f"{each.operator} ({format_percent(each.share)})" for each in job.uncounted[:3]]
    uncounted = (
        "Of the time of all operators, the largest shares without counted FLOPs are"
        f" {', '.join(names)}."
    )
    return f"{text} {uncounted}" if names else text


def build_roofline_table(report: Report) -> Table | None:
    """Return the modules with the most FLOPs, and what limits them."""
    rows = report["utilization"].modules
    if not rows:
        return None
    columns = [
        Column("module", [each.name or "(outside of modules)" for each in rows], Quantity.TEXT),
        Column("FLOPs/step", [format_flops(each.flops) for each in rows], Quantity.TEXT),
        Column("share of FLOPs", [each.share for each in rows], Quantity.SHARE),
        Column("FLOP/byte", [
            None if each.flops_per_byte is None else format_rounded(each.flops_per_byte) for each in rows
        ], Quantity.TEXT, 0.5,
               help="FLOPs per byte of operands and results in the forward pass."),
        *columns_if(
            any(each.roofline_flops_per_s or each.forward_flops_per_s for each in rows),
            Column("forward", [_flops(each.forward_flops_per_s, "FLOP/s") for each in rows],
                   Quantity.TEXT,
                   help="FLOPs of the forward pass over the module's own time."),
            Column("of limit", [_or_unknown(each.roofline_share) for each in rows], Quantity.SHARE,
                   0.2, help="Share of what the device's peak and memory allow."),
            Column("limited by", [each.bound for each in rows], Quantity.TEXT, 0.4),
        ),
    ]  # fmt: skip
    rank = report["utilization"].ranks[0].rank
    return Table(
        "roofline",
        f"Modules by FLOPs, rank {rank}",
        columns,
        first=_FIRST_ROWS,
        noun="module",
        ranged="share",
    )
