"""The README's first example in the frameworks that people use, and loops without one: on what is really installed.

`make test` has the scripts whose framework is in the test environment; `make test-frameworks` has all. Each script runs
without us, with a watch() of its own, and under TORCHLENS_PERF=1, and must lose nothing and change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import only_report, run_warm

SCRIPTS = Path(__file__).parent / "scripts"
# What may be the most important thing to say on these scripts, on a machine that is shared.
SENSIBLE = {"compute_bound", "host_bound", "lack_of_cpu", "long_steps", "data_bound"}


@dataclasses.dataclass(frozen=True)
class Script:
    """A script, and what is true of it."""

    needs: str
    """The package that it is about; "" for torch alone."""
    phases: set[str]
    modules: set[str]
    """Some that a user would look for."""
    wrong_modules: frozenset[str] = frozenset()
    micro_steps: int = 1
    unseen: int = 1
    """Steps that a recording that begins by itself does not have."""
    merged: int = 0
    """Steps that are a part of the next one in a watch() of the script's own."""
    only_with_a_watch: bool = False


TRAINING = {"forward", "backward", "optimizer", "host"}
SCRIPTS_BY_NAME = {
    "accelerate_loop": Script("accelerate", TRAINING | {"data"}, {"0", "2", "6"}, micro_steps=2),
    "fabric_loop": Script("lightning", TRAINING | {"data"}, {"0", "2", "6"}),
    "lightning_fit": Script("lightning", TRAINING | {"data"}, {"model.0", "model.6", "criterion"}),
    "hf_trainer": Script(
        "transformers", TRAINING | {"data", "recompute"}, {"bert.encoder.layer.0", "bert.embeddings"}, micro_steps=2
    ),
    "trl_sft": Script("trl", TRAINING | {"data"}, {"transformer.h.0", "transformer.wte"}),
    "gan": Script("", TRAINING, {"generator.0", "critic.0"}, frozenset({"0", "2"}), micro_steps=2),
    "sac": Script("", TRAINING, {"actor.fc1", "first_critic.fc1", "second_critic.fc1"}, frozenset({"fc1"})),
    "manual_sgd": Script("", {"forward", "backward", "host"}, {"0", "2", "6"}, unseen=2, merged=1),
    "lbfgs": Script("", TRAINING, {"0", "2", "6"}),
    "inference": Script("", {"forward"}, {"0", "2", "6"}, only_with_a_watch=True),
}
SOME = {("accelerate_loop", "watch"), ("lightning_fit", "variable")}
"""The others are left to make test-frameworks."""
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
    """What the script prints without us."""
    return facts(name, folder)


def facts(name: str, folder: Path, **environment: str) -> dict[str, Any]:
    """Runs a script, and reads its last line. Its own warnings and progress go to stderr."""
    done = run_warm([sys.executable, str(SCRIPTS / f"{name}.py")], folder, timeout_s=200, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unwatched")


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "way"), CASES)
def test_script(name: str, way: str, folder: Path, tmp_path: Path) -> None:
    """Same losses; its steps, its phases, its models under their names in the script; a sensible headline."""
    expected = unwatched(name, folder)
    how = {"watch": {"SCRIPT_WATCHES": "1"}, "variable": {"TORCHLENS_PERF": "1"}}[way]
    found = facts(name, tmp_path, **how)
    report = only_report(tmp_path)
    script, (rank,) = SCRIPTS_BY_NAME[name], report["ranks"]

    assert found == expected, "the losses are not the same"
    assert rank["steps"] == expected["steps"] - (script.unseen if way == "variable" else script.merged)
    assert report["quality"]["lost"] == 0
    assert rank["phases"].keys() - {"tool"} >= script.phases
    assert rank["not_measured"] == []
    names = {row["name"] for row in report["modules"]}
    assert script.modules <= names
    assert not script.wrong_modules & names
    assert report["steps"]["micro_steps"] == script.micro_steps
    assert report["steps"]["inference"] is (name == "inference")
    assert {verdict["kind"] for verdict in report["verdicts"]} <= SENSIBLE
    forward_s = rank["phases"]["forward"]["typical_s"]
    assert sum(row["own_s_per_step"] for row in report["modules"]) <= forward_s * 1.001, "modules exceed their phase"
    kinds = {"evaluation", "forward passes without gradients"}
    evaluations = [step for long in report["steps"]["long"] if kinds & set(long["kinds"]) for step in long["steps"]]
    inside = [step for step in expected.get("evaluations", []) if step < expected["steps"]]
    assert set(evaluations) <= set(inside)  # an evaluation that takes no longer than a step is no class of its own
