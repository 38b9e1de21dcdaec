"""The sidecar has the native tap built for the next run: when, how politely, and what the report says of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.ranks import HOST, Rank, run_without_traces
from tests.support.taps import (
    compiler,
    copying,
    empty_places,
    has_ended,
    hurried,
    runs,
    tap,
    tap_name,
    tiny_torch,
    with_torch,
)
from torchlens_perf.recorder import recorder
from torchlens_perf.report.build import build
from torchlens_perf.run import tap_requirements
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar import tap_for_next_run
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.tap_for_next_run import TapForNextRun
from torchlens_perf.verdicts import node_state

LASTS_S = 1000.0  # longer than a run must last, for its sidecar to build meanwhile
PLANNED = "the sidecar builds the native tap for the next run"
BUILT = "the native tap has been built, for the next run"

__all__ = ["tap"]  # a fixture
pytestmark = [
    pytest.mark.skipif(not recorder.NATIVE, reason="the native recorder is missing: there is no C compiler"),
    pytest.mark.timeout(400),  # at the lowest priority, on a busy machine, where we may not raise it again
]


class Node(NamedTuple):
    """A user's home on a node with a torch that is imported at once, and a compiler that gives a tap at once."""

    home: Path
    cache: Path
    site: Path
    name: str
    cxx: Path


@pytest.fixture
def node(tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    cache = empty_places(tmp_path, monkeypatch)
    site = tiny_torch(tmp_path / "site")
    cxx = copying(tmp_path / "cxx", tap)
    for name, value in with_torch(site, CXX=str(cxx)).items():
        monkeypatch.setenv(name, value)
    # As Python does with PYTHONPATH, behind the script's folder: children look for modules where this process does.
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(site), *sys.path[1:]])
    with hurried(tmp_path / "home"):
        yield Node(tmp_path / "home", cache, site, tap_name(site), cxx)


def wait_until_built(tap: TapForNextRun, name: str) -> str:
    """Looks as a sidecar does, until what it says of the tap is no plan any more."""
    deadline_s = time.monotonic() + 300
    while tap.outlook(name, wanted=True) == PLANNED and time.monotonic() < deadline_s:
        tap.begin_if_due(LASTS_S)
        time.sleep(0.02)
    return tap.outlook(name, wanted=True)


# -- when


def test_a_run_that_lasts_has_it_built_meanwhile(node: Node) -> None:
    """Not in its first two minutes; then at once, and only one time."""
    tap = TapForNextRun(builds=True)
    assert tap.outlook(node.name, wanted=True) == PLANNED
    tap.begin_if_due(119.0)
    assert tap._child is None
    assert wait_until_built(tap, node.name) == BUILT
    tap.begin_if_due(LASTS_S)
    tap.finish()

    assert (node.cache / node.name).is_file()
    assert len(runs(node.cxx)) == 1


def test_a_short_run_has_it_built_at_its_end(node: Node) -> None:
    """finish() waits for it."""
    tap = TapForNextRun(builds=True)
    tap.outlook(node.name, wanted=True)
    tap.finish()

    assert (node.cache / node.name).is_file()
    assert tap.outlook(node.name, wanted=True) == BUILT


def test_build_that_outlasts_the_run(node: Node, tap: Path) -> None:
    """The sidecar waits for the child that it has started; it starts no other."""
    copying(node.cxx, tap, before="sleep 1")
    begun = TapForNextRun(builds=True)
    begun.outlook(node.name, wanted=True)
    begun.begin_if_due(LASTS_S)
    child = begun._child
    assert child is not None
    begun.finish()

    assert child.returncode == 0
    assert len(runs(node.cxx)) == 1


def test_without_memory_to_spare_it_waits_for_the_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes 0.9 GB, which a job near its limit may be killed for."""
    monkeypatch.setattr(tap_for_next_run, "_NEEDED_BYTES", 1 << 60)
    tap = TapForNextRun(builds=True)
    tap.outlook(node.name, wanted=True)
    tap.begin_if_due(LASTS_S)
    assert tap._child is None
    tap.finish()

    assert (node.cache / node.name).is_file()


@pytest.mark.parametrize("missed", ["", "the setting", "by hand"])
def test_no_build(missed: str, node: Node) -> None:
    """Where no rank has missed the tap, the user does not want it, or somebody waits for the sidecar's end."""
    tap = TapForNextRun(builds=missed != "by hand")
    said = tap.outlook(node.name if missed else "", wanted=missed != "the setting")
    tap.begin_if_due(LASTS_S)
    tap.finish()

    expected = {
        "": "",
        "the setting": "no native tap is built: TORCHLENS_PERF_BUILD_TAP is off",
        "by hand": "torchlens-perf build-tap builds the native tap",
    }
    assert said == expected[missed]
    assert runs(node.cxx) == []
    assert list(node.cache.iterdir()) == []


