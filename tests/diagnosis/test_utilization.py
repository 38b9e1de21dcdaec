"""Rates, utilization and the roofline, from records whose values the test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.test_report import report_on
from tests.support.ranks import Rank, make_run
from tests.support.tables import MS
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.diagnosis.device_peaks import find_device_peak
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.operators import OperatorKey, Pass, Work
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.words.report_utilization import UncountedOperator, Utilization

H100 = "NVIDIA H100 80GB HBM3"
STEP_S = 0.01
TERA = 10**12
Amount = tuple[Pass, Work, str, int]
FORWARD = (Pass.FORWARD, Work.PRODUCT, "bf16", TERA)
BACKWARD = (Pass.BACKWARD, Work.PRODUCT, "bf16", 2 * TERA)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def record(rank: Rank, name: str, key: OperatorKey, value0: int, value1: int, ns: int) -> None:
    recorder = rank.session.recorder
    name_id = rank.session.intern(name) if name else 0
    recorder.record_span(Kind.OPERATORS, name_id, 0, ns, key.to_flags(), value0, value1)


def trained(
    run: RunDirectory,
    *amounts: Amount,
    number: int = 0,
    devices: list[str] | None = None,
    workload: int = 640,
    samples: int = 0,
    steps: int = 20,
    counted: int = 10,
    **options: Any,
) -> Rank:
    """Return a rank whose step `counted` had these operations of the module "block"."""
    rank = Rank(run, number)
    rank.session.metadata.add_modules(
        {"block": False}, device="cuda" if devices else "cpu", all_levels=True, unopened=()
    )
    rank.session.facts.gpus = [
        {"uuid": f"GPU-{number}-{index}", "name": name, "index": index}
        for index, name in enumerate(devices or [])
    ]
    rank.session.facts.operators_missing = options.get("missing", "")
    rank.session.publish()
    for step in range(steps):
        recorder = rank.session.recorder
        rank.begin(Kind.FORWARD, "forward model")
        rank.begin(Kind.MODULE, "block")
        rank.clock.advance(round(STEP_S * 1e9))
        recorder.end(Kind.MODULE, rank.session.intern("block"))
        recorder.end(Kind.FORWARD, rank.session.intern("forward model"))
        if step == counted and amounts:
            for in_pass, work, precision, flops in amounts:
                key = OperatorKey(in_pass, work, precision)
                record(rank, "block", key, flops, options.get("bytes", 10**9), 1000)
            other = OperatorKey(Pass.FORWARD, Work.OTHER, "other")
            record(rank, "aten::softmax", other, 0, 7, 250)
            key = other._replace(work=options.get("kind", Work.TOKEN_STEP))
            record(rank, "", key, samples + 1 if samples else 0, 99, 1000)
        if devices and step < WARM_UP_STEPS + options.get("sampled", 20):
            device_ns = round(1e9 * options.get("device_s", STEP_S))
            of_device = int(Kind.DEVICE), rank.session.intern("block"), step, rank.clock.now_ns
            recorder.record_completed(*of_device, device_ns, 0, int(Kind.MODULE), 30 * MS)
        its_workload = options.get("workloads", {}).get(step, workload)
        recorder.next_step(0, 0, 1 | (its_workload + 1) << 16)
    return rank


def utilization(run: RunDirectory, *ranks: Rank) -> Utilization:
    found: Utilization = report_on(run, list(ranks))["utilization"]
    return found


# -- utilization


def test_utilization_is_the_time_at_the_peak_over_the_time_of_a_step(run: RunDirectory) -> None:
    found = utilization(run, trained(run, FORWARD, BACKWARD, devices=[H100]))

    assert found.model_flops == found.hardware_flops == 3 * TERA
    assert found.mfu == found.hfu == pytest.approx(3 / 989.4 / STEP_S)
    assert found.peak_flops_per_s == pytest.approx(989.4e12)
    assert "H100" in found.peak_source
    assert "https://" in found.peak_source
    assert "PaLM" in found.convention
    assert found.not_measured is None


def test_recomputation_and_the_optimizers_products_are_hardware_operations(
    run: RunDirectory,
) -> None:
    repeated = (Pass.RECOMPUTE, Work.PRODUCT, "bf16", TERA)
    optimizer = (Pass.OPTIMIZER, Work.PRODUCT, "bf16", TERA)
    found = utilization(run, trained(run, FORWARD, BACKWARD, repeated, optimizer, devices=[H100]))

    assert (found.model_flops, found.hardware_flops) == (3 * TERA, 5 * TERA)
    assert found.hfu == pytest.approx(5 / 3 * found.mfu)


def test_each_precision_is_divided_by_its_own_peak(run: RunDirectory) -> None:
    eight = (Pass.FORWARD, Work.PRODUCT, "fp8", 2 * TERA)
    found = utilization(run, trained(run, FORWARD, eight, devices=[H100]))

    assert found.mfu == pytest.approx((1 / 989.4 + 2 / 1978.9) / STEP_S)
    assert found.precisions == pytest.approx({"fp8": 2 / 3, "bf16": 1 / 3})


def test_causal_attention_by_half_is_stated_too(run: RunDirectory) -> None:
    causal = (Pass.FORWARD, Work.CAUSAL_ATTENTION, "bf16", 2 * TERA)
    full = (Pass.FORWARD, Work.ATTENTION, "bf16", TERA)
    found = utilization(run, trained(run, FORWARD, causal, full, devices=[H100]))

    assert (found.attention_flops, found.causal_attention_flops) == (3 * TERA, 2 * TERA)
    assert found.mfu_causal_half == pytest.approx(found.mfu * 3 / 4)


@pytest.mark.parametrize(
    "name", ["NVIDIA H100", "NVIDIA B300 SXM6 AC", "AMD Radeon", "H100 PCIe 2", ""]
)
def test_device_that_is_not_listed_has_no_utilization(run: RunDirectory, name: str) -> None:
    """No other device's peak is used instead. An H100 without a suffix is the SXM5 module."""
    found = utilization(run, trained(run, FORWARD, devices=[name]))

    assert (find_device_peak(name) is None) == (name != "NVIDIA H100")
    assert (found.mfu is None) == (name != "NVIDIA H100")
    assert found.model_flops == TERA


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp8", 1670.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA B200", "fp4", 9000),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("NVIDIA L40S", "fp8", 733),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_peaks_are_dense(name: str, precision: str, tera: float) -> None:
    peak = find_device_peak(name)
    assert peak is not None
    assert peak.flops_per_s[precision] == tera * 1e12
    assert peak.source.startswith("https://")


