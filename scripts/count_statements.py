"""Count the statements of each folder of the package, and hold them to their limits (`make lines`).

Docstrings and imports do not count, so that explaining costs nothing and packing gains nothing. C,
CUDA and JavaScript count by lines that are not blank. The limits are in `statements.json`:
`--lower` sets them to the present sizes. Their two sums only fall: a limit that rises, for a folder
to which code was moved, is paid for by another in the same commit.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchlens_perf"
LIMITS = ROOT / "scripts" / "statements.json"
UNITS = {".py": "Python", **dict.fromkeys((".c", ".h", ".cpp", ".cu", ".cuh", ".js"), "C and JS")}
GRANTS = {"roles": 1600, "experts": 100, "sidecar/hang_witness": 150, "check": 750, "actions": 500}
"""Limits of Python folders that are outside the sum that only falls, see
docs/internals/decisions/0063-a-grant-for-roles.md, 0064 and 0066 to 0068."""
SLACK = 100
"""A sum of limits may exceed the sum of the counts by this much, so that not every commit lowers it."""
Counts = dict[str, dict[str, int]]
"""Unit, folder, count."""


def main() -> int:
    """Print the table. Return 1 if a limit is exceeded, has risen or is too high."""
    counts = count_package()
    if sys.argv[1:] == ["--lower"]:
        LIMITS.write_text(json.dumps(_without_grants(counts), indent=1) + "\n")
    limits = json.loads(LIMITS.read_text())
    limits["Python"] |= GRANTS
    print("\n".join(_rows(counts, limits)))
    problems = [*find_excess(counts, limits), *find_raised(limits, list(earlier_limits()))]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return int(bool(problems))


def count_package() -> Counts:
    """Return the size of each folder. Files at the top are the entry points."""
    counts: dict[str, Counter[str]] = {unit: Counter() for unit in UNITS.values()}
    for file in sorted(PACKAGE.rglob("*")):
        place = file.relative_to(PACKAGE).parts
        if file.suffix in UNITS and not {"__pycache__", "vendor", "deploy"} & set(place):
            top = place[0] if len(place) > 1 else "entry points"
            inner = "/".join(place[:2])
            folder = inner if inner in GRANTS else top
            counts[UNITS[file.suffix]][folder] += count_file(file)
    return {unit: dict(found) for unit, found in counts.items()}


def count_file(file: Path) -> int:
    """Return the number of statements, or of lines that are not blank."""
    text = file.read_text()
    if file.suffix != ".py":
        return sum(bool(line.strip()) for line in text.splitlines())
    return sum(isinstance(node, ast.stmt) and _counts(node) for node in ast.walk(ast.parse(text)))


def _counts(node: ast.stmt) -> bool:
    is_docstring = (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return not is_docstring and not isinstance(node, (ast.Import, ast.ImportFrom))


def find_excess(counts: Counts, limits: Counts) -> Iterator[str]:
    """Yield a line for each folder above its limit, and for each sum of limits that is too high."""
    for unit, found in counts.items():
        for folder, count in found.items():
            if count > (limit := limits[unit].get(folder, 0)):
                yield f"{folder} has {count - limit} more than its limit ({unit}): delete as many."
        if sum_limits(limits[unit]) > sum_limits(found) + SLACK:
            yield f"the limits ({unit}) are too high: lower them by `{sys.argv[0]} --lower`."


def sum_limits(by_folder: dict[str, int]) -> int:
    """Return the sum over all folders without a grant."""
    return sum(count for folder, count in by_folder.items() if folder not in GRANTS)


def find_raised(limits: Counts, earlier: list[Counts]) -> Iterator[str]:
    """Yield a line for each sum of limits that is above its sum in an earlier commit."""
    for unit, found in limits.items():
        lowest = min((sum_limits(each[unit]) for each in earlier), default=sys.maxsize)
        if (raised := sum_limits(found) - lowest) > 0:
            yield f"the sum of the limits ({unit}) has risen by {raised}: it only falls."


def earlier_limits() -> Iterator[Counts]:
    """Yield the limits of the last 20 commits that changed them, if there is a history."""
    name = f"./{LIMITS.relative_to(ROOT)}"
    for commit in _git("log", "-20", "--format=%H", "--", name).split():
        if text := _git("show", f"{commit}:{name}"):
            yield json.loads(text)


def _without_grants(counts: Counts) -> Counts:
    return {
        unit: {folder: count for folder, count in found.items() if folder not in GRANTS}
        for unit, found in counts.items()
    }


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def _rows(counts: Counts, limits: Counts) -> Iterator[str]:
    for unit, found in counts.items():
        yield f"{unit:24} {'count':>7} {'limit':>7}"
        for folder, count in found.items():
            yield f"  {folder:22} {count:7,} {limits[unit].get(folder, 0):7,}"
        yield f"  {'sum':22} {sum_limits(found):7,} {sum_limits(limits[unit]):7,}"


if __name__ == "__main__":
    sys.exit(main())
