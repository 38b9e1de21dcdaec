"""`act` sends each finding once to each target, records it, and survives targets that fail."""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import MISSING, PROGRAM
from tests.support.otlp_receiver import Receiver as Collector
from tests.support.simulated_runs import simulate_run
from torchlens_perf.actions import ledger
from torchlens_perf.actions.ledger import Ledger, read_lines
from torchlens_perf.commands.cli import main

SLOW_NODE = ("--fault", "node:node=1,share=0.3", "--node-size", "2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate_run(tmp_path_factory.mktemp("runs") / "r", *SLOW_NODE, ranks=8)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A run in a folder of its own, with the records of one simulation."""
    (tmp_path / "r").mkdir()
    for each in recorded.iterdir():
        (tmp_path / "r" / each.name).symlink_to(each)
    return tmp_path / "r"


class Receiver:
    """A web server that keeps the bodies of requests, and answers with `status`."""

    def __init__(self) -> None:
        bodies: list[Any] = []
        self.bodies, self.status = bodies, 200
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(owner.status)
                self.send_header("Location", "/other")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


def act(run: Path, *arguments: str) -> int:
    return main(["act", str(run), "--allow", "node-*", *arguments])


def test_without_send_nothing_is_sent_or_written(
    run: Path, receiver: Receiver, capsys: Any
) -> None:
    assert (
        act(run, "--to", f"webhook={receiver.url}", "--to", f"exclude={run.parent / 'list'}") == 0
    )
    shown = capsys.readouterr().out
    assert shown.count("would send") == 2
    assert "Nothing was sent: add --send." in shown
    assert receiver.bodies == []
    assert not (run / ledger.NAME).exists()
    assert not (run.parent / "list").exists()


def test_webhook_receives_one_alert_in_the_form_of_alertmanager(
    run: Path, receiver: Receiver
) -> None:
    for _ in range(3):
        assert act(run, "--to", f"webhook={receiver.url}", "--send") == 0
    (body,) = receiver.bodies
    assert (body["version"], body["status"]) == ("4", "firing")
    (alert,) = body["alerts"]
    assert alert["labels"]["node"] == "node-0001"
    assert "ranks 2-3" in alert["annotations"]["summary"]
    assert [each["state"] for each in read_lines(run / ledger.NAME, {})] == ["sending", "sent"]
    assert "ranks 2-3" in read_lines(run / ledger.NAME, {})[0]["why"]


@pytest.mark.parametrize("status", [500, 302])
def test_failed_target_is_recorded_and_tried_again_while_the_other_one_gets_it(
    run: Path, receiver: Receiver, capsys: Any, status: int
) -> None:
    receiver.status = status
    targets = (
        "--to",
        f"webhook={receiver.url}",
        "--to",
        f"exclude={run.parent / 'list'}",
        "--send",
    )
    assert act(run, *targets) == 1
    assert f"failed: HTTP status {status}" in capsys.readouterr().out
    assert (run.parent / "list").read_text() == "node-0001\n"
    receiver.status = 200
    assert act(run, *targets) == 0
    assert len(receiver.bodies) == 2
    assert (run.parent / "list").read_text() == "node-0001\n"


def test_unreachable_target_ends_in_one_line(run: Path, capsys: Any) -> None:
    assert act(run, "--to", "webhook=http://127.0.0.1:1/", "--send") == 1
    assert "http://127.0.0.1:1/ cannot be reached" in capsys.readouterr().out


def test_report_that_may_have_been_sent_before_a_crash_is_not_sent_again(
    run: Path, receiver: Receiver
) -> None:
    assert act(run, "--to", f"webhook={receiver.url}", "--send") == 0
    # A process was killed after its first line, and while it wrote another one.
    first = (run / ledger.NAME).read_text().splitlines()[1]
    (run / ledger.NAME).write_text(f"\n{first}\n\n{first[:40]}")
    assert act(run, "--to", f"webhook={receiver.url}", "--send") == 0
    assert len(receiver.bodies) == 1


def test_processes_that_act_at_once_send_once(run: Path, receiver: Receiver) -> None:
    context = multiprocessing.get_context("fork")
    arguments = (run, "--to", f"webhook={receiver.url}", "--send")
    started = [context.Process(target=act, args=arguments) for _ in range(4)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    assert len(receiver.bodies) == 1


def test_false_verdicts_of_many_runs_report_few_nodes_a_day(
    run: Path, receiver: Receiver, capsys: Any
) -> None:
    """Many runs name different nodes at once, as after a change of the network or a fault of ours."""
    for number in range(2):
        other = run.parent / f"other-{number}"
        other.mkdir()
        line = {
            "unix_s": time.time(),
            "state": "sent",
            "target": "x",
            "node": f"node-9{number}",
            "kind": "straggler",
        }
        (other / ledger.NAME).write_text(json.dumps(line) + "\n")
    assert Ledger(run).find_recent_nodes() == {"node-90", "node-91"}
    assert act(run, "--to", f"webhook={receiver.url}", "--send", "--most-nodes", "2") == 0
    assert "2 nodes in 24 hours is the limit" in capsys.readouterr().out
    assert receiver.bodies == []
    assert act(run, "--to", f"webhook={receiver.url}", "--send", "--most-nodes", "3") == 0
    assert len(receiver.bodies) == 1


def test_node_that_was_reported_yesterday_does_not_count(run: Path) -> None:
    other = run.parent / "other"
    other.mkdir()
    line = {
        "unix_s": time.time() - 90_000,
        "state": "sent",
        "target": "x",
        "node": "n",
        "kind": "straggler",
    }
    (other / ledger.NAME).write_text(json.dumps(line) + "\n")
    assert Ledger(run).find_recent_nodes() == set()


def test_ledger_that_cannot_be_written_sends_nothing(
    run: Path, receiver: Receiver, capsys: Any
) -> None:
    (run / ledger.NAME).mkdir()
    assert act(run, "--to", f"webhook={receiver.url}", "--send") == 2
    assert "cannot be used: Is a directory" in capsys.readouterr().err
    assert receiver.bodies == []


def test_strange_ledgers_of_other_runs_stop_nothing(run: Path) -> None:
    line = json.dumps({"unix_s": "now", "state": [], "target": 1, "node": {}, "kind": None})
    for number, text in enumerate([b"5\n[]\n", line.encode(), b"\xff\n", b"[" * 100_000]):
        (run.parent / f"other-{number}").mkdir()
        (run.parent / f"other-{number}" / ledger.NAME).write_bytes(text)
    (run.parent / "pipe").mkdir()
    os.mkfifo(run.parent / "pipe" / ledger.NAME)
    assert Ledger(run).find_recent_nodes() == set()


def test_nothing_is_written_through_a_link(run: Path, capsys: Any) -> None:
    (run.parent / "mine").write_text("")
    (run / ledger.NAME).symlink_to(run.parent / "mine")
    assert act(run, "--to", f"exclude={run.parent / 'list'}", "--send") == 2
    assert "cannot be used" in capsys.readouterr().err
    assert (run.parent / "mine").read_text() == ""
    assert not (run.parent / "list").exists()


def test_healthy_run_says_so(tmp_path: Path, capsys: Any) -> None:
    run = simulate_run(tmp_path / "r", ranks=4)
    assert act(run, "--to", f"exclude={tmp_path / 'list'}", "--send") == 0
    assert capsys.readouterr().out == "No verdict names a node.\n"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("slrum", "did you mean 'slurm'?"),
        ("webhook=ftp://x", "no http:// or https:// address"),
        ("exclude=/nowhere/list", "there is no folder /nowhere"),
    ],
)
def test_mistake_in_a_target_is_one_line(run: Path, capsys: Any, target: str, problem: str) -> None:
    assert act(run, "--to", target) == 2
    assert problem in capsys.readouterr().err


def test_what_was_sent_is_an_event(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PROGRAM.exists():
        pytest.skip(MISSING)
    collector = Collector(tmp_path)
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint("http"))
        assert act(run, "--to", f"exclude={run.parent / 'list'}", "--send") == 0
        (event,) = collector.events()
    finally:
        collector.close()
    assert event.name == "torch.train.action"
    assert event.attributes["torch.train.action.state"] == "sent"
    assert event.attributes["torch.train.alert.host"] == "node-0001"
    assert "ranks 2-3" in event.body
