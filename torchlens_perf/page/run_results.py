"""Results of a run as its sidecar delivers them: report.txt, and answers to live requests.

Imports are inside of the functions, because most of a sidecar's life needs none of them.
"""

from __future__ import annotations

from torchlens_perf.run import ownership
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import deliver_text
from torchlens_perf.run.rank_facts import RankFacts, decode_path


def write_report(run: RunDirectory, facts: RankFacts) -> None:
    """Send the short report to rank 0 if it waits for one, and write report.txt.

    facts: what rank 0 has published.
    """
    from torchlens_perf.report.run_report import load_report
    from torchlens_perf.view.terminal import render_full, render_short

    report = load_report(run)
    asked = facts.report
    # Send the report to rank 0 before writing report.txt, because the run directory's disk may be
    # slow.
    if asked.mailbox:
        page = str(run.report.with_suffix(".html")) if facts.settings.writes_page else ""
        short = render_short(
            report, str(run.path), page=page, columns=asked.columns, color=asked.color
        )
        if asked.in_cell:
            from torchlens_perf.page.notebook import results_as_json

            short = results_as_json(report, str(run.path), short, page)
        deliver_text(decode_path(asked.mailbox), short)
    ownership.replace_private_file(
        run.report, render_full(report, str(run.path), columns=0, color=False), like=run.nodes
    )


def render_live_results(run: RunDirectory) -> str:
    """Return the results of a run in progress, see LiveResultDelivery. Raises RunStoreError."""
    from torchlens_perf.page.notebook import results_from_run

    return results_from_run(run)
