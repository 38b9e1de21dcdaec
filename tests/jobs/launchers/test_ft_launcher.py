"""`act --to nvrx` takes a slow node out of the next rendezvous of a real job under NVIDIA's ft_launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launched import by_shell, why_no_nodes
from tests.support.processes import ROOT, SCRIPTS, clean_environ
from tests.support.servers import free_port
from tests.support.simulated_runs import simulate_run
from torchlens_perf.actions import ledger
from torchlens_perf.actions.ledger import read_lines

NVRX = os.environ.get("NVRX", "")
REASON = (
    why_no_nodes()
    if NVRX
    else "`make test-launchers` sets NVRX to an environment with nvidia-resiliency-ext"
)
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]
HEALTHY, SLOW = "node-0000", "node-0001"
_START_TIMEOUT_S, _END_TIMEOUT_S = 60, 120


def act(node: str, run: Path, path: str) -> str:
    """Return what `act --to nvrx --send` prints on a node."""
    (packages,) = Path(NVRX).glob("lib/python*/site-packages")
    command = by_shell(
        node, sys.executable, "-W", "ignore", "-m", "torchlens_perf", "act", str(run), "--allow", "node-*",
        "--to", f"nvrx={path}", "--send",
    )  # fmt: skip
    environ = clean_environ({"PYTHONPATH": f"{ROOT}:{packages}"})
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("excluded", [True, False])
def test_excluded_node_is_not_in_the_next_rendezvous(tmp_path: Path, excluded: bool) -> None:
    fault = ("--fault", "node:node=1,share=0.3", "--node-size", "2")
    run = simulate_run(tmp_path / "runs" / "r", *fault, ranks=8)
    made = tmp_path / "made"
    made.mkdir()
    launcher = [
        f"{NVRX}/bin/ft_launcher", "--ignore-missing-fault-tol-cfg", "--nnodes=1:2", "--nproc-per-node=1",
        "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job",
    ]  # fmt: skip
    jobs = []
    for node in (HEALTHY, SLOW):
        conf = f"--rdzv-conf=is_host={int(node == HEALTHY)},last_call_timeout=10"
        script = [str(SCRIPTS / "ft_worker.py"), str(made), HEALTHY]
        with (tmp_path / f"{node}.log").open("w") as log:
            command = by_shell(node, *launcher, conf, *script)
            jobs.append(subprocess.Popen(command, env=clean_environ(), stdout=log, stderr=log))
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while len(list(made.glob("*-0"))) < 2:
            assert time.monotonic() < deadline_s, (tmp_path / f"{HEALTHY}.log").read_text()[-3000:]
            time.sleep(0.1)
        ranks, path = (made / f"{SLOW}-0").read_text().split()
        assert ranks == "2"
        if excluded:
            assert f"run this command on {SLOW}" in act(HEALTHY, run, path)
            assert "sent: the launcher has the request" in act(SLOW, run, path)
            assert "sent before" in act(SLOW, run, path)
        (made / "fail").touch()
        for job in jobs:
            job.wait(_END_TIMEOUT_S)
    finally:
        for job in jobs:
            job.terminate()
            job.wait(60)
    found = {each.name: each.read_text().split()[0] for each in made.glob("*-1")}
    assert found == ({f"{HEALTHY}-1": "1"} if excluded else {f"{HEALTHY}-1": "2", f"{SLOW}-1": "2"})
    log = (tmp_path / f"{SLOW}.log").read_text()
    assert ("is excluded from the training due to an user request" in log) == excluded
    states = [each["state"] for each in read_lines(run / ledger.NAME, {})]
    assert states == ["sending", "sent"] * excluded
