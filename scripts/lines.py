"""Print the lines of each package and its budget (`make lines`).

Fail if a package exceeds its limit.

The budget is the goal for a package. The limit is the current size and only goes down. A commit
whose feature needs more lines raises the limit of its package and gives the reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "torchlens_perf"
SUFFIXES = {".py", ".pyi", ".js", ".css", ".c", ".h", ".cpp", ".cu", ".cuh"}
# Package, its folders and files, budget, limit. A file counts for the first entry that contains it.
PACKAGES: tuple[tuple[str, tuple[str, ...], int, int], ...] = (
    ("native, kernels", ("native", "cuda/*.cu", "cuda/*.h"), 4300, 7512),
    (
        "training side",
        ("hooks", "recorder", "cuda", "results", "integrations", "instrumentation", "startup"),
        8900,
        15801,
    ),
    ("store", ("store",), 1600, 1045),
    ("run", ("run",), 3000, 6311),
    (
        "verdicts",
        (
            "verdicts", "verdicts/stragglers", "verdicts/causes", "verdicts/words", "verdicts/verdict_periods.py",
            "verdicts/judged_windows.py", "report/waited_for.py", "report/step_classes.py",
        ),
        4100,
        11147,
    ),
    ("analysis", ("analysis",), 3300, 6434),
    ("exporters", ("exporters",), 2600, 5881),
    ("view", ("report", "view", "page", "top"), 6000, 13845),
    ("compare, queries", ("compare", "timeline", "query"), 2500, 2766),
    ("diagnosis", ("diagnosis",), 2500, 3057),
    ("serve", ("serve",), 1300, 2572),
    ("sidecar", ("sidecar",), 5400, 10949),
    ("simulate, commands", ("simulate", "commands"), 2200, 5235),
    ("entry points", (".",), 1000, 2164),
)  # fmt: skip


def main() -> int:
    """Print the table. Return 1 if a package is above its limit."""
    left = {
        file
        for file in PACKAGE.rglob("*")
        if file.suffix in SUFFIXES and "__pycache__" not in file.parts
    }
    above, sums = [], [0, 0, 0]
    print(f"{'package':20} {'lines':>7} {'budget':>7} {'limit':>7}")
    for name, places, budget, limit in PACKAGES:
        ours = {file for file in left if any(_is_in(file, place) for place in places)}
        left -= ours
        lines = sum(len(file.read_bytes().splitlines()) for file in ours)
        sums = [total + each for total, each in zip(sums, (lines, budget, limit), strict=True)]
        if lines > limit:
            above.append(f"{name} has {lines} lines, {lines - limit} more than its limit")
        print(
            f"{name:20} {lines:7,} {budget:7,}"
            f" {limit:7,}{'  above its limit' if lines > limit else ''}"
        )
    print(f"{'sum':20} {sums[0]:7,} {sums[1]:7,} {sums[2]:7,}")
    for each in above:
        print(
            f"{each}: delete as many, or raise the limit in scripts/lines.py and say why.",
            file=sys.stderr,
        )
    return int(bool(above) or bool(left))


def _is_in(file: Path, place: str) -> bool:
    relative = file.relative_to(PACKAGE)
    if "*" in place:
        return relative.match(place)
    return place == "." or relative == Path(place) or Path(place) in relative.parents


if __name__ == "__main__":
    sys.exit(main())
