"""Events that end a step, for every kind of training loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlens_perf.recorder.steps import EvaluationRule, StepRule

OPTIMIZERS = {"a": 1, "o": 2, "t": 3}
MODULES = {"m": 11, "n": 12}  # Modules of a model that is never called as a whole.


def ends(rule: StepRule, events: str, passed: str = "", *, alive: bool = True) -> str:
    """Play events, and return them with a bar at the end of each step.

    - f, e: forward pass with and without gradients
    - b: backward pass
    - a, o, t: steps of the optimizers
    - w: w.step()
    - m, n: forward passes of parts of the model without gradients
    - M, N: the same with gradients

    `passed` has the optimizers that were passed to watch(), in order. `alive` is True if an
    optimizer exists when the rule searches for one.
    """
    played = ""
    for event in events.replace("|", ""):
        if event == "w":
            ended = rule.on_manual_step()
        elif event == "b":
            rule.on_backward_end()
            if rule.should_search_optimizer():
                rule.note_missing_optimizer(alive=alive)
            ended = rule.does_backward_end_step()
        elif event in OPTIMIZERS:
            ended = rule.on_optimizer_step(
                OPTIMIZERS[event], passed.index(event) if event in passed else None
            )
        elif event.lower() in MODULES:
            module = MODULES[event.lower()]
            ended = rule.on_forward_end(with_gradient=event.isupper(), module=module, is_root=False)
        else:
            ended = rule.on_forward_end(with_gradient=event == "f")
        played += event + ("|" if ended else "")
    return played


@pytest.mark.parametrize(
    ("loop", "passed", "expected"),
    [
        ("one optimizer", "", "fba|fba|"),
        ("one optimizer, passed", "a", "fba|fba|"),
        ("accumulation", "", "fbfbfba|fbfbfba|"),
        ("no backward seen", "", "fa|fa|"),
        ("optimizer alone", "", "a|a|"),
        ("GAN, not passed: the first one seen ends the step", "", "fba|fbo" + "fba|fbo"),
        ("GAN, passed", "ao", "fbafbo|fbafbo|"),
        ("three in turn, passed", "aot", "fbaot|fbaot|"),
        ("a critic that steps three times for each step of the generator", "oa",
         "fbofbofbofba|" + "fbofbo|fbo|fba" + "fbo|fbo|fbo|fba"),
        ("an actor that is updated twice in every second turn", "ao",
         "fbafbo|fbo|fbafbafbo|fbo|fbafba|fbofbofba|fba|fbofbofba|"),
        ("an actor that is updated in every third turn", "ao", "fbafbafbafbo|fbafba|fba|fbofba|fba|"),
        ("three in turn, the last one now and then", "aot", "fbafbofbt|fbafbofbafbofbt|fbafbofbafbo|fbtfbafbo|"),
        ("only one counts", "a", "ofba|oofba|o"),
        ("the one that ended the step is gone", "", "fba|" + "fbo" * 5 + "|fbo|"),
        ("models one after the other, not passed", "", "fba|" * 8 + "fbofbo|" + "fbo|" * 8 + "fbafba|fba|"),
        ("a generator that trains alone for a time, not passed", "", "fba|" * 9 + "fbofba|fbofba|"),
        ("an actor that steps twice in every second turn, not passed", "", "fba|fba|fbofbofba|fba|fbofbofba|"),
        ("the last one passed never steps", "ao", "fba" * 5 + "|fba|fba|"),
        ("the last one passed pauses", "ao", "fbafbo|" + "fba" * 4 + "|" + "fba|" * 3 + "fbofba|"),
        ("the last one passed pauses later", "ao", "fbafbo|" * 6 + "fba" * 20 + "fbo|fba"),
        ("the last one passed never comes back", "ao", "fbafbo|" * 6 + "fba" * 33 + "|fba|"),
        ("another one than what was passed steps", "a", "fbofbofbo|fbo|fbo|"),
        ("what was passed steps late", "a", "fbofbofbo|fbo|" + "fbo|fba|" + "fbofba|fbofba|"),
        ("others take turns, and what was passed does not step", "a", "oto|to|to|t"),
        ("inference", "", "e|e|e|"),
        ("inference with gradients on", "", "ff|f|f|"),
        ("inference in a training job", "", "fba|eeefba|e"),
        ("inference of parts: the first one called ends the step", "", "m|nm|nm|n"),
        ("inference of parts with gradients on", "", "MNM|NM|N"),
        ("a model and its loss are two forward passes of a training step", "", "MNba|MNba|"),
        ("inference of a part, then of the whole", "", "m|e|e|me|"),
        ("validation before training, not passed", "", "e|e|fba|fba|"),
        ("validation before training, passed", "a", "eefba|fba|"),
        ("two forward passes for a loss", "", "ff|ba|ffba|"),
        ("manual", "", "w|fbaw|fbaw|"),
        ("manual from the second step on", "", "fba|wfbaw|"),
        ("manual after one of two optimizers", "", "fba|fbowfbafbow|"),
        ("manual before the optimizer's step", "", "fbw|afbw|a"),
        ("manual, accumulation", "", "fbfba|wfbfbaw|fbfbaw|"),
        ("manual per backward pass, accumulation", "", "fbw|fbw|afbw|fbw|a"),
        ("manual after some steps, before the optimizer's", "", "fba|fba|fbw|afbw|a"),
        ("manual inference", "", "e|wew|eew|"),
        ("long accumulation: an optimizer is there", "", "fb" * 100 + "a|fba|"),
        ("an optimizer that is there and never steps", "", "fb" * 256 + "|fb|fb|"),
        ("one that was passed and never steps", "a", "fb" * 256 + "|fb|fb|"),
    ],
)  # fmt: skip
def test_step_ends_at_the_expected_event_for_each_kind_of_loop(
    loop: str, passed: str, expected: str
) -> None:
    assert expected == ends(StepRule(len(passed)), expected, passed)


@pytest.mark.parametrize(
    "expected",
    ["fbfb|fb|fb|", "bb|b|", "fbe|fb|fb|ee", "fbfb|fb|a|fbfba|", "fbw|fbw|fbfbw|"],
    ids=[
        "each backward pass",
        "without forward passes",
        "with evaluation",
        "until one steps",
        "until w.step()",
    ],
)
def test_each_backward_pass_ends_a_step_without_an_optimizer(expected: str) -> None:
    """The first backward pass ends no step yet, because another event might."""
    assert expected == ends(StepRule(), expected, alive=False)


def test_forward_passes_before_the_first_optimizer_step_count_as_inference() -> None:
    """No optimizer was passed to watch() in this loop."""
    rule = StepRule()
    assert not rule.trains
    rule.on_optimizer_step(1)
    assert rule.trains
    assert StepRule(passed=1).trains


def test_last_optimizer_left_ends_steps_although_it_steps_in_another_loop() -> None:
    rule = StepRule(passed=2)
    rule.exclude_optimizer(1)
    rule.exclude_optimizer(0)

    assert [rule.on_optimizer_step(7, 0), rule.on_optimizer_step(8, 1)] == [True, False]


def test_optimizer_not_passed_to_watch_ends_steps_only_if_it_continues_alone() -> None:
    rule = StepRule(passed=1)
    assert not rule.on_optimizer_step(2)
    assert not rule.ignores_passed
    rule.on_optimizer_step(2)
    rule.on_optimizer_step(2)
    assert rule.ignores_passed


@given(st.text("fbaoe", max_size=60))
def test_only_manual_step_calls_end_steps_after_the_first_such_call(events: str) -> None:
    rule = StepRule()
    rule.on_manual_step()
    assert "|" not in ends(rule, events, alive=False)


@given(st.text("fbaoe", max_size=60))
def test_training_steps_end_only_at_optimizer_steps(events: str) -> None:
    """Forward and backward passes end no step in training."""
    played = ends(StepRule(passed=2), events, "ao")
    assert all(played[place - 1] in "ao" for place, sign in enumerate(played) if sign == "|")


@pytest.mark.parametrize(
    ("loop", "without_gradient", "evaluates"),
    [
        ("training", "......", "......"),
        ("evaluation now and then", "...x....x...", "...x....x..."),
        ("evaluation before training", "x.....x", "x.....x"),
        ("a target network in every step", "xxxxxx", "x....."),
        ("a target network in most steps", "xxx.xxxx.xx", "x.........."),
        ("a target network in every other step", "x.x.x.x", "x......"),
        ("an agent that acts once, and learns from it in five steps", "x....x....x", "x....x....x"),
    ],
)
def test_evaluation_is_recognized_by_unusual_forward_passes(
    loop: str, without_gradient: str, evaluates: str
) -> None:
    """A step is an evaluation if it has forward passes without gradients that most steps do not
    have.
    """
    assert evaluating(EvaluationRule(), without_gradient) == evaluates


def evaluating(rule: EvaluationRule, without_gradient: str) -> str:
    return "".join(
        "x" if rule.decide_step_end(without_gradient=each == "x") else "."
        for each in without_gradient
    )


def test_evaluation_is_recognized_after_a_change_of_step_ends() -> None:
    """Observations from before the change do not count, and neither does the step in which it
    happens.
    """
    rule = EvaluationRule()
    assert evaluating(rule, ".......") == "......."
    rule.restart()
    assert evaluating(rule, "xxxx") == "...."
    rule.restart()
    assert evaluating(rule, "x....x....x") == ".....x....x"
