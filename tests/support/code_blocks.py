"""Code blocks of the README and docs/, and the shell commands in them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator

from tests.support.processes import ROOT

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?:    .*\n|\n(?=    ))+)")
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=.*")


@dataclasses.dataclass(frozen=True)
class Block:
    """One code block of a page."""

    page: str
    line: int
    language: str
    """Language after the fence, or "indented" for an indented block."""
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[Command]:
        """Return the lines of a shell block without comments."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                assigned = [word for word in words if _ASSIGNMENT.fullmatch(word)]
                count = next(
                    (i for i, word in enumerate(words) if word not in assigned), len(words)
                )
                yield Command(self, tuple(words[:count]), tuple(words[count:]))


@dataclasses.dataclass(frozen=True)
class Command:
    """One shell line: variables, and a program with its arguments."""

    block: Block
    variables: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join([*self.variables, *self.words])


def pages() -> list[str]:
    """Return the paths of the README and of all pages in docs/ below the repository's root."""
    return [
        "README.md",
        "CONTRIBUTING.md",
        *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
    ]


def blocks() -> list[Block]:
    """Return all code blocks in the order of pages and lines."""
    found = []
    for page in pages():
        text = (ROOT / page).read_text()
        for match in _FENCED.finditer(text):
            found.append(Block(page, _line(text, match.start()), match[1] or "plain", match[2]))
        # Lists also contain indented paragraphs, but in our docs they never start with four spaces
        # after a blank line.
        rest = _FENCED.sub(lambda match: re.sub(r"[^\n]", "", match[0]), text)
        for match in _INDENTED.finditer(rest):
            lines = [line[4:] for line in match[1].splitlines()]
            found.append(Block(page, _line(rest, match.start()), "indented", "\n".join(lines)))
    return found


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
