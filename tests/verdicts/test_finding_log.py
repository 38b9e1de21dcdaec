"""Findings in the node's state are the same as the alerts, also after a sidecar's restart."""

from __future__ import annotations

import dataclasses

from msgspec import structs

from tests.support.findings import PLACES, episode, findings, hang, slow_links
from torchlens_perf.verdicts.finding_log import MAX_KEPT, Finding, FindingLog, FindingRecords
from torchlens_perf.verdicts.node_state import decode_json, encode_json
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.hang import HangEvidence, build_hang_verdict

S = 1_000_000_000


class Rig:
    """A log of findings that can be restarted from its saved records."""

    def __init__(self) -> None:
        self.log, self.raised = FindingLog("run"), 0

    def look(
        self,
        at_s: float,
        step: int,
        hung: HangEvidence | None = None,
        *verdicts: Verdict,
        attempt: int = 0,
    ) -> list[Finding]:
        alerts = self.log.record_changes(
            attempt,
            NOTHING,
            hung,
            PLACES,
            round(at_s * S),
            at_step=step + 1,
            last_step=step,
            verdicts=list(verdicts),
        )
        self.raised += len(alerts)
        return self.found

    @property
    def found(self) -> list[Finding]:
        return self.log.records.findings

    def restart(self) -> None:
        self.log = FindingLog("run", decode_json(encode_json(self.log.records), FindingRecords))


def test_hang_is_recorded_with_start_end_duration_and_last_sentence() -> None:
    rig = Rig()
    rig.look(100, 56)
    (noted,) = rig.look(112, 56, hang(57, since_s=12))
    assert (noted.kind, noted.since_step, noted.since_unix_ns, noted.is_over) == (
        "hang",
        57,
        100 * S,
        False,
    )
    rig.look(150, 56, hang(57, "dead", (2,), since_s=50))
    (noted,) = rig.look(161, 57)

    assert (noted.since_unix_ns, noted.until_unix_ns) == (100 * S, 161 * S)
    assert (noted.until_step, noted.alert.duration_s, noted.alert.text) == (
        58,
        50.0,
        build_hang_verdict(hang(57, since_s=50)).text,
    )
    assert rig.log.records.find_open("hang") is None


def test_duration_of_a_hang_is_kept_after_the_job_was_restarted() -> None:
    rig = Rig()
    rig.look(112, 56, hang(57, since_s=12))
    rig.look(150, 56, hang(57, since_s=50))
    rig.look(200, 3, attempt=1)
    rig.restart()
    rig.look(260, 8, hang(9, since_s=15), attempt=1)

    assert rig.log.records.hung_s == {0: {57: 50.0}, 1: {9: 15.0}}


def test_sidecar_restart_changes_neither_alerts_nor_records() -> None:
    straight, restarted = Rig(), Rig()
    looks = [
        (100, 56, None), (112, 56, hang(57)), (113, 56, hang(57, since_s=13)), (114, 56, None), (160, 57, None),
        (172, 80, hang(81)), (185, 81, None),
    ]  # fmt: skip
    for at_s, step, hung in looks:
        straight.look(
            at_s, step, hung or (hang(57, since_s=14) if at_s == 114 else None), slow_links((0, 1))
        )
        restarted.look(at_s, step, hung, slow_links((0, 1)))
        restarted.restart()

    assert [(each.kind, each.since_step) for each in straight.found] == [
        ("slow_link", 56), ("hang", 57), ("hang", 81),
    ]  # fmt: skip
    for one, other in zip(straight.found, restarted.found, strict=True):
        assert _without_duration(one) == _without_duration(other)
    assert straight.raised == restarted.raised


def _without_duration(finding: Finding) -> Finding:
    """Return a finding without its duration.

    The longest duration may occur while no sidecar runs.
    """
    hang = (
        None
        if finding.hang is None
        else structs.replace(finding.hang, since_s=0.0, opening="", finding="")
    )
    alert = dataclasses.replace(finding.alert, duration_s=None, text="", unix_ns=0)
    return dataclasses.replace(finding, hang=hang, alert=alert, seen_ns=0)


def test_slow_link_ends_a_minute_after_it_was_seen_last() -> None:
    rig, held = Rig(), []
    for at_s, verdicts in (
        (0, []),
        (10, [slow_links((0, 1))]),
        (20, [slow_links((0, 1), (2, 3))]),
        (40, []),
        (90, []),
    ):
        rig.look(at_s, at_s, None, *verdicts)
        held.append(len(rig.log.records.open_findings))
    (noted,) = rig.found

    assert held == [0, 1, 1, 1, 0]
    assert (noted.since_step, noted.until_step, noted.alert.ranks) == (10, 90, (0, 1))


def test_slow_link_that_returns_after_a_minute_is_a_new_finding() -> None:
    rig = Rig()
    for at_s, verdicts in (
        (0, [slow_links((0, 1))]),
        (10, []),
        (90, []),
        (100, [slow_links((0, 1))]),
        (110, []),
    ):
        rig.look(at_s, at_s, None, *verdicts)

    assert [(each.since_step, each.until_step) for each in rig.found] == [(0, 90), (100, None)]


def test_stragglers_are_removed_from_the_log_at_their_end() -> None:
    """The detector still has the episodes of these stragglers."""
    log = FindingLog("run")
    alerts = log.record_changes(
        0, findings(episode(), episode(5, until=180)), None, PLACES, S, last_step=200
    )

    assert len(alerts) == 3
    assert [(each.kind, each.alert.rank, each.since_step) for each in log.records.findings] == [
        ("straggler", 3, 100)
    ]
    log.record_changes(
        0, findings(episode(until=190), episode(5, until=180)), None, PLACES, S, last_step=200
    )
    assert log.records.findings == []


def test_new_attempt_starts_without_findings() -> None:
    rig = Rig()
    rig.look(112, 56, hang(57))
    rig.look(120, 3, None, slow_links((0, 1)), attempt=1)

    assert (rig.log.records.attempt, [each.kind for each in rig.found]) == (1, ["slow_link"])


def test_oldest_ended_findings_are_removed_above_the_limit() -> None:
    """Open findings stay."""
    rig = Rig()
    for step in range(0, 10 * MAX_KEPT, 10):
        rig.look(step, step, hang(step + 1), slow_links((0, 1)))
        rig.look(step + 5, step + 5, None, slow_links((0, 1)))
    noted = rig.found

    assert len(noted) == MAX_KEPT
    assert (noted[0].kind, noted[1].since_step) == ("slow_link", 11)
    assert noted[-1].since_step == 10 * MAX_KEPT - 9
