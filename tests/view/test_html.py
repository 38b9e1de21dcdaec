"""Headlines and tables as HTML: each fact once, all rows present, hostile names as text."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from xml.etree.ElementTree import Element

from torchlens_perf.verdicts.kinds import BAD
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.html import build_table, build_verdict_card, build_verdict_line
from torchlens_perf.view.markup import tag, to_html
from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e"
SLOW = Headline(
    kind="straggler",
    status="SLOW RANK",
    severity=BAD,
    facts=(
        ("rank", "13 (node-1)"),
        ("phase", "forward"),
        ("steps", "since step 40"),
        ("seen", "in 9 of 9 windows"),
    ),
    cost_s_per_step=0.0229,
    cost_share=0.27,
    sentence="Rank 13 computes 249 ms per step.",
    cause="none found (checked: disk)",
    action="profile it.",
    command="torchlens-perf capture RUN --rank 13",
    is_over=False,
)
RANKS = Table(
    "ranks",
    "Ranks",
    [
        Column("rank", [13, *range(9)], Quantity.NUMBER),
        Column("host", ["node-1"] * 10, Quantity.TEXT),
        Column("compute", [0.249, NOT_MEASURED, *[0.199] * 8], help="Without waiting."),
    ],
    slow=frozenset([0]),
    first=8,
)


def text_of(element: Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def tags_of(text: str) -> set[str]:
    """Return the elements that an HTML parser finds."""
    found: set[str] = set()

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            found.add(tag)

    Tags().feed(text)
    return found


def test_card_of_a_verdict_shows_each_fact_once() -> None:
    words = text_of(build_verdict_card(SLOW, "verdict-1"))

    for fact in (
        "22.9 ms",
        "27%",
        "SLOW RANK",
        "13 (node-1)",
        "forward",
        "since step 40",
        "9 of 9",
        SLOW.sentence,
    ):
        assert words.count(fact) == 1, fact
    assert "Next: profile it." in words


def test_card_of_a_verdict_without_cost_has_no_number() -> None:
    made = build_verdict_card(dataclasses.replace(SLOW, cost_s_per_step=None), "verdict-1")

    assert "lost per step" not in text_of(made)


def test_command_in_a_card_can_be_copied_unchanged() -> None:
    (command,) = build_verdict_card(SLOW, "verdict-1").iter("code")

    assert command.text == SLOW.command


def test_verdict_line_has_status_facts_and_cost_in_its_summary() -> None:
    summary = build_verdict_line(SLOW, "verdict-2").find("summary")

    assert summary is not None
    words = text_of(summary)
    assert words.startswith("SLOW RANK rank 13 (node-1), phase forward, since step 40")
    assert words.endswith("22.9 ms per step = 27% of step time")


def test_verdict_line_shows_the_sentence_once() -> None:
    without_facts = dataclasses.replace(SLOW, facts=())
    for headline in (SLOW, without_facts):
        words = text_of(build_verdict_line(headline, "verdict-2"))
        assert words.count(SLOW.sentence) == 1
        assert "Next: profile it." in words


def test_further_rows_of_a_table_are_hidden_behind_a_checkbox() -> None:
    made = build_table(RANKS)
    rows = list(made.iter("tr"))[1:]
    (checkbox,), (label,) = made.iter("input"), made.iter("label")

    assert len(rows) == 10
    assert [row.get("class") for row in rows] == ["slow", *[None] * 7, "rest", "rest"]
    assert label.get("for") == checkbox.get("id")
    assert "Show all 10" in text_of(label)


def test_short_table_has_no_checkbox() -> None:
    assert list(build_table(dataclasses.replace(RANKS, first=None)).iter("input")) == []


def test_numbers_are_right_aligned_with_their_unit_in_the_header() -> None:
    made = build_table(RANKS)
    heads = list(made.iter("th"))[:3]

    assert [head.get("class") for head in heads] == [None, "text", None]
    assert text_of(heads[2]) == "compute ms"
    assert [abbr.get("title") for abbr in heads[2].iter("abbr")] == ["Without waiting."]
    assert [text_of(cell) for cell in list(made.iter("td"))[1:4:2]] == ["249", NOT_MEASURED]


def test_html_elements_replace_the_text_of_a_column() -> None:
    links = [tag("a", "run", href=f"#{at}") for at in range(10)]

    assert len(list(build_table(RANKS, {"host": links}).iter("a"))) == 10


def test_shortened_text_has_the_whole_text_as_its_title() -> None:
    name = "layers." * 40
    made = build_table(Table("modules", "Modules", [Column("module", [name], Quantity.TEXT)]))
    (short,) = made.iter("span")

    assert len(short.text or "") < 60
    assert short.get("title") == name


def test_hostile_text_is_escaped_in_html() -> None:
    facts = (("rank", HOSTILE),)
    bad = dataclasses.replace(SLOW, facts=facts, sentence=HOSTILE, action=HOSTILE, command=HOSTILE)
    spec = Table(
        "t", HOSTILE, [Column(HOSTILE, [HOSTILE], Quantity.TEXT, help=HOSTILE)], note=HOSTILE
    )

    for made in (build_verdict_card(bad, "a"), build_verdict_line(bad, "b"), build_table(spec)):
        assert "img" not in tags_of(to_html(made))
        assert "onerror=alert(1)" in text_of(made)
        assert not {"\x1b", "\u202e"} & set(to_html(made))


def test_sentences_wrap_and_other_long_texts_are_cut() -> None:
    text = "a sentence of several words that is longer than the longest cell of a table"
    columns = [Column("because", [text], Quantity.TEXT, wraps=True)]
    assert text in text_of(build_table(Table("advice", "Advice", columns)))
    names = [Column("module", [text], Quantity.TEXT)]
    assert text not in text_of(build_table(Table("modules", "Modules", names)))
