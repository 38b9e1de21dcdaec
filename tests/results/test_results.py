"""w.summary() and w.step_table() during the run, after its end, and without data."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
import torch

import torchlens_perf as perf
from tests.recorder.test_late_report import sidecar_of
from tests.support.processes import run as run_command
from tests.support.processes import wait_for_sidecar
from torchlens_perf.errors import RAISE, ConfigError, RunStoreError
from torchlens_perf.results import ask, child
from torchlens_perf.run import children
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import KINDS
from torchlens_perf.run.records import PARTS
from torchlens_perf.watching import Watch


class Loop:
    """A watch, and a loop that makes steps during it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()


@contextmanager
def training(folder: Path, **settings: Any) -> Iterator[Loop]:
    """Run a watched loop whose sidecar ends before this function returns."""
    with perf.watch(dir=str(folder), **{"report": "off", **settings}) as watch:
        yield Loop(watch)
    if watch.run_dir is not None:
        wait_for_sidecar(RunDirectory(watch.run_dir))


def test_results_have_all_finished_steps_during_and_after_the_run(tmp_path: Path) -> None:
    """The first second of the run is included, but no unfinished step."""
    with training(tmp_path) as loop:
        loop.train(30)
        live, frame = loop.watch.summary(), loop.watch.step_table("pandas")
        loop.train(12)
        (again,) = {loop.watch.summary().steps}
        assert list(loop.watch._session.ring_path.parent.glob("*.answer")) == []
    after, last = loop.watch.summary(), loop.watch.step_table("pandas")

    assert (live.steps, live.running, live.ranks, live.missing) == (30, True, 1, "")
    assert (len(frame), again) == (30, 42)
    assert (after.steps, after.running, after.run_id) == (42, False, loop.watch.run_dir.name)
    assert (len(last), after.records_lost) == (42, 0)
    assert last["step"].tolist() == list(range(42))
    assert {f"{part}_ns" for part in PARTS} < set(last)
    assert after.step_p50_s == pytest.approx(last["duration_ns"][3:].median() / 1e9, rel=0.05)
    verdict, *_ = after.verdicts
    assert verdict.text
    assert verdict.next
    assert verdict.text in str(after)
    assert f"Next: {verdict.next}" in str(after)
    assert "42 steps: p50 " in str(after)


def test_results_right_after_the_end_wait_for_the_sidecar(tmp_path: Path) -> None:
    """Without a report the watch does not wait at its end, so the sidecar is still writing."""
    with perf.watch(dir=str(tmp_path), report="off") as watch:
        Loop(watch).train(17)
    found = watch.summary()

    assert (found.steps, found.running, len(watch.step_table("pandas"))) == (17, False, 17)
    assert found._repr_html_() is not None
    assert "17</td>" in found._repr_html_()
    assert "<td>" not in repr(found)


def test_time_for_results_is_charged_to_this_package(tmp_path: Path) -> None:
    """The step with the call does not count as slow user code."""
    with training(tmp_path) as loop:
        loop.train(20)
        began_s = time.perf_counter()
        loop.watch.summary()
        took_s = time.perf_counter() - began_s
        loop.train(20)
    asked = loop.watch.step_table("pandas").query("step == 20").iloc[0]

    assert asked["tool_ns"] > 0.9 * took_s * 1e9
    assert asked["own_ns"] < 0.5 * asked["tool_ns"]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed")
def test_step_table_of_polars_has_the_same_numbers_as_that_of_pandas(tmp_path: Path) -> None:
    """Unmeasured values are null."""
    import polars

    with training(tmp_path) as loop:
        loop.train(8)
    ours, theirs = loop.watch.step_table("polars"), loop.watch.step_table("pandas")

    assert isinstance(ours, polars.DataFrame)
    assert ours.columns == list(theirs.columns)
    assert ours["duration_ns"].to_list() == theirs["duration_ns"].tolist()
    assert ours["cpu_ns"].null_count() == theirs["cpu_ns"].isna().sum() > 0


def test_step_table_uses_the_imported_or_installed_dataframe_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without such a library, an error lists the choices."""
    watch = perf.watch()
    assert isinstance(watch.step_table(), pandas.DataFrame)
    with monkeypatch.context() as only_polars:
        only_polars.delitem(sys.modules, "pandas")
        only_polars.setitem(
            sys.modules, "polars", types.SimpleNamespace(DataFrame=lambda: "polars' own")
        )
        assert watch.step_table() == "polars' own"
    with pytest.raises(
        ConfigError, match="backend='arrow': must be 'pandas', 'polars' or 'pyarrow'"
    ):
        watch.step_table("arrow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "pandas")
    monkeypatch.delitem(sys.modules, "polars", raising=False)
    with pytest.raises(ConfigError, match="polars is not installed: pip install polars"):
        watch.step_table("polars")
    assert isinstance(watch.step_table(), pyarrow.Table)


@pytest.mark.parametrize("why", ["not begun", "off", "refused"])
def test_results_without_recording_have_the_reason(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The script continues. Values are None, never 0."""
    if why == "off":
        monkeypatch.setenv("TORCHLENS_PERF", "0")
    folder = tmp_path / "runs"
    if why == "refused":
        folder.write_text("no folder")
    watch = perf.watch(dir=str(folder))
    calls: list[object] = []
    watch.on_verdict(calls.append)
    if why != "not begun":
        with watch:
            Loop(watch).train(3)
    found = watch.summary()

    assert "nothing is recorded" in found.missing
    assert "nothing is recorded" in str(found._repr_html_())
    assert (found.steps, found.step_p50_s, found.overhead_share, found.verdicts) == (
        None,
        None,
        None,
        (),
    )
    with caplog.at_level(logging.WARNING, "torchlens_perf"):
        assert len(watch.step_table()) == 0
    assert "there are no steps to show: nothing is recorded" in caplog.text
    assert "nothing is recorded" in watch._repr_mimebundle_()["text/plain"]
    assert calls == []


