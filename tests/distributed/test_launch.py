"""Tests of the ways to record an unmodified script: the torchrun flag, the variable, and `run`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import (
    SCRIPTS,
    TRAIN,
    only_report,
    report,
    run,
    run_warm,
    runs,
    torchrun,
)

pytestmark = pytest.mark.distributed

FLAG = ("--logs-specs", "torchlens_perf")
RUN = [sys.executable, "-m", "torchlens_perf", "run"]


def facts_printed(stdout: str) -> list[str]:
    """Return the script's output: its rank, world size and other values, and the checksum of its
    parameters.
    """
    return [line for line in stdout.splitlines() if line.startswith(("parameters", "started as"))]


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the output of unrecorded runs, with one and with two ranks."""
    folder = tmp_path_factory.mktemp("unwatched")
    alone, pair = run_warm([sys.executable, TRAIN], folder), run_warm(torchrun(TRAIN), folder)
    assert (alone.returncode, pair.returncode) == (0, 0)
    return {"alone": facts_printed(alone.stdout), "pair": facts_printed(pair.stdout)}


def without_arguments(lines: list[str]) -> list[str]:
    """Return only the checksum, because arguments differ between the cases."""
    return [line for line in lines if line.startswith("parameters")]


@pytest.mark.parametrize("workers", ["fork", *long("spawn")])
def test_torchrun_flag_records_every_rank(
    workers: str, unwatched: dict[str, list[str]], tmp_path: Path
) -> None:
    """The script has forked and spawned loader workers, and rank 0 prints the verdict."""
    done = run(torchrun(*FLAG, TRAIN, "--workers", workers), tmp_path)
    value = only_report(tmp_path)

    assert done.returncode == 0
    assert without_arguments(facts_printed(done.stdout)) == without_arguments(unwatched["pair"])
    assert [rank["steps"] for rank in value["ranks"]] == [29, 29]
    assert [rank["first_step"] for rank in value["ranks"]] == [1, 1]
    assert value["quality"]["lost"] == 0
    assert "data" in value["ranks"][0]["phases"]
    # On a busy machine, rank 0 does not wait for the report and prints how to show it.
    assert (
        done.stderr.count("torchlens_perf  train.py  2 ranks")
        + done.stderr.count("the report is not ready")
        == 1
    )
    assert str(runs(tmp_path)[0].path) in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("workers", ["fork", *long("spawn")])
def test_environment_variable_records_an_unmodified_script(
    workers: str, unwatched: dict[str, list[str]], tmp_path: Path
) -> None:
    """TORCHLENS_PERF=1 records a script under plain python.

    The script's loader workers are not recorded as ranks.
    """
    done = run([sys.executable, TRAIN, "--workers", workers], tmp_path, TORCHLENS_PERF="1")
    value = only_report(tmp_path)

    assert done.returncode == 0
    assert without_arguments(facts_printed(done.stdout)) == without_arguments(unwatched["alone"])
    assert [rank["steps"] for rank in value["ranks"]] == [29]
    assert value["run"]["program"] == "train.py"


@pytest.mark.parametrize("workers", long("fork", "spawn"))
def test_run_command_starts_a_script_like_python(
    workers: str, unwatched: dict[str, list[str]], tmp_path: Path
) -> None:
    """__main__, arguments, sys.path[0], pickles and spawned workers are as under `python`."""
    arguments = ["--workers", workers]
    done = run([*RUN, TRAIN, *arguments], tmp_path)
    value = only_report(tmp_path)

    assert done.returncode == 0
    expected = unwatched["alone"][1].replace("[]", str(arguments))
    assert facts_printed(done.stdout) == [unwatched["alone"][0], expected]
    assert [rank["steps"] for rank in value["ranks"]] == [29]


