"""Internal errors fail the test that causes them, wherever they happen."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.processes import clean_environ, run
from tests.support.recording import recorded
from tests.support.strict import PLANTED, find_failed_sidecars
from torchlens_perf.errors import RAISE
from torchlens_perf.hooks.module import ModuleCallRouter

TESTS = Path(__file__).parent
_LENIENT = re.compile(r'RAISE(, |: |=|": )"0"|delenv\((errors\.)?("TORCHLENS_PERF_)?RAISE')


def test_all_tests_that_do_not_raise_internal_errors_are_listed() -> None:
    found = {
        str(file.relative_to(TESTS))
        for file in TESTS.rglob("test_*.py")
        if _LENIENT.search(file.read_text()) and file != Path(__file__)
    }

    assert found == set(PLANTED)


def test_started_programs_raise_internal_errors(tmp_path: Path) -> None:
    shown = run([sys.executable, "-c", f"import os; print(os.environ['{RAISE}'])"], tmp_path)

    assert shown.stdout == "1\n"
    assert clean_environ({RAISE: "0"})[RAISE] == "0"


def test_error_in_a_function_that_native_code_calls_reaches_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, module: nn.Module) -> bool:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ModuleCallRouter, "_observe_call", fail)
    model = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError, match="planted"), recorded(tmp_path):
        call_often(model)


def call_often(model: nn.Module) -> None:
    import torch

    for _ in range(100):
        model(torch.ones(1, 2))


def test_log_of_a_failed_sidecar_is_found(tmp_path: Path) -> None:
    log = tmp_path / "a run" / "nodes" / "host.log"
    log.parent.mkdir(parents=True)
    failed = "12:00 ERROR the sidecar has failed and restarts in 2 s\nTraceback:\n  File 1\n{}\n"
    log.write_text("12:00 an export took long\n" + failed.format("OSError: [Errno 5] planted"))
    assert find_failed_sidecars(tmp_path) == []
    log.write_text(failed.format("TypeError: planted") + "12:01 INFO reading\n")
    assert find_failed_sidecars(tmp_path) == ["TypeError: planted"]
    log.unlink()
