"""Draw sentences and names at random, for readers who have not seen the project.

usage: python scripts/sample_sentences.py [SEED]

Prints 40 sentences of docstrings and comments, 30 of docs, 30 that users see, 50 names of tests and
50 names of classes and functions, each with the place that it comes from.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Strings of these places are mostly sentences for users.
SHOWN = (
    "torchlens_perf/verdicts/words", "torchlens_perf/view", "torchlens_perf/top", "torchlens_perf/serve",
    "torchlens_perf/page", "torchlens_perf/commands", "torchlens_perf/report", "torchlens_perf/config.py",
    "torchlens_perf/errors.py", "torchlens_perf/watching.py", "torchlens_perf/torchrun.py",
)  # fmt: skip
MIN_WORDS = 5
Found = list[tuple[str, str]]


def main() -> int:
    generator = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    code = [name for name in names if name.endswith(".py") and not name.startswith("tests/zoo/")]
    docs = [name for name in names if name.endswith(".md")]
    kinds: list[tuple[str, int, Found]] = [
        ("code", 40, [each for name in code for each in explanations(name)]),
        ("docs", 30, [each for name in docs for each in prose(name)]),
        (
            "shown to users",
            30,
            [each for name in code if name.startswith(SHOWN) for each in messages(name)],
        ),
        (
            "tests",
            50,
            [
                each
                for name in code
                if name.startswith("tests/")
                for each in definitions(name, "test_")
            ],
        ),
        (
            "names",
            50,
            [
                each
                for name in code
                if name.startswith("torchlens_perf/")
                for each in definitions(name, "")
            ],
        ),
    ]
    for kind, count, found in kinds:
        print(f"## {kind}: {count} of {len(found)}\n")
        for place, text in generator.sample(found, count):
            print(f"- {text}  ({place})")
        print()
    return 0


def sentences(text: str, place: str) -> Iterator[tuple[str, str]]:
    """Split a text into sentences of at least MIN_WORDS words."""
    for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*] ", text):
        words = " ".join(sentence.split()).removeprefix("- ")
        if len(re.findall(r"[A-Za-z]{2,}", words)) >= MIN_WORDS:
            yield place, words


def scopes(name: str) -> Iterator[tuple[ast.AST, str]]:
    """Return modules, classes and functions of a file with their qualified names."""
    left: list[tuple[ast.AST, str]] = [(ast.parse((ROOT / name).read_text()), "")]
    while left:
        node, path = left.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            path = f"{path}.{node.name}".lstrip(".") if hasattr(node, "name") else path
            yield node, path
        left += [(child, path) for child in ast.iter_child_nodes(node)]


def explanations(name: str) -> Iterator[tuple[str, str]]:
    """Return sentences of docstrings and comments."""
    for node, path in scopes(name):
        text = ast.get_docstring(node)
        if text is not None:
            yield from sentences(text, f"{name}:{node.body[0].lineno} {path}")
    with (ROOT / name).open("rb") as file:
        comments = [
            token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT
        ]
    texts: dict[int, str] = {}  # By first line. A comment can continue on the next lines.
    first = 0
    for token in comments:
        line, text = token.start[0], token.string.lstrip("#: ")
        if first + texts.get(first, "").count("\n") + 1 != line:
            first = line
        texts[first] = f"{texts[first]}\n{text}" if first in texts else text
    for line, text in texts.items():
        yield from sentences(text, f"{name}:{line}")


def prose(name: str) -> Iterator[tuple[str, str]]:
    """Return sentences of a page without its code blocks, and its table rows with their headings."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    headings: list[str] = []
    for line in text.splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells:
            headings = []
        elif not headings:
            headings = cells
        elif len(re.findall(r"[A-Za-z]{2,}", line)) >= MIN_WORDS:
            pairs = zip(headings, cells, strict=False)
            yield name, " | ".join(f"{head}: {cell}".lstrip(": ") for head, cell in pairs)
    yield from sentences(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE), name)


def messages(name: str) -> Iterator[tuple[str, str]]:
    """Return strings in code that read as sentences; `{}` stands for a value."""
    tree = ast.parse((ROOT / name).read_text())
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield from sentences("".join(map(str, parts)), f"{name}:{node.lineno}")
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield from sentences(node.value, f"{name}:{node.lineno}")


def definitions(name: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Return qualified names of classes and functions whose names begin with a prefix."""
    for node, path in scopes(name):
        own = path.rpartition(".")[2]
        if own and own.startswith(prefix) and not own.startswith("__"):
            yield f"{name}:{node.lineno}", f"`{path}`"


if __name__ == "__main__":
    sys.exit(main())
