"""One step of several ranks on one line of time: phases, modules, collectives with who waited for whom. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.semantics import parse
from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.page.pictures.frame import WIDTH, Frame, rect, svg, ticks, x_axis
from torchlens_perf.page.pictures.phases import part_legend
from torchlens_perf.run.records import PARTS
from torchlens_perf.view.markup import Child, Element, tag

if TYPE_CHECKING:
    from torchlens_perf.page.contents import RankTrace, SpanRow, StepTraceRow

_LEFT, _TOP, _ROW, _GAP = 108.0, 6.0, 13.0, 7.0
_MAX_DEPTH = {"host": 4, "device": 3}  # rows of a lane; deeper spans are in the page's data
_OTHER_DEPTH = 2
_MIN_LABEL = 46.0  # units of width from which on a span has its name in it
_LETTER = 6.2
_PARTS = {"wait": "communication", "closure": "host"}
_WORDS = {"module": "module", "module_backward": "module, backward", "section": "section", "collective": "collective"}
_DARK = ("backward", "host")
_KINDS = ("data", "forward", "recompute", "backward", "optimizer", "wait", "closure")


def time_line(step: StepTraceRow, names: Sequence[str], marked: Collection[int], description: str) -> Element:
    """The step's ranks below one another. marked: ranks that stand out. description: what is to be seen, in words."""
    ends = [(each["offset_us"] or 0.0) + each["duration_us"] for each in step["ranks"]]
    frame = Frame(_LEFT, _TOP, WIDTH - _LEFT - 12, 0.0, 0.0, max(ends))
    y, marks = frame.top, list[Child]()
    for trace in step["ranks"]:
        drawn, height = _rank(trace, names, _waits(step, trace, names), frame, y)
        look = "marked" if trace["rank"] in marked else None
        label = f"rank {trace['rank']}" + ("" if trace["offset_us"] is not None else " *")
        marks.append(tag("text", label, x=frame.left - 7, y=y + 11, text_anchor="end", class_=look))
        marks += drawn
        y += height + _GAP
        marks.append(tag("path", d=f"M0 {y - _GAP / 2:.1f}H{WIDTH:.0f}", class_="grid"))
    axis = Frame(frame.left, frame.top, frame.width, y - frame.top, 0.0, frame.x1)
    marks.append(x_axis(axis, ticks(0, frame.x1), lambda us: duration(us / 1e6), "since the first rank began the step"))
    title = f"Step {step['step']} of {len(step['ranks'])} ranks"
    return svg(WIDTH, axis.bottom + 40, f"step-{step['step']}-picture", title, description, marks)


def _waits(step: StepTraceRow, trace: RankTrace, names: Sequence[str]) -> dict[tuple[str, float], float]:
    """By name and start of a rank's blocking collectives, how long it waited in each for the last to come.

    Of an operation on a group, the rank's spans and the joined ones are in the same order; where there are not as many,
    it is not known which is which.
    """
    joined: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for each in step["collectives"]:
        wait_us = each["wait_us"].get(str(trace["rank"]))
        if wait_us is not None and not each["asynchronous"]:
            joined[each["name"], each["group_name"]].append((each["number"], wait_us))
    spans: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for row in trace["rows"]:
        for kind, index, start_us in zip(row["kind"], row["name"], row["start_us"], strict=True):
            operation = parse(names[index]) if kind == "collective" else None
            if operation is not None:
                key = f"{operation.operation} {operation.dtype}".strip(), operation.group
                spans[key].append((start_us, names[index]))
    return {
        (name, start_us): wait_us
        for key, found in spans.items()
        if len(found) == len(joined[key])
        for (start_us, name), (_, wait_us) in zip(sorted(found), sorted(joined[key]), strict=True)
    }


def _rank(
    trace: RankTrace, names: Sequence[str], waits: Mapping[tuple[str, float], float], frame: Frame, top: float
) -> tuple[list[Child], float]:
    """The rank's spans, and how high they are."""
    offset_us, y, marks = trace["offset_us"] or 0.0, top, list[Child]()
    begin, end = frame.x(offset_us), frame.x(offset_us + trace["duration_us"])
    for row in trace["rows"]:
        rows = _MAX_DEPTH.get(row["lane"], _OTHER_DEPTH)
        deepest = min(max(row["depth"], default=0), rows - 1)
        if row["lane"] == "host":
            marks.append(rect(begin, y, end - begin, _ROW * (deepest + 1), "step-ground"))
        elif row["lane"] != "collectives":
            marks.append(tag("text", row["lane"], x=frame.left - 7, y=y + 10, text_anchor="end", class_="lane"))
        marks += _spans(row, names, waits, frame, offset_us, y, rows)
        y += _ROW * (deepest + 1)
    return marks, y - top


def _spans(
    row: SpanRow,
    names: Sequence[str],
    waits: Mapping[tuple[str, float], float],
    frame: Frame,
    offset_us: float,
    top: float,
    rows: int,
) -> list[Child]:
    marks: list[Child] = []
    columns = zip(row["kind"], row["name"], row["start_us"], row["duration_us"], row["depth"], strict=True)
    for kind, name, start_us, duration_us, depth in columns:
        if depth >= rows:
            continue
        x = frame.x(offset_us + start_us)
        width = frame.width * duration_us / frame.x1
        if width < 0.25 and kind not in _KINDS:
            continue
        y = top + depth * _ROW
        what = "wait" if kind == "wait" else names[name]
        words = f"{kind}: {what}, {duration(duration_us / 1e6)}"
        wait_us = waits.get((names[name], start_us)) if kind == "collective" else None
        if wait_us is not None:
            words += f", of it waited for the last rank: {duration(wait_us / 1e6)}"
            waiting = frame.width * min(wait_us, duration_us) / frame.x1
            marks.append(rect(x, y + 0.5, waiting, _ROW - 1, "span waiting", words))
            marks.append(rect(x + waiting, y + 0.5, width - waiting, _ROW - 1, f"span {look(kind)}", words))
        else:
            marks.append(rect(x, y + 0.5, width, _ROW - 1, f"span {look(kind)}", words))
        if width >= _MIN_LABEL:
            letters = int((width - 6) / _LETTER)
            text = what.partition(" group=")[0] if kind == "collective" else what
            text = text if len(text) <= letters else f"{text[: letters - 1]}…"
            ground = " on-dark" if kind in _DARK else " on-wait" if kind == "wait" else ""
            marks.append(tag("text", text, x=x + 3, y=y + 10, class_=f"in-span{ground}"))
    return marks


def legend(step: StepTraceRow) -> Element:
    """Colours of what is in the picture."""
    kinds = {kind for trace in step["ranks"] for row in trace["rows"] for kind in row["kind"]}
    parts = [part for part in PARTS if any(_PARTS.get(kind, kind) == part for kind in kinds)]
    spans = {kind: words for kind, words in _WORDS.items() if kind in kinds}
    if any(not each["asynchronous"] for each in step["collectives"]):
        spans["waiting"] = "collective, waiting for the last rank"
    return part_legend(parts, spans)


def look(kind: str) -> str:
    """The CSS classes of a kind of span."""
    return f"part {_PARTS.get(kind, kind)}" if kind in _KINDS else kind.replace(" ", "-")
