"""The resource detector sets the attributes of each launcher without importing torch."""

from __future__ import annotations

import os
import socket
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.processes import run
from torchlens_perf.config import EXCHANGE_TOKEN, fields_by_variable
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.otlp_resource import build_node_resource
from torchlens_perf.instrumentation import environment_variables
from torchlens_perf.instrumentation.resource_detector import collect_resource_attributes
from torchlens_perf.run.identity import Identity

ALWAYS = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


def among(found: dict[str, str | int], names: str) -> dict[str, str | int]:
    return {name: value for name, value in found.items() if name.startswith(names)}


def test_process_without_a_launcher_has_no_rank() -> None:
    """The process may be the launcher itself, or may not train at all."""
    found = collect_resource_attributes({})
    assert ALWAYS.items() <= found.items()
    assert among(found, "torch.") == {}


def test_rank_and_run_id_are_detected_under_torchrun() -> None:
    found = collect_resource_attributes(TORCHRUN)
    assert among(found, "torch.") == {
        semantics.RANK: 3, semantics.WORLD_SIZE: 4, semantics.LOCAL_RANK: 1, semantics.RESTART_COUNT: 2,
        "torch.elastic.run_id": "job",
    }  # fmt: skip


def test_rank_and_run_id_are_detected_under_srun() -> None:
    """The run has the same id on all nodes: the Slurm job and step."""
    found = collect_resource_attributes(SRUN)
    assert among(found, "torch.") == {
        semantics.RANK: 1, semantics.WORLD_SIZE: 2, semantics.LOCAL_RANK: 0, semantics.RESTART_COUNT: 0,
        semantics.RUN_ID: "slurm-77.0",
    }  # fmt: skip
    assert among(found, "slurm.") == {"slurm.job.id": "77", "slurm.step.id": "0"}


@pytest.mark.parametrize("environ", [{}, TORCHRUN, SRUN], ids=["alone", "torchrun", "srun"])
def test_run_id_of_the_user_has_priority_over_the_launchers(environ: dict[str, str]) -> None:
    assert (
        collect_resource_attributes({**environ, "TORCHLENS_PERF_RUN_ID": "mine"})[semantics.RUN_ID]
        == "mine"
    )


DETECT = """
import json, sys
from opentelemetry.sdk.resources import Resource
found = dict(Resource.create().attributes)
print(json.dumps([found.get("torch.distributed.rank"), found.get("service.name"), "torch" in sys.modules]))
"""


def test_opentelemetry_sdk_loads_the_detector_without_torch(tmp_path: Path) -> None:
    """The SDK finds the detector by its entry point. The user's own attributes remain."""
    done = run(
        [sys.executable, "-c", DETECT],
        tmp_path,
        OTEL_EXPERIMENTAL_RESOURCE_DETECTORS="torchlens_perf",
        OTEL_SERVICE_NAME="mine",
        **TORCHRUN,
    )
    assert (done.stdout.strip(), done.returncode) == ('[3, "mine", false]', 0), done.stderr


def test_sidecar_metrics_have_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar inherits the detector and the variables of the rank that started it.

    Metrics of a sidecar cover all ranks of the node.
    """
    for name, value in {**SRUN, "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "*"}.items():
        monkeypatch.setenv(name, value)
    identity = Identity("run", 1, 0, 2, 1, 0, "host", 1, 1, 1, False, "train.py", "", {})
    process_attributes = {
        "process.pid",
        semantics.RANK,
        semantics.LOCAL_RANK,
        semantics.RESTART_COUNT,
    }
    found = build_node_resource(identity).attributes
    assert process_attributes & set(found) == set()
    assert found[semantics.RUN_ID] == "run"


def test_entry_points_are_installed_and_list_every_setting() -> None:
    groups = ("instrumentor", "resource_detector", "environment_variables")
    for group in groups:
        assert entry_points(group=f"opentelemetry_{group}", name="torchlens_perf"), (
            "install the package again"
        )
    (listed,) = entry_points(group="opentelemetry_environment_variables", name="torchlens_perf")
    names = {
        name.removeprefix("OTEL_PYTHON_") for name in dir(listed.load()) if name.startswith("OTEL_")
    }
    # The token must not be an option: all users of a machine can read command lines.
    settings = fields_by_variable().keys() - {EXCHANGE_TOKEN}
    assert names == {"TORCHLENS_PERF", "TORCHLENS_PERF_RUN_ID", *settings}
    assert names == {name.removeprefix("OTEL_PYTHON_") for name in environment_variables.VARIABLES}
