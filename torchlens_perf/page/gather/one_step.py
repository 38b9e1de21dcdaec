"""Any one step that was recorded, span by span: what the live page asks for when somebody chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.latest_attempt import latest_attempt
from torchlens_perf.page.gather.node_clocks import NodeClocks, RankRecords
from torchlens_perf.page.gather.run_contents import as_plain
from torchlens_perf.page.gather.span_files import records_of
from torchlens_perf.page.gather.step_choice import chosen_ranks
from torchlens_perf.page.gather.step_collectives import joined_by_step
from torchlens_perf.page.gather.step_matrices import slow_times
from torchlens_perf.page.gather.step_trace import Names
from torchlens_perf.page.gather.whole_steps import by_step, offset_ns, step_row
from torchlens_perf.report.run_report import report_and_states
from torchlens_perf.verdicts.stragglers.detector import NOTHING

if TYPE_CHECKING:
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
    ranks = chosen_ranks(as_plain(report), slow_times(findings), node_of)
    notes: list[str] = []
    keys = {rank: each.identity.key for rank, each in processes.items()}
    read = records_of(run, {keys[rank]: node_of[rank] for rank in ranks}, [step], notes)
    of_ranks = [
        RankRecords(rank, node_of[rank], offset_ns(processes[rank]), processes[rank].groups, read[keys[rank]])
        for rank in ranks
        if keys[rank] in read
    ]
    of_step = [
        each._replace(records=records) for each in of_ranks if (records := by_step(each.records).get(step)) is not None
    ]
    uncomparable = {name for state in states for name in state.join.uncomparable()}
    names = Names()
    row = step_row(step, "asked for", of_step, len(processes), names, NodeClocks([of_step], uncomparable))
    if row is None:
        return {"names": [], "steps": []}
    row["collectives"] = joined_by_step(of_ranks, ranks, uncomparable).get(step, [])
    return {"names": names.all(), "steps": [row]}
