"""A node's run directory joins node 0's; names of nodes."""

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


def test_files_move_to_node_0s_directory_on_a_shared_disk(tmp_path: Path) -> None:
    """All known paths stay valid, also for later files."""
    first, other = made(tmp_path, "run-0", "node-a"), made(tmp_path, "run-1", "node-b")
    log = open(other.node_log("node-b"), "w")  # noqa: SIM115  as a sidecar's

    assert join_run(other.path, "run-0")
    log.write("said later")
    log.close()
    other.oom_table(3, 1).parent.mkdir()
    other.oom_table(3, 1).write_text("{}")

    assert {path.name for path in first.nodes.iterdir()} == {
        "node-a.json",
        "node-b.json",
        "node-b.log",
    }
    assert first.node_log("node-b").read_text() == "said later"
    assert other.node_state("node-b").read_text() == "node-b"
    assert first.oom_table(3, 1).exists()
    # A repeated call does nothing.
    assert not join_run(other.path, "run-0")


def test_node_0s_name_becomes_a_link_without_a_shared_disk(tmp_path: Path) -> None:
    other = made(tmp_path, "run-1", "node-b")
    assert not join_run(other.path, "run-0")
    assert not join_run(other.path, "run-0")
    assert RunDirectory(tmp_path / "run-0").node_state("node-b").read_text() == "node-b"


@pytest.mark.parametrize("name", ["../away", "", ".", "a/b", ".hidden", "x" * 200])
def test_directory_names_from_node_0_that_lead_elsewhere_are_refused(
    tmp_path: Path, name: str
) -> None:
    """Names from node 0 come over a network and are not trusted."""
    other = made(tmp_path / "runs", "run-1", "node-b")
    assert not join_run(other.path, name)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run-1"]


def test_node_name_has_host_and_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has the host and the namespace of process ids. Another namespace on the host is
    another node of that host.
    """
    here = node.node_name()
    assert node.host_of(here) == socket.gethostname()
    monkeypatch.setattr(node, "pid_namespace", lambda: 1)
    assert node.node_name() != here
    assert node.host_of(node.node_name()) == socket.gethostname()
    assert node.host_of("node-a") == "node-a"
