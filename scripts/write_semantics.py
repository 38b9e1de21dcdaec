"""Write docs/reference/telemetry.md from torchlens_perf/exporters/semantics.py.

    usage: python scripts/write_semantics.py

tests/exporters/test_semantics.py compares the page with what the exporters send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchlens_perf.exporters import NodeRole, semantics
from torchlens_perf.exporters.series_room import max_ranks_with_own_series

PAGE = Path(__file__).parents[1] / "docs/reference/telemetry.md"

HEAD = """# Metrics, spans and events

This page lists every name that is sent over OTLP. `scripts/write_semantics.py` generates it from
`torchlens_perf/exporters/semantics.py`. How to send a run: [opentelemetry.md](../guides/opentelemetry.md). Names that
exist only on `/metrics`: [prometheus.md](../guides/prometheus.md#metrics).

- Names that begin with `torch` are defined by this package. `nv.dl.*` and `slurm.job.*` are names of NeMo Lens. All
  others are OpenTelemetry's semantic conventions, except those with \\*.
- **Condition**: what a run must have for the name to be sent. Event attributes come with the events that have them.
- **Large job**: a job of more than {most_ranks} ranks with the default `export_limit`.
- A device is a GPU on which torch computes. GPU metrics appear as far as the GPU reports them.
"""


def page() -> str:
    """Return the text of the page."""
    names = [
        f"`{semantics.name_of_alert_event(kind, each)}`"
        for kind, changes in semantics.EVENTS.items()
        for each in changes
    ]
    ends = [name for name in names if name.endswith(".ended`")]
    hardware = [each for each in semantics.METRICS if each.name.startswith("hw.")]
    explained = [each for each in semantics.ATTRIBUTES if each.meaning]
    bounds = ", ".join(f"{bound:g}" for bound in semantics.DURATION_BOUNDS_S)
    parts = [
        HEAD.format(most_ranks=max_ranks_with_own_series(NodeRole().max_series)),
        "## Spans\n",
        _table(
            ("span", "parent", "meaning", "condition"),
            ((f"`{each.name}`", each.parent, each.meaning, each.when) for each in semantics.SPANS),
        ),
        (
            "Below the root, each rank has a span `rank N`: its step. Spans below that are named"
            " after their phase, module, section or collective.\n"
        ),
        "## Metrics\n",
        _metrics(each for each in semantics.METRICS if each not in hardware),
        (
            "In a large job, points have a rank only where it stands out. Bucket bounds of"
            f" explicit histograms, in seconds: {bounds}.\n"
        ),
        "### Hardware\n",
        (
            "Each point has `hw.id` and `hw.type`, and each point of a GPU also `hw.name`. A port"
            " is an InfiniBand or RoCE port.\n"
        ),
        _metrics(
            hardware,
            leave_out=(semantics.HARDWARE_ID, semantics.HARDWARE_TYPE, semantics.HARDWARE_NAME),
        ),
        "## Attributes\n",
        "Attributes without a type are strings.\n",
        _table(
            ("attribute", "on", "meaning (condition)"),
            (
                (_typed(a), a.on, _meaning(a.meaning, a.when))
                for a in explained
                if a.on != "resource"
            ),
        ),
        "### Resource\n",
        _table(
            ("attribute", "meaning"),
            ((_typed(a), a.meaning) for a in explained if a.on == "resource"),
        ),
        "The resource also has these strings, where they are known:\n",
        "\n".join(_unexplained()),
        "",
        "## Events\n",
        f"- WARN: {', '.join(name for name in names if name not in ends)}",
        f"- INFO: {', '.join(ends)}",
        "",
    ]
    return "\n".join(parts)


def _metrics(metrics: Iterable[semantics.Metric], leave_out: Sequence[str] = ()) -> str:
    return _table(
        ("metric", "type, unit", "attributes", "meaning (condition)"),
        (
            (
                _name(m),
                f"{m.instrument}, `{m.unit}`",
                ", ".join(f"`{name}`" for name in m.attributes if name not in leave_out),
                _meaning(m.meaning, m.when),
            )
            for m in metrics
        ),
    )


def _unexplained() -> Iterator[str]:
    """Lists the attributes whose names say it all, by what must be there."""
    rest = [each for each in semantics.ATTRIBUTES if not each.meaning]
    for when in dict.fromkeys(each.when for each in rest):
        yield f"- {when}: {', '.join(_name(each) for each in rest if each.when == when)}"


def _meaning(meaning: str, condition: str) -> str:
    return f"{meaning} ({condition})" if condition else meaning


def _typed(each: semantics.Attribute) -> str:
    return _name(each) + ("" if each.kind == "string" else f", {each.kind}")


def _name(each: semantics.Metric | semantics.Attribute) -> str:
    is_marked = each.source == semantics.OURS and not each.name.startswith("torch")
    return f"`{each.name}`" + (r"\*" if is_marked else "")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
