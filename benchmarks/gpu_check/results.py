"""Results of the check as JSON, and as the table of docs/internals/gpu-check.md."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.lines import COLUMNS, FAIL, NOT_RUN, Line

_ROOT = Path(__file__).parent.parent.parent
DOCS_DATA = _ROOT / "benchmarks" / "gpu_check.json"
DOCS_PAGE = _ROOT / "docs" / "internals" / "gpu-check.md"
_ABOUT = (
    "Lines with a bar are PASS or FAIL, the others are figures. *not run* is no PASS. A newer table is",
    "written by `make gpu-check` and `python -m benchmarks.gpu_check --docs gpu-check.json`.",
)
HEAD = (f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS))


@dataclasses.dataclass
class Results:
    """Facts and lines of one run of the check, complete or not."""

    date: str
    facts: dict[str, str]
    """The machine's hardware and software, by name."""
    lines: list[Line] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each part that has ended."""
    left: list[str] = dataclasses.field(default_factory=list)
    """Parts that were not completed because the time was over."""
    to_come: list[str] = dataclasses.field(default_factory=list)
    """Parts that have not ended, including running ones: the file of a killed run names them."""

    @property
    def failed(self) -> int:
        """Number of missed bars."""
        return sum(line.result == FAIL for line in self.lines)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read results. Raises OSError or ValueError."""
        found: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**found, "lines": [Line(*line) for line in found["lines"]]})

    def save(self, path: Path) -> None:
        """Replace the file in one step, so a kill leaves the old or the new one."""
        write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def summary(self) -> str:
        """Return the numbers of missed bars and of parts that were not run."""
        bars = sum(bool(line.bar) for line in self.lines)
        words = f"{self.failed} FAIL of {bars} lines with a bar"
        missing = sum(line.result == NOT_RUN for line in self.lines)
        if missing:
            words += f"; {missing} not run"
        if self.left:
            words += f"; left for lack of time: {', '.join(self.left)}"
        if self.to_come:
            words += f"; not ended: {', '.join(self.to_come)}"
        return words + "."

    def markdown(self) -> str:
        """Return the page. Lines of one part stand together, though parts run side by side."""
        facts = [f"- {name}: {value}" for name, value in {"date": self.date, **self.facts}.items()]
        took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        order = {
            name: index for index, name in enumerate(dict.fromkeys(x.part for x in self.lines))
        }
        lines = sorted(self.lines, key=lambda line: order[line.part])
        rows = [line.markdown() for line in lines if line.result != NOT_RUN]
        took = [f"Seconds of each part: {took}."] if took else []
        page = [
            "# What `make gpu-check` found",
            "",
            *_ABOUT,
            "",
            *facts,
            "",
            self.summary(),
            "",
            *HEAD,
            *rows,
            *_list_missing(lines),
        ]
        return "\n".join([*page, *(["", *took] if took else []), ""])


def _list_missing(lines: list[Line]) -> list[str]:
    """Return a paragraph with the lines that were not run, by their reason."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if line.result == NOT_RUN:
            reasons.setdefault(line.value, []).append(f"{line.part} ({line.what})")
    named = [f"- Not run ({reason}): {', '.join(each)}" for reason, each in reasons.items()]
    return ["", *named] if named else []


def write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def write_docs(results: Results) -> None:
    """Make results those of the documentation."""
    results.save(DOCS_DATA)
    write(DOCS_PAGE, results.markdown())
