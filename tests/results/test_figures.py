"""w.log_to(): rows of metrics for loggers, which cannot disturb the job."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator

import pytest

import torchlens_perf as perf
from tests.support.ranks import Rank
from torchlens_perf.errors import ConfigError
from torchlens_perf.recorder.session import Session
from torchlens_perf.results.figures import (
    DATA,
    REPORT,
    SLOW_RANK,
    SLOW_RANK_COST,
    STEP,
    VERDICT,
    FigureLoggers,
    check_log_arguments,
)
from torchlens_perf.results.loggers import (
    MlflowAdapter,
    SummaryWriterAdapter,
    WandbAdapter,
    adapt_logger,
)
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import FIGURES, deliver_text
from torchlens_perf.run.verdicts import Alert

SLOW = Alert(
    "1" * 32, "a" * 32, "straggler", "started", "Rank 3 is slow.", "look at its host.", 1_500_000_000, 0,
    since_step=40, rank=3, ranks=(3,), host="node-a", phase="forward", cost_s_per_step=0.25, cost_share=0.5,
)  # fmt: skip


class Board:
    """A logger with the interface of SummaryWriter that stores its input."""

    def __init__(self, error: Exception | None = None) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str]] = []
        self._error = error

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Store a scalar."""
        if self._error is not None:
            raise self._error
        self.rows.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        """Store a text."""
        self.texts.append((name, text))

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


@pytest.fixture
def session(run: RunDirectory) -> Iterator[Session]:
    """Return a rank's session without a sidecar, whose messages the tests write."""
    rank = Rank(run, 0, 1)
    yield rank.session
    rank.close()


def summed(session: Session, steps: int, step_ns: int, data_ns: int) -> None:
    """Deliver sums as the sidecar does."""
    sums = {"steps": steps, "step": step_ns, "data": data_ns, "communication": 0}
    deliver_text(str(session.ring_path.with_suffix(FIGURES)), json.dumps(sums))


def test_logged_rows_are_means_since_the_previous_row(session: Session) -> None:
    """Each row has the step of the user's counter. Unchanged values are not written again."""
    now_s, board = [0.0], Board()
    figures = FigureLoggers(lambda: now_s[0])
    figures.add_logger(check_log_arguments(board, 10.0, lambda: 7))
    with figures.attached_to(session):
        figures.write_due_figures()
        summed(session, 2, 4_000_000_000, 1_000_000_000)
        figures.write_due_figures()
        summed(session, 4, 10_000_000_000, 1_000_000_000)
        now_s[0] = 9.0
        figures.write_due_figures()
        assert len(board.rows) == 2, "the second row is not due"
        now_s[0] = 10.0
        figures.write_due_figures()
        now_s[0] = 30.0
        figures.write_due_figures()

    assert board.rows == [(STEP, 2.0, 7), (DATA, 0.5, 7), (STEP, 3.0, 7), (DATA, 0.0, 7)]


def test_slow_rank_is_logged_until_it_is_no_longer_slow(session: Session) -> None:
    """A text with the action is also written, and the report without colours."""
    board, figures = Board(), FigureLoggers()
    figures.add_logger(check_log_arguments(board, 0.0, None))
    with figures.attached_to(session):
        figures.write_alert(SLOW)
        summed(session, 1, 1_000_000_000, 0)
        figures.write_due_figures()
        figures.write_alert(dataclasses.replace(SLOW, change="ended"))
        summed(session, 2, 2_000_000_000, 0)
        figures.write_due_figures()
    figures.write_report("\x1b[1mNo rank stands out.\x1b[0m\n")

    values = [(name, value) for name, value, _ in board.rows]
    assert values == [
        (STEP, 1.0),
        (DATA, 0.0),
        (SLOW_RANK, 3.0),
        (SLOW_RANK_COST, 0.25),
        (STEP, 1.0),
        (DATA, 0.0),
    ]
    assert [name for name, _ in board.texts] == [VERDICT, VERDICT, REPORT]
    assert "started: Rank 3 is slow. Next: look at its host." in board.texts[0][1]
    assert board.texts[2][1].strip() == "No rank stands out."


def test_exception_of_a_logger_does_not_end_the_job(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception is logged once, and the other loggers get their rows."""
    bad, good, figures = Board(ConnectionError("no \x1b[2J network")), Board(), FigureLoggers()
    figures.add_logger(check_log_arguments(bad, 0.0, None))
    figures.add_logger(check_log_arguments(good, 0.0, None))
    with caplog.at_level(logging.WARNING, "torchlens_perf"), figures.attached_to(session):
        for steps in (1, 2):
            summed(session, steps, 1, 0)
            figures.write_due_figures()

    (record,) = caplog.records
    assert (
        "Board, passed to log_to(), raised, and training goes on: ConnectionError: no ?[2J network"
        in record.message
    )
    assert len(good.rows) == 4


def test_logger_is_recognized_by_its_interface() -> None:
    """No logging library is imported."""
    run = type("Run", (), {"log": print, "summary": {}})()
    module = type(
        "mlflow", (), {"log_metrics": print, "active_run": print, "MlflowClient": print}
    )()

    assert isinstance(adapt_logger(Board()), SummaryWriterAdapter)
    assert isinstance(adapt_logger(run), WandbAdapter)
    assert isinstance(adapt_logger(module), MlflowAdapter)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"logger": "tensorboard"}, "str is no logger"), ({"logger": print, "every_s": -1}, "every_s=-1"),
     ({"logger": print, "step": 3}, "step=3")],
)  # fmt: skip
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
