"""Tokens and times of a rank's experts, from the exchanges in its records."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.collectives import Issued, records
from tests.support.tables import MS, step_table
from torchlens_perf.experts.load import ExpertLoad
from torchlens_perf.run.records import StepTable

ROW = 256
TOKENS = f"alltoall_base group=ep dtype=bfloat16 row={ROW}"
SPLIT_EVENLY = "alltoall_base group=ep dtype=bfloat16"
COUNTS = "alltoall_base group=ep dtype=int64"


def one_step(
    *received: int, name: str = TOKENS, duration: int = 1 * MS, **more: int
) -> list[Issued]:
    """Return exchanges 10 ms apart that receive these numbers of rows."""
    return [
        Issued(name, at, duration, rows * ROW, start_ns=10 * at * MS, **more)
        for at, rows in enumerate(received)
    ]


def signals(
    issued: list[Issued], step: int = 0, load: ExpertLoad | None = None
) -> dict[str, float]:
    """Return the signals of one step of 100 ms."""
    load = load or ExpertLoad()
    made, names = records(issued)
    made["step"] = step
    load.add_steps(made, names, steps(step))
    return load.take_signals()


def steps(first: int) -> StepTable:
    return step_table([{"forward": 100.0}], first)


def test_every_first_exchange_receives_the_tokens_of_the_experts() -> None:
    """The backward pass exchanges in the other direction, and receives the tokens first, too."""
    found = signals(one_step(900, 500, 700, 500, 700, 500, 900, 500))

    assert found["expert_ktokens"] == pytest.approx(0.8)
    assert found["expert_share"] == pytest.approx(4 * 9 / 100)


def test_rank_without_tokens_has_zero_and_not_nothing() -> None:
    assert signals(one_step(0, 500, 0, 500))["expert_ktokens"] == 0
    assert signals([]) == {}


def test_exchanges_in_an_unknown_order_are_not_measured() -> None:
    """Two batches whose passes overlap are an example."""
    assert signals(one_step(900, 500, 700)) == {}
    assert signals(one_step(900, 700, 500, 500, 500, 800)) == {}


def test_only_exchanges_split_by_rows_of_sampled_steps_are_examined() -> None:
    assert signals(one_step(900, 500, name=SPLIT_EVENLY)) == {}
    assert signals(one_step(900, 500), step=3) == {}
    assert signals(one_step(900, 500), step=4)["expert_ktokens"] == pytest.approx(0.9)


def test_probabilities_and_counts_are_not_taken_for_tokens() -> None:
    probabilities = "alltoall_base group=ep dtype=float32 row=4"
    apart = [Issued(probabilities, 0, 1 * MS, 900 * 4), Issued(COUNTS, 1, 1 * MS, 64)]
    found = signals([*apart, *one_step(900, 500)])

    assert found["expert_ktokens"] == pytest.approx(0.9)


def test_time_of_the_experts_is_missing_if_the_end_of_an_exchange_is_not_known() -> None:
    assert signals(one_step(900, 500, flags=0)).keys() == {"expert_ktokens"}


def test_signals_are_those_since_the_last_call() -> None:
    load = ExpertLoad()
    signals(one_step(900, 500), load=load)

    assert signals(one_step(700, 500), step=4, load=load)["expert_ktokens"] == pytest.approx(0.7)
    load.add_steps(np.zeros(0, records([])[0].dtype), [], steps(8))
    assert load.take_signals() == {}
