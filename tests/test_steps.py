"""Where a step ends, for every kind of loop. A table: what happens in the loop, and where steps end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlens_perf.steps import StepRule

ADAM, OTHER, THIRD = 1, 2, 3


def ends(rule: StepRule, events: str) -> str:
    """Plays events, and marks the ends of steps with a bar.

    f forward with gradients, e forward without, b backward, a o t the optimizers' steps, w w.step()
    """
    played = ""
    for event in events.replace("|", ""):
        ended = {
            "f": lambda: rule.forward_ended(with_gradient=True),
            "e": lambda: rule.forward_ended(with_gradient=False),
            "b": rule.backward_ended,
            "a": lambda: rule.optimizer_stepped(ADAM),
            "o": lambda: rule.optimizer_stepped(OTHER),
            "t": lambda: rule.optimizer_stepped(THIRD),
            "w": rule.manual_step,
        }[event]()
        played += event + ("|" if ended else "")
    return played


@pytest.mark.parametrize(
    ("loop", "told", "expected"),
    [
        ("one optimizer", (), "fba|fba|"),
        ("one optimizer, told", (ADAM,), "fba|fba|"),
        ("accumulation", (), "fbfbfba|fbfbfba|"),
        ("no backward seen", (), "fa|fa|"),
        ("optimizer alone", (), "a|a|"),
        ("GAN, not told: the first one seen ends the step", (), "fba|fbo" + "fba|fbo"),
        ("GAN, told", (ADAM, OTHER), "fbafbo|fbafbo|"),
        ("three in turn, told", (ADAM, OTHER, THIRD), "fbaot|fbaot|"),
        ("a critic that steps five times for each step of the generator", (OTHER, ADAM), "fbofbofbofba|fbofbofba|"),
        ("only one counts", (ADAM,), "ofba|oofba|o"),
        ("the one that ended the step is gone", (), "fba|fbo" + "fbo|fbo|"),
        ("the last one told never steps", (ADAM, OTHER), "fba" * 33 + "|fba|fba|"),
        ("the last one told pauses", (ADAM, OTHER), "fbafbo|" + "fba" * 20 + "fbo|fba"),
        ("inference", (), "e|e|e|"),
        ("inference with gradients on", (), "ff|f|f|"),
        ("inference in a training job", (), "fba|eeefba|e"),
        ("validation before training, not told", (), "e|e|fba|fba|"),
        ("validation before training, told", (ADAM,), "eefba|fba|"),
        ("two forward passes for a loss", (), "ff|ba|ffba|"),
        ("manual", (), "w|fbaw|fbaw|"),
        ("manual from the second step on", (), "fba|w|fbaw|"),
        ("manual inference", (), "e|w|ew|eew|"),
    ],
)  # fmt: skip
def test_step_ends(loop: str, told: tuple[int, ...], expected: str) -> None:
    """Each loop ends its steps where its author would say that they end."""
    assert expected == ends(StepRule(told), expected)


def test_trains_from_the_first_optimizer_step() -> None:
    """Until an optimizer has stepped, or was named, forward passes count as inference."""
    rule = StepRule()
    assert not rule.trains
    rule.optimizer_stepped(ADAM)
    assert rule.trains
    assert StepRule([ADAM]).trains


def test_another_optimizer_does_not_make_it_training() -> None:
    """An optimizer that was not named says nothing about the loop."""
    rule = StepRule([ADAM])
    assert not rule.optimizer_stepped(OTHER)


@given(st.text("fbaoe", max_size=60))
def test_nothing_but_the_user_ends_a_step_after_the_first_manual_one(events: str) -> None:
    """Whatever the loop does."""
    rule = StepRule()
    rule.manual_step()
    assert "|" not in ends(rule, events)


@given(st.text("fbaoe", max_size=60))
def test_a_step_ends_at_most_once_per_event_and_only_at_steps_of_optimizers_once_training(events: str) -> None:
    """In training, forward and backward passes end nothing."""
    rule = StepRule([ADAM, OTHER])
    played = ends(rule, events)
    assert all(played[place - 1] in "ao" for place, sign in enumerate(played) if sign == "|")
