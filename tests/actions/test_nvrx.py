"""A node is excluded from the next rendezvous of ft_launcher only on this node, and by a package that exists.

tests/jobs/launchers/test_ft_launcher.py has a real job.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.actions.test_act import SLOW_NODE, act
from tests.actions.test_rules import NODE
from tests.support.simulated_runs import simulate_run
from torchlens_perf.actions import ledger
from torchlens_perf.actions.act import report_nodes
from torchlens_perf.actions.nodes import Rules
from torchlens_perf.actions.nvrx import FaultTolerantLauncher
from torchlens_perf.actions.targets import NotSentError
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

PACKAGE = "nvidia_resiliency_ext"
HERE = msgspec.structs.replace(NODE, host=socket.gethostname())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate_run(tmp_path_factory.mktemp("runs") / "r", *SLOW_NODE, ranks=8)


@pytest.fixture
def empty_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package without modules. Any import from it fails."""
    (tmp_path / PACKAGE).mkdir()
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is not None, reason="nvidia-resiliency-ext is installed"
)
def test_missing_package_is_one_line(run: Path, capsys: Any) -> None:
    assert act(run, "--to", "nvrx=/tmp/socket") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nvidia-resiliency-ext is not installed here: pip install" in line


@pytest.mark.usefixtures("empty_package")
@pytest.mark.parametrize("send", [(), ("--send",)])
def test_command_on_another_node_says_where_to_run_it_and_records_nothing(
    run: Path, capsys: Any, send: tuple[str, ...]
) -> None:
    assert act(run, "--to", "nvrx=/tmp/socket", *send) == 0
    expected = f"not sent: this is {socket.gethostname()}: run this command on node-0001"
    assert expected in capsys.readouterr().out
    assert not (run / ledger.NAME).exists()


@pytest.mark.usefixtures("empty_package")
def test_dry_run_imports_nothing_of_the_package() -> None:
    described = FaultTolerantLauncher("/tmp/socket").describe(HERE)
    assert described == f"exclude {HERE.host} from the next rendezvous, by /tmp/socket"


@pytest.mark.usefixtures("empty_package")
def test_package_without_the_expected_modules_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "socket").touch()
    with pytest.raises(NotSentError, match="ImportError: cannot import name 'fault_tolerance'"):
        FaultTolerantLauncher(str(tmp_path / "socket")).send(HERE)
    assert socket.getdefaulttimeout() is None


@pytest.mark.usefixtures("empty_package")
def test_socket_of_another_user_gets_nothing(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    (tmp_path / "socket").touch()
    os.chown(tmp_path / "socket", 1, 1)
    with pytest.raises(NotSentError, match="belongs to another user"):
        FaultTolerantLauncher(str(tmp_path / "socket")).send(HERE)


@pytest.mark.usefixtures("empty_package")
def test_node_of_a_job_that_runs_may_be_excluded_under_the_other_rules_of_drains(run: Path) -> None:
    report = load_report(RunDirectory(run), lost_time=False)
    report["run"]["live"] = True
    targets = {"nvrx": FaultTolerantLauncher("/tmp/socket")}
    rules = Rules(allowed=("node-*",))
    (outcome,) = report_nodes(report, run, targets, rules, send=False)
    assert "run this command on node-0001" in outcome.text
    report["verdicts"] = [
        msgspec.structs.replace(
            each, diagnosis=None, evidence=msgspec.structs.replace(each.evidence, scope="rank")
        )
        for each in report["verdicts"]
        if each.evidence.scope == "node"
    ]
    (outcome,) = report_nodes(report, run, targets, rules, send=False)
    assert "no cause in this machine was measured" in outcome.text
