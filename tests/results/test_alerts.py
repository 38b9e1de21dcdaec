"""w.on_verdict(): callbacks hear of each verdict once, and whatever they do, the job goes on."""

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
from torchlens_perf.errors import ConfigError
from torchlens_perf.recorder.session import Session
from torchlens_perf.results.alerts import Alerts
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import ALERTS, deliver
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.watch import running

STARTED = Alert(
    "1" * 32, "a" * 32, "straggler", "started", "Rank 1 is slow.", "look at its host.", 1_500_000_000, 0,
    since_step=40, rank=1, ranks=(1,), host="node-a", phase="forward", cause="slow_compute", scope="rank",
    because=("gpu_throttled",), cost_s_per_step=0.25, cost_share=0.5,
)  # fmt: skip
ENDED = dataclasses.replace(STARTED, id="2" * 32, change="ended", text="It is over.", next="", until_step=90)


class Heard:
    """A callback that keeps what it has heard."""

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
    """A rank's, without a sidecar: the tests say what that would."""
    rank = Rank(run, 0, 1)
    yield rank.session
    rank.close()


def named(session: Session, *raised: Alert) -> None:
    """What the sidecar does with its newest alerts."""
    rows = [dataclasses.asdict(each) for each in raised]
    deliver(str(session.ring_path.with_suffix(ALERTS)), json.dumps(rows))


def look(session: Session) -> None:
    """What is done at a step's end, once in 50 ms at most."""
    (work,) = (work for work, name in session.step_callbacks._throttled.items() if "on_verdict" in name)
    work()


def test_each_alert_is_heard_once_by_each_callback(session: Session) -> None:
    """In their order, with what the sidecar has found; also what was named before somebody listened."""
    alerts, first, second = Alerts(), Heard(), Heard()
    alerts.callbacks += [first, second]
    with alerts.listening(session):
        named(session, STARTED)
        look(session)
        named(session, STARTED, ENDED)
        look(session)
        look(session)

    assert first.alerts == second.alerts == [STARTED, ENDED]
    assert first.alerts[0].found_unix_s == 1.5


def test_an_exception_ends_nothing(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once for each callback; the others hear of it, and it is called again."""
    alerts, bad, good = Alerts(), Heard(ValueError("no \x1b[2J network")), Heard()
    alerts.callbacks += [bad, good]
    with caplog.at_level(logging.WARNING, "torchlens_perf"), alerts.listening(session):
        named(session, STARTED, ENDED)
        look(session)

    assert len(bad.alerts) == len(good.alerts) == 2
    (record,) = caplog.records
    assert "a callback of on_verdict(), raised, and training goes on: ValueError: no ?[2J network" in record.message
    assert "Heard" in record.message
    assert session.metadata.notes == []


def test_a_callback_may_end_the_job(session: Session) -> None:
    """SystemExit and Ctrl-C are the user's word."""
    alerts = Alerts()
    alerts.callbacks.append(Heard(SystemExit(3)))
    with alerts.listening(session):
        named(session, STARTED)
        with pytest.raises(SystemExit):
            look(session)


def test_its_time_is_the_users(tmp_path: Path) -> None:
    """A callback that posts to a chat for 0.2 s is no cost of this tool, and no later step pays for it."""
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


def test_before_the_watch_begins(tmp_path: Path) -> None:
    """Callbacks wait for it."""
    heard = Heard()
    watch = perf.watch(dir=str(tmp_path), report="off")
    watch.on_verdict(heard)
    with watch:
        named(watch._session, STARTED)
        look(watch._session)

    assert len(heard.alerts) == 1


def test_in_a_watch_inside_of_another_one(loop: Loop) -> None:
    """They are the outer one's, whether they were given before or after."""
    before, after = Heard(), Heard()
    inner = perf.watch(loop.model)
    inner.on_verdict(before)
    with inner:
        inner.on_verdict(after)
    named(loop.watch._session, STARTED)
    look(loop.watch._session)

    assert len(before.alerts) == len(after.alerts) == 1


def test_a_forked_child_hears_nothing_and_takes_nothing_away(loop: Loop) -> None:
    """It is the parent's mailbox, also where the child has a watch of its own."""
    heard = Heard()
    loop.watch.on_verdict(heard)
    child = os.fork()
    if child == 0:
        with training(loop.watch.run_dir.parent):
            ours = not heard.alerts and running()._live_views is None
        os._exit(0 if ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    named(loop.watch._session, STARTED)
    look(loop.watch._session)

    assert len(heard.alerts) == 1


def test_nothing_is_left_and_nothing_heard_after_the_end(tmp_path: Path) -> None:
    heard = Heard()
    with training(tmp_path) as loop:
        loop.watch.on_verdict(heard)
        mailbox = loop.watch._session.ring_path.with_suffix(ALERTS)
        assert mailbox.exists()
    assert not mailbox.exists()
    assert heard.alerts == []


def test_without_a_sidecar_nobody_is_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That is said once, when it is known."""
    with caplog.at_level(logging.WARNING, "torchlens_perf"), training(tmp_path, sidecar=False) as loop:
        loop.watch.on_verdict(Heard())
        loop.watch.on_verdict(Heard())
        loop.train(3)
    assert [record.message for record in caplog.records] == [
        "torchlens_perf: on_verdict() calls no callback: verdicts need the sidecar"
    ]


def test_what_cannot_be_called(loop: Loop) -> None:
    with pytest.raises(ConfigError, match="callback='slack': must be a function of one argument, the alert"):
        loop.watch.on_verdict("slack")  # type: ignore[arg-type]
