"""Tests of jobs of one process, in installed frameworks and in loops without one.

`make test` runs two cases, and `make test-frameworks` runs all.

Each job runs unrecorded, with its own watch(), and without it under TORCHLENS_PERF=1. Each
recording must be complete and must not change the job's losses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import only_report, run_warm

FOLDER = Path(__file__).parent
JOBS = FOLDER / "jobs"
# Headlines that the reports on these scripts may have on a shared machine.
# On a busy machine, imports take most of a short job.
SENSIBLE = {"compute_bound", "host_bound", "lack_of_cpu", "long_steps", "data_bound", "startup"}


@dataclasses.dataclass(frozen=True)
class Script:
    """The expected contents of the report on a job of one process."""

    needs: str
    """Package under test, or "" for torch alone."""
    phases: set[str]
    modules: set[str]
    """Some of the modules that the report must contain."""
    wrong_modules: frozenset[str] = frozenset()
    micro_steps: int = 1
    unseen: int = 1
    """Number of steps that an automatic recording does not have."""
    merged: int = 0
    """Number of steps that count as part of the next one under the script's own watch()."""
    only_with_a_watch: bool = False
    framework: str = "none"
    """The frameworks that the report must name."""
    called_modules: set[str] | None = None
    """The modules that an automatic recording finds, if it finds only a part of the model, because
    the framework does not call the model itself."""


TRAINING = {"forward", "backward", "optimizer", "host"}
LAYERS = {"0", "2", "4"}
SCRIPTS_BY_NAME = {
    "accelerate_loop": Script(
        "accelerate", TRAINING | {"data"}, LAYERS, micro_steps=2, framework="accelerate"
    ),
    "fabric_loop": Script("lightning", TRAINING | {"data"}, LAYERS, framework="lightning"),
    "lightning_fit": Script(
        "lightning",
        TRAINING | {"data"},
        {"model.0", "model.4"},
        micro_steps=2,
        framework="lightning",
        called_modules={"0", "4"},
    ),
    "hf_trainer": Script(
        "transformers",
        TRAINING | {"data"},
        {"bert.encoder.layer.0", "bert.embeddings"},
        micro_steps=2,
        framework="accelerate, transformers.trainer",
    ),
    "trl_peft": Script(
        "trl",
        TRAINING | {"data"},
        {"transformer.h.0", "transformer.wte"},
        micro_steps=2,
        framework="accelerate, transformers.trainer, trl.trainer",
    ),
    "gan": Script(
        "", TRAINING, {"Sequential.0", "Sequential_2.0"}, frozenset({"0", "2"}), micro_steps=2
    ),
    "sac": Script("", TRAINING, {"Actor.fc1", "Critic.fc1", "Critic_2.fc1"}, frozenset({"fc1"})),
    "manual_sgd": Script("", {"forward", "backward", "host"}, LAYERS, unseen=2, merged=1),
    "lbfgs": Script("", TRAINING, LAYERS),
    "inference": Script("", {"forward"}, LAYERS, only_with_a_watch=True),
}
SOME = {("accelerate_loop", "watch"), ("lightning_fit", "variable")}
"""The other cases run only in make test-frameworks."""
CASES = [
    pytest.param(
        name, way, id=f"{name}-{way}",
        marks=[
            pytest.mark.skipif(
                script.needs != "" and importlib.util.find_spec(script.needs) is None,
                reason=f"{script.needs} is not in this environment: make test-frameworks",
            ),
            *([] if (name, way) in SOME else [pytest.mark.long]),
        ],
    )
    for name, script in SCRIPTS_BY_NAME.items()
    for way in ("watch", "variable")
    if not (script.only_with_a_watch and way == "variable")
]  # fmt: skip


@functools.cache
def unwatched(name: str, folder: Path) -> dict[str, Any]:
    """Return the job's output without recording."""
    return facts(without_watch(name, folder), folder)


def without_watch(name: str, folder: Path) -> Path:
    """Return a copy of the job that uses tests/frameworks/without instead of the package."""
    copy = folder / f"{name}.py"
    copy.write_text(
        (JOBS / copy.name).read_text().replace("torchlens_perf", "without.torchlens_perf")
    )
    return copy


def facts(script: Path, folder: Path, **environment: str) -> dict[str, Any]:
    """Run a script and parse its last line. The script's warnings and progress go to stderr."""
    environment["PYTHONPATH"] = f"{FOLDER}{os.pathsep}{JOBS}"
    done = run_warm([sys.executable, str(script)], folder, timeout_s=200, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unwatched")


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "way"), CASES)
def test_script_of_a_framework_is_recorded_and_its_losses_are_unchanged(
    name: str, way: str, folder: Path, tmp_path: Path
) -> None:
    """The report has the steps, the phases, the models by name, and a sensible headline."""
    expected = unwatched(name, folder)
    found = (
        facts(JOBS / f"{name}.py", tmp_path)
        if way == "watch"
        else facts(without_watch(name, tmp_path), tmp_path, TORCHLENS_PERF="1")
    )
    report = only_report(tmp_path)
    script, (rank,) = SCRIPTS_BY_NAME[name], report["ranks"]

    assert found == expected, "the losses are not the same"
    assert rank["steps"] == expected["steps"] - (
        script.unseen if way == "variable" else script.merged
    )
    assert report["quality"]["lost"] == 0
    assert rank["phases"].keys() - {"tool"} >= script.phases
    assert rank["not_measured"] == []
    names = {row["name"] for row in report["modules"]}
    called = way == "variable" and script.called_modules
    assert (called or script.modules) <= names
    assert not script.wrong_modules & names
    assert report["steps"]["micro_steps"] == script.micro_steps
    assert report["run"]["settings"]["framework"] == script.framework
    assert report["steps"]["inference"] is (name == "inference")
    assert {verdict.kind for verdict in report["verdicts"]} <= SENSIBLE
    forward_s = rank["phases"]["forward"]["typical_s"]
    assert sum(row["own_s_per_step"] for row in report["modules"]) <= forward_s * 1.001, (
        "modules exceed their phase"
    )
    kinds = {"evaluation", "forward passes without gradients"}
    evaluations = [
        step
        for long in report["steps"]["long"]
        if kinds & set(long["kinds"])
        for step in long["steps"]
    ]
    inside = [
        step
        for step in expected.get("tagged", {}).get("evaluation", [])
        if step < expected["steps"]
    ]
    # Steps with an evaluation are not a separate class if the evaluation takes no longer than a
    # step.
    assert set(evaluations) <= set(inside)


USES = """
import accelerate
import torch
from torchlens_perf.recorder.rank_metadata import _name_frameworks
print(_name_frameworks())
accelerator = accelerate.Accelerator(cpu=True)
accelerator.unwrap_model(torch.nn.Linear(1, 1))
print(_name_frameworks())
"""


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="no accelerate")
def test_framework_is_named_once_the_program_uses_it(tmp_path: Path) -> None:
    """transformers imports accelerate for any model, and accelerate imports an installed deepspeed."""
    done = run_warm([sys.executable, "-c", USES], tmp_path, timeout_s=200)
    # DeepSpeed logs to stdout.
    named = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert named == ["none", "accelerate"], done.stderr
