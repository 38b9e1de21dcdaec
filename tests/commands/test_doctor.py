"""`torchlens-perf doctor`: what a run would record here, what it would not, and the remedies."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torchlens_perf.commands.doctor import BROKEN, LIMITED, OK, Check, run_checks, summarize
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.recorder import torch_private


def by_subject() -> dict[str, Check]:
    return {check.subject: check for check in run_checks()}


def test_all_doctor_checks_pass_in_the_test_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has all private names that this package uses."""
    monkeypatch.chdir(tmp_path)
    checks = by_subject()

    assert [str(check) for check in checks.values() if check.severity != OK] == []
    count = len(torch_private.PRIVATE_NAMES)
    assert (
        checks["torch's internals"].finding
        == f"{count} of {count} private names that hooks use are there"
    )
    assert list(tmp_path.iterdir()) == [], "the doctor must leave no files behind"


def test_missing_private_name_of_torch_is_one_line_with_the_lost_feature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line has the missing name, and another line all available names."""
    import torch

    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    torch_private.is_usable.cache_clear()
    checks = by_subject()
    check = checks["torch.autograd._engine_run_backward"]
    monkeypatch.undo()
    torch_private.is_usable.cache_clear()

    assert {entry.name for entry in torch_private.PRIVATE_NAMES} & set(checks) == {check.subject}
    assert checks["torch's internals"].finding.startswith(
        f"{len(torch_private.PRIVATE_NAMES) - 1} of "
    )
    assert check.severity == LIMITED
    assert "missing: the backward pass is not timed" in str(check)


@pytest.mark.parametrize(
    ("variable", "value", "subject", "severity", "text"),
    [
        (
            "TORCHLENS_PERF_MODULES",
            "",
            "TORCHLENS_PERF* variables",
            BROKEN,
            "recording is off: TORCHLENS_PERF_MODULES",
        ),
        ("TORCHLENS_PERF", "1", "TORCHLENS_PERF* variables", OK, "TORCHLENS_PERF on"),
        (
            "TORCH_DEVICE_BACKEND_AUTOLOAD",
            "0",
            "TORCHLENS_PERF=1 and the torchrun flag",
            LIMITED,
            "unset",
        ),
        (
            "TORCH_DEVICE_BACKEND_AUTOLOAD",
            "yes",
            "TORCHLENS_PERF=1 and the torchrun flag",
            LIMITED,
            "=yes switches",
        ),
        (
            "TORCHLENS_PERF_DIR",
            "/proc/nothing",
            "run directories",
            BROKEN,
            "set TORCHLENS_PERF_DIR",
        ),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "http://u:secret@h:4318",
            "OpenTelemetry",
            OK,
            "to http://h:4318",
        ),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "https://h/x?token=secret#secret",
            "OpenTelemetry",
            OK,
            "to https://h/x",
        ),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "u:secret@h:4317", "OpenTelemetry", LIMITED, "to h:4317"),
        (
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "https://u:secret@t/v1",
            "OpenTelemetry",
            OK,
            "to https://t/v1",
        ),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "http://h:4317",
            "OpenTelemetry",
            LIMITED,
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
        ),
        ("OTEL_SDK_DISABLED", "true", "OpenTelemetry", OK, "off"),
    ],
)
def test_effect_of_environment_variables_is_shown_without_secrets(
    variable: str,
    value: str,
    subject: str,
    severity: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The doctor also prints the remedy."""
    monkeypatch.setenv(variable, value)
    check = by_subject()[subject]

    assert check.severity == severity
    assert text in str(check)
    assert "secret" not in str(check)


@pytest.mark.long
def test_unusable_shared_memory_is_reported_with_another_folder_and_a_remedy() -> None:
    """The ring file is written to the folder that the doctor names."""
    program = (
        "from pathlib import Path\n"
        "from torchlens_perf.run import directory; directory._SHARED_MEMORY = Path('/proc')\n"
        "from torchlens_perf.commands.doctor import run_checks\n"
        "print(next(str(c) for c in run_checks() if c.subject == 'ring files'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    place = f"{tempfile.gettempdir()}/torchlens-perf-{os.getuid()}"
    assert done.stdout.startswith(f"limited ring files: in anonymous memory, linked from {place}")
    assert "--shm-size" in done.stdout


def test_doctor_exits_with_1_only_if_a_check_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from torchlens_perf.commands.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--verbose"]) == 0
    assert capsys.readouterr().out.startswith("ok      system: torchlens-perf ")
    monkeypatch.setenv("TORCHLENS_PERF", "perhaps")
    assert main(["doctor"]) == 1


def test_doctor_prints_all_groups_and_nothing_to_do_if_all_checks_pass(tmp_path: Path) -> None:
    """The command's process can import pandas, without which Dynamo would look missing."""
    command = [sys.executable, "-m", "torchlens_perf", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "system",
        "stored",
        "export",
        "recorded",
        "details",
    ]
    assert lines[1].endswith(f"in {tmp_path}/torchlens-perf")
    assert "steps, phases, modules, data loading, collectives" in lines[3]
    assert lines[-1].endswith("checks passed, nothing to do)")


def test_first_lines_of_doctor_are_known_without_importing_torch() -> None:
    """The import takes seconds, and more on a busy machine."""
    program = (
        "import itertools, sys\n"
        "from torchlens_perf.commands.doctor import run_checks, summarize\n"
        "lines = [line.split()[0] for line in itertools.islice(summarize(run_checks()), 3)]\n"
        "assert lines == ['system', 'stored', 'export'], lines\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_doctor_summary_has_each_problem_with_its_remedy() -> None:
    """Limited features are not listed as recorded. If a check is broken, nothing is recorded."""
    native = Check(OK, "recorder", "native", records="steps")
    tap = Check(LIMITED, "tap", "from Python", "torchlens-perf build-tap", records="ends")
    lines = list(summarize([native, tap]))

    assert lines[:3] == [
        "limited   tap: from Python",
        "          fix: torchlens-perf build-tap",
        "recorded  steps",
    ]
    assert lines[-1].endswith("(1 of 2 checks passed)")
    broken = list(
        summarize([native, Check(BROKEN, "torch", "cannot be imported", "pip install torch")])
    )
    assert not any(line.startswith("recorded") for line in broken)
    assert "broken    torch: cannot be imported" in broken


@pytest.mark.parametrize(
    ("version", "costs"), [((2, 28, 9), True), ((2, 30, 7), True), ((2, 31, 2), False)]
)
def test_doctor_states_the_cpu_time_of_timing_nccl_if_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], costs: bool
) -> None:
    monkeypatch.setattr(nccl_plugin, "read_nccl_version", lambda: version)
    monkeypatch.delenv(nccl_plugin.VARIABLE, raising=False)
    (check,) = (check for check in run_checks() if "NCCL" in check.subject)
    assert ("takes CPU time" in check.finding) == costs
