"""w.on_verdict(): callbacks receive each alert once and cannot disturb the job."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchlens_perf as perf
from tests.results.test_results import Loop, training
from tests.support.ranks import Rank
from torchlens_perf import watching
from torchlens_perf.errors import ConfigError
from torchlens_perf.recorder.session import Session
from torchlens_perf.results.alerts import AlertCallbacks
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import ALERTS, deliver_text
from torchlens_perf.run.verdicts import Alert

STARTED = Alert(
    "1" * 32, "a" * 32, "straggler", "started", "Rank 1 is slow.", "look at its host.", 1_500_000_000, 0,
    since_step=40, rank=1, ranks=(1,), host="node-a", phase="forward", cause="slow_compute", scope="rank",
    because=("gpu_throttled",), cost_s_per_step=0.25, cost_share=0.5,
)  # fmt: skip
ENDED = dataclasses.replace(
    STARTED, id="2" * 32, change="ended", text="It is over.", next="", until_step=90
)


class Heard:
    """A callback that stores the alerts that it receives."""

    def __init__(self, error: BaseException | None = None, wait_s: float = 0.0) -> None:
        self.alerts: list[Alert] = []
        self._error = error
        self._wait_s = wait_s

    def __call__(self, alert: Alert) -> None:
        self.alerts.append(alert)
        time.sleep(self._wait_s)
        if self._error is not None:
            raise self._error


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with training(tmp_path) as made:
        yield made


@pytest.fixture
def session(run: RunDirectory) -> Iterator[Session]:
    """Return a rank's session without a sidecar, whose messages the tests write."""
    rank = Rank(run, 0, 1)
    yield rank.session
    rank.close()


def named(session: Session, *raised: Alert) -> None:
    """Deliver the newest alerts as the sidecar does."""
    rows = [dataclasses.asdict(each) for each in raised]
    deliver_text(str(session.ring_path.with_suffix(ALERTS)), json.dumps(rows))


def look(session: Session) -> None:
    """Check for alerts as at a step's end, at most once in 50 ms."""
    (work,) = (
        work for work, name in session.step_callbacks._throttled.items() if "on_verdict" in name
    )
    work()


def test_each_callback_receives_each_alert_once_and_in_order(session: Session) -> None:
    """Alerts found before a callback was registered are included."""
    alerts, first, second = AlertCallbacks(), Heard(), Heard()
    alerts.callbacks += [first, second]
    with alerts.attached_to(session):
        named(session, STARTED)
        look(session)
        named(session, STARTED, ENDED)
        look(session)
        look(session)

    assert first.alerts == second.alerts == [STARTED, ENDED]
    assert first.alerts[0].unix_ns == 1_500_000_000


def test_exception_of_a_callback_does_not_end_the_job(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception is logged once for each callback.

    All callbacks are called again for later alerts.
    """
    alerts, bad, good = AlertCallbacks(), Heard(ValueError("no \x1b[2J network")), Heard()
    alerts.callbacks += [bad, good]
    with caplog.at_level(logging.WARNING, "torchlens_perf"), alerts.attached_to(session):
        named(session, STARTED, ENDED)
        look(session)

    assert len(bad.alerts) == len(good.alerts) == 2
    (record,) = caplog.records
    assert (
        "a callback of on_verdict(), raised, and training goes on: ValueError: no ?[2J network"
        in record.message
    )
    assert "Heard" in record.message
    assert session.facts.notes == []


def test_callback_may_end_the_job_with_system_exit_or_ctrl_c(session: Session) -> None:
    """The exception is raised in the user's code."""
    alerts = AlertCallbacks()
    alerts.callbacks.append(Heard(SystemExit(3)))
    with alerts.attached_to(session):
        named(session, STARTED)
        with pytest.raises(SystemExit):
            look(session)


def test_time_of_a_callback_is_not_overhead_of_this_package(tmp_path: Path) -> None:
    """A callback that sends a chat message for 0.2 s does not change later steps."""
    heard = Heard(wait_s=0.2)
    with training(tmp_path) as loop:
        assert loop.watch.on_verdict(heard) is heard
        loop.train(20)
        named(loop.watch._session, STARTED)
        deadline_s = time.monotonic() + 30
        while not heard.alerts and time.monotonic() < deadline_s:
            loop.train(1)
        loop.train(5)
    steps = loop.watch.step_table("pandas")
    (row,) = steps.query("duration_ns > 200_000_000 and step > 3").to_dict("records")

    assert row["host_ns"] > 190_000_000
    assert (steps["tool_ns"] < 100_000_000).all()


def test_callback_registered_before_the_watch_is_called_during_it(tmp_path: Path) -> None:
    heard = Heard()
    watch = perf.watch(dir=str(tmp_path), report="off")
    watch.on_verdict(heard)
    with watch:
        named(watch._session, STARTED)
        look(watch._session)

    assert len(heard.alerts) == 1


def test_callback_of_a_nested_watch_belongs_to_the_outer_one(loop: Loop) -> None:
    """The callback may be registered before or after the nested watch begins."""
    before, after = Heard(), Heard()
    inner = perf.watch(loop.model)
    inner.on_verdict(before)
    with inner:
        inner.on_verdict(after)
    named(loop.watch._session, STARTED)
    look(loop.watch._session)

    assert len(before.alerts) == len(after.alerts) == 1


def test_forked_child_receives_no_alerts_and_removes_no_file(loop: Loop) -> None:
    """The mailbox belongs to the parent, even if the child has its own watch."""
    heard = Heard()
    loop.watch.on_verdict(heard)
    child = os.fork()
    if child == 0:
        with training(loop.watch.run_dir.parent):
            ours = not heard.alerts and watching._running._live_views is None
        os._exit(0 if ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    named(loop.watch._session, STARTED)
    look(loop.watch._session)

    assert len(heard.alerts) == 1


def test_no_file_is_left_and_no_alert_delivered_after_the_watch(tmp_path: Path) -> None:
    heard = Heard()
    with training(tmp_path) as loop:
        loop.watch.on_verdict(heard)
        mailbox = loop.watch._session.ring_path.with_suffix(ALERTS)
        assert mailbox.exists()
    assert not mailbox.exists()
    assert heard.alerts == []


def test_no_callback_is_called_without_a_sidecar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A message says so once."""
    with (
        caplog.at_level(logging.WARNING, "torchlens_perf"),
        training(tmp_path, sidecar=False) as loop,
    ):
        loop.watch.on_verdict(Heard())
        loop.watch.on_verdict(Heard())
        loop.train(3)
    assert [record.message for record in caplog.records] == [
        "torchlens_perf: on_verdict() calls no callback: verdicts need the sidecar"
    ]


def test_callback_that_is_not_callable_is_refused(loop: Loop) -> None:
    with pytest.raises(
        ConfigError, match="callback='slack': must be a function of one argument, the alert"
    ):
        loop.watch.on_verdict("slack")  # type: ignore[arg-type]
