"""The HTML of the page has no outside text as markup, and needs no request and no script."""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any, cast

import pytest
from msgspec import structs

from tests.page.conftest import SLOW_RANK, recorded
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.document.html import build_document, contents_as_json
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.page.sections.every import SECTIONS
from torchlens_perf.page.sections.overview import _state_text
from torchlens_perf.simulate.simulation import Topology
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.specs import Table
from torchlens_perf.view.tables import build_tables
from torchlens_perf.view.theme import PARTS

HOSTILE = (
    "</script><img src=x onerror=alert(1)> <b>\x1b[31m\u202egnp\u2066\u2028 'q' \"dq\" &amp; ]]>"
    " --> \ud800"
)
VOID = {"meta", "br", "link", "input", "img", "hr"}


class Parsed(HTMLParser):
    """A page's elements with attributes, its text, and unclosed elements."""

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


def element_text(text: str) -> str:
    """Return the page's text in document order."""
    found: list[str] = []

    class Words(HTMLParser):
        def handle_data(self, data: str) -> None:
            found.append(data)

    Words().feed(re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S))
    return " ".join(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> PageContents:
    return gather_contents(
        recorded(tmp_path_factory.mktemp("alone"), steps=60, topology=Topology(1, 1))
    )


@pytest.fixture(scope="module")
def text(shown: PageContents) -> str:
    return build_document(shown)


@pytest.fixture(scope="module")
def page(text: str) -> Parsed:
    return Parsed(text)


def test_elements_of_the_page_are_closed_and_ids_unique(page: Parsed) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]

    assert page.open == []
    assert len(set(ids)) == len(ids)


def test_every_section_with_content_is_there_without_scripts(
    page: Parsed, shown: PageContents
) -> None:
    """Each section has a fragment, a heading and a link."""
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    expected = [key for key, _, section in SECTIONS if section(shown) is not None]

    assert sections == ["verdicts", "figures", *expected[1:]]
    assert {
        "verdicts",
        "ranks",
        "steps",
        "heat",
        "phases",
        "step",
        "modules",
        "collectives",
        "quality",
    } <= set(expected)
    assert {f"#{key}" for key in expected} <= set(links)


def test_verdict_is_the_first_section(page: Parsed) -> None:
    """On a phone, key figures above it would hide it."""
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]

    assert sections[:4] == ["verdicts", "figures", "heat", "steps"]


def test_charts_say_that_they_need_scripts(page: Parsed) -> None:
    charts = [
        attributes["data-chart"] for _, attributes in page.elements if "data-chart" in attributes
    ]
    waiting = [
        attributes
        for _, attributes in page.elements
        if attributes.get("class") == "note unscripted"
    ]

    assert charts == ["heat", "steps", "step"]
    assert len(waiting) == len(charts)


def test_lengths_and_shares_of_bars_equal_the_report(text: str, shown: PageContents) -> None:
    """Each rank's bar has its parts in seconds, lengths on one scale, and shares of the rank's own
    step.
    """
    figure = text.partition('id="phases-host"')[2].partition("</figure>")[0]
    typical = {
        rank["rank"]: rank["typical"]
        for rank in shown["report"]["ranks"]
        if rank["typical"] is not None
    }
    longest = max(each["s"] for each in typical.values())
    for rank, each in typical.items():
        row = re.search(rf'<div [^>]*data-rank="{rank}">.*?</div>', figure, re.S)
        assert row is not None
        found = re.findall(
            r'width="([\d.]+)%"[^>]*data-part="(\w+)" data-value="([^"]+)"><title>([^<]*)<', row[0]
        )
        assert {part: float(value) for _, part, value, _ in found} == pytest.approx(
            {part: value for part, value in each["parts"].items() if value > 0}, rel=1e-5
        )
        for width, part, value, words in found:
            assert float(width) == pytest.approx(100 * float(value) / longest, abs=0.02)
            assert words.startswith(f"{PARTS[part].name}: {format_duration(each['parts'][part])} (")
            assert words.endswith(
                f"({format_percent(each['parts'][part] / sum(each['parts'].values()))})"
            )


def test_page_has_first_verdict_key_figures_and_all_ranks(text: str, shown: PageContents) -> None:
    """Slow ranks come first."""
    page = " ".join(element_text(text).split())
    headline, steps = shown["headlines"][0], shown["report"]["steps"]

    for words in (headline.sentence, headline.action, headline.command):
        assert " ".join(words.split()) in page
    assert headline.cost_s_per_step is not None
    assert headline.cost_share is not None
    assert steps["p50_s"] is not None
    assert (
        f"{format_duration(headline.cost_s_per_step)} {headline.cost_unit} {format_percent(headline.cost_share)}"
        f" of {headline.whole}" in page
    )
    assert f"{format_percent(headline.cost_share)} of {headline.whole} lost" in page
    assert re.fullmatch(r"a mean step of \d+ ms", headline.whole)
    assert f"{format_duration(steps['p50_s'])} step p50" in page
    assert "8 of 8 ranks compared" in page
    rows = re.findall(
        r'<tr[^>]*><th scope="row">(\d+)</th>',
        text.partition('id="ranks"')[2].partition("</section>")[0],
    )
    assert rows[0] == str(SLOW_RANK)
    assert len(rows) == len(shown["report"]["ranks"])