# -- what is said


def test_obstacles_are_told_and_nothing_is_started(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps it from being built, with the remedy, is known at once."""
    monkeypatch.setenv("CXX", "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    tap = TapForNextRun(builds=True)
    said = tap.outlook(node.name, wanted=True)
    tap.begin_if_due(LASTS_S)
    tap.finish()

    assert said == "no native tap yet: no C++ compiler: install g++, or name one in CXX"
    assert tap._child is None


@pytest.mark.parametrize("at", ["meanwhile", "end"])
def test_failed_build_is_told(at: str, node: Node) -> None:
    """With the compiler's first error; the next run knows it without trying."""
    compiler(node.cxx, "echo 'tap.cpp:7: error: too old' >&2; exit 1")
    tap = TapForNextRun(builds=True)
    tap.outlook(node.name, wanted=True)
    if at == "meanwhile":
        wait_until_built(tap, node.name)
    tap.finish()

    reason = "no native tap yet: the compiler failed: tap.cpp:7: error: too old"
    assert tap.outlook(node.name, wanted=True) == reason
    assert TapForNextRun(builds=True).outlook(node.name, wanted=True) == f"{reason}; {tap_requirements.AGAIN}"


def test_child_that_dies(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the kernel has ended it for want of memory: its status is told."""
    compiler(node.cxx, "kill -KILL $PPID")
    tap = TapForNextRun(builds=True)
    tap.outlook(node.name, wanted=True)
    tap.finish()

    assert tap.outlook(node.name, wanted=True) == "no native tap yet: its build has ended with status -9"


# -- how politely


def test_whatever_else_runs_goes_first(node: Node, tap: Path) -> None:
    """The compiler runs at the lowest priority of the lowest class, in a session of its own that is as low, is the
    first to go where memory runs out, and has a limit to its processor time."""
    seen = node.home / "seen"
    me = "/proc/$$"
    copying(
        node.cxx, tap,
        f"cut -d' ' -f6,19,41 {me}/stat > {seen}; cat {me}/oom_score_adj >> {seen}; ulimit -t >> {seen};"
        f"cat {me}/autogroup >> {seen} || true",
    )  # fmt: skip
    # Its priority must not be raised again before it has told it.
    environ = {**os.environ, "HOME": f"{node.home}/"}
    program = (
        "import sys; from torchlens_perf.sidecar.tap_for_next_run import TapForNextRun\n"
        "tap = TapForNextRun(builds=True); tap.outlook(sys.argv[1], wanted=True); tap.finish()"
    )
    subprocess.run([sys.executable, "-c", program, node.name], env=environ, check=True, timeout=390)
    stat, oom_score, cpu_s, *autogroup = seen.read_text().splitlines()

    session, nice, policy = map(int, stat.split())
    assert session not in (os.getsid(0), 0)
    assert (nice, policy, oom_score, cpu_s) == (19, os.SCHED_IDLE, "1000", "600")
    assert all(line.endswith("nice 19") for line in autogroup)


PARENT = """
import sys, time
from torchlens_perf.sidecar.tap_for_next_run import TapForNextRun
tap = TapForNextRun(builds=True)
tap.outlook(sys.argv[1], wanted=True)
tap._begin()
print(tap._child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_sidecar(sent: signal.Signals, node: Node, tap: Path) -> None:
    """However the sidecar ends, the build, the compiler and its children do; nothing unfinished is left."""
    pids = node.home / "pids"
    copying(node.cxx, tap, f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    sidecar = subprocess.Popen([sys.executable, "-c", PARENT, node.name], stdout=subprocess.PIPE, text=True)
    assert sidecar.stdout is not None
    child = int(sidecar.stdout.readline())
    deadline_s = time.monotonic() + 300
    while not pids.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    sidecar.send_signal(sent)
    sidecar.wait(30)

    # At the lowest priority: on a busy machine it takes a while until they have ended.
    assert [has_ended(pid, 150) for pid in (child, *map(int, pids.read_text().split()))] == [True, True, True]
    assert [path.name for path in node.cache.iterdir()] == ["tap.lock"]


def test_it_does_not_last_for_ever(node: Node, tap: Path) -> None:
    """A compiler that does not end keeps the sidecar for ten minutes at most."""
    copying(node.cxx, tap, "sleep 1000")
    begun = TapForNextRun(builds=True)
    begun.outlook(node.name, wanted=True)
    begun._begin()
    child = begun._child
    assert child is not None
    begun.finish(timeout_s=1.0)

    assert has_ended(child.pid)
    assert child.wait(1) == 128 + signal.SIGTERM


# -- what the report says


def reported(run: RunDirectory, *outlooks: TapForNextRun, groups: bool = True, **settings: bool) -> list[str]:
    """The report's notes on a run whose ranks have missed the tap, each node with a sidecar of its own."""
    for number, outlook in enumerate(outlooks):
        host = f"{HOST}{number}"
        rank = Rank(run, number, len(outlooks), identity={"host": host}, **settings)
        rank.session.publish(missing_tap="a-tap.so")
        if groups:
            rank.session.metadata.add_group("0", list(range(len(outlooks))), "default")
        rank.steps(12, forward=4, host=1)
        rank.close()
        sidecar = Sidecar(run, host, None, lambda run, asked: None, tap=outlook)
        sidecar.poll()
        sidecar.account()
        sidecar.keep()
        sidecar.close()
    return [note for note in build(run.run_id, node_state.load_all(run))["quality"]["notes"] if "tap" in note]


TAPPED = "collectives were tapped from Python: some 50 us each, and no end of asynchronous ones"


@pytest.mark.parametrize(
    ("builds", "settings", "outlook"),
    [
        (True, {}, PLANNED),
        (False, {}, "torchlens-perf build-tap builds the native tap"),
        (True, {"_build_tap": False}, "no native tap is built: TORCHLENS_PERF_BUILD_TAP is off"),
    ],
)
def test_report_has_one_line(builds: bool, settings: dict[str, bool], outlook: str, node: Node, tmp_path: Path) -> None:
    """How collectives were tapped, and what becomes of the native tap; nodes that say the same say it once."""
    with run_without_traces(tmp_path / "run") as run:
        notes = reported(run, TapForNextRun(builds=builds), TapForNextRun(builds=builds), **settings)

    assert notes == [f"{TAPPED}; {outlook}"]


def test_report_of_nodes_that_differ(node: Node, tmp_path: Path) -> None:
    """A line for each outlook."""
    with run_without_traces(tmp_path / "run") as run:
        notes = reported(run, TapForNextRun(builds=True), TapForNextRun(builds=False))

    assert notes == [f"{TAPPED}; {PLANNED}", f"{TAPPED}; torchlens-perf build-tap builds the native tap"]


def test_report_after_a_restart_with_the_tap(node: Node, tmp_path: Path) -> None:
    """What ranks before a restart have missed, those of now may have."""
    with run_without_traces(tmp_path / "run") as run:
        for attempt, missed in enumerate(("a-tap.so", "")):
            rank = Rank(run, 0, 1, identity={"attempt": attempt})
            rank.session.publish(missing_tap=missed)
            rank.session.metadata.add_group("0", [0], "default")
            rank.steps(12, forward=4, host=1)
            rank.close()
        sidecar = Sidecar(run, HOST, None, lambda run, asked: None, tap=TapForNextRun(builds=True))
        sidecar.poll()
        sidecar.account()
        sidecar.keep()
        sidecar.close()
        (state,) = node_state.load_all(run)

    assert state.tap_outlook == PLANNED
    assert not any("tap" in note for note in build(run.run_id, [state])["quality"]["notes"])


def test_report_without_collectives(node: Node, tmp_path: Path) -> None:
    """Ranks that have no group in common have missed nothing, and nothing is built for them."""
    outlook = TapForNextRun(builds=True)
    with run_without_traces(tmp_path / "run") as run:
        assert reported(run, outlook, groups=False) == []
    outlook.finish()

    assert runs(node.cxx) == []


def test_state_of_an_earlier_version(tmp_path: Path) -> None:
    """A node's file that was written before there was such a thing can be read."""
    with run_without_traces(tmp_path) as run:
        assert reported(run, TapForNextRun(builds=False), groups=False) == []
        (path,) = run.nodes.glob("*.json")
        value = json.loads(path.read_text())
        del value["tap_outlook"]
        for process in value["processes"].values():
            del process["missing_tap"]
        path.write_text(json.dumps(value))

        assert build(run.run_id, node_state.load_all(run))["quality"]["records"] > 0
