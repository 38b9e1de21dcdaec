"""Tests that links between pages have existing targets, and that every page can be reached from the
README.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.code_blocks import pages
from tests.support.processes import ROOT

_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the file and the heading of each link on a page. The heading may be empty."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in _LINK.findall(text) if "://" not in target]
    split = [target.partition("#") for target in targets]
    return [
        ((page.parent / path).resolve() if path else page, heading) for path, _, heading in split
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, formed by GitHub's rule."""
    headings = _HEADING.findall(
        re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", pages())
def test_every_link_in_the_docs_has_an_existing_target(page: str) -> None:
    found = links(ROOT / page)
    assert [str(path) for path, _ in found if not path.exists()] == []
    named = [(path, heading) for path, heading in found if heading]
    assert [
        f"{path.name}#{heading}" for path, heading in named if heading not in anchors(path)
    ] == []


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [path for path, _ in links(page) if path.suffix == ".md"]
    assert {path.name for path in (ROOT / "docs").rglob("*.md")} - {
        path.name for path in reached
    } == set()
