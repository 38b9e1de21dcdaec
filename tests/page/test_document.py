"""The page as a file: nothing from outside is markup, nothing is fetched, all is readable without scripts."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any, cast

import pytest

from tests.page.conftest import SLOW_RANK
from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.page.contents import Contents
from torchlens_perf.page.document.html import document
from torchlens_perf.page.document.scripts import static
from torchlens_perf.page.sections.every import SECTIONS

HOSTILE = "</script><img src=x onerror=alert(1)> <b>\x1b[31m\u202egnp\u2066\u2028 'q' \"dq\" &amp; ]]> --> \ud800"
VOID = {"meta", "br", "link", "input", "img", "hr"}


class Parsed(HTMLParser):
    """A page's elements with their attributes, its text, and what was not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all_text(self) -> str:
        shown = {tag: texts for tag, texts in self.text.items() if tag not in ("script", "style")}
        return " ".join(text for texts in shown.values() for text in texts)


@pytest.fixture(scope="module")
def text(shown: Contents) -> str:
    return document(shown)


@pytest.fixture(scope="module")
def page(text: str) -> Parsed:
    return Parsed(text)


def test_it_is_whole(page: Parsed) -> None:
    """Every element is closed, and ids are unique."""
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]

    assert page.open == []
    assert len(set(ids)) == len(ids)


def test_every_section_is_there_without_scripts(page: Parsed, shown: Contents) -> None:
    """Those that have something to show have a fragment, a heading and a link to it; pictures have words."""
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    expected = [key for key, _, section in SECTIONS if section(shown) is not None]

    assert sections == expected
    assert {"verdicts", "ranks", "steps", "heat", "phases", "step", "modules", "collectives", "quality"} <= set(
        expected
    )
    assert {f"#{key}" for key in expected} <= set(links)
    labelled = {
        attributes["id"] for tag, attributes in page.elements if tag in ("title", "desc") and "id" in attributes
    }
    for tag, attributes in page.elements:
        if tag == "svg" and attributes.get("aria-hidden") != "true":
            assert attributes["role"] == "img"
            assert set((attributes["aria-labelledby"] or "").split()) <= labelled


def test_charts_have_their_places(page: Parsed) -> None:
    """Each figure that scripts replace has a picture in it meanwhile."""
    charts = [
        attributes["data-chart"] for tag, attributes in page.elements if tag == "figure" and "data-chart" in attributes
    ]

    assert charts == ["steps", "heat", "phases", "step", "modules", "collectives"]


def test_it_says_what_the_report_says(page: Parsed, shown: Contents) -> None:
    """The verdicts' sentences, word for word, and the table of ranks, the named one first."""
    words = " ".join(page.all_text().split())
    finding, _, action = shown["report"]["verdicts"][0]["text"].partition(" Next: ")

    assert finding in words
    assert action in words
    rows = re.findall(r"<tr[^>]*><th scope=\"row\">(\d+)</th>", document(shown).partition('id="ranks"')[2])
    assert int(rows[0]) == SLOW_RANK
    own_s = next(rank["typical"] for rank in shown["report"]["ranks"] if rank["rank"] == SLOW_RANK)
    assert own_s is not None
    assert duration(own_s["s"]) in words


def test_nothing_is_fetched(page: Parsed, text: str) -> None:
    """No attribute leads out of the page, no style has a URL, and the policy forbids all of it."""
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("href", "src", "action", "data", "poster", "srcset", "xlink:href", "ping", "background"):
                assert (value or "").startswith(("#", "data:image/png;base64,")), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
    styles = "".join(page.text["style"])
    assert "url(" not in styles
    assert "@import" not in styles
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}


