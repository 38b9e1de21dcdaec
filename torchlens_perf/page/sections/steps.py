"""Step times: how they are spread, how they went, and which steps take longer for what reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import duration, duration_or_dash, percent
from torchlens_perf.page.decoded import Steps
from torchlens_perf.page.pictures.heat import flag_legend
from torchlens_perf.page.pictures.phases import WORDS
from torchlens_perf.page.pictures.step_times import MAX_COLUMNS, step_times_picture
from torchlens_perf.page.sections.section import figure, of_picture, section
from torchlens_perf.page.sections.section import old_table as table
from torchlens_perf.view.markup import Child, Element, tag

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, StepBands
    from torchlens_perf.verdicts.words.evidence import LongSteps
    from torchlens_perf.verdicts.words.report import Report

_QUANTILES = (("p50", "p50_s"), ("p95", "p95_s"), ("p99", "p99_s"), ("longest", "max_s"), ("mean", "mean_s"))


def steps(contents: Contents) -> Element | None:
    report, matrices = contents["report"], contents["steps"]
    if matrices is None:
        return None
    words = _words(report)
    merged = Steps(matrices, MAX_COLUMNS)
    bands = merged_bands(matrices["bands"], merged.together)
    picture = step_times_picture(merged.columns, bands, matrices["slow"], words)
    of = f"each {merged.columns['width']} steps" if merged.columns["width"] > 1 else "each step"
    how = (
        f"Line: median over all ranks of {of}; band: from the 5th to the 95th percentile; thin line: the longest; "
        "triangles: longer than there is room for. By the hosts' clocks, with the warm-up."
    )
    if letters := flag_legend(merged.columns):
        how += f" Below: {letters}."
    caption: Child = [tag("strong", words), " ", of_picture(how)]
    return section("steps", "Step time", figure("steps", picture, caption), _quantiles(report), _step_classes(report))


def merged_bands(bands: StepBands, together: int) -> StepBands:
    """Of so many columns each: medians of quantiles, the longest of the longest."""
    if together == 1:
        return bands

    def merged(name: str) -> list[float | None]:
        values = np.array([np.nan if each is None else each for each in bands[name]])  # type: ignore[literal-required]
        groups = np.pad(values, (0, -len(values) % together), constant_values=np.nan).reshape(-1, together)
        known = np.isfinite(groups).any(axis=1)
        found = np.full(len(groups), np.nan)
        found[known] = (np.nanmax if name == "max_s" else np.nanmedian)(groups[known], axis=1)
        return [None if each != each else each for each in found.tolist()]

    return {"p5_s": merged("p5_s"), "p50_s": merged("p50_s"), "p95_s": merged("p95_s"), "max_s": merged("max_s")}


def _words(report: Report) -> str:
    found = report["steps"]
    unit = "forward passes" if found["inference"] else "steps"
    if found["p50_s"] is None:
        return f"{found['count']} {unit}, all of them warm-up."
    text = f"{found['count']} {unit}; without the warm-up, half of them take at most {duration(found['p50_s'])}"
    if found["p95_s"] is not None and found["max_s"] is not None:
        text += f", 95 % at most {duration(found['p95_s'])}, and the longest {duration(found['max_s'])}"
    trend = found["trend"]
    if trend is not None:
        change = trend["change"]
        word = "steady" if abs(change) < 0.03 else "slower" if change > 0 else "faster"
        text += f"; {word} over the run ({change:+.1%} from the first to the last third)"
    return f"{text}."


def _quantiles(report: Report) -> Element:
    found = report["steps"]
    clock = "the devices' clocks" if found["by"] == "device" else "the hosts' clocks"
    caption = f"Durations of steps of all ranks, without the warm-up, by {clock}"
    headers: list[Child] = ["steps", *(label for label, _ in _QUANTILES), "longest of the warm-up"]
    cells = [duration_or_dash(found[key]) for _, key in _QUANTILES]  # type: ignore[literal-required]
    return table(caption, headers, [[str(found["count"]), *cells, duration_or_dash(found["warm_up_max_s"])]], texts=())


def _step_classes(report: Report) -> Element | None:
    steps = report["steps"]
    found = [*steps["long"], *steps["short"]]
    if not found or steps["alike_mean_s"] is None:
        return None
    total = steps["alike"] + sum(each["count"] for each in found)
    time_share = steps["alike"] * steps["alike_mean_s"] / steps["total_s"]
    rows = [["typical", str(steps["alike"]), "-", duration(steps["alike_mean_s"]), "-", "-", percent(time_share), "-"]]
    rows += [
        [
            ", ".join(each["kinds"]) or _unknown(each),
            str(each["count"]),
            f"every {each['period']}" if each["period"] is not None else "-",
            duration(each["mean_s"]),
            f"{'+' if each['more_s'] > 0 else '-'}{duration(abs(each['more_s']))}",
            WORDS.get(each["part"], each["part"]),
            percent(each["count"] * each["mean_s"] / steps["total_s"]),
            ", ".join(map(str, each["steps"][:6])) + (", …" if len(each["steps"]) > 6 else ""),
        ]
        for each in found
    ]
    headers = [
        "what they do",
        "steps",
        "period",
        "mean",
        "more than typical",
        "in",
        "share of all time",
        "step numbers",
    ]
    caption = (
        f"Classes of steps: {total} steps of a rank after {steps['warm_up']} of warm-up, the mean over the ranks; step "
        "numbers are those of any rank"
    )
    return table(caption, headers, rows, texts=(0, 5, 7))


def _unknown(long: LongSteps) -> str:
    """What is known of long steps that do nothing else."""
    rank = long["waited_for"]
    return "not known what" if rank is None else f"all waited for rank {rank}"
