"""Device times of modules rest on enough samples, and a single outlier changes nothing.

Three runs were recorded on an H200 while other programs used it too. Each module has two samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.reports import checked
from tests.support.saved import save_and_load
from torchlens_perf.analysis.statistics.device import CAUGHT_UP_NS, DeviceStatistics, mask_fed
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.diagnosis.facts.module_times import (
    count_device_samples,
    estimate_device_self_times,
)
from torchlens_perf.report.build import build_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.operators import OperatorKey, Pass, Work
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.ring import UNKNOWN_NS, Kind, record_dtype
from torchlens_perf.run.sketch import Sketch
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.view.tables import build_tables

RECORDED = Path(__file__).parents[1] / "golden" / "gpu"
US = 1000
STEPS = 100


def sketch(times_us: Any) -> Sketch:
    made = Sketch()
    made.add((np.asarray(times_us, np.float64) * US).astype(np.int64))
    return made


def process_of(
    samples: dict[str, Any],
    calls: int = 1,
    flops: dict[str, int] | None = None,
    roots: tuple[str, ...] = (),
) -> ProcessState:
    """Return a process whose device was never idle in these samples of modules, in us."""
    statistics = RankStatistics(usual_steps=STEPS)
    for name, times_us in samples.items():
        statistics.modules[name] = sketch([50] * STEPS * calls)
        statistics.device.modules[name] = sketch(times_us)
    statistics.device.fed_modules = dict(statistics.device.modules)
    key = OperatorKey(Pass.FORWARD, Work.PRODUCT, "bf16").to_flags()
    for name, count in (flops or {}).items():
        statistics.operators.counted[f"{key}:{name}"] = [count, 1, 1]
    identity = Identity("r", 0, 0, 1, 1, 0, "h", 10, 1, 1, False, "train.py", "", {})
    return ProcessState(
        identity, Anchor(0, 0, 0), statistics, facts=RankFacts(root_modules=list(roots))
    )


def times_us(process: ProcessState) -> dict[str, float]:
    found = estimate_device_self_times(process)
    return {name: each.value * 1e6 for name, each in found.items()}


# -- recorded runs


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """Return the reports on the recorded runs by name."""
    found = {}
    for each in sorted(path for path in RECORDED.iterdir() if path.is_dir()):
        states = node_state.load_all(RunDirectory(each))
        found[each.name] = checked(build_report(each.name, states))
    return found


def test_outlier_in_one_of_twelve_equal_blocks_is_not_named(reports: dict[str, Any]) -> None:
    """Block 6 took 0.18 and 2.72 ms. All blocks take 0.18 ms, and have 24 samples together."""
    report = reports["infer"]
    rows = {row["name"]: row for row in report["modules"]}

    assert "blocks.6" not in " ".join(each.sentence for each in report["verdicts"])
    assert "look first at blocks.*.mlp, the largest by device time (12 equal modules, 2.1" in (
        report["verdicts"][-1].sentence
    )
    for block in range(12):
        row = rows[f"blocks.{block}.mlp"]
        assert row["device_own_low_s"] <= 177e-6 <= row["device_own_high_s"] < 185e-6
        assert (row["device_samples"], row["device_equal"]) == (24, "blocks.*.mlp")
    assert rows["head"]["device_own_s_per_step"] is None
    assert rows["head"]["device_samples"] == 2


def test_two_passes_of_one_step_are_no_times_of_modules(reports: dict[str, Any]) -> None:
    """Another program delayed a dropout by 4.4 ms in both."""
    report = reports["hf"]
    drop = next(row for row in report["modules"] if row["name"] == "transformer.drop")

    assert (drop["device_own_s_per_step"], drop["device_samples"]) == (None, 1)
    assert not any(row["device_own_by_rank"] for row in report["modules"])
    assert not any(row.forward_flops_per_s for row in report["utilization"].modules)


def test_heavy_module_is_found_by_its_work_without_enough_samples(reports: dict[str, Any]) -> None:
    """Its siblings have a quarter of its FLOPs. Some of their samples contain host stalls."""
    assert (
        "Next: look first at blocks.5.mlp, which has the most FLOPs of all timed modules (11% of a"
        in reports["slow_module"]["verdicts"][-1].sentence
    )


def test_rates_of_recorded_runs_are_below_their_limits(reports: dict[str, Any]) -> None:
    rows = [row for each in reports.values() for row in each["utilization"].modules]
    shares = [row.roofline_share for row in rows if row.roofline_share is not None]

    assert len(shares) >= 11, "those of the blocks of `infer`, and of other runs"
    assert max(shares) < 0.5


# -- samples


@pytest.mark.parametrize("count", [0, 1, 4])
def test_module_with_fewer_than_five_samples_has_no_time(count: int) -> None:
    process = process_of({"head": [900] * count, "embed": [30] * 5})

    assert [*estimate_device_self_times(process)] == ["embed"]
    assert count_device_samples(process) == {"head": count, "embed": 5}


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_median_and_its_interval_hold_the_time_among_outliers(share: float) -> None:
    """Other programs on the device multiply some samples by up to 20."""
    rng, held, off = np.random.default_rng(3), [], []
    for _ in range(200):
        count = int(rng.integers(5, 40))
        delayed = rng.random(count) < share
        samples = 180 * np.exp(0.02 * rng.standard_normal(count) + delayed * rng.uniform(0.5, 3))
        found = estimate_device_self_times(process_of({"mlp": samples}))["mlp"]
        held.append(found.low <= 1.02 * 180e-6 and found.high >= 180e-6)
        off.append(abs(found.value / 180e-6 - 1) < 0.1)

    assert np.mean(held) > 0.9
    assert np.mean(off) > (0.9 if share < 0.2 else 0.75)


def test_equal_modules_are_told_apart_by_their_flops() -> None:
    samples = {f"layers.{i}.proj": [100 + i, 101 + i] for i in range(4)}
    samples |= {f"layers.{i}.proj": [400 + i, 401 + i] for i in (4, 5, 6)}
    flops = {name: 10**9 if times[0] < 200 else 4 * 10**9 for name, times in samples.items()}
    found = times_us(process_of(samples, flops=flops))

    assert found["layers.0.proj"] == pytest.approx(102, rel=0.02)
    assert found["layers.5.proj"] == pytest.approx(403, rel=0.02)
    assert times_us(process_of(samples)) == {}, "without FLOPs, they differ too much to be equal"


@pytest.mark.parametrize(("count", "known"), [(2, False), (4, False), (5, True), (9, True)])
def test_module_that_differs_from_its_siblings_needs_samples_of_its_own(
    count: int, known: bool
) -> None:
    """A kernel without a formula for its FLOPs may be slow in one layer only."""
    samples = {f"layers.{i}.norm": [30.0] * count for i in range(11)}
    found = estimate_device_self_times(process_of({**samples, "layers.11.norm": [90.0] * count}))

    assert found["layers.3.norm"].equal == "layers.*.norm"
    assert ("layers.11.norm" in found) is known
    if known:
        assert found["layers.11.norm"][:1] == pytest.approx((90e-6,), rel=0.02)
        assert found["layers.11.norm"].equal == ""


def test_calls_of_one_step_that_differ_have_their_mean() -> None:
    """An embedding that an encoder and a decoder share is called with inputs of two lengths."""
    samples = [10.0, 10.0, 10.0, 70.0] * 8
    found = estimate_device_self_times(process_of({"embed": samples}, calls=4))["embed"]

    assert found.value == pytest.approx(100e-6, rel=0.03)
    assert (found.samples, found.low < 41e-6) == (8, True)


def test_module_around_others_has_the_rest_of_their_time() -> None:
    samples = {"block": [500.0] * 5, "block.attn": [200.0] * 5, "block.mlp": [250.0] * 5}
    found = times_us(process_of({**samples, "norm": [7.0] * 5}, roots=("Net",)))

    assert found["block"] == pytest.approx(50, abs=1)
    few = process_of({**samples, "block.mlp": [250.0] * 2})
    assert [*times_us(few)] == ["block.attn"], "the time of block.mlp is in that of block"


# -- waits for the host


def device_records(*spans: tuple[Kind, int, int, int]) -> np.ndarray:
    """Return records of the device: kind, start, duration and lag at the end, in us."""
    records = np.zeros(len(spans), record_dtype())
    records["kind"] = int(Kind.DEVICE)
    for record, (kind, start, duration, behind) in zip(records, spans, strict=True):
        record["value0"], record["start_ns"] = int(kind), start * US
        record["duration_ns"], record["value1"] = duration * US, min(behind * US, UNKNOWN_NS)
    return records


QUEUED, IDLE, UNKNOWN = 2 * CAUGHT_UP_NS // US, 20, UNKNOWN_NS // US + 1


@pytest.mark.parametrize(
    ("before", "inside", "after", "fed"),
    [
        (QUEUED, QUEUED, QUEUED, True),
        (IDLE, QUEUED, QUEUED, False),
        (QUEUED, IDLE, QUEUED, False),
        (QUEUED, QUEUED, IDLE, False),
        (QUEUED, QUEUED, UNKNOWN, False),
        (UNKNOWN, QUEUED, QUEUED, False),
    ],
)
def test_time_in_which_the_device_may_have_waited_for_its_host_is_no_work(
    before: int, inside: int, after: int, fed: bool
) -> None:
    records = device_records(
        (Kind.STEP, 0, 100, before),
        (Kind.MODULE, 120, 300, inside),
        (Kind.MODULE, 110, 500, after),
        (Kind.FORWARD, 105, 900, IDLE),
    )

    assert mask_fed(records, records[2:3]).tolist() == [fed]


def test_samples_with_a_wait_are_counted_apart_and_survive_a_restart() -> None:
    statistics = DeviceStatistics()
    for behind in (QUEUED, IDLE):
        statistics.add_records(
            device_records((Kind.STEP, 0, 100, QUEUED), (Kind.MODULE, 120, 300, behind)), ["mlp"]
        )
        statistics = save_and_load(statistics)

    assert statistics.modules["mlp"].count == 2
    assert statistics.fed_modules is not None
    assert statistics.fed_modules["mlp"].count == 1


# -- tables


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("infer", ["device per step", "at least", "at most", "samples"]),
        ("hf", ["samples"]),
        ("slow_module", ["samples"]),
    ],
)
def test_module_table_has_an_interval_and_samples_with_each_device_time(
    reports: dict[str, Any], name: str, shown: list[str]
) -> None:
    (table,) = [each for each in build_tables(reports[name]) if each.key == "modules"]
    titles = [column.title for column in table.columns]

    assert titles[1 : len(shown) + 2] == [*shown, "forward per step"]
    assert ("share of step" in titles) is (len(shown) > 1), "no share of host times"
    times, *interval = (column.values for column in table.columns[1:4])
    for own_s, low_s, high_s in zip(times, *interval, strict=True) if len(shown) > 1 else ():
        assert (own_s is None) or low_s <= own_s <= high_s
