"""w.log_to(): verdicts and the report for loggers, which cannot disturb the job."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import torchlens_perf as perf
from tests.support.ranks import Rank
from torchlens_perf.errors import ConfigError
from torchlens_perf.results.logged_verdicts import (
    REPORT,
    VERDICT,
    VerdictLoggers,
    check_log_arguments,
)
from torchlens_perf.results.loggers import adapt_logger
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.verdicts import Alert

SLOW = Alert(
    "1" * 32, "a" * 32, "straggler", "started", "Rank 3 is slow.", "look at its host.", 1_500_000_000, 0,
    since_step=40, rank=3, ranks=(3,), host="node-a", phase="forward", cost_s_per_step=0.25, cost_share=0.5,
)  # fmt: skip


class Board:
    """A logger with the interface of SummaryWriter that stores its input."""

    def __init__(self, error: Exception | None = None) -> None:
        self.texts: list[tuple[str, str, int]] = []
        self._error = error

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Raise AssertionError, because no numbers are written."""
        raise AssertionError(name)

    def add_text(self, name: str, text: str, step: int) -> None:
        """Store a text."""
        if self._error is not None:
            raise self._error
        self.texts.append((name, text, step))

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


@pytest.fixture
def rank(run: RunDirectory) -> Iterator[Rank]:
    """Return a rank without a sidecar."""
    rank = Rank(run, 0, 1)
    yield rank
    rank.close()


def test_verdicts_and_the_report_are_written_with_the_step(rank: Rank) -> None:
    """The report has no colours. It comes after the recording, and has the step of its end."""
    board, loggers = Board(), VerdictLoggers()
    loggers.requests.append(check_log_arguments(board, None))
    with loggers.attached_to(rank.session):
        loggers.write_alert(SLOW)
        rank.session.recorder.training_steps = 1
        loggers.write_alert(dataclasses.replace(SLOW, change="ended"))
        rank.session.recorder.training_steps = 2
    loggers.write_report("\x1b[1mNo rank stands out.\x1b[0m\n")

    assert [(name, step) for name, _, step in board.texts] == [
        (VERDICT, 0),
        (VERDICT, 1),
        (REPORT, 2),
    ]
    assert "started: Rank 3 is slow. Next: look at its host." in board.texts[0][1]
    assert board.texts[2][1].strip() == "No rank stands out."


def test_step_number_may_come_from_the_user(rank: Rank) -> None:
    board, loggers = Board(), VerdictLoggers()
    loggers.requests.append(check_log_arguments(board, lambda: 7))
    with loggers.attached_to(rank.session):
        loggers.write_alert(SLOW)

    assert board.texts[0][2] == 7


def test_exception_of_a_logger_does_not_end_the_job(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception is logged once, and the other loggers get their texts."""
    bad, good, loggers = Board(ConnectionError("no \x1b[2J network")), Board(), VerdictLoggers()
    for each in (bad, good):
        loggers.requests.append(check_log_arguments(each, None))
    with caplog.at_level(logging.WARNING, "torchlens_perf"), loggers.attached_to(rank.session):
        loggers.write_alert(SLOW)
        loggers.write_alert(SLOW)

    (record,) = caplog.records
    assert (
        "Board, passed to log_to(), raised, and training goes on: ConnectionError: no ?[2J network"
        in record.message
    )
    assert len(good.texts) == 2


def test_logger_is_recognized_by_its_interface() -> None:
    """No logging library is imported."""
    logged: list[tuple[str, ...]] = []
    client = SimpleNamespace(log_text=lambda *arguments: logged.append(arguments))
    active = SimpleNamespace(info=SimpleNamespace(run_id="7"))
    board, run = Board(), SimpleNamespace(log=print, summary={})
    mlflow = SimpleNamespace(
        log_metrics=print, active_run=lambda: active, MlflowClient=lambda: client
    )
    for each in (board, run, mlflow):
        adapt_logger(each)("name", "text", 3)

    assert board.texts == [("name", "    text", 3)]
    assert run.summary == {"name": "text"}
    assert logged == [("7", "text", "name.txt")]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"logger": "tensorboard"}, "str is no logger"),
        ({"logger": print}, r"A function belongs into w.on_verdict\(\)"),
        ({"logger": Board(), "step": 3}, "step=3"),
    ],
)
def test_invalid_arguments_of_log_to_raise_before_recording(
    arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        perf.watch().log_to(**arguments)  # type: ignore[arg-type]


def test_unknown_tags_are_refused() -> None:
    """Without a run, known tags do nothing."""
    perf.watch().tag("evaluation")
    with pytest.raises(ConfigError, match="what='lunch'"):
        perf.watch().tag("lunch")
