"""Tests of a live elastic job on two nodes after a failure, and when nodes leave and join.

The nodes share a disk and a rendezvous that runs on neither of them, so each node may leave.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.jobs.launchers.test_torchrun import C10D
from tests.support.endpoints import answering, serving
from tests.support.launched import NODES, on_node, sidecars_ended, why_no_nodes
from tests.support.processes import ROOT, SCRIPTS, clean_environ
from tests.support.reports import as_json
from tests.support.servers import free_port
from tests.support.warm_python import WarmPython
from torchlens_perf.commands.cli import main
from torchlens_perf.exporters import semantics
from torchlens_perf.report.build import build_report
from torchlens_perf.report.captures import capture_rows
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

REASON = why_no_nodes()
pytestmark = [
    pytest.mark.distributed, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900),
    pytest.mark.skipif(bool(REASON), reason=REASON),
]  # fmt: skip
SCRIPT = str(SCRIPTS / "launched_elastic.py")
WITHIN_S = 180.0
# torchrun's own store keeps the addresses of the first attempt. With that store, gloo therefore
# fails to connect, with or without a watch.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class ElasticJob:
    """torchrun agents, one per node, each with two ranks.

    Two agents run inside the context, and all agents are ended with it.
    """

    def __init__(self, folder: Path, nodes: str, **environment: str) -> None:
        """Set up the job. `nodes` is the value of --nnodes."""
        self.folder, self._nodes = folder, nodes
        self._environ = clean_environ(
            {
                "TORCHLENS_PERF": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **OWN_STORE, **C10D,
                **environment,
            }
        )  # fmt: skip
        self._port, self._logs = free_port(), 0
        self._agents: dict[str, WarmPython] = {}

    def __enter__(self) -> ElasticJob:
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        for node in NODES:
            self.join(node)
        return self

    def join(self, node: str) -> None:
        """Start a node's agent."""
        meeting = "is_host=0,last_call_timeout=6,keep_alive_interval=2,keep_alive_max_attempt=5"
        command = on_node(
            node, 0.0, "-m", "torch.distributed.run", f"--nnodes={self._nodes}", "--nproc-per-node=2",
            "--max-restarts=5", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=job",
            f"--rdzv-conf={meeting}", "--local-addr=127.0.0.1", "--monitor-interval=0.5", SCRIPT,
        )  # fmt: skip
        self._logs += 1
        with open(self.folder / f"log{self._logs}-{node}", "wb") as log:
            self._agents[node] = WarmPython(
                command,
                cwd=self.folder,
                env=self._environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def leave(self, node: str) -> None:
        """End a node's agent together with its ranks."""
        agent = self._agents.pop(node)
        agent.send_signal(signal.SIGTERM)
        agent.wait(60)

    def tell(self, what: str) -> Path:
        """Create a file that the ranks poll for."""
        path = self.folder / what
        path.touch()
        return path

    def stop(self) -> None:
        """End the job normally."""
        self.tell("stop")
        for agent in self._agents.values():
            assert agent.wait(60) == 0, self.read_output()
        self._agents.clear()

    def read_output(self) -> str:
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("log*"))
        )

    @property
    def runs(self) -> list[RunDirectory]:
        found = sorted((self.folder / "torchlens-perf").glob("*/nodes"))
        return [RunDirectory(path.parent) for path in found if not path.parent.is_symlink()]

    def report(self) -> dict[str, Any]:
        """Return the command's current report on the run, or an empty report without a run."""
        if len(self.runs) != 1 or not list(self.runs[0].nodes.glob("*.json")):
            return {}
        value: dict[str, Any] = as_json(
            build_report(self.runs[0].run_id, node_state.load_all(self.runs[0]))
        )
        return value

    def wait_for(self, wanted: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Return the first report that meets the condition."""
        deadline_s = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                report = self.report()
                if report and wanted(report):
                    return report
            for node, agent in self._agents.items():
                assert agent.poll() is None, (
                    f"{node}'s agent has ended: {self.read_output()[-6000:]}"
                )
            time.sleep(0.3)
        report = self.report()
        raise AssertionError(
            f"{what}: {report.get('ranks')}, {report.get('verdicts')}, {self.read_output()[-3000:]}"
        )

    def __exit__(self, *raised: object) -> None:
        for agent in self._agents.values():
            agent.send_signal(signal.SIGTERM)
        for agent in self._agents.values():
            with contextlib.suppress(Exception):
                agent.wait(60)
            agent.kill()
        sidecars_ended(self.folder)


def trains(attempt: int, ranks: int, steps: int = 60) -> Callable[[dict[str, Any]], bool]:
    """Return True if exactly the given ranks of the attempt make steps."""

    def wanted(report: dict[str, Any]) -> bool:
        return [(rank["rank"], rank["attempt"], rank["state"]) for rank in report["ranks"]] == [
            (rank, attempt, "running") for rank in range(ranks)
        ] and all(rank["steps"] >= steps for rank in report["ranks"])

    return wanted


def verdict(report: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the first verdict of a kind. A verdict that has ended has another kind."""
    return next((each for each in report["verdicts"] if each["kind"] == kind), None)


def hang_of(rank: int) -> Callable[[dict[str, Any]], bool]:
    return lambda report: (
        (found := verdict(report, "hang")) is not None and found["evidence"]["ranks"] == [rank]
    )


def traced(bodies: list[bytes]) -> dict[tuple[int, int], set[int]]:
    """Return the ranks whose spans are in a step's trace, by attempt and step.

    Each step must have exactly one trace.
    """
    ranks, traces = defaultdict(set), defaultdict(set)
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            of_resource = {each.key: each.value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    own = of_resource | {each.key: each.value for each in span.attributes}
                    key = own[semantics.RESTART_COUNT].int_value, own[semantics.STEP].int_value
                    ranks[key].add(own[semantics.RANK].int_value)
                    traces[key].add(span.trace_id)
    assert all(len(found) == 1 for found in traces.values()), traces
    return dict(ranks)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run a job on two nodes in which a worker of the second node fails.

    Return data from before and after the failure.
    """
    bodies: list[bytes] = []

    class Collector(answering(200)):  # type: ignore[misc]
        def do_POST(self) -> None:
            body = self.body()
            if self.path.endswith("/v1/traces"):
                bodies.append(body)
            self.answer(200)

    seen: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("elastic")
    told = {"TORCHLENS_PERF_TRACE_EVERY": "20"}
    with (
        serving(Collector) as address,
        ElasticJob(folder, "2", OTEL_EXPORTER_OTLP_ENDPOINT=address, **told) as job,
    ):
        seen["before"] = job.wait_for(trains(0, 4), "all ranks train")
        job.tell("fail-3")
        seen["after"] = job.wait_for(trains(1, 4), "all ranks train again")
        (run,) = job.runs
        seen["codes"] = [
            main(["capture", str(run.path), "--rank", str(rank), "--steps", "2"]) for rank in (0, 3)
        ]
        seen["captures"] = capture_rows(run)
        slow = job.tell("slow-3")
        seen["slow"] = job.wait_for(
            lambda report: verdict(report, "straggler"), "the slow rank is named"
        )
        slow.unlink()
        hangs = job.tell("hang-1")
        seen["hang"] = job.wait_for(hang_of(1), "the rank that hangs is named")
        hangs.unlink()
        seen["over"] = job.wait_for(
            lambda report: verdict(report, "hang") is None, "the hang is over"
        )
        job.stop()
        sidecars_ended(folder)
        seen["end"], seen["runs"] = job.report(), job.runs
        seen["nodes"] = node_state.load_all(run)
    seen["traces"] = traced(bodies)
    return seen


def test_run_contains_all_ranks_of_the_second_attempt_after_a_failure(
    failed: dict[str, Any],
) -> None:
    assert len(failed["runs"]) == 1
    assert [(rank["rank"], rank["attempt"], rank["state"]) for rank in failed["end"]["ranks"]] == [
        (rank, 1, "closed") for rank in range(4)
    ]
    assert max(node.findings.compared for node in failed["nodes"]) == 4


def test_rank_on_either_node_can_be_captured_after_a_failure(failed: dict[str, Any]) -> None:
    assert failed["codes"] == [0, 0]
    assert [(row["rank"], row["attempt"], row["ended"]) for row in failed["captures"]] == [
        (0, 1, ""),
        (3, 1, ""),
    ]
    assert all(row["last_step"] == row["first_step"] + 1 for row in failed["captures"])


def test_spans_of_all_ranks_are_in_one_trace_after_a_failure(failed: dict[str, Any]) -> None:
    """Each step has one trace in both attempts."""
    whole = {attempt for (attempt, _), ranks in failed["traces"].items() if ranks == {0, 1, 2, 3}}

    assert whole == {0, 1}
    assert {attempt for attempt, _ in failed["traces"]} == {0, 1}


def test_slow_rank_of_the_other_node_is_named_after_a_failure(failed: dict[str, Any]) -> None:
    found = verdict(failed["slow"], "straggler")
    assert found is not None
    assert found["rank"] == 3


def test_missing_rank_of_a_hang_is_named_after_a_failure(failed: dict[str, Any]) -> None:
    """The verdict names the rank that other ranks wait for.

    The ended processes of the first attempt do not count as a hang.
    """
    found = verdict(failed["hang"], "hang")
    assert found is not None
    assert found["evidence"]["kind"] == "missing"
    assert sorted(found["evidence"]["waiting"]) == [0, 2, 3]
    for when in ("before", "after", "slow", "over", "end"):
        assert verdict(failed[when], "hang") is None, when


def attempts(report: dict[str, Any]) -> list[tuple[int, int]]:
    """Return attempt and number of devices of each attempt in the goodput, which must add up."""
    goodput = report["goodput"]
    total_s = sum(each["seconds"] or 0.0 for each in goodput["classes"].values())
    assert total_s == pytest.approx(goodput["wall_s"])
    assert abs(goodput["classes"]["other"]["seconds"]) < 0.01 * goodput["wall_s"]
    return [(each["attempt"], each["devices"]) for each in goodput["attempts"]]


def test_goodput_covers_both_attempts_and_does_not_guess_lost_steps(
    failed: dict[str, Any],
) -> None:
    """The job has neither a step counter nor checkpoints."""
    assert attempts(failed["end"]) == [(0, 4), (1, 4)]
    goodput = failed["end"]["goodput"]
    assert goodput["classes"]["restart"]["seconds"] > 0
    assert goodput["classes"]["hang"]["seconds"] > 0
    assert goodput["lost_steps"] is None


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run a job of one or two nodes.

    The node with rank 0 leaves and returns, and the job continues each time.
    """
    seen: dict[str, Any] = {"hosts": []}
    folder = tmp_path_factory.mktemp("moved")
    with ElasticJob(folder, "1:2") as job:
        seen["two"] = job.wait_for(trains(0, 4), "both nodes train")
        first = seen["two"]["ranks"][0]["host"]
        job.leave(first)
        seen["one"] = job.wait_for(trains(1, 2), "the other node trains alone")
        hangs = job.tell("hang-1")
        seen["hang"] = job.wait_for(hang_of(1), "the rank that hangs is named")
        hangs.unlink()
        job.wait_for(lambda report: verdict(report, "hang") is None, "the hang is over")
        job.join(first)
        seen["again"] = job.wait_for(trains(2, 4), "both nodes train again")
        slow = job.tell("slow-3")
        seen["slow"] = job.wait_for(
            lambda report: verdict(report, "straggler"), "the slow rank is named"
        )
        slow.unlink()
        job.stop()
        sidecars_ended(folder)
        seen["end"], seen["runs"], seen["said"] = job.report(), job.runs, job.read_output()
        seen["nodes"] = [node_state.load_all(run) for run in job.runs]
    return seen


def test_remaining_node_judges_after_rank_0_moves_to_it(moved: dict[str, Any]) -> None:
    """Ranks that have left are not reported as missing."""
    assert {rank["host"] for rank in moved["two"]["ranks"]} == set(NODES)
    (host,) = {rank["host"] for rank in moved["one"]["ranks"]}
    assert host != moved["two"]["ranks"][0]["host"]
    assert moved["one"]["run"]["world_size"] == 2
    assert verdict(moved["one"], "hang") is None
    found = verdict(moved["hang"], "hang")
    assert found is not None
    assert found["evidence"]["waiting"] == [0]


def test_node_that_joins_is_compared_in_the_same_run_and_attempt(moved: dict[str, Any]) -> None:
    assert {rank["host"] for rank in moved["again"]["ranks"]} == set(NODES)
    found = verdict(moved["slow"], "straggler")
    assert found is not None
    assert found["rank"] == 3
    assert len(moved["runs"]) == 1
    assert [(rank["rank"], rank["attempt"], rank["state"]) for rank in moved["end"]["ranks"]] == [
        (rank, 2, "closed") for rank in range(4)
    ]
    assert verdict(moved["end"], "hang") is None


def test_goodput_counts_the_devices_of_each_world(moved: dict[str, Any]) -> None:
    assert attempts(moved["end"]) == [(0, 4), (1, 2), (2, 4)]
