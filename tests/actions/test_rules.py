"""Nodes that verdicts name are reported only if the rules allow it. A false verdict reports few."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.actions.nodes import NamedNode, Rules, find_nodes, find_objection
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

NODE = NamedNode(
    run="r", host="gpu-7", scheduler_names={}, kind="straggler", ranks=(3,), cost_share=0.2, windows=10,
    judged=10, since="", text="slow", causes=("cpu_clock",), is_whole=False, is_live=False,
)  # fmt: skip
RULES = Rules(allowed=("gpu-*",), most=2)


def _object(
    node: NamedNode, rules: Rules, recent: Collection[str] = (), *, drains: bool = False
) -> str:
    return find_objection(node, rules, recent, drains=drains, sent_name=node.host)


@pytest.fixture(scope="module")
def slow_node(tmp_path_factory: pytest.TempPathFactory) -> list[NamedNode]:
    run = tmp_path_factory.mktemp("runs") / "r"
    simulate_run(run, "--fault", "node:node=1,share=0.3", "--node-size", "2", ranks=8)
    return list(find_nodes(load_report(RunDirectory(run))))


def test_planted_node_is_named_with_all_its_ranks_and_its_cost(slow_node: list[NamedNode]) -> None:
    (node,) = slow_node
    assert (node.host, node.ranks, node.is_whole, node.is_live) == (
        "node-0001",
        (2, 3),
        True,
        False,
    )
    assert 0.1 < node.cost_share < 0.35
    assert node.windows == node.judged >= 3


@pytest.mark.parametrize(
    ("change", "drains", "why"),
    [
        ({}, True, ""),
        ({"host": "login-1"}, False, "no --allow pattern"),
        ({"cost_share": 0.01}, False, "costs 1.0% of the step"),
        ({"windows": 2, "judged": 2}, False, "slow in 2 of 2 windows"),
        ({"judged": 30}, False, "slow in 10 of 30 windows"),
        ({"is_live": True}, True, "the job still runs"),
        ({"is_live": True}, False, ""),
        ({"causes": ()}, True, "no cause in this machine"),
        ({"causes": (), "is_whole": True}, True, ""),
        ({"causes": ()}, False, ""),
    ],
)  # fmt: skip
def test_rule(change: dict[str, object], drains: bool, why: str) -> None:
    found = _object(msgspec.structs.replace(NODE, **change), RULES, drains=drains)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("login-1", "no --allow pattern matches login-1"),
        ("gpu-[1-99]", "no name of one node"),
        ("gpu-1,login-1", "no name of one node"),
        ("gpu-1\nlogin-1", "no name of one node"),
    ],
)
def test_rules_hold_for_the_name_that_is_sent(name: str, why: str) -> None:
    """A job says both, and its folder may be another user's."""
    assert why in find_objection(NODE, RULES, (), drains=False, sent_name=name)


def test_nothing_is_allowed_by_default() -> None:
    assert "no --allow pattern" in _object(NODE, Rules())


def test_number_of_nodes_in_a_day_is_limited_but_the_same_node_may_go_to_another_target() -> None:
    assert "2 nodes in 24 hours" in _object(NODE, RULES, {"gpu-1", "gpu-2"})
    assert not _object(NODE, RULES, {"gpu-1", "gpu-7"})


@pytest.mark.parametrize(
    "fault",
    [
        "variable_length:spread=0.4,reported=yes",
        "pauses:share=0.3,every=10",
        "link:rank=3,share=0.3",
    ],
)
def test_verdict_that_blames_no_machine_names_no_node(tmp_path: Path, fault: str) -> None:
    run = simulate_run(tmp_path / "r", "--fault", fault, ranks=4)
    assert list(find_nodes(load_report(RunDirectory(run)))) == []
