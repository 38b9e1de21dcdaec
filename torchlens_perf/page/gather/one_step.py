"""Any one step that was recorded, span by span: what the live page asks for when somebody chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from torchlens_perf.analysis.stragglers.detector import NOTHING
from torchlens_perf.page.gather.span_files import records_of
from torchlens_perf.page.gather.step_choice import chosen_ranks
from torchlens_perf.page.gather.step_collectives import RankRecords
from torchlens_perf.page.gather.step_matrices import slow_times
from torchlens_perf.page.gather.step_trace import Names
from torchlens_perf.page.gather.whole_steps import offset_ns, records_of_step, step_row
from torchlens_perf.report.build import latest_attempt
from torchlens_perf.report.run_report import report_and_states

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.report import Report
    from torchlens_perf.page.contents import StepTraces
    from torchlens_perf.run.directory import RunDirectory


def one_step(run: RunDirectory, step: int) -> StepTraces:
    """The step with the ranks that the page shows; no steps where it was not recorded, or its records are gone.

    Raises RunStoreError as run_report().
    """
    report, states = report_and_states(run)
    processes = latest_attempt(states)
    node_by_key = {key: state.host for state in states for key in state.processes}
    node_of = {rank: node_by_key[each.identity.key] for rank, each in processes.items()}
    findings = max((state.findings for state in states), key=lambda each: each.compared, default=NOTHING)
    plain = cast("Report", msgspec.to_builtins(report, enc_hook=lambda number: number.item(), str_keys=True))
    ranks = chosen_ranks(plain, slow_times(findings), node_of)
    notes: list[str] = []
    read = records_of(run, {processes[rank].identity.key: node_of[rank] for rank in ranks}, [step], notes)
    of_step = [
        RankRecords(rank, node_of[rank], offset_ns(processes[rank]), processes[rank].groups, records)
        for rank in ranks
        if (records := records_of_step(read.get(processes[rank].identity.key), step)) is not None
    ]
    names = Names()
    uncomparable = {name for state in states for name in state.join.uncomparable()}
    row = step_row(step, "asked for", of_step, len(processes), names, uncomparable)
    return {"names": names.all(), "steps": [] if row is None else [row]}
