"""All times that are shown are sums of the cells of one account, which add up to the wall time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.diagnosis.test_goodput import process, state_of
from tests.diagnosis.test_what_if import make_facts
from tests.golden.test_recorded_runs import replayed
from torchlens_perf.analysis.statistics.time_account import CELLS, CPU, TimeAccount
from torchlens_perf.diagnosis.goodput import build_goodput
from torchlens_perf.diagnosis.lost_time import classify_time
from torchlens_perf.diagnosis.step_times import StepTimes
from torchlens_perf.diagnosis.what_if import Replay, parse_change
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.records import OWN_PARTS, PARTS
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.latest_attempt import latest_processes
from torchlens_perf.view.rank_tables import parts_by_rank

RUNS = 500
_GAINS = ("data=0", "forward=0", "backward=0", "optimizer=0", "host=0", "recompute=0")


@dataclasses.dataclass(frozen=True)
class Planted:
    """A random synchronous run: times of each rank, step and part in ns."""

    parts_ns: np.ndarray
    lack_ns: np.ndarray
    """NaN in steps whose waits for a CPU were not measured."""

    @classmethod
    def make(cls, seed: int) -> Planted:
        random = np.random.default_rng(seed)
        ranks, steps = int(random.integers(1, 5)), int(random.integers(16, 48))
        usual_ns = random.choice([0, 1, 5, 20, 80], len(PARTS)) * 1e6 + random.integers(1000)
        noise = random.lognormal(0, random.choice([0.01, 0.2]), (ranks, steps, len(PARTS)))
        parts_ns = np.rint(usual_ns * noise)
        parts_ns[int(random.integers(ranks)), :, int(random.integers(6))] += random.choice([0, 4e7])
        busy = random.random() * random.integers(2)
        lack_ns = np.rint(parts_ns * busy * random.random(parts_ns.shape))
        lack_ns[random.random((ranks, steps)) < random.choice([0.0, 0.3, 1.0])] = np.nan
        own_ns = parts_ns.sum(axis=2) - parts_ns[..., PARTS.index("communication")]
        exposed_ns = parts_ns[..., PARTS.index("communication")].min(axis=0)
        parts_ns[..., PARTS.index("communication")] = own_ns.max(axis=0) - own_ns + exposed_ns
        return cls(parts_ns, lack_ns)

    @property
    def times(self) -> StepTimes:
        ranks, steps, _ = self.parts_ns.shape
        account = TimeAccount.from_parts(self.parts_ns, self.lack_ns)
        return StepTimes(tuple(range(ranks)), ("",) * ranks, np.arange(steps), 1, account)


@pytest.mark.parametrize("begin", range(0, RUNS, 100))
def test_cells_of_random_runs_add_up_and_contain_what_was_planted(begin: int) -> None:
    for seed in range(begin, begin + 100):
        run = Planted.make(seed)
        account = run.times.account
        wall_ns = run.parts_ns.sum(axis=2)
        assert (account.cells_ns >= 0).all()
        assert (account.wall_ns == wall_ns).all()
        for at, part in enumerate(PARTS):
            assert (account.sum_ns([part]) == run.parts_ns[..., at]).all(), (seed, part)
        not_measured = ~account.is_measured
        assert not account.sum_ns(states=[CPU])[not_measured].any()
        own = [PARTS.index(part) for part in OWN_PARTS]
        known_ns = np.nan_to_num(run.lack_ns[..., own]).sum(axis=2)
        assert (account.sum_ns(states=[CPU]) == known_ns).all()


@pytest.mark.parametrize("begin", range(0, RUNS, 100))
def test_path_and_gains_of_random_runs_are_sums_of_cells(begin: int) -> None:
    """Classes add up. Gains of subsets are ordered, and of one rank equal to the part's cells."""
    for seed in range(begin, begin + 100):
        times = Planted.make(seed).times
        facts = make_facts(times)
        replay, classes = Replay(times, facts), classify_time(times, facts, [])
        step_s = replay.step_s
        assert sum(each.s_per_step for each in classes) == pytest.approx(step_s)
        assert sum(each.share for each in classes) == pytest.approx(1)
        assert all(0 <= each.s_per_step <= step_s * (1 + 1e-9) for each in classes)

        def gain_s(*texts: str, replay: Replay = replay, step_s: float = step_s) -> float | None:
            found = replay.predict([parse_change(text) for text in texts])
            if found is None:
                return None
            assert found.low_s <= found.gain_s <= found.high_s <= step_s * (1 + 1e-9)
            return found.gain_s

        both_s, everything_s = gain_s("data=0", "forward=0"), gain_s("rank=all@median")
        for text in ("data=0", "forward=0"):
            one_s = gain_s(text)
            # Where both are known to remove most of the contention, one of them may not.
            assert one_s is None or (both_s is not None and one_s <= both_s + 1e-12), seed
        for rank in times.ranks:
            of_rank_s = gain_s(f"rank={rank}@median")
            assert None in (of_rank_s, everything_s) or of_rank_s <= everything_s + 1e-12, seed
        if len(times.ranks) == 1:
            for text in _GAINS:
                part_ns = times.account.sum_ns([text.removesuffix("=0")]).mean()
                found_s = gain_s(text)
                assert found_s is None or found_s == pytest.approx(part_ns / 1e9), (seed, text)


