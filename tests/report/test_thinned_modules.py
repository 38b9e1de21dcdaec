"""Reports on runs in which the calls of modules were timed in some steps only."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import HOST, Rank, make_run
from tests.support.reports import checked
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.page.notebook import results_as_json
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.run.verdicts import Summary
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.timeline.export import write_trace
from torchlens_perf.view.step_words import describe_overhead
from torchlens_perf.view.terminal import render_full

STEPS = 600
MODULES_MS = {"embed": 1.0, "block": 3.0, "head": 2.0}
WITHOUT = int(Flag.WITHOUT_MODULES)
# The calls of step i are timed with the period p if CHOICE[i] < 1 / p, on all ranks.
CHOICE = np.random.default_rng(7).random(STEPS)


class ThinnedRank(Rank):
    """A rank whose model calls `block` twice in a step, for 1.5 ms each."""

    def train(
        self,
        period: int,
        *,
        slow_block_ms: float = 0.0,
        cost_ms: float = 0.0,
        calibrated_ns: float | None = None,
    ) -> None:
        """Make steps of about 14 ms.

        cost_ms: time by which timing modules prolongs a step. calibrated_ns: published cost of a
        record.
        """
        recorder, intern = self.session.recorder, self.session.intern
        noise = np.random.default_rng(self.identity.rank)
        names = {"Net": True, **dict.fromkeys(MODULES_MS, False)}
        self.session.metadata.add_modules(names, device="cpu", all_levels=True, unopened=[])
        self.session.facts.recording = {"mark_ns": calibrated_ns, "module_period": period}
        self.session.publish()
        for step in range(STEPS):
            timed = CHOICE[step] < 1 / period
            recorder.begin(Kind.FORWARD, intern("forward Net"))
            for name in ("embed", "block", "block", "head"):
                duration_ms = MODULES_MS[name] + slow_block_ms * (name == "block")
                if timed:
                    recorder.begin(Kind.MODULE, intern(name))
                share = 0.5 if name == "block" else 1.0
                self.clock.advance(round(1e6 * share * duration_ms * noise.uniform(0.9, 1.1)))
                if timed:
                    recorder.end(Kind.MODULE, intern(name))
            self.clock.advance(500_000 + round(1e6 * cost_ms) * timed)
            recorder.end(Kind.FORWARD, intern("forward Net"))
            for kind in (Kind.BACKWARD, Kind.WAIT):
                recorder.begin(kind, intern("rest"))
                self.clock.advance(3_500_000)
                recorder.end(kind, intern("rest"))
            if timed and step % 8 == 0:
                on_device = int(Kind.DEVICE), intern("block"), step, self.clock.now_ns, 1_500_000
                recorder.record_completed(*on_device, 0, int(Kind.MODULE), 1_000_000)
            recorder.next_step(0 if timed else WITHOUT, 0, 1)


def report_on(
    folder: Path, periods: tuple[int, ...], slow_rank: int | None = None, **settings: float
) -> Any:
    """Return the report on ranks with these periods. Of a slow rank, `block` takes 2 ms longer."""
    run = make_run(folder)
    for rank, period in enumerate(periods):
        made = ThinnedRank(run, rank, len(periods), ring_records=16384)
        made.train(period, slow_block_ms=2.0 * (rank == slow_rank), **settings)
        made.close()
    return judge(run)


def judge(run: RunDirectory) -> Any:
    """Return the report on the run's ranks, which have ended."""
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.judge_ranks(1e6, final=True)
    sidecar.save_records()
    sidecar.save_state()
    sidecar.close()
    return checked(build_report(run.run_id, [sidecar.state]))


