"""Names and messages of the program that contain " Next: " do not cut a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.report import test_memory_table as memory
from tests.report.test_schema import FAILURE, node
from tests.support.progress import behind, found
from tests.support.reports import checked
from torchlens_perf.page.notebook import results_as_json
from torchlens_perf.report.build import build_report
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.words.hang import RankStack, describe_hang
from torchlens_perf.view.headline import build_headlines

NAME = "a. Next: b"

NODES: dict[str, Callable[[], NodeState]] = {
    "exception": lambda: node(ended="failed", failure={**FAILURE, "message": NAME}),
    "module": lambda: node(ended="failed", failure={**FAILURE, "module": NAME}),
    "span of a crash": lambda: node(ended="died", open_spans=[NAME]),
    "span of an allocation": lambda: node(
        out_of_memory=memory.oom(step=99, file="f", inside=[NAME])
    ),
    "span of a hang": lambda: node(
        ended="", hang=describe_hang(found(behind(2, inside=(NAME,))), {}, {})
    ),
    "line of a hang": lambda: node(
        ended="",
        hang=describe_hang(
            found(behind(2, operations={"0": {57: NAME}}, issued={"0": 57})), {0: RankStack((), "")}, {2: NAME}
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", NODES)
def test_text_of_the_program_is_no_action(where: str) -> None:
    report = checked(build_report("run", [NODES[where]()]))
    row: dict[str, Any] = report["verdicts"][0]
    headline = build_headlines(report)[0]
    summary = json.loads(results_as_json(report, "", ""))["summary"]["verdicts"][0]

    assert NAME in row.sentence
    assert NAME not in row.action != ""
    assert row.sentence == f"{summary['text']} Next: {summary['next']}"
    assert NAME in headline.sentence
    assert headline.action == summary["next"] == row.action
