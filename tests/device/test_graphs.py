"""Tests that the asynchronous device captures and replays graphs, and what is reported of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import device
from tests.device.test_device import MS, mlp, timed_ms
from tests.support.gloo import run_ranks
from tests.support.processes import ROOT, SCRIPTS, only_report, run
from torchlens_perf.verdicts.words.evidence import GraphReplayEvidence

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        device.missing() is not None,
        reason=f"the device cannot be built: {device.missing()}",
    ),
]
REPLAYS = 3


def trained(where: str, *, replayed: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the weights after one eager step and REPLAYS others, and those after the capture."""
    model, batch = mlp().to(where), torch.ones(16, 64).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    run_step = device.capture_graph(step) if replayed else step
    captured = model[0].weight.detach().cpu().clone()
    for _ in range(REPLAYS):
        run_step()
    return [each.detach().cpu() for each in model.parameters()], captured


def check_graphs(folder: Path) -> dict[str, Any]:
    device.load()
    results: dict[str, Any] = {
        "eager": trained(device.NAME, replayed=False),
        "replayed": trained(device.NAME, replayed=True),
    }
    kernels = device.counters()["kernels"]
    replay = device.capture_graph(lambda: [device.spin(2 * MS) for _ in range(5)])
    results["captured"] = device.counters()["kernels"] - kernels
    results["ms"] = timed_ms(replay)[1]
    results["launches"] = device.counters()["kernels"] - kernels - results["captured"]
    try:
        device.capture_graph(torch.accelerator.synchronize)
    except RuntimeError as error:
        results["wait"] = str(error)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    device.build()
    (result,) = run_ranks(check_graphs, tmp_path_factory.mktemp("graphs"), 1)
    return dict(result)


def test_replays_compute_what_the_captured_steps_would(results: dict[str, Any]) -> None:
    """The captured step itself is not executed."""
    eager, first = results["eager"]
    replayed, captured = results["replayed"]

    assert torch.equal(first, captured)
    assert all(torch.equal(*each) for each in zip(eager, replayed, strict=True))
    assert not torch.equal(captured, replayed[0])


def test_replay_is_one_launch_and_takes_as_long_as_its_kernels(results: dict[str, Any]) -> None:
    assert results["ms"] == pytest.approx(5 * 2, abs=0.2)
    assert results["launches"] == 2, "the replay, and the kernel before it"


def test_host_must_not_wait_during_a_capture(results: dict[str, Any]) -> None:
    assert "while a graph is captured" in results["wait"]


def test_loop_that_replays_a_graph_is_reported_as_one(tmp_path: Path) -> None:
    """Marks go through the driver's calls, which refuse to mark a stream during a capture."""
    made = run([sys.executable, str(SCRIPTS / "replay_graph.py")], tmp_path, PYTHONPATH=str(ROOT))
    replay_ms = float(made.stdout.split()[-1])
    report = only_report(tmp_path)
    (rank,) = report["ranks"]
    verdict = report["verdicts"][0]

    assert (verdict.kind, report["run"]["judged_by"]) == ("not_known", "device")
    assert rank["device"]["captured"] > 0
    assert isinstance(verdict.evidence, GraphReplayEvidence)
    assert 1e3 * verdict.evidence.step_s == pytest.approx(replay_ms, rel=0.1)
    assert 1e3 * rank["device"]["step_s"]["p50_s"] == pytest.approx(replay_ms, rel=0.1)
    assert "replays a CUDA graph" in verdict.text
    assert "host_bound" not in {each.kind for each in report["verdicts"]}
    assert report["lost_time"] is None or not report["lost_time"].changes
