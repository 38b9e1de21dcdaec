"""Find texts that break the rules for plain language in CONTRIBUTING.md.

usage: python scripts/lint_language.py [FILE ...]
Lines `FILE: WORD` of scripts/language_exceptions.txt are exceptions.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = (ROOT / "scripts" / "language_exceptions.txt").read_text().splitlines()
FRAGMENT = re.compile(r"(Of|That|Those|Whose|As|By|To|What|Where|Who|Which|How|Whether|It)\b")
PHRASE = re.compile(
    r"\b(is none|are none|of none|no other one|"
    r"as without us|[Nn]obody|[Ss]omebody|[Ww]hoever|[Bb]esides?|beforehand)\b"
)


def main() -> int:
    tracked = subprocess.check_output(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, text=True)
    found = 0
    for name in sys.argv[1:] or tracked.split():
        for line, word, text in broken(name):
            if f"{name}: {word}" not in EXCEPTIONS:
                print(f"{name}:{line}: {word!r} in {' '.join(text.split())[:80]!r}")
                found += 1
    return bool(found)


def broken(name: str) -> Iterator[tuple[int, str, str]]:
    """Return (line, word, text) of each text that breaks a rule."""
    path = ROOT / name
    if path.suffix == ".md":
        texts = list(enumerate(path.read_text().splitlines(), 1))
    else:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        for node in nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if match := FRAGMENT.match(text):
                    yield node.body[0].lineno, match[1], text
        constants = [node for node in nodes if isinstance(node, ast.Constant)]
        texts = [(node.lineno, node.value) for node in constants if type(node.value) is str]
        with path.open("rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
        texts += [(each.start[0], each.string) for each in tokens if each.type == tokenize.COMMENT]
    for line, text in texts:
        if match := PHRASE.search(text):
            yield line, match[1], text


if __name__ == "__main__":
    sys.exit(main())