@pytest.mark.long
def test_run_command_works_under_torchrun(unwatched: dict[str, list[str]], tmp_path: Path) -> None:
    """`torchrun -m torchlens_perf run` works without entry points."""
    command = torchrun("-m", "torchlens_perf", "run", TRAIN)
    done = run(command, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    value = only_report(tmp_path)

    assert done.returncode == 0
    assert facts_printed(done.stdout) == unwatched["pair"]
    assert [rank["steps"] for rank in value["ranks"]] == [29, 29]


@pytest.mark.long  # test_run_is_python.py also starts modules, but none of them trains.
def test_run_command_starts_a_module_like_python(tmp_path: Path) -> None:
    """`run -m module` is compared with `python -m module`."""
    (tmp_path / "trainer.py").write_text(Path(TRAIN).read_text())
    done = run([*RUN, "-m", "trainer", "--steps", "12"], tmp_path)

    assert done.returncode == 0
    assert "started as __main__ trainer.py ['--steps', '12']" in done.stdout
    assert only_report(tmp_path)["ranks"][0]["steps"] == 11


@pytest.mark.long  # test_elastic_ranks.py has a restart with more ranks.
def test_elastic_restart_is_recorded_in_the_same_run(tmp_path: Path) -> None:
    """torchrun restarts the ranks.

    The run directory contains both attempts, and the report is about the last one.
    """
    # torchrun's own store keeps the addresses of the first attempt. With that store, gloo therefore
    # fails to connect, with or without a watch.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = run(
        torchrun("--max-restarts", "1", *FLAG, TRAIN, "--fail-at", "8"), tmp_path, **own_store
    )
    (made,) = runs(tmp_path)
    value = report(made)

    assert done.returncode == 0, done.stderr
    assert (value["run"]["attempt"], [rank["steps"] for rank in value["ranks"]]) == (1, [29, 29])
    import pandas as pd

    steps = pd.read_parquet(made.steps)
    assert steps.groupby("attempt")["step"].max().to_dict() == {0: 7, 1: 29}


@pytest.mark.parametrize("value", long("0", "true"))
def test_torchrun_flag_reports_disabled_autoload_in_one_line(
    value: str, unwatched: dict[str, list[str]], tmp_path: Path
) -> None:
    """For torch, TORCH_DEVICE_BACKEND_AUTOLOAD=1 means enabled."""
    done = run(torchrun(*FLAG, TRAIN), tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD=value)
    ours = [line for line in done.stderr.splitlines() if "torchlens" in line]

    assert done.returncode == 0
    assert facts_printed(done.stdout) == unwatched["pair"]
    assert len(ours) == 1
    assert ours[0].startswith(f"torchlens_perf is off: TORCH_DEVICE_BACKEND_AUTOLOAD={value}")
    assert not (tmp_path / "torchlens-perf").exists()


@pytest.mark.long
def test_invalid_variable_disables_recording_with_one_line_per_node(
    unwatched: dict[str, list[str]], tmp_path: Path
) -> None:
    """The job runs as if unrecorded."""
    done = run(torchrun(*FLAG, TRAIN), tmp_path, TORCHLENS_PERF_RING_RECORDS="many")
    ours = [line for line in done.stderr.splitlines() if "torchlens" in line]

    assert (done.returncode, facts_printed(done.stdout)) == (0, unwatched["pair"])
    assert ours == [
        "torchlens_perf is off: TORCHLENS_PERF_RING_RECORDS='many': not a valid ring_records, see"
        " docs/reference/settings.md"
    ]


@pytest.mark.long
def test_unwritable_folder_disables_recording_with_one_line(
    unwatched: dict[str, list[str]], tmp_path: Path
) -> None:
    """The job runs as if unrecorded."""
    (tmp_path / "file").write_text("in the way")
    done = run(
        [sys.executable, TRAIN],
        tmp_path,
        TORCHLENS_PERF="1",
        TORCHLENS_PERF_DIR=str(tmp_path / "file" / "runs"),
    )
    ours = [line for line in done.stderr.splitlines() if "torchlens" in line]

    assert (done.returncode, facts_printed(done.stdout)) == (0, unwatched["alone"])
    assert len(ours) == 1
    assert ours[0].startswith("torchlens_perf is off: cannot write to ")


