"""Hostile names are shown as text in every chart and table, and the page's policy is enforced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.page.browser.conftest import TabOf, written
from tests.page.browser.tab import need_browser
from torchlens_perf.page.contents import PageContents

need_browser()

HOSTILE = [
    "<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "\x1b[2Jred\x1b[31m", "\u202egnp.exe\u2066",
    "line\nline\u2028line", "x" * 10_000, "'\"&lt;${alert(1)}{{constructor}}", "$$\\href{javascript:alert(1)}{x}$$",
    "\\(x\\) \\[y\\]", "__proto__",
]  # fmt: skip


def hostile(of: PageContents) -> PageContents:
    """Return contents with hostile names wherever a job, scheduler or driver can set a name."""
    made: Any = copy.deepcopy(of)
    for at, place in enumerate(made["steps"]["places"]):
        name = HOSTILE[at % len(HOSTILE)]
        place["host"] = name
        place["mesh"] = dict.fromkeys(HOSTILE, at)
    for at, slow in enumerate(made["steps"]["slow"]):
        slow["phase"] = HOSTILE[at % len(HOSTILE)]
    made["steps"]["columns"]["flags"][5] = HOSTILE[:3]
    traces = made["traces"]
    traces["names"] = [HOSTILE[at % len(HOSTILE)] for at in range(len(traces["names"]))]
    for at, step in enumerate(traces["steps"]):
        step["why"] = step["clock"] = HOSTILE[at % len(HOSTILE)]
        for each, joined in enumerate(step["collectives"]):
            joined["name"] = joined["group"] = HOSTILE[each % len(HOSTILE)]
        for rank in step["ranks"]:
            for row in rank["rows"]:
                row["lane"] = HOSTILE[0] if row["lane"] == "collectives" else row["lane"]
    for at, series in enumerate(made["telemetry"]):
        series["where"] = HOSTILE[at % len(HOSTILE)]
        series["unit"] = HOSTILE[0]
    report = made["report"]
    report["run"] |= {"program": HOSTILE[1], "id": HOSTILE[0], "nodes": HOSTILE}
    for kind in ("modules", "sections", "device_sections"):
        for at, row in enumerate(report[kind]):
            row["name"] = HOSTILE[at % len(HOSTILE)]
    for at, row in enumerate(report["collectives"]):
        row["operation"] = row["description"] = row["dtype"] = HOSTILE[at % len(HOSTILE)]
        row["ranks"] = row["ranks_seen"] = HOSTILE[0]
    for at, rank in enumerate(report["ranks"]):
        rank["host"] = HOSTILE[at % len(HOSTILE)]
    first = report["verdicts"][0]
    report["verdicts"][0] = structs.replace(first, action=" ".join(HOSTILE))
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
def test_hostile_names_are_shown_as_text_in_charts_and_tables(
    tab_of: TabOf, wide: PageContents, tmp_path: Path, phone: bool
) -> None:
    tab = tab_of(written(tmp_path, "hostile", hostile(wide)), phone=phone)
    dialogs: list[str] = []
    tab.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    tab.open("#heat;rank=11;steps=310-329;step=315")
    for name in ("group", "quantity", "order"):
        for value in tab.value(
            f"[...document.querySelector('select[name={name}]').options].map(each => each.value)"
        ):
            tab.page.select_option(f"#heat select[name={name}]", value)
            tab.settle()
    tab.show_all()
    for value in tab.value(
        "[...document.querySelector('select[name=recorded-step]').options].map(each => each.value)"
    )[:4]:
        tab.page.select_option("select[name=recorded-step]", value)
        tab.settle()
    for name in ("heat", "steps", "step", "memory", "telemetry"):
        box = tab.chart(name).bounding_box()
        for x in (0.2, 0.5, 0.8):
            tab.page.mouse.move(box["x"] + x * box["width"], box["y"] + 30)
            assert len(tab.tip()) < 2000
    assert (dialogs, tab.problems, tab.foreign()) == ([], [], [])
    assert (
        tab.value(
            "document.querySelectorAll('img, main script, main style, iframe, object,"
            " embed').length"
        )
        == 0
    )
    assert tab.value("Object.keys(Object.prototype).length + Number('polluted' in {})") == 0
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    shown = tab.value("document.body.innerText")
    assert not set("\x1b\u202e\u2066\u2028") & set(shown)


def test_policy_blocks_foreign_scripts_requests_and_eval(tab_of: TabOf, file: Path) -> None:
    tab = tab_of(file).open()
    tried = tab.value(
        """(async () => { const script = document.createElement("script"); script.textContent = "window.ran = 1";
        document.head.append(script);
        const evaluated = await new Promise(done => { addEventListener("securitypolicyviolation", () => done(true));
          const frame = document.createElement("button"); frame.setAttribute("onclick", "window.ran = 2");
          document.body.append(frame); frame.click(); frame.remove(); });
        const fetched = await fetch("https://example.org/").then(() => true, () => false);
        const image = await new Promise(done => { const made = new Image(); made.onload = () => done(true);
          made.onerror = () => done(false); made.src = "https://example.org/x.png"; });
        return [window.ran ?? null, evaluated, fetched, image]; })()"""
    )
    assert tried == [None, True, False, False]
    assert any("Content Security Policy" in each for each in tab.problems)