def test_precision_without_a_peak_leaves_utilization_unknown(run: RunDirectory) -> None:
    """A V100 has no peak for bfloat16, and no operation is moved to another precision's peak."""
    found = utilization(run, trained(run, FORWARD, devices=["Tesla V100-SXM2-32GB"]))

    assert found.mfu is found.peak_flops_per_s is None


def test_devices_of_one_rank_are_added(run: RunDirectory) -> None:
    found = utilization(run, trained(run, FORWARD, devices=[H100, H100]))

    assert found.mfu == pytest.approx(1 / (2 * 989.4) / STEP_S)


def test_operations_of_a_step_grow_with_its_workload(run: RunDirectory) -> None:
    """The counted step has twice the tokens of the others."""
    found = utilization(run, trained(run, FORWARD, workloads={10: 1280}, devices=[H100]))

    assert found.model_flops == pytest.approx(TERA * (640 * 19 + 1280) / 20 / 1280)


def test_ranks_without_counts_leave_the_job_unmeasured(run: RunDirectory) -> None:
    ranks = [
        trained(run, FORWARD, devices=[H100]),
        trained(run, number=1, devices=[H100], missing="the native tap is not built"),
    ]
    found = utilization(run, *ranks)

    assert found.not_measured == "the native tap is not built"
    assert found.mfu is found.model_flops is None
    assert found.ranks[0].mfu is not None
    assert found.ranks[1].mfu is None
    assert found.ranks[1].not_measured == "the native tap is not built"


@pytest.mark.parametrize("steps", [0, 5])
def test_run_without_counted_steps_says_why(run: RunDirectory, steps: int) -> None:
    found = utilization(run, trained(run, steps=steps))

    assert "no step was counted" in found.not_measured
    assert found.model_flops is found.mfu is found.tokens_per_s is None


# -- rates


def test_rates_are_those_of_a_mean_step(run: RunDirectory) -> None:
    found = utilization(run, trained(run, FORWARD, samples=32))

    assert found.tokens_per_s == pytest.approx(640 / STEP_S)
    assert found.samples_per_s == pytest.approx(32 / STEP_S)


def test_elements_that_are_no_tokens_give_no_tokens_per_second(run: RunDirectory) -> None:
    found = utilization(run, trained(run, FORWARD, samples=32, kind=Work.STEP))

    assert found.tokens_per_s is None
    assert found.samples_per_s is not None


@pytest.mark.parametrize(
    ("description", "replicas"),
    [
        ("mesh_tp", 1),
        ("TENSOR_MODEL_PARALLEL_GROUP", 1),
        ("mesh_dp", 2),
        ("default_pg", 2),
        ("http", 2),
    ],
)
def test_ranks_that_share_a_model_count_their_batch_once(
    run: RunDirectory, description: str, replicas: int
) -> None:
    ranks = [trained(run, FORWARD, number=number, samples=32) for number in (0, 1)]
    for rank in ranks:
        rank.session.metadata.add_group("1", [0, 1], description)
    found = utilization(run, *ranks)

    assert found.tokens_per_s == pytest.approx(replicas * 640 / STEP_S)
    assert found.samples_per_s == pytest.approx(replicas * 32 / STEP_S)


# -- coverage and modules


def test_operators_without_a_formula_are_listed_with_their_share(run: RunDirectory) -> None:
    found = utilization(run, trained(run, FORWARD))

    assert found.uncounted == [UncountedOperator("aten::softmax", 7, 0.25)]
    assert found.counted_share == 0.75


@pytest.mark.parametrize(("moved", "bound"), [(10**6, "compute"), (10**10, "memory")])
def test_roofline_names_what_limits_a_module(run: RunDirectory, moved: int, bound: str) -> None:
    found = utilization(run, trained(run, FORWARD, BACKWARD, devices=[H100], bytes=moved))
    (row,) = found.modules

    limit = min(989.4e12, TERA / moved * 3.35e12)
    assert row.bound == bound
    assert row.roofline_flops_per_s == pytest.approx(limit)
    assert row.forward_flops_per_s == pytest.approx(TERA / STEP_S)
    assert row.roofline_share == pytest.approx(TERA / STEP_S / limit)
    assert (row.flops, row.share) == (3 * TERA, 1)


@pytest.mark.parametrize(
    "options",
    [{"device_s": 0.001}, {"device_s": 0.0029, "bytes": 10**10}, {"sampled": 4}],
    ids=["above the peak", "above the memory's limit", "four samples"],
)
def test_rate_that_is_impossible_or_rests_on_few_samples_is_unknown(
    run: RunDirectory, options: dict[str, Any]
) -> None:
    """The time that the host took to issue the module's work is not used instead."""
    (row,) = utilization(run, trained(run, FORWARD, devices=[H100], **options)).modules

    assert row.roofline_flops_per_s
    assert (row.forward_flops_per_s, row.roofline_share) == (None, None)