@pytest.mark.parametrize("code", long(0, 3))
def test_exit_code_of_sys_exit_is_kept(code: int, tmp_path: Path) -> None:
    """Recording makes no difference."""
    done = run([sys.executable, TRAIN, "--exit", str(code)], tmp_path, TORCHLENS_PERF="1")

    assert done.returncode == code
    assert only_report(tmp_path)["ranks"][0]["state"] == "closed"


@pytest.mark.long
def test_traceback_and_exit_code_of_an_exception_are_kept(tmp_path: Path) -> None:
    """The exit code is 1."""
    script = tmp_path / "fails.py"
    script.write_text(Path(TRAIN).read_text().replace("and rank == 1", ""))
    done = run([sys.executable, str(script), "--fail-at", "9"], tmp_path, TORCHLENS_PERF="1")

    assert done.returncode == 1
    assert "RuntimeError: planted failure" in done.stderr
    assert only_report(tmp_path)["ranks"][0]["steps"] == 8


@pytest.mark.parametrize("method", ["fork", *long("spawn")])
def test_ranks_started_by_multiprocessing_are_recorded_in_one_run(
    method: str, tmp_path: Path
) -> None:
    start = run_warm if method == "fork" else run
    done = start(
        [sys.executable, str(SCRIPTS / "start_ranks.py"), method], tmp_path, TORCHLENS_PERF="1"
    )
    value = only_report(tmp_path)

    assert done.returncode == 0, done.stderr
    assert value["run"]["world_size"] == 2
    assert [(rank["rank"], rank["steps"], rank["state"]) for rank in value["ranks"]] == [
        (0, 19, "closed"),
        (1, 19, "closed"),
    ]


@pytest.mark.long
def test_recorded_process_and_its_forked_trainer_are_two_runs(tmp_path: Path) -> None:
    """Each run contains its own steps."""
    script = tmp_path / "forks.py"
    script.write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def train(steps):\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(steps):\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
        "train(10)\n"
        "child = mp.get_context('fork').Process(target=train, args=(25,))\n"
        "child.start(); child.join(); train(7)\n"
    )
    done = run([sys.executable, str(script)], tmp_path, TORCHLENS_PERF="1")
    values = [report(each) for each in runs(tmp_path)]

    assert done.returncode == 0, done.stderr
    # Of 17 steps, the first one is not measured. After the first optimizer is freed, the second one
    # alone ends the steps.
    assert sorted(value["ranks"][0]["steps"] for value in values) == [16, 24]
    assert {value["ranks"][0]["state"] for value in values} == {"closed"}


@pytest.mark.long
def test_script_with_its_own_watch_is_recorded_once(tmp_path: Path) -> None:
    """The script calls watch() under the flag, and only this watch records."""
    script = tmp_path / "watched.py"
    script.write_text(
        "import torch, torchlens_perf as perf\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with perf.watch(model, optimizer, report='off'):\n"
        "    for _ in range(12):\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
    )
    done = run([sys.executable, str(script)], tmp_path, TORCHLENS_PERF="1")

    assert done.returncode == 0, done.stderr
    assert [rank["steps"] for rank in only_report(tmp_path)["ranks"]] == [12]


@pytest.mark.long
def test_environment_variable_0_disables_recording(tmp_path: Path) -> None:
    """TORCHLENS_PERF=0 has priority over watch() in the script and over the flag, and creates no
    file.
    """
    script = tmp_path / "watched.py"
    script.write_text(
        "import torchlens_perf as perf, threading\n"
        "with perf.watch() as w:\n"
        "    with perf.section('a'): pass\n"
        "    w.step()\n"
        "assert w.run_dir is None\n"
    )
    done = run([sys.executable, str(script)], tmp_path, TORCHLENS_PERF="0")
    flagged = run(torchrun(*FLAG, TRAIN), tmp_path, TORCHLENS_PERF="0")

    assert (done.returncode, done.stderr) == (0, "")
    assert flagged.returncode == 0
    assert "torchlens" not in flagged.stderr
    assert not (tmp_path / "torchlens-perf").exists()
