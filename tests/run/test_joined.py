"""A node's run directory that joins node 0's, and names of nodes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place import node
from torchlens_perf.run.place.joined import join_run


def made(folder: Path, name: str, of_node: str) -> RunDirectory:
    run = RunDirectory(folder / name)
    run.create()
    run.node_state(of_node).write_text(of_node)
    (run.steps / f"{of_node}-000001.parquet").write_text("steps")
    return run


def test_on_a_shared_disk(tmp_path: Path) -> None:
    """The files move, and every path that was known goes on to lead to them; what comes later is there too."""
    first, other = made(tmp_path, "run-0", "node-a"), made(tmp_path, "run-1", "node-b")
    log = open(other.node_log("node-b"), "w")  # noqa: SIM115  as a sidecar's

    assert join_run(other.path, "run-0")
    log.write("said later")
    log.close()
    other.oom_table(3, 1).parent.mkdir()
    other.oom_table(3, 1).write_text("{}")

    assert {path.name for path in first.nodes.iterdir()} == {"node-a.json", "node-b.json", "node-b.log"}
    assert first.node_log("node-b").read_text() == "said later"
    assert other.node_state("node-b").read_text() == "node-b"
    assert first.oom_table(3, 1).exists()
    assert not join_run(other.path, "run-0")  # again is harmless


def test_without_a_shared_disk(tmp_path: Path) -> None:
    """Node 0's name leads to the node's own directory."""
    other = made(tmp_path, "run-1", "node-b")
    assert not join_run(other.path, "run-0")
    assert not join_run(other.path, "run-0")
    assert RunDirectory(tmp_path / "run-0").node_state("node-b").read_text() == "node-b"


@pytest.mark.parametrize("name", ["../away", "", ".", "a/b", ".hidden", "x" * 200])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    """What node 0 says comes over a network."""
    other = made(tmp_path / "runs", "run-1", "node-b")
    assert not join_run(other.path, name)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run-1"]


def test_names_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host, and whose process ids; another namespace on the same host is another node of that host."""
    here = node.node_name()
    assert node.host_of(here) == socket.gethostname()
    monkeypatch.setattr(node, "pid_namespace", lambda: 1)
    assert node.node_name() != here
    assert node.host_of(node.node_name()) == socket.gethostname()
    assert node.host_of("node-a") == "node-a"
