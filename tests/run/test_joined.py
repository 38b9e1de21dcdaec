"""Tests that a node's run directory is joined with that of node 0, and tests of node names."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place import node
from torchlens_perf.run.place.joined import join_run_directories


def make_run(folder: Path, name: str, of_node: str) -> RunDirectory:
    run = RunDirectory(folder / name)
    run.create()
    run.node_state_path(of_node).write_text(of_node)
    (run.steps / f"{of_node}-000001.parquet").write_text("steps")
    return run


def test_files_move_to_node_0s_directory_on_a_shared_disk(tmp_path: Path) -> None:
    """All known paths stay valid, also for files that are written later."""
    first, other = make_run(tmp_path, "run-0", "node-a"), make_run(tmp_path, "run-1", "node-b")
    log = open(other.node_log_path("node-b"), "w")  # noqa: SIM115  as a sidecar's

    assert join_run_directories(other.path, "run-0")
    log.write("said later")
    log.close()
    other.oom_table_path(3, 1).parent.mkdir()
    other.oom_table_path(3, 1).write_text("{}")

    assert {path.name for path in first.nodes.iterdir()} == {
        "node-a.json",
        "node-b.json",
        "node-b.log",
    }
    assert first.node_log_path("node-b").read_text() == "said later"
    assert other.node_state_path("node-b").read_text() == "node-b"
    assert first.oom_table_path(3, 1).exists()
    # A repeated call has no effect.
    assert not join_run_directories(other.path, "run-0")


def test_link_with_node_0s_run_id_is_created_without_a_shared_disk(tmp_path: Path) -> None:
    other = make_run(tmp_path, "run-1", "node-b")
    assert not join_run_directories(other.path, "run-0")
    assert not join_run_directories(other.path, "run-0")
    assert RunDirectory(tmp_path / "run-0").node_state_path("node-b").read_text() == "node-b"


@pytest.mark.parametrize("name", ["../away", "", ".", "a/b", ".hidden", "x" * 200])
def test_directory_names_from_node_0_outside_the_folder_are_refused(
    tmp_path: Path, name: str
) -> None:
    """Names from node 0 arrive over a network and are not trusted."""
    other = make_run(tmp_path / "runs", "run-1", "node-b")
    assert not join_run_directories(other.path, name)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run-1"]


def test_node_name_contains_host_and_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pid namespace on the same host is another node."""
    here = node.node_name()
    assert node.host_of_node(here) == socket.gethostname()
    monkeypatch.setattr(node, "pid_namespace_inode", lambda: 1)
    assert node.node_name() != here
    assert node.host_of_node(node.node_name()) == socket.gethostname()
    assert node.host_of_node("node-a") == "node-a"