def test_results_of_a_nested_watch_are_those_of_the_outer_one(tmp_path: Path) -> None:
    """The results stay the same after the inner watch has ended."""
    with training(tmp_path) as loop:
        with perf.watch(loop.model) as inner:
            loop.train(5)
            assert inner.summary().steps == 5
        loop.train(5)
        assert (inner.summary().steps, inner.summary().running) == (10, True)
    of_inner, of_outer = (
        dataclasses.replace(each.summary(), as_of=None) for each in (inner, loop.watch)
    )
    assert of_inner == of_outer


def test_results_without_a_sidecar_have_a_remedy(tmp_path: Path) -> None:
    """After the remedy was applied, the results exist."""
    with training(tmp_path, sidecar=False) as loop:
        loop.train(5)
        missing = loop.watch.summary().missing
        assert (
            missing
            == f"no sidecar has read the records. Next: torchlens-perf sidecar {loop.watch.run_dir}"
        )
    assert "torchlens-perf sidecar" in loop.watch.summary().missing
    done = run_command(
        [sys.executable, "-m", "torchlens_perf", "sidecar", str(loop.watch.run_dir)], tmp_path
    )

    assert done.returncode == 0, done.stderr
    assert loop.watch.summary().steps == len(loop.watch.step_table("pandas")) == 5


def test_killed_sidecar_is_started_again_for_results(tmp_path: Path) -> None:
    """The results have all steps, including those that the killed sidecar had not read."""
    with training(tmp_path) as loop:
        loop.train(5)
        os.kill(sidecar_of(loop.watch), signal.SIGKILL)
        loop.train(5)
        assert loop.watch.summary().steps == 10


def test_last_results_are_returned_if_the_sidecar_does_not_respond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is limited."""
    with training(tmp_path) as loop:
        loop.train(5)
        assert loop.watch.summary().steps == 5
        loop.train(5)
        pid = sidecar_of(loop.watch)
        os.kill(pid, signal.SIGSTOP)
        try:
            monkeypatch.setattr(ask, "ANSWER_TIMEOUT_S", 0.05)
            assert loop.watch.summary().steps == 5
        finally:
            os.kill(pid, signal.SIGCONT)


def test_watch_without_requests_for_results_has_no_mailbox(tmp_path: Path) -> None:
    """The watch does no work for a mailbox at steps' ends."""
    with training(tmp_path) as loop:
        loop.train(3)
        works = set(loop.watch._session.step_callbacks._throttled.values()) | set(
            loop.watch._session.step_callbacks._each_step.values()
        )
        files = [
            path for path in loop.watch._session.ring_path.parent.iterdir() if path.suffix in KINDS
        ]

    assert files == []
    assert not {name for name in works if "cell" in name or "on_verdict" in name}


class TestResultsProcess:
    """The process that computes results after a run has ended."""

    def test_error_line_of_the_results_process_is_shown(self, tmp_path: Path) -> None:
        """The line is shown without the process's name."""
        with pytest.raises(RunStoreError, match=r"^/.* is not a run directory"):
            child.run_and_capture("results", str(tmp_path), "cell")

    def test_results_process_is_killed_on_timeout_with_a_message(self, tmp_path: Path) -> None:
        with pytest.raises(RunStoreError, match=r"results took longer than 0\.001 s"):
            child.run_and_capture("results", str(tmp_path), "cell", timeout_s=0.001)

    def test_results_process_is_not_a_training_process(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process is not a rank, has no GPU, and does not record itself."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("TORCHLENS_PERF", "1")
        made = children.build_environment()

        assert not {"RANK", "TORCHLENS_PERF"} & set(made)
        assert made["CUDA_VISIBLE_DEVICES"] == ""


def test_output_of_the_results_process_without_a_result_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sidecar that could not make a report writes the reason in a line, which is shown as it is."""
    monkeypatch.delenv(RAISE, raising=False)
    for text in ("torchlens_perf: no report: <disk> full\n", "[]", "{}", "12"):
        found = ask.parse_results(text)
        assert found.summary == {}
        assert found.text == found.missing == text.strip()
        assert "<disk>" not in found.html
