"""Tests of the lanes of iterations: which processes have one, and where the path is."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from xml.etree.ElementTree import Element

import pytest

from tests.roles import tables
from tests.roles.tables import job_events
from torchlens_perf.roles.iterations import build_iterations, pair_events
from torchlens_perf.roles.lanes import build_lanes, draw_lanes


def shown(**times: Any) -> Any:
    """Return the lanes of the typical and of the slowest iteration of a job."""
    events = sorted(job_events(**times), key=lambda each: each.time_s)
    roles = {each.process: each.process for each in events}
    roles |= {each: "rollout" for each in roles if each.startswith("engine")}
    roles |= {"lead": "trainer", "rank 1": "trainer"}
    return build_lanes(build_iterations(events), list(pair_events(events)), roles)


def slow_at(iteration: int, sample: int) -> float:
    return 0.9 if (iteration, sample) == (3, 4) else 0.02


def test_lanes_are_those_of_the_typical_and_of_the_slowest_iteration() -> None:
    typical, slowest = shown(tool_s=slow_at)

    assert (typical.kind, slowest.kind, slowest.batch) == ("typical", "slowest", "3")
    assert [each.process for each in slowest.lanes] == [
        "lead", "rank 1", "engine-0", "engine-1", "engine-2", "tool", "reward"
    ]  # fmt: skip
    assert not slowest.others


def test_path_of_lanes_adds_up_to_the_iteration() -> None:
    for lanes in shown(tool_s=slow_at):
        assert lanes.path[0].begin_s == pytest.approx(0.0)
        assert lanes.path[-1].end_s == pytest.approx(lanes.seconds)
        assert sum(each.end_s - each.begin_s for each in lanes.path) == pytest.approx(lanes.seconds)


def test_samples_at_once_are_one_span_of_their_engine() -> None:
    engine = shown()[0].lanes[2]

    assert Counter(each.what for each in engine.spans) == {"busy": 1, "weights": 1}
    assert engine.busy_s == pytest.approx(0.3 + 0.025)


def test_of_many_engines_the_path_and_the_extremes_have_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "ENGINES", 64)
    monkeypatch.setattr(tables, "SAMPLES", 128)
    lanes = shown(
        engine_of=lambda sample: sample % 64,
        tokens=lambda iteration, sample: 200 if sample == 77 else 20 + sample % 64,
    )[0]

    assert [each.process for each in lanes.lanes if each.role == "rollout"] == [
        "engine-0", "engine-13"
    ]  # fmt: skip
    assert lanes.others == {"rollout": 62}
    assert "Not shown: 62 of rollout." in draw_lanes(lanes)[1]


def test_drawing_has_the_path_and_its_words() -> None:
    title, caption, drawn = draw_lanes(shown(tool_s=slow_at)[1])
    (image,) = (each for each in drawn.iter("svg") if each.get("role") == "img")

    assert title.startswith("Slowest iteration: 3 (")
    assert "tool 900 ms" in caption
    assert caption in str(image.get("aria-label"))
    assert ends_of(image)[-1] == pytest.approx(1000, abs=0.2)
    # No lane needs a style, which the page's policy forbids.
    assert not [each for each in drawn.iter() if each.get("style")]


def ends_of(image: Element) -> list[float]:
    return [float(re.sub(".*H", "", each.get("d", ""))) for each in image.iter("path")]