def steps_of(run: Planted, rank: int) -> list[dict[str, Any]]:
    """Return the steps of a rank as tests of tables write them, in ms."""
    return [dict(zip(PARTS, (row / 1e6).tolist(), strict=True)) for row in run.parts_ns[rank]]


@pytest.mark.parametrize("seed", range(20))
def test_bar_goodput_report_and_account_give_one_answer(seed: int) -> None:
    run = Planted.make(seed)
    # The same steps over and over: typical, mean and sum are then one number.
    first = steps_of(run, 0)[0]
    state = state_of(process([first] * 40))
    report, goodput = build_report("run", [state]), build_goodput([state], [])
    assert goodput is not None
    (rank,) = report["ranks"]
    account, typical = rank["account"], rank["typical"]
    assert account is not None
    assert typical is not None
    cells = {
        (part, state): ns for part, of in account["cells_ns"].items() for state, ns in of.items()
    }
    assert set(cells) <= set(CELLS)
    assert sum(cells.values()) == account["wall_ns"]
    assert (account["steps"], account["first_step"], account["last_step"]) == (37, 3, 39)
    for part in PARTS:
        part_s = sum(ns for (name, _), ns in cells.items() if name == part) / 1e9
        assert typical["parts"].get(part, 0.0) * 37 == pytest.approx(part_s)
        assert parts_by_rank(report)[0].get(part, 0.0) * 37 == pytest.approx(part_s)
    for name, part in (("data_stall", "data"), ("communication", "communication")):
        shown_s = goodput.classes[name].seconds
        assert shown_s == pytest.approx(first.get(part, 0.0) * 40 / 1e3)


@pytest.mark.parametrize("name", ["slow_data", "evaluates_and_saves", "host_code"])
def test_account_of_a_recorded_run_is_its_wall_time_to_the_nanosecond(
    name: str, tmp_path: Path
) -> None:
    report, _ = replayed(name, tmp_path)
    processes = latest_processes(node_state.load_all(RunDirectory(tmp_path / name)))
    for rank in report["ranks"]:
        account, steps = rank["account"], processes[rank["rank"]].statistics.step
        cells_ns = [ns for of_part in account["cells_ns"].values() for ns in of_part.values()]
        assert sum(cells_ns) == account["wall_ns"] == steps.sum_ns
        assert account["steps"] == steps.count
        assert 0 < account["cpu_measured_steps"] <= account["steps"]
        assert any(of_part.get(CPU) for of_part in account["cells_ns"].values())