def test_policy(text: str) -> None:
    """Nothing is allowed but what is in the page, by its hash: no scripts by others, no network."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy[1].split(";"))

    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert "connect-src" not in rules
    for executable in re.findall(r"<script>(.*?)</script>", text, re.S):
        digest = base64.b64encode(hashlib.sha256(executable.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in rules["script-src"]
    assert "unsafe" not in rules["script-src"]


def test_data_are_inert_json(text: str, shown: Contents) -> None:
    """The contents are in the page as JSON that is no markup, and come back as they were."""
    found = re.search(r'<script type="application/json" id="contents">(.*?)</script>', text, re.S)
    assert found is not None

    assert not re.search(r"[<>&\u2028\u2029]", found[1])
    assert found[1].isascii()
    assert json.loads(found[1]) == json.loads(json.dumps(shown))


def hostile(value: Any, key: str = "") -> Any:
    """The same with all texts from outside replaced: names, hosts, notes, sentences."""
    if isinstance(value, dict):
        return {each: hostile(inner, each) for each, inner in value.items()}
    if isinstance(value, list):
        return [hostile(each, key) for each in value]
    kept = {
        "codes", "kind", "lane", "unit", "started", "ended", "last_step_at", "written", "part", "state", "first_steps",
        "by", "judged_by", "flags", "scope", "class", "phase", "kinds", "not_measured", "ranks", "ranks_seen",
        "operation",
    }  # fmt: skip
    return value if not isinstance(value, str) or key in kept else HOSTILE


def test_hostile_texts_are_text(shown: Contents) -> None:
    """Whatever names and sentences hold, there are the same elements as without, and nothing drives a terminal or
    turns letters round."""
    expected = [tag for tag, _ in Parsed(document(shown)).elements]
    attacked = hostile(copy.deepcopy(shown))
    text = document(cast("Contents", attacked))
    found = Parsed(text)

    assert [tag for tag, _ in found.elements if tag == "img"] == []
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert {tag for tag, _ in found.elements} <= set(expected) | {"pre"}
    assert found.open == []
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u2028]", text)
    assert "onerror=alert(1)" in found.all_text()  # it is shown, as text
    text.encode("utf-8")


def test_long_names_are_short_with_the_whole_in_a_title(shown: Contents) -> None:
    """A module's name of ten thousand characters does not fill the page."""
    changed = copy.deepcopy(shown)
    changed["report"]["modules"][0]["name"] = "layer." * 1700
    page = Parsed(document(changed))
    titles = [attributes["title"] for tag, attributes in page.elements if tag == "span" and "title" in attributes]

    assert any((title or "").startswith("layer.layer.") for title in titles)
    assert max(len(each) for each in page.text["span"]) < 100
    assert max(len(title or "") for title in titles) <= 2001


def test_a_run_without_steps(shown: Contents) -> None:
    """What is not there has no section, and is not shown as zero."""
    empty = copy.deepcopy(shown)
    empty["steps"], empty["traces"], empty["telemetry"] = None, {"names": [], "steps": []}, []
    report = empty["report"]
    report["ranks"], report["modules"], report["collectives"], report["links"] = [], [], [], []
    report["steps"] = {**report["steps"], "count": 0, "p50_s": None, "p95_s": None, "p99_s": None, "max_s": None}
    page = Parsed(document(empty))

    assert [attributes["id"] for tag, attributes in page.elements if tag == "section"] == [
        "verdicts",
        "causes",
        "quality",
    ]
    words = " ".join(page.all_text().split())
    assert "no step was recorded" in words
    assert "of steps whole" not in words


def test_cards_say_where_and_since_when(shown: Contents) -> None:
    """A verdict that held at once held from the first step; what is of the whole job says nothing of a rank's place."""
    placed = copy.deepcopy(shown)
    verdict, held = placed["report"]["verdicts"][0], placed["held"][0]
    assert held is not None
    verdict["where"] = {"host.name": "a", "torch.elastic.run_id": "x-1", "slurm.job.id": "77", "host.rack": "rack 12"}
    held["since_s"] = -0.001
    text = document(placed).partition('id="ranks"')[0]

    assert "<dt>held</dt><dd>from the first step, still</dd>" in text
    assert "<dt>host.rack</dt><dd>rack 12</dd>" in text
    assert "torch.elastic" not in text
    assert "slurm.job.id" not in text


def test_styles_hide_nothing_that_is_read() -> None:
    """On screens, only what a chart has replaced; on paper, what has no use there. Braces are balanced."""
    style = re.sub(r"/\*.*?\*/", "", static("page.css"), flags=re.S)
    screen, _, paper = style.partition("@media print")
    hidden = {
        where: {
            selector.strip()
            for selectors in re.findall(r"([^{}]*)\{[^{}]*display: none", css)
            for selector in selectors.split(",")
        }
        for where, css in (("screen", screen), ("paper", paper))
    }

    assert style.count("{") == style.count("}") > 50
    assert hidden["screen"] == {"figure.drawn .of-picture"}
    assert hidden["paper"] == {"nav", ".skip", ".here"}
