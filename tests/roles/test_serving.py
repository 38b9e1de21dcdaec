"""The plugin for vLLM's workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.processes import ROOT
from torchlens_perf.roles import serving

PYTHON = os.environ.get("VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="needs vLLM: make test-long VLLM=1")


@pytest.mark.parametrize("switch", [{}, {"TORCHLENS_PERF": "0"}, {"TORCHLENS_PERF": "off"}])
def test_plugin_imports_nothing_if_recording_is_not_switched_on(switch: dict[str, str]) -> None:
    """Each process of an engine loads the plugin."""
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from torchlens_perf.roles import serving\n"
            "before = set(sys.modules)\n"
            "serving.load()\n"
            "print(sorted({*sys.modules} - before), 'torch' in sys.modules)",
        ],
        env={key: value for key, value in os.environ.items() if key != "TORCHLENS_PERF"} | switch,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[] False\n"


def test_worker_of_another_version_is_called_as_before() -> None:
    class Worker:
        def execute_model(self, scheduler_output: object, *args: object, **kwargs: object) -> Any:
            return scheduler_output, args, kwargs

        def shutdown(self) -> None:
            pass

    serving._patch(Worker)
    assert Worker().execute_model("a", 1, more=2) == ("a", (1,), {"more": 2})


@needs_vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_slowed_rank_of_an_engine_is_named_and_tokens_are_unchanged() -> None:
    """A layer of rank 1 of 2 sleeps. Without the sleep no rank is named."""
    done = subprocess.run(
        [
            PYTHON, "-m", "benchmarks.serving_verdicts", "--clean", "1", "--slow", "1",
            "--tokens", "100", "--hidden", "256", "--layers", "4", "--sleep", "0.1",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (clean,), (slow,) = found["clean"], found["slow"]

    assert found["same_tokens"]
    assert clean["slow"] == []
    assert {each["rank"] for each in slow["slow"]} == {1}
    assert "workload" not in slow["slow"][0]["text"]
    assert slow["slow"][0]["cost_s"] == pytest.approx(slow["planted_s"], rel=0.5)
    assert clean["sections"]["prefill"] == 2
    # One pass makes the first token, and one rank has one call in each step.
    assert clean["sections"]["decode"] == pytest.approx(2 * (clean["steps"] - 1), abs=8)


@needs_vllm
@pytest.mark.long
def test_doctor_finds_the_private_names_of_vllm() -> None:
    done = subprocess.run(
        [PYTHON, "-m", "torchlens_perf", "doctor", "--verbose"], capture_output=True, text=True
    )
    assert "ok      workers of vLLM: 0.32.0, tested with 0.32\n" in done.stdout
