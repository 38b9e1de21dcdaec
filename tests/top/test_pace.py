"""How far, how fast, how long: said only as far as it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.top.reports import view_of
from torchlens_perf.top.pace import Pace, SeenSteps, curve, time_left


def made(**changed: object) -> Pace:
    values: dict[str, object] = {"steps": 400, "total": 1000, "mean_s": 0.5, "curve_s": (0.5, 0.5), "window_steps": 8}
    return Pace(**{**values, **changed})  # type: ignore[arg-type]


def test_time_left() -> None:
    """The steps that are left times the run's mean step."""
    assert made().left_s == (300.0,)
    assert made().progress == "400 of 1,000 steps (40%)"


def test_time_left_by_the_newest_steps_too() -> None:
    """Where they take another time than the mean: none of the two is the truth."""
    assert made(curve_s=(0.5,) * 8 + (1.0,)).left_s == (300.0, 600.0)
    assert made(curve_s=(0.5,) * 8 + (0.54,)).left_s == (300.0,)


def test_one_window_that_is_slow_by_chance_is_not_the_pace() -> None:
    assert made(curve_s=(0.5,) * 15 + (0.58,)).left_s == (300.0,)


@pytest.mark.parametrize(
    "unknown", [{"total": None}, {"steps": None}, {"mean_s": None}, {"steps": 1001}], ids=lambda each: str(each)
)
def test_nothing_is_guessed(unknown: dict[str, object]) -> None:
    """Without the number of all steps, or a step, or where there are more than was said, no time is left."""
    assert made(**unknown).left_s == ()


def test_more_steps_than_were_said() -> None:
    assert made(steps=1001).progress == "1,001 steps, more than the 1,000 expected"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (91, "2 min"), (5340, "89 min"), (5460, "1 h 31 min"), (200_000, "2 d 7 h")],
)
def test_words_for_a_time(seconds: float, text: str) -> None:
    assert time_left(seconds) == text


def test_curve() -> None:
    """The lowest value is the lowest block, the highest the highest; neighbours share one where there is no room."""
    assert curve([1, 2, 3, 4], 4, "_-=#") == "_-=#"
    assert curve([1, 1, 4, 4], 2, "_-=#") == "_#"
    assert curve([1, 1, 1.01], 3, "_-=#") == "___"
    assert curve([], 10, "_#") == curve([1, 2], 0, "_#") == ""


def test_what_was_seen_lately() -> None:
    """The pace now is by what was made from look to look, for a minute at most; by the newest window before that."""
    seen, second = SeenSteps(), 10**9
    assert seen.add("a", 10, 100 * second) is None
    assert seen.add("a", 12, 102 * second) is None  # too short to tell
    assert seen.add("a", 20, 105 * second) == pytest.approx(0.5)
    assert seen.add("a", 20, 105 * second) == pytest.approx(0.5)
    for at in range(1, 13):  # from here on a step takes a second
        found = seen.add("a", 20 + 10 * at, (105 + 10 * at) * second)
    assert found == pytest.approx(1.0)
    assert seen.add("another process", 5, 300 * second) is None
    assert made(seen_s=0.25).steps_per_s == 4
    assert made().steps_per_s == 2


def test_of_a_run(tmp_path: Path) -> None:
    """Steps of a run that is slow from its middle on: the curve rises, and the newest window's pace is shown."""
    found = view_of(tmp_path / "run", 4, "constant:rank=3,share=0.5,since=64", blocks=4).pace
    assert found is not None

    assert (found.steps, found.total, found.window_steps) == (128, None, 8)
    assert found.now_s == pytest.approx(0.3, rel=0.1)
    assert found.curve_s[0] == pytest.approx(0.21, rel=0.1)
    assert found.mean_s == pytest.approx(0.255, rel=0.1)
    assert found.steps_per_s == pytest.approx(1 / found.curve_s[-1])