def test_page_of_a_single_process_does_not_mention_ranks(alone: PageContents) -> None:
    """There are no sections, columns or words on ranks."""
    text = build_document(alone)
    page = Parsed(text)
    sections = {attributes["id"] for tag, attributes in page.elements if tag == "section"}
    words = page.all_text()

    assert not {"ranks", "heat", "collectives"} & sections
    assert "steps" in sections
    assert ">rank<" not in text.partition('id="contents"')[0]
    assert "ranks compared" not in words
    assert "of 1 ranks" not in words
    assert "rank 0" not in text.partition('id="phases-host"')[2].partition("</figure>")[0]
    assert "clock. " not in words


def test_page_requests_nothing_from_elsewhere(page: Parsed, text: str) -> None:
    """No attribute leads out of the page, no style has a URL, and the policy forbids requests."""
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in (
                "href",
                "src",
                "action",
                "data",
                "poster",
                "srcset",
                "xlink:href",
                "ping",
                "background",
            ):
                assert (value or "").startswith(("#", "data:image/svg+xml,")), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
    styles = "".join(page.text["style"])
    assert "url(" not in styles
    assert "@import" not in styles
    assert not {"iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}


def test_policy_allows_only_the_pages_own_scripts(text: str) -> None:
    """Scripts are allowed by hash, and there is no network access."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy[1].split(";"))

    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert "connect-src" not in rules
    for executable in re.findall(r"<script>(.*?)</script>", text, re.S):
        digest = base64.b64encode(hashlib.sha256(executable.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in rules["script-src"]
    style = re.search(r"<style>(.*?)</style>", text, re.S)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert rules["style-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy[1]


def test_data_in_the_page_are_json_and_no_markup(text: str, shown: PageContents) -> None:
    """The contents that are read back from the page equal the original ones."""
    found = re.search(r'<script type="application/json" id="contents">(.*?)</script>', text, re.S)
    assert found is not None

    assert not re.search(r"[<>&\u2028\u2029]", found[1])
    assert found[1].isascii()
    assert json.loads(found[1]) == json.loads(contents_as_json(shown))
    made_for_scripts = {"named_ranks", "prominent_ranks"}
    assert set(json.loads(found[1])) - made_for_scripts == set(shown) - {
        "headlines",
        "tables",
        "thinned_report",
    }


def hostile(value: Any, key: str = "") -> Any:
    """Return a report with all outside texts replaced: names, hosts, notes and sentences."""
    if isinstance(value, dict):
        return {each: hostile(inner, each) for each, inner in value.items()}
    if isinstance(value, list):
        return [hostile(each, key) for each in value]
    if isinstance(value, Headline):
        facts = tuple((name, HOSTILE) for name, _ in value.facts)
        return dataclasses.replace(
            value, facts=facts, sentence=HOSTILE, action=HOSTILE, command=HOSTILE
        )
    if isinstance(value, Table):
        columns = [
            dataclasses.replace(
                each, values=[HOSTILE if isinstance(one, str) else one for one in each.values]
            )
            for each in value.columns
        ]
        return dataclasses.replace(value, title=HOSTILE, note=HOSTILE, columns=columns)
    kept = {
        "codes", "kind", "lane", "unit", "started", "ended", "last_step_at", "written", "part", "state", "first_steps",
        "by", "judged_by", "flags", "scope", "class", "phase", "kinds", "not_measured", "ranks", "ranks_seen",
        "operation",
    }  # fmt: skip
    return value if not isinstance(value, str) or key in kept else HOSTILE


def test_hostile_texts_are_shown_as_text(shown: PageContents) -> None:
    """The page has the same elements as without hostile texts, and no text controls a terminal or
    reverses letters.
    """
    expected = [tag for tag, _ in Parsed(build_document(shown)).elements]
    attacked = hostile(copy.deepcopy(shown))
    text = build_document(cast("PageContents", attacked))
    found = Parsed(text)

    assert [tag for tag, _ in found.elements if tag == "img"] == []
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert {tag for tag, _ in found.elements} <= set(expected) | {"pre"}
    assert found.open == []
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u2028]", text)
    # The name is shown as text.
    assert "onerror=alert(1)" in found.all_text()
    text.encode("utf-8")


def test_long_names_are_shortened_with_a_tooltip(shown: PageContents) -> None:
    """A module's name has ten thousand characters."""
    changed = copy.deepcopy(shown)
    changed["report"]["modules"][0]["name"] = "layer." * 1700
    changed["tables"] = build_tables(changed["report"])
    page = Parsed(build_document(changed))
    titles = [
        attributes["title"]
        for tag, attributes in page.elements
        if tag == "span" and "title" in attributes
    ]

    assert any((title or "").startswith("layer.layer.") for title in titles)
    assert max(len(each) for each in page.text["span"] + page.text["p"]) < 1000
    assert max(len(title or "") for title in titles) <= 2001


def test_page_of_a_run_without_steps_has_no_empty_sections(shown: PageContents) -> None:
    """Missing values are not shown as zero."""
    empty = copy.deepcopy(shown)
    empty["steps"], empty["traces"], empty["telemetry"] = None, {"names": [], "steps": []}, []
    empty["tables"] = []
    report = empty["report"]
    report["ranks"], report["modules"], report["collectives"], report["links"] = [], [], [], []
    report["steps"] = {
        **report["steps"],
        "count": 0,
        "p50_s": None,
        "p95_s": None,
        "p99_s": None,
        "max_s": None,
    }
    page = Parsed(build_document(empty))

    assert [attributes["id"] for tag, attributes in page.elements if tag == "section"] == [
        "verdicts",
        "quality",
    ]
    words = " ".join(page.all_text().split())
    assert "no step was recorded" in words
    assert "of steps complete" not in words


def test_rank_cards_have_the_location_of_the_rank(shown: PageContents) -> None:
    """Values that are equal on all ranks are left out."""
    placed = copy.deepcopy(shown)
    places = {
        "host.name": "a",
        "torch.elastic.run_id": "x-1",
        "slurm.job.id": "77",
        "host.rack": "rack 12",
    }
    verdicts = placed["report"]["verdicts"]
    verdicts[0] = structs.replace(verdicts[0], where=places)
    text = build_document(placed).partition('id="heat"')[0]

    assert "host.rack rack 12" in text
    assert "torch.elastic" not in text
    assert "slurm.job.id" not in text


def test_header_has_program_name_commit_and_settings(shown: PageContents) -> None:
    changed = copy.deepcopy(shown)
    run = changed["report"]["run"]
    run["settings"] = {
        "commit": "1a2b3c4d-dirty", "launcher": "torchrun", "torch": "2.12.0", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    header = build_document(changed).partition("<header>")[2].partition("</header>")[0]
    words = " ".join(element_text(header).split())

    assert words.startswith(f"{run['program']} {run['id']} SLOW RANK ")
    assert words.endswith(
        "commit 1a2b3c4d-dirty launcher torchrun torch 2.12.0 Settings OMP_NUM_THREADS 4"
    )
    assert f'<time datetime="{run["started"]}" ' in header
    assert "Settings" not in build_document(shown)


def test_further_verdicts_are_a_line_each_and_ended_ones_come_last(shown: PageContents) -> None:
    several = copy.deepcopy(shown)
    row, headline = several["report"]["verdicts"][0], several["headlines"][0]
    over = dataclasses.replace(headline, is_over=True, severity="neutral")
    several["report"]["verdicts"] = [row, row, row]
    several["headlines"] = [over, headline, dataclasses.replace(headline, kind="data_bound")]
    page = build_document(several).partition('id="heat"')[0]
    first, second, third = (page.index(f'id="verdict-{number}"') for number in (2, 3, 1))

    assert first < second < page.index("Earlier in this run (1)") < third
    assert page.count("<article") == 1


LAST, BEGAN = "2026-11-26T23:04:12+00:00", "2026-11-26T23:03:34+00:00"
NO_RANKS: dict[str, Any] = {"live": False, "died": [], "failed": [], "ranks_seen": 2}


@pytest.mark.parametrize(
    ("changed", "last", "words"),
    [
        ({}, LAST, "ended 23:04 UTC, ran 38.0 s"),
        ({}, None, "ended"),
        ({"died": [1]}, LAST, "ended 23:04 UTC, rank 1 died, ran 38.0 s"),
        ({"died": [0, 1]}, LAST, "all ranks died, last step 23:04:12 UTC, ran 38.0 s"),
        ({"failed": [1]}, LAST, "failed, last step 23:04:12 UTC, ran 38.0 s"),
        ({"failed": [1]}, None, "failed"),
        ({"live": True}, LAST, "running, last step 23:04:12 UTC"),
        ({"live": True}, None, "running"),
        ({"live": True, "failed": [1]}, LAST, "running, rank 1 failed, last step 23:04:12 UTC"),
        ({"live": True, "as_of": BEGAN}, LAST, "silent for "),
    ],
)
def test_header_has_the_state_and_says_of_what_its_time_is(
    changed: dict[str, Any], last: str | None, words: str
) -> None:
    run: Any = {
        **NO_RANKS, "as_of": None, "last_step_at": last, "started": BEGAN if last else None, **changed
    }  # fmt: skip
    found = _state_text(run)

    assert found == words or (found.startswith(words) and "as_of" in changed)
