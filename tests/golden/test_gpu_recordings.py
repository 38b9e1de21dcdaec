"""Tests of the reports on recorded GPU runs against what is true of them.

`gpu/expected.json` was written by hand from measurements of the same steps: own CUDA events at the
borders of the phases, kineto's kernel times and nvidia-smi. An optional key of a run is a claim that
these measurements allow:

- `why`: the truth in a sentence.
- `first`: kinds of verdicts that may be the first one. `kinds`: other kinds that must be present.
- `launch_bound`: whether a verdict may be that the GPU waits for kernels, and must be.
- `action`: what the first verdict must advise.
- `cost_share`: bounds of the first verdict's share of a step; null for a cost that is not known.
- `step_ms`, `phases_ms`, `sections_ms`, `modules_ms`: bounds of medians by the device's clock.
- `gap`: the place with most host code of which a verdict speaks, with bounds of its time and of all
  host code in ms. Without the key, no verdict may speak of a place.
- `typical_busy`: bounds of the busy share of the GPU; null if it must be missing.
- `actions`, `no_actions`: rules whose action a verdict must have, and must not. `changes`: all predictions.
- `unknown_parts`: true if no part of the step may be named, because it is a replayed graph.
- `others_first`: true if other programs are to be looked for before batches.
"""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from tests.golden.gpu_recordings import RECORDINGS, report_on_recording
from torchlens_perf.verdicts.words.device_pace import LaunchBoundEvidence
from torchlens_perf.view.headline import build_headlines, choose_headline
from torchlens_perf.view.rank_tables import build_rank_table

EXPECTED: dict[str, dict[str, Any]] = json.loads((RECORDINGS / "expected.json").read_text())

ACTIONS = {
    "compile": "model = torch.compile(model)",
    "cuda-graphs": 'torch.compile(model, mode="reduce-overhead")',
    "fused-optimizer": "(fused=True)",
    "synchronization": "read results on the host less often",
    "zero-grad-to-none": "set gradients to None",
}
"""Words of the actions of rules."""


@pytest.fixture(scope="module", params=sorted(EXPECTED))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is true of a run, and the report on it."""
    name = request.param
    return EXPECTED[name], report_on_recording(name, tmp_path_factory.mktemp("gpu"))


def test_twenty_recordings_have_expectations() -> None:
    assert len(EXPECTED) == 20
    assert {each.name for each in RECORDINGS.iterdir() if each.is_dir()} == set(EXPECTED)


def assert_between(value: float | None, bounds: list[float], what: str) -> None:
    assert value is not None, what
    assert bounds[0] <= value <= bounds[1], (what, value, bounds)


def test_verdicts_are_those_that_the_measurements_allow(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    expected, report = case
    verdicts = [each for each in report["verdicts"] if not each.is_over]
    first = choose_headline(build_headlines(report))

    assert first is not None
    assert first.kind in expected["first"], first.sentence
    assert {each.kind for each in verdicts} >= set(expected.get("kinds", ()))
    launch_bound = any(isinstance(each.evidence, LaunchBoundEvidence) for each in verdicts)
    assert launch_bound is expected["launch_bound"]
    if "cost_share" in expected:
        if expected["cost_share"] is None:
            assert first.cost_share is None
        else:
            assert_between(first.cost_share, expected["cost_share"], "cost")
    if "action" in expected:
        assert verdicts[0].action == expected["action"]
    if expected.get("others_first"):
        assert first.action.lower().startswith("see whether other programs used the gpu")


def test_host_memory_does_not_look_like_device_memory(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    table = build_rank_table(cast("Any", case[1]))
    titles = [each.title for each in table.columns] if table is not None else []
    assert "peak memory" not in titles


def test_device_times_are_within_bounds_of_own_events(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    expected, report = case
    device = report["ranks"][0]["device"]
    if "step_ms" in expected:
        assert_between(1e3 * device["step_s"]["p50_s"], expected["step_ms"], "step")
    for phase, bounds in expected.get("phases_ms", {}).items():
        assert_between(1e3 * device["phases"][phase]["p50_s"], bounds, phase)
    for field in ("sections", "modules"):
        rows = report["device_sections" if field == "sections" else field]
        found = {row["name"]: row["device_s"] for row in rows}
        for name, bounds in expected.get(f"{field}_ms", {}).items():
            assert_between(1e3 * found[name]["p50_s"], bounds, name)


def test_place_of_the_host_code_is_named_only_where_it_is_known(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    expected, report = case
    gaps = [gap for each in report["verdicts"] if (gap := getattr(each.evidence, "gap", None))]
    if "gap" not in expected:
        assert not gaps
        return
    (gap,) = gaps
    at, own_ms, all_ms = expected["gap"]
    assert gap.at == at
    assert_between(1e3 * gap.s, own_ms, at)
    assert_between(1e3 * gap.of_s, all_ms, "host code")


def test_busy_share_of_the_gpu_is_that_of_the_samples(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    expected, report = case
    busy = [each["typical_busy"] for each in report["gpus"]]
    if "typical_busy" in expected:
        if expected["typical_busy"] is None:
            assert set(busy) <= {None}
        else:
            assert_between(busy[0], expected["typical_busy"], "busy")


def test_gains_lie_inside_their_bounds_and_below_the_step(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    expected, report = case
    changes = [] if report["lost_time"] is None else report["lost_time"].changes
    for each in changes:
        assert 0 < each.low_s <= each.gain_s <= each.high_s, each
        assert each.high_s <= report["lost_time"].step_s, each
        assert each.share < 1, each
    if "changes" in expected:
        assert [each.change for each in changes] == expected["changes"]


def test_actions_suit_the_loop(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    expected, report = case
    actions = [row.action for row in report["verdicts"]]
    given = {rule for rule, words in ACTIONS.items() if any(words in each for each in actions)}

    assert given >= set(expected.get("actions", ()))
    assert not given & set(expected.get("no_actions", ()))
    for row in report["verdicts"]:
        assert any(letter.isdigit() for letter in row.because) == bool(row.because)


def test_parts_of_a_replayed_graph_have_no_names(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    expected, report = case
    steps = report["steps"]
    named = {each["part"] for each in (*steps["long"], *steps["short"])}
    if expected.get("unknown_parts"):
        assert named == {""}
    else:
        assert "" not in named