def modules_by_name(report: Any) -> dict[str, Any]:
    return {row["name"]: row for row in report["modules"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a run whose rank 1 times modules in 1 of 4 steps."""
    folder = tmp_path_factory.mktemp("thinned")
    report_on(folder, (1, 4))
    (path,) = folder.iterdir()
    return RunDirectory(path)


@pytest.mark.parametrize("period", [4, 16])
def test_module_times_are_those_of_the_full_recording(tmp_path: Path, period: int) -> None:
    """The noise of a module in one step is 6 %, so its mean over 35 steps is exact to 3 %."""
    full, thinned = (modules_by_name(report_on(tmp_path, (each,))) for each in (1, period))

    assert [*thinned] == [*full] == ["block", "head", "embed", "Net"]
    for name, row in thinned.items():
        assert row["own_s_per_step"] == pytest.approx(full[name]["own_s_per_step"], rel=0.03)
        assert row["own_s"]["p50_s"] == pytest.approx(full[name]["own_s"]["p50_s"], rel=0.05)
        assert row["calls_per_step"] == full[name]["calls_per_step"] == 1 + (name == "block")
    assert thinned["block"]["device_own_s_per_step"] == pytest.approx(0.003, rel=0.01)
    timed = int((CHOICE[WARM_UP_STEPS:] < 1 / period).sum())
    assert (thinned["head"]["calls"], thinned["block"]["calls"]) == (timed, 2 * timed)


def test_own_times_of_modules_add_up_to_the_forward_pass(tmp_path: Path) -> None:
    report = report_on(tmp_path, (4,))
    own_s = sum(row["own_s_per_step"] for row in report["modules"])
    assert own_s == pytest.approx(report["ranks"][0]["typical"]["parts"]["forward"], rel=1e-6)


def test_steps_without_module_times_are_no_class_of_steps(tmp_path: Path) -> None:
    steps = report_on(tmp_path, (4,))["steps"]
    assert (steps["count"], steps["long"], steps["short"]) == (STEPS, [], [])


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_slow_module_is_named_though_periods_differ(tmp_path: Path, slow_rank: int) -> None:
    (verdict,) = report_on(tmp_path, (1, 4), slow_rank)["verdicts"]

    assert (verdict.kind, verdict.rank, verdict.phase) == (
        "straggler",
        slow_rank,
        "forward",
    )
    assert verdict.evidence.modules == ("block",)
    assert verdict.evidence.module_excess_s == pytest.approx(0.002, rel=0.15)


def test_report_has_the_period_and_an_interval_of_the_cost(tmp_path: Path) -> None:
    report = report_on(tmp_path, (1, 4), cost_ms=0.1, calibrated_ns=25_000)
    quality, words = report["quality"], render_full(report, "runs/x", columns=200, color=False)

    assert quality["module_period"] == 4
    assert quality["overhead_low"] < quality["overhead_share"] < quality["overhead_high"]
    shown = "{overhead_share:.2%} of step time (at least {overhead_low:.2%}, at most {overhead_high:.2%})"
    overhead = f"overhead {shown.format(**quality)}; modules timed in 1 of 4 steps"
    assert overhead in words
    assert overhead in Summary(**json.loads(results_as_json(report, "x", ""))["summary"]).figures


@pytest.mark.parametrize("calibrated_ns", [25_000, 100_000, 200_000])
def test_measured_cost_corrects_a_wrong_calibration(tmp_path: Path, calibrated_ns: float) -> None:
    """Timing 4 calls takes 0.4 ms, so a record costs 0.1 ms. A step has 4 records without calls."""
    report = report_on(tmp_path, (4,), cost_ms=0.4, calibrated_ns=calibrated_ns)
    truth = 1e5 * report["quality"]["records"] / STEPS / 1e9 / report["steps"]["mean_s"]

    quality = report["quality"]
    assert quality["overhead_share"] == pytest.approx(truth, rel=0.15)
    assert quality["overhead_low"] < truth < quality["overhead_high"]
    assert quality["overhead_high"] - quality["overhead_low"] < 0.6 * truth


def test_calibrated_cost_is_uncertain_without_untimed_steps(tmp_path: Path) -> None:
    quality = report_on(tmp_path, (1,), calibrated_ns=25_000)["quality"]
    ratios = [quality[f"overhead_{end}"] / quality["overhead_share"] for end in ("low", "high")]
    assert ratios == [pytest.approx(0.02), pytest.approx(1.98)]


def test_module_without_a_timed_typical_step_has_the_time_of_other_steps(tmp_path: Path) -> None:
    """Only steps of three times the usual duration were timed."""
    run = make_run(tmp_path)
    rank = ThinnedRank(run, 0, 1)
    recorder, intern = rank.session.recorder, rank.session.intern
    for step in range(100):
        timed = step % 20 == 7
        recorder.begin(Kind.FORWARD, intern("forward Net"))
        if timed:
            recorder.begin(Kind.MODULE, intern("block"))
        rank.clock.advance(30_000_000 if timed else 10_000_000)
        if timed:
            recorder.end(Kind.MODULE, intern("block"))
        recorder.end(Kind.FORWARD, intern("forward Net"))
        recorder.next_step(0 if timed else WITHOUT, 0, 1)
    rank.close()
    assert modules_by_name(judge(run))["block"]["by_rank"] == {"0": pytest.approx(0.03)}


def test_page_says_which_ranks_did_not_time_modules_in_a_step(saved: RunDirectory) -> None:
    """Typical steps are chosen among those with the modules of all ranks."""
    steps = gather_contents(saved)["traces"]["steps"]
    assert any(each["why"].startswith("typical") for each in steps)
    assert {bool(CHOICE[each["step"]] < 1 / 4) for each in steps} == {True, False}
    for each in steps:
        untimed = CHOICE[each["step"]] >= 1 / 4
        assert ("Modules were not timed on rank 1." in each["clock"]) == untimed
        assert not (untimed and each["why"].startswith("typical"))


def test_steps_of_a_trace_say_that_modules_were_not_timed(
    saved: RunDirectory, tmp_path: Path
) -> None:
    write_trace(saved, tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    for rank, period in enumerate((1, 4)):
        steps = {
            event["name"]: event.get("args", {})
            for event in events
            if event["ph"] == "X" and event["pid"] == rank + 1
        }
        for step in range(STEPS):
            untimed = {"modules": "not timed in this step"} if CHOICE[step] >= 1 / period else {}
            assert steps[f"step {step}"] == untimed
        assert "modules" not in steps["forward Net"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((None, None, None, 1, 1), "not measured"),
        ((0.0, 0.0, 0.0, 1, 1), "0.00% of step time"),
        ((0.00001, 0.0, 0.00002, 1, 1), "<0.01% of step time (at least 0.00%, at most <0.01%)"),
        ((0.0042, 0.0031, 0.0055, 1, 1), "0.42% of step time (at least 0.31%, at most 0.55%)"),
        ((0.0042, 0.0042, 0.0042, 1, 1), "0.42% of step time"),
        (
            (0.01, 0.005, 0.02, 4, 2),
            "1.00% of step time (at least 0.50%, at most 2.00%); modules timed in 1 of 4 steps; device phases timed"
            " in 1 of 2 steps",
        ),
    ],
)
def test_overhead_as_text(values: Any, text: str) -> None:
    names = ("overhead_share", "overhead_low", "overhead_high", "module_period", "phase_period")
    quality: Any = dict(zip(names, values, strict=True))
    assert describe_overhead(quality) == text
