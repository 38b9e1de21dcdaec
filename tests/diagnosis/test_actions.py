"""Each rule gives its action where its condition is planted, and is silent where one fact differs.

The facts are made here. Real processes are in test_actions_of_real_jobs.py. Rules that need a GPU are
tested with these facts only.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.diagnosis.test_what_if import make_times
from torchlens_perf.analysis.statistics.time_account import find_cells
from torchlens_perf.diagnosis.actions.job import Job, Rule
from torchlens_perf.diagnosis.actions.table import (
    ACTIONS,
    Choice,
    choose_actions,
    find_actions,
)
from torchlens_perf.diagnosis.lost_time import classify_time
from torchlens_perf.diagnosis.what_if import Replay
from torchlens_perf.run.training_settings import (
    DdpSettings,
    LoaderSettings,
    OptimizerSettings,
    TrainingSettings,
)
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.report import LostTime

GB, STEPS = 1 << 30, 64
CLEAN = {"forward": 20.0, "backward": 40.0}
LOADER = LoaderSettings(workers=2, pin_memory=True)
RESTARTED = dataclasses.replace(LOADER, restarts=8, restart_ns=400_000_000)
DDP = DdpSettings(25 << 20, False, False, False, 400 << 20, 0)
ADAM = OptimizerSettings("AdamW", 100, "cpu")
CPU = {"cpus": 8, "threads": 2, "workers": 0, "others_share": None, "programs": [], "ranks": None}
SUMS = {"operation": "allreduce", "group": "0", "description": "dp", "dtype": "float32",
        "count": STEPS * 2, "bytes": 0, "transfer_s": {"mean_s": 0.004}}  # fmt: skip


DEVICE_PARTS = {"forward": 0.03, "backward": 0.06, "host": 0.01}


def device(used: float = 0.9, caught_up: float = 0.1, retries: Any = None) -> dict[str, Any]:
    memory = {"limit_bytes": 80 * GB, "peak_reserved_bytes": int(used * 80 * GB)}
    return {
        "device": {"caught_up": caught_up, "captured": 0, "parts": DEVICE_PARTS},
        "memory": {"device": {**memory, "retries_in": retries}, "max_bytes": None},
    }


def long(kind: str, total_ms: float, part: str = "host", **changed: Any) -> dict[str, Any]:
    row = {"kinds": [kind] if kind else [], "part": part, "count": 4, "total_s": total_ms / 1e3}
    return {**row, "period": None, "waited_for": None, **changed}


def make_job(
    *uses: dict[str, float],
    settings: dict[str, Any] | None = None,
    rank: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    steps: dict[str, Any] | None = None,
    lengths: float | None = None,
    **facts: Any,
) -> Job:
    """Return a job whose ranks spend these milliseconds per step, by use."""
    uses = uses or (CLEAN,)
    times = make_times(*uses, rows=STEPS)
    step_s = float(times.uses_ns.sum(axis=2).mean()) / 1e9
    long_rows = (steps or {}).get("long", [])
    total_s = step_s * STEPS + sum(row["total_s"] for row in long_rows)
    row = {"host": "a", "typical": None, "cpu": CPU, "device": None}
    row = {**row, "memory": {"device": None, "max_bytes": GB}, **(rank or {})}
    report: Any = {
        "run": {"device": None, "world_size": len(uses), "settings": {}, **(run or {})},
        "steps": {"count": STEPS, "total_s": total_s, "warm_up": 0, "long": [], "micro_steps": 1, "alike": STEPS,
                  "own_time": None, "sampled_lack_of_cpu": None, **(steps or {})},
        "ranks": [{**row, "rank": number} for number in range(len(uses))],
        "modules": [], "sections": [], "collectives": [], "verdicts": [], "gpus": [],
        "device_sections": [], **facts,
    }  # fmt: skip
    classes = classify_time(times, report, report["verdicts"])
    mean_s = report["steps"]["total_s"] / STEPS
    report["lost_time"] = LostTime(0, STEPS - 1, STEPS, mean_s, classes, [], 0.0)
    known = TrainingSettings(**{"cpu_count": CPU["cpus"], **(settings or {})})
    return Job(report, known, Replay(times, report), len(uses), lengths)


GPU: dict[str, Any] = {"run": {"device": "GPU"}, "rank": device()}
STARVED = device(caught_up=0.8)
WAITS = {**CLEAN, "data": 30.0}
EXPOSED = ({**CLEAN, "communication": 20.0}, CLEAN)
MOSTLY_EXPOSED = ({**CLEAN, "communication": 60.0}, CLEAN)
UNEVEN = ({**CLEAN, "forward": 60.0}, CLEAN, CLEAN)
SEARCHES = dataclasses.replace(DDP, find_unused_parameters=True)
MAPS = {**SUMS, "dtype": "int32", "bytes": 400 * 2 * STEPS}
FULL = {"run": {"device": "GPU"}, "rank": device(0.85)}
HALF_EMPTY = {"run": {"device": "GPU"}, "rank": device(0.4)}

# For each rule: the uses of each rank's step, the other facts, and the facts that are different in
# the job that is nearly the same. "uses" stands for other uses.
CASES: dict[str, tuple[tuple[dict[str, float], ...], dict[str, Any], dict[str, Any]]] = {
    "loader-workers": (
        (WAITS,),
        {"settings": {"loader": dataclasses.replace(LOADER, workers=0)}},
        {"rank": {"cpu": {**CPU, "cpus": 2}}},
    ),
    "persistent-workers": (
        (WAITS,),
        {"settings": {"loader": RESTARTED}},
        # Each epoch has a new loader, which is iterated once.
        {"settings": {"loader": dataclasses.replace(RESTARTED, restarts=0, restart_ns=0)}},
    ),
    "pin-memory": (
        (WAITS,),
        {**GPU, "settings": {"loader": dataclasses.replace(LOADER, pin_memory=False)}},
        {"run": {"device": None}},
    ),
    "ddp-bucket-size": (
        EXPOSED,
        {"settings": {"ddp": dataclasses.replace(DDP, bucket_bytes=1 << 20)}},
        {"settings": {"ddp": DDP}},
    ),
    "ddp-unused-parameters": (
        EXPOSED,
        {"settings": {"ddp": SEARCHES}, "collectives": [MAPS]},
        {"collectives": [{**MAPS, "transfer_s": {"mean_s": 0.0005}}]},
    ),
    "ddp-static-graph": (
        EXPOSED,
        {"settings": {"ddp": dataclasses.replace(SEARCHES, unused=3)}, "collectives": [MAPS]},
        {"settings": {"ddp": dataclasses.replace(SEARCHES, unused=3, static_graph=True)}},
    ),
    "ddp-no-sync": (
        EXPOSED,
        {
            "settings": {"ddp": DDP},
            "steps": {"micro_steps": 4},
            "collectives": [{**SUMS, "bytes": 4 * DDP.gradient_bytes * 2 * STEPS}],
        },
        {"collectives": [{**SUMS, "bytes": DDP.gradient_bytes * 2 * STEPS}]},
    ),
    "accumulate-gradients": (
        MOSTLY_EXPOSED,
        {"settings": {"ddp": DDP}, "collectives": [{**SUMS, "bytes": 4 << 20}]},
        {"uses": EXPOSED},
    ),
    "fused-optimizer": (
        ({**CLEAN, "optimizer": 20.0},),
        {"settings": {"optimizer": ADAM}},
        {"settings": {"optimizer": dataclasses.replace(ADAM, kind="SGD")}},
    ),
    "foreach-optimizer": (
        ({**CLEAN, "optimizer": 20.0},),
        {**GPU, "settings": {"optimizer": OptimizerSettings("NAdam", 9, "cuda", foreach=False)}},
        {"settings": {"optimizer": OptimizerSettings("NAdam", 9, "cuda")}},
    ),
    "zero-grad-to-none": (
        ({**CLEAN, "host": 6.0},),
        {"settings": {"zeroes_gradients": True}},
        {"settings": {"zeroes_gradients": True, "compiled": True}},
    ),
    "compile": (
        (CLEAN,),
        {**GPU, "settings": {"compiled": False}, "rank": STARVED},
        {"rank": device(caught_up=0.7)},
    ),
    "cuda-graphs": (
        (CLEAN,),
        {**GPU, "settings": {"compiled": True, "cuda_graphs": False}, "rank": STARVED},
        {"settings": {"compiled": True, "cuda_graphs": True}},
    ),
    "needless-checkpointing": (
        ({**CLEAN, "recompute": 20.0},),
        {"settings": {"free_memory_bytes": 8 * GB}},
        {"settings": {"free_memory_bytes": GB}},
    ),
    "larger-micro-batch": (
        (CLEAN,),
        {**HALF_EMPTY, "rank": device(0.4, caught_up=0.8), "steps": {"micro_steps": 4}},
        {"rank": device(0.6, caught_up=0.8)},
    ),
    "synchronization": (
        ({**CLEAN, "host": 10.0},),
        GPU,
        {"rank": device(caught_up=0.9)},
    ),
    "uneven-lengths": (UNEVEN, {"lengths": 0.9}, {"lengths": 0.5}),
}  # fmt: skip


SLIGHTLY_EXPOSED = ({**CLEAN, "communication": 3.0}, CLEAN)


def changed(key: str, **fields: Any) -> dict[str, Any]:
    """Return the planted settings of a rule with other fields of TrainingSettings."""
    return {"settings": {**CASES[key][1].get("settings", {}), **fields}}


def changed_part(key: str, part: str, **fields: Any) -> dict[str, Any]:
    """Like changed(), for fields of one part, such as the loader."""
    return changed(key, **{part: dataclasses.replace(CASES[key][1]["settings"][part], **fields)})


# More jobs that are nearly the same: each differs in one other part of the condition.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("loader-workers", changed_part("loader-workers", "loader", is_iterable=True)),
    ("ddp-unused-parameters", changed("ddp-unused-parameters", zeroes_gradients=True)),
    (
        "accumulate-gradients",
        {"collectives": [{**SUMS, "bytes": 4 << 20}, {**SUMS, "operation": "all_to_all", "bytes": 8 << 20}]},
    ),
    ("fused-optimizer", changed_part("fused-optimizer", "optimizer", can_fuse=False)),
    ("fused-optimizer", changed_part("fused-optimizer", "optimizer", kind="bitsandbytes.optim.AdamW")),
    ("loader-workers", {"uses": ({**WAITS, "cpu": 60.0},)}),
    ("persistent-workers", changed_part("persistent-workers", "loader", persistent_workers=True)),
    ("persistent-workers", changed_part("persistent-workers", "loader", workers=0)),
    ("persistent-workers", changed_part("persistent-workers", "loader", restart_ns=4_000_000)),
    ("pin-memory", changed_part("pin-memory", "loader", pin_memory=True)),
    ("pin-memory", {"uses": ({**CLEAN, "data": 3.0},)}),
    ("ddp-bucket-size", {"uses": SLIGHTLY_EXPOSED}),
    ("ddp-unused-parameters", changed_part("ddp-unused-parameters", "ddp", static_graph=True)),
    ("ddp-unused-parameters", changed_part("ddp-unused-parameters", "ddp", unused=3)),
    ("ddp-unused-parameters", {"settings": {"ddp": DDP}}),
    ("ddp-static-graph", changed_part("ddp-static-graph", "ddp", unused=0)),
    ("ddp-static-graph", changed_part("ddp-static-graph", "ddp", find_unused_parameters=False)),
    ("ddp-no-sync", {"steps": {"micro_steps": 1}}),
    ("accumulate-gradients", {"steps": {"micro_steps": 2}}),
    ("fused-optimizer", changed_part("fused-optimizer", "optimizer", fused=True)),
    (
        "fused-optimizer",
        {"uses": ({**CLEAN, "optimizer": 1.5},), **changed_part("fused-optimizer", "optimizer", device="cuda")},
    ),
    ("foreach-optimizer", changed_part("foreach-optimizer", "optimizer", fused=True)),
    ("foreach-optimizer", changed_part("foreach-optimizer", "optimizer", device="cpu")),
    ("foreach-optimizer", changed_part("foreach-optimizer", "optimizer", kind="AdamW")),
    ("foreach-optimizer", {"uses": ({**CLEAN, "optimizer": 1.5},)}),
    ("zero-grad-to-none", {"steps": {"micro_steps": 2}}),
    ("zero-grad-to-none", {"uses": ({**CLEAN, "host": 2.0},)}),
    ("zero-grad-to-none", changed("zero-grad-to-none", ddp=dataclasses.replace(DDP, gradient_as_bucket_view=True))),
    ("cuda-graphs", {"rank": device(caught_up=0.7)}),
    ("cuda-graphs", {"settings": {"compiled": None, "cuda_graphs": False}}),
    ("cuda-graphs", {"settings": {"compiled": True}}),  # Whether it uses graphs is not known.
    ("compile", {"gpus": [{"ranks": [0], "typical_busy": 0.96}]}),
    ("compile", {"gpus": [{"ranks": [0], "typical_busy": 0.76}]}),
    ("needless-checkpointing", {"uses": (CLEAN,)}),
    ("needless-checkpointing", {"run": {"device": "GPU"}, "rank": device(0.6)}),
    ("needless-checkpointing", {"rank": {"memory": {"device": None, "max_bytes": None}}}),
    ("larger-micro-batch", {"steps": {"micro_steps": 1}}),
    ("larger-micro-batch", {"rank": device(0.4, caught_up=0.7)}),
    ("synchronization", {"run": {"device": None}}),
    ("synchronization", {"rank": STARVED}),
]  # fmt: skip


def verdict(kind: str, advice: str) -> Verdict:
    """Return a verdict of this kind, whose general action has this key."""
    return Verdict(
        kind=kind,
        confidence=0.9,
        notes=("It is so.",),
        advice=advice,
        action="wait.",
        evidence=Evidence(),
    )


def choices(job: Job) -> list[Choice]:
    """Return the actions that verdicts of all kinds would get."""
    return [each for key in ACTIONS for each in find_actions(job, verdict(*key))]


def keys(job: Job) -> set[str]:
    return {each.rule.key for each in choices(job)}


def test_each_rule_is_planted() -> None:
    assert {rule.key for rules in ACTIONS.values() for rule in rules} == set(CASES)


@pytest.mark.parametrize("key", CASES)
def test_planted_condition_gives_its_action_with_figures(key: str) -> None:
    uses, facts, _ = CASES[key]
    found = [each for each in choices(make_job(*uses, **facts)) if each.rule.key == key]
    assert found
    assert any(letter.isdigit() for letter in found[0].because)
    assert ("Predicted gain: " in found[0].because) == (found[0].share is not None)
    assert found[0].share is None or 0.02 < found[0].share <= 1


@pytest.mark.parametrize("key", CASES)
def test_job_that_is_nearly_the_same_gets_no_such_action(key: str) -> None:
    uses, facts, different = CASES[key]
    different = dict(different)
    uses = different.pop("uses", uses)
    assert key not in keys(make_job(*uses, **{**facts, **different}))


@pytest.mark.parametrize(("key", "different"), MORE)
def test_job_that_misses_another_part_of_the_condition_gets_no_such_action(
    key: str, different: dict[str, Any]
) -> None:
    uses, facts, _ = CASES[key]
    different = dict(different)
    uses = different.pop("uses", uses)
    assert key not in keys(make_job(*uses, **{**facts, **different}))


@pytest.mark.parametrize("key", CASES)
def test_rule_abstains_where_no_setting_and_no_cpu_is_known(key: str) -> None:
    """Rules that need only recorded times give their action without settings."""
    uses, facts, _ = CASES[key]
    without = {name: each for name, each in facts.items() if name != "settings"}
    found = keys(make_job(*uses, **{**without, "settings": {"cpu_count": None}}))
    assert (key in found) == ("settings" not in facts)


@pytest.mark.parametrize("ranks", [1, 4])
def test_clean_balanced_job_gets_no_precise_action(ranks: int) -> None:
    uses = {**CLEAN, "data": 0.5, "host": 1.0, "optimizer": 1.5, "cpu": 0.3}
    settings = {
        "loader": dataclasses.replace(LOADER, workers=0), "ddp": DDP, "optimizer": ADAM,
        "compiled": False, "zeroes_gradients": True,
    }  # fmt: skip
    rows = [long("garbage collection", 20), long("saving", 50), long("", 60, "data", period=16)]
    assert not keys(make_job(*[uses] * ranks, settings=settings, steps={"long": rows}))


def test_number_of_workers_is_what_the_wait_needs_and_the_cpus_allow() -> None:
    loader = dataclasses.replace(LOADER, workers=0)
    uses = {**CLEAN, "data": 150.0}
    (choice,) = choices(make_job(uses, settings={"loader": loader}))
    assert choice.action == "load batches in more processes: DataLoader(num_workers=3)."
    few = make_job(uses, settings={"loader": loader}, rank={"cpu": {**CPU, "cpus": 4}})
    (choice,) = choices(few)
    # Two workers return a batch every 75 ms, while the rest of a step takes 60 ms.
    assert "num_workers=2" in choice.action
    assert choice.share == pytest.approx(0.135 / 0.21)


def test_times_of_workers_are_told_where_they_are_known() -> None:
    loader = dataclasses.replace(LOADER, worker_ns=(60_000_000, 9_000_000, 500_000))
    (choice,) = choices(make_job(WAITS, settings={"loader": loader}))
    told = "2 DataLoader workers (60.0 ms per batch: 9.00 ms on a CPU, 500 us collating) cannot keep up"
    assert choice.because.startswith(told)


def test_short_wait_is_not_worth_a_worker() -> None:
    settings = {"loader": dataclasses.replace(LOADER, workers=0)}
    assert not keys(make_job({"forward": 8.0, "data": 0.9}, settings=settings))
    assert keys(make_job({"forward": 8.0, "data": 3.0}, settings=settings)) == {"loader-workers"}


def test_largest_gain_is_first_and_unknown_gains_are_last() -> None:
    settings = {"loader": dataclasses.replace(RESTARTED, pin_memory=False)}
    job = make_job({**CLEAN, "data": 40.0}, **GPU, settings=settings)
    found = find_actions(job, verdict("data_bound", "data"))

    assert [each.rule.key for each in found] == [
        "loader-workers",
        "persistent-workers",
        "pin-memory",
    ]


def test_verdict_gets_a_precise_action_and_the_figures_behind_it() -> None:
    job = make_job(WAITS, settings={"loader": LOADER})
    verdicts = [
        verdict("data_bound", "data"),
        verdict("host_bound", ""),
        structs.replace(verdict("data_bound", "data"), is_over=True),
    ]
    job.report["verdicts"] = verdicts
    choose_actions(job)

    assert (
        verdicts[0].sentence
        == "It is so. Next: load batches in more processes: DataLoader(num_workers=3)."
    )
    assert verdicts[0].because.startswith("2 DataLoader workers cannot keep up: data loading")
    assert [each.action for each in verdicts[1:]] == ["wait.", "wait."]
    assert [each.because for each in verdicts[1:]] == ["", ""]


def test_time_of_a_class_says_that_its_waits_for_a_cpu_are_not_in_it() -> None:
    told = [
        make_job({**WAITS, **cpu}).describe("data loading takes", *names)
        for cpu, names in (
            ({"cpu": 10.0}, ["data"]),
            ({"cpu": 10.0}, ["imbalance"]),
            ({}, ["data"]),
        )
    ]

    assert told == [
        "data loading takes 30.0 ms (30%) of a step without its waits for a CPU",
        "data loading takes 0 ns (0.0%) of a step",
        "data loading takes 30.0 ms (33%) of a step",
    ]


def test_correlation_with_lengths_is_within_steps() -> None:
    times = make_times(CLEAN, CLEAN)
    longer = np.random.default_rng(1).uniform(0, 10, (2, 64))
    cells = times.account.cells_ns.copy()
    cells[..., find_cells(("forward",), ("running",))] += 1e6 * longer[..., None]
    account = dataclasses.replace(times.account, cells_ns=cells)
    # All ranks have longer batches in some steps, which is no imbalance.
    common = np.arange(64) * 100.0
    found = dataclasses.replace(times, account=account, workload=longer + common)
    assert found.correlate_workload() == pytest.approx(1.0)
    assert (
        dataclasses.replace(found, workload=np.stack([common, common])).correlate_workload() is None
    )
    assert dataclasses.replace(found, workload=longer * np.nan).correlate_workload() is None


def test_documentation_lists_each_rule_with_its_condition_and_link() -> None:
    page = (Path(__file__).parents[2] / "docs/explanation/diagnosis.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    kinds: dict[Rule, list[str]] = {}
    for (kind, _), rules in ACTIONS.items():
        for rule in rules:
            kinds.setdefault(rule, []).append(f"`{kind}`")
    assert rows == [
        f"| {', '.join(dict.fromkeys(found))} | {rule.condition} | [{rule.key}]({rule.link}) |"
        for rule, found in kinds.items()
    ]
