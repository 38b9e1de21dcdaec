"""The headline of each kind of verdict, from the reports in the golden files."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
from msgspec import structs

from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.report.build import build_report
from torchlens_perf.report.report_json import EVIDENCE, kinds_with
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.kinds import BAD, GOOD, KINDS, NEUTRAL, WARNING
from torchlens_perf.verdicts.verdict import Evidence
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.headline import (
    Headline,
    build_headlines,
    choose_headline,
    describe_status,
)


def simulated(
    folder: Path,
    *faults: str,
    ranks: int = 8,
    steps: int = 120,
    device: SimulatedDevice | None = None,
) -> Report:
    # The lock of a run is global to the machine, so each run needs its own name.
    run = RunDirectory(folder / uuid.uuid4().hex)
    run.create()
    record_simulation(
        Simulation(Topology(ranks), faults=[parse_fault(each) for each in faults], noise=0.05),
        steps,
        run,
        run.run_id,
        device,
    )
    return build_report(run.run_id, node_state.load_all(run))


def first(report: Report) -> Headline:
    return build_headlines(report, "runs/x")[0]


def test_headline_of_a_slow_rank_has_separate_facts_cost_and_sentence(tmp_path: Path) -> None:
    found = first(simulated(tmp_path, "constant:rank=3,share=0.25,phase=forward"))

    assert (found.status, found.severity) == ("SLOW RANK", BAD)
    facts = dict(found.facts)
    assert facts["rank"].startswith("3 (")
    assert facts["phase"] == "forward"
    assert facts["steps"] == "since step 0"
    assert facts["seen"].startswith("slow in ")
    assert " per step = " in found.cost
    assert re.search(r"% of a mean step of [0-9.]+ ms$", found.cost)
    assert "costs the job" not in found.sentence
    assert "Next:" not in found.sentence


def test_headline_of_a_slow_node_lists_its_ranks(tmp_path: Path) -> None:
    found = first(simulated(tmp_path, "node:node=1,share=0.15", ranks=16))

    assert found.status == "SLOW NODE"
    assert dict(found.facts)["ranks"] == "8-15 (node-0001)"


def test_run_without_finding_has_status_ok(tmp_path: Path) -> None:
    report = simulated(tmp_path)
    whole = choose_headline(build_headlines(report))

    assert whole is not None
    assert (whole.status, whole.severity, whole.cost) == ("OK", GOOD, "")


def test_run_with_too_few_steps_has_status_not_compared(tmp_path: Path) -> None:
    found = next(
        each for each in build_headlines(simulated(tmp_path, steps=12)) if each.kind == "none"
    )

    assert (found.status, found.severity) == ("NOT COMPARED", NEUTRAL)


def test_command_profiles_the_rank_while_the_job_runs(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=3,share=0.25")
    report["run"]["live"] = True

    assert (
        build_headlines(report, "my runs/x")[0].command
        == "torchlens-perf capture 'my runs/x' --rank 3"
    )


def test_command_profiles_the_next_run_when_the_job_has_ended(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=3,share=0.25")

    assert build_headlines(report, "x")[0].command.startswith(
        "export TORCHLENS_PERF_CAPTURE=verdict"
    )


def test_first_finding_gives_the_status_of_the_run(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=3,share=0.25")
    slow, *_ = build_headlines(report)
    fine = Headline("none", "OK", GOOD, (), None, None, "", "", "", "", is_over=False)
    over = Headline(
        "long_steps", "LONG STEPS", WARNING, (), None, None, "", "", "", "", is_over=True
    )

    assert choose_headline([over, fine, slow]) is slow
    assert choose_headline([over, fine]) is fine
    assert choose_headline([over]) is None
    assert describe_status([over, slow, fine]) == "SLOW RANK 3"
    assert describe_status([fine, over]) == "OK"


@pytest.mark.parametrize("kind", sorted({kind for each in EVIDENCE for kind in kinds_with(each)}))
def test_each_kind_of_verdict_has_a_status(kind: str) -> None:
    assert kind in KINDS


def test_unknown_kind_of_verdict_has_a_status(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=2,share=0.3")
    row = structs.replace(
        report["verdicts"][0], kind="kind_of_a_later_version_ended", evidence=Evidence()
    )
    (head,) = build_headlines({**report, "verdicts": [row]}, "")  # type: ignore[typeddict-item]
    assert (head.status, head.severity) == ("OTHER", WARNING)


def test_every_record_of_a_kind_belongs_to_a_verdict() -> None:
    """A kind that no evidence lists any more has no record."""
    used = {kind for each in EVIDENCE for kind in kinds_with(each)}
    current = {name for name, each in KINDS.items() if not each.is_past}
    assert current <= used <= KINDS.keys()
