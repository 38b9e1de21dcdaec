"""Planted outliers of losses and gradient norms are found, and noisy curves have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.saved import save_and_load
from torchlens_perf.analysis.statistics.number_checks import NumberChecks, ValueChecks
from torchlens_perf.diagnosis.wrong_numbers import find_wrong_numbers
from torchlens_perf.run.ring import GRADIENT_NORM, LOSS
from torchlens_perf.verdicts.words.numbers import build_number_verdicts

STEPS = 2000
Curve = npt.NDArray[np.float64]


def steps_of() -> Curve:
    return np.arange(STEPS, dtype=np.float64)


CURVES = {
    "constant": np.full(STEPS, 2.5),
    "decay": 0.5 + 9.5 * np.exp(-steps_of() / 150),
    "power law": 1.7 + 9 * (1 + steps_of()) ** -0.4,
    # The loss hardly falls, or even rises, until the learning rate is warm.
    "learning-rate warm-up": 1 + 9 / (1 + np.exp((steps_of() - 300) / 40))
    + np.exp(-(((steps_of() - 150) / 50) ** 2)),
    "epochs": 1.5 + np.exp(-steps_of() / 400) + 0.4 * (1 - steps_of() % 250 / 250),
}  # fmt: skip


def noisy(curve: Curve, noise: str, seed: int) -> Curve:
    """Return a curve with noise of 3 to 30 % of its value."""
    random = np.random.default_rng(seed)
    if noise == "normal":
        return curve * (1 + 0.03 * random.standard_normal(STEPS))
    if noise == "heavy tails":
        return curve * (1 + 0.03 * random.standard_t(5, STEPS))
    return curve * np.exp(0.3 * random.standard_normal(STEPS))


def checked(name: str, values: Curve) -> NumberChecks:
    checks = ValueChecks()
    for step, value in enumerate(values.tolist()):
        checks.add_value(step, value)
    return NumberChecks(values={name: checks})


def find(*ranks: NumberChecks) -> list[Any]:
    found = find_wrong_numbers(dict(enumerate(ranks)), ())
    assert found is not None
    return found["outliers"]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("noise", ["normal", "heavy tails", "log-normal"])
def test_noisy_curves_have_no_outliers(curve: str, noise: str) -> None:
    for seed in range(20):
        assert find(checked(LOSS, noisy(CURVES[curve], noise, seed))) == [], seed


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("name", [LOSS, GRADIENT_NORM])
def test_planted_outlier_is_found_in_its_step(curve: str, name: str) -> None:
    for seed in range(20):
        values = noisy(CURVES[curve], "normal", seed)
        step = 700 + 50 * seed
        values[step] *= 6
        (found,) = find(checked(name, values))
        assert (found["what"], found["step"], found["count"]) == (name, step, 1)
        assert found["value"] == values[step]
        assert found["usual"] == pytest.approx(values[step] / 6, rel=0.3)


def test_rank_is_named_if_only_its_loss_is_an_outlier() -> None:
    ranks = [noisy(CURVES["decay"], "normal", seed) for seed in range(3)]
    ranks[1][700] = 90.0
    checks = [checked(LOSS, values) for values in ranks]
    (found,) = find(*checks)
    assert (found["ranks"], found["is_everywhere"]) == ([1], False)
    (verdict,) = verdicts(*checks)
    assert (verdict.kind, verdict.rank, verdict.since_step) == ("number_outlier", 1, 700)
    assert verdict.text.startswith("Rank 1 has a loss far above usual in step 700: 90, usually 0.5")


def test_outlier_of_all_ranks_names_no_rank() -> None:
    ranks = [noisy(CURVES["decay"], "normal", seed) for seed in range(3)]
    for values in ranks:
        values[[700, 900]] = 60.0, 90.0
    (verdict,) = verdicts(*(checked(LOSS, values) for values in ranks))
    assert (verdict.rank, verdict.since_step) == (None, 900)
    assert verdict.text.startswith("The loss is far above usual in step 900: 90, usually 0.5")
    assert "It is the largest of 2 outliers." in verdict.text


def test_ranks_are_not_compared_by_gradient_norms() -> None:
    """A rank may have made fewer checks than the others."""
    norms = noisy(CURVES["constant"], "normal", 0)
    norms[600] = 100.0
    checks = [checked(GRADIENT_NORM, each) for each in (norms, norms[::2])]
    (found,) = find(*checks)
    assert found["is_everywhere"]


def test_lasting_change_is_reported_for_a_few_steps_only() -> None:
    values = noisy(CURVES["constant"], "normal", 0)
    values[1000:] *= 4
    (found,) = find(checked(LOSS, values))
    assert found["count"] <= 8


def test_state_is_bounded_and_survives_saving() -> None:
    values = noisy(CURVES["constant"], "normal", 0)
    values[150::100] *= 9
    checks = checked(LOSS, values)
    kept = checks.values[LOSS]
    assert (len(kept.deviations), len(kept.outliers)) == (128, 16)
    assert kept.outlier_count >= 16
    assert save_and_load(checks) == checks


def verdicts(*ranks: NumberChecks) -> list[Any]:
    found = find_wrong_numbers(dict(enumerate(ranks)), ())
    return build_number_verdicts({"numbers": found})  # type: ignore[typeddict-item]
