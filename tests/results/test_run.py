"""perf.open_run(): the results of a run directory, in any process."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas
import pyarrow
import pytest

import torchlens_perf as perf
from tests.results.test_results import Loop, training
from tests.support.live_simulation import LiveSimulation
from tests.support.processes import run as run_command
from tests.support.ranks import make_run
from torchlens_perf.errors import ConfigError, RunStoreError
from torchlens_perf.results import ask
from torchlens_perf.results.run import Run
from torchlens_perf.run.hardware_samples import PROCESSES, Sample
from torchlens_perf.store.samples import SampleWriter


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run of four ranks, in which rank 2 is slow."""
    path = tmp_path_factory.mktemp("planted") / "run"
    with LiveSimulation(path, 4, "constant:rank=2,share=0.3,phase=forward") as live:
        live.add_blocks(8)
    return perf.open_run(path)


def test_loaded_run_has_verdicts_numbers_tables_and_report(planted: Run) -> None:
    found = planted.summary()

    assert (found.ranks, found.steps, found.running) == (4, 256, False)
    assert planted.verdicts == found.verdicts
    assert ("straggler", 2) in {(each.kind, each.rank) for each in planted.verdicts}
    steps = planted.step_table("pandas")
    assert isinstance(steps, pandas.DataFrame)
    assert steps.groupby("rank")["step"].count().to_dict() == dict.fromkeys(range(4), 256)
    assert steps.groupby("rank")["forward_ns"].median().idxmax() == 2
    assert planted.table("steps", "pyarrow").num_rows == len(steps)
    spans = planted.table("spans", "pyarrow")
    assert isinstance(spans, pyarrow.Table)
    assert {"forward", "collective"} <= set(spans["kind"].to_pylist())
    assert planted.report()["run"]["id"] == planted.run_dir.name
    assert repr(planted) == f"<Run '{planted.run_dir}'>"
    assert "Rank 2" in planted._repr_mimebundle_()["text/plain"]


def test_table_without_data_in_a_loaded_run_is_empty(
    planted: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A run without GPUs has an empty table of GPUs. An unknown table name raises an error."""
    assert planted.table("gpus", "pyarrow").num_rows == 0
    assert "has no gpus yet" in caplog.text
    with pytest.raises(
        ConfigError,
        match=r"^name='modules': must be 'steps', 'spans', 'gpus', 'links', 'processes' or 'events'",
    ):
        planted.table("modules")


def test_loading_a_missing_run_directory_raises(tmp_path: Path) -> None:
    """A folder that is not a run directory raises too. Each error is one line."""
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunStoreError, match="is no run directory: it has no folder nodes"):
            perf.open_run(folder)


def test_loaded_run_without_data_gives_the_reason(tmp_path: Path) -> None:
    """Nothing is saved yet. summary() gives the reason and raises nothing, report() raises."""
    (tmp_path / "run" / "nodes").mkdir(parents=True)
    made = perf.open_run(tmp_path / "run")

    assert made.summary().missing
    assert made.verdicts == ()
    with pytest.raises(RunStoreError):
        made.report()


def test_run_of_this_process_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During recording, saved data are returned at once. After the end, all data are returned."""
    with training(tmp_path) as loop:
        loop.train(30)
        # The data have been saved.
        assert loop.watch.summary().steps == 30
        with monkeypatch.context() as impatient:
            impatient.setattr(
                ask,
                "wait_until_run_is_written",
                lambda run: pytest.fail("it waits for the end of a live run"),
            )
            live = perf.open_run(loop.watch.run_dir).summary()
        loop.train(12)
    ended = perf.open_run(loop.watch.run_dir).summary()

    assert live.running is True or live.missing
    assert (ended.steps, ended.running) == (42, False)


def test_loading_right_after_the_end_waits_for_the_sidecar(tmp_path: Path) -> None:
    """The sidecar is still writing."""
    with perf.watch(dir=tmp_path, report="off") as watch:
        Loop(watch).train(17)

    assert perf.open_run(watch.run_dir).summary().steps == 17


def test_loading_a_run_imports_no_torch(planted: Run, tmp_path: Path) -> None:
    """A process that only reads a run has neither torch nor a watch."""
    code = (
        "import sys, torchlens_perf as perf\n"
        "found = perf.open_run(sys.argv[1]).summary()\n"
        "print(found.ranks, 'torch' in sys.modules, 'pyarrow' in sys.modules)"
    )
    done = run_command([sys.executable, "-c", code, str(planted.run_dir)], tmp_path)
    assert done.stdout == "4 False False\n", done.stderr


def test_process_table_of_a_loaded_run_has_the_recorded_sample(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    sample = Sample(PROCESSES, "3", 5, 7, {"rank": 3, "cpu_ns": 11})
    SampleWriter(run, "node-0").write([sample], 1 << 20)
    (row,) = perf.open_run(run.path).table("processes", "pyarrow").to_pylist()
    assert (row["rank"], row["cpu_ns"], row["resident_bytes"]) == (3, 11, None)
