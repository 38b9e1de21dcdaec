"""Tests of building the native tap for the next run: times, priorities, and notes in the report."""

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
    environ_with_torch,
    has_ended,
    raise_build_priority,
    runs,
    tap,
    tap_name,
    tiny_torch,
)
from torchlens_perf.recorder import recorder
from torchlens_perf.report.build import build_report
from torchlens_perf.run import tap_requirements
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar import tap_for_next_run
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.tap_for_next_run import TapBuilder
from torchlens_perf.verdicts import node_state

LASTS_S = 1000.0  # The sidecar builds the tap during runs that last at least this long.
PLANNED = "the sidecar builds the native tap for the next run"
BUILT = "the native tap has been built, for the next run"

__all__ = ["tap"]  # A pytest fixture.
pytestmark = [
    pytest.mark.skipif(
        not recorder.NATIVE, reason="the native recorder is missing: there is no C compiler"
    ),
    # The build sets the lowest priority, which its process cannot raise again.
    pytest.mark.timeout(400),
]


class Node(NamedTuple):
    """A user's home with a fake torch that imports fast and a fake compiler that ends at once."""

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
    for name, value in environ_with_torch(site, CXX=str(cxx)).items():
        monkeypatch.setenv(name, value)
    # Child processes search modules in the same folders as this process. As with PYTHONPATH, these
    # folders follow the script's folder.
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(site), *sys.path[1:]])
    with raise_build_priority(tmp_path / "home"):
        yield Node(tmp_path / "home", cache, site, tap_name(site), cxx)


def wait_until_built(tap: TapBuilder, name: str) -> str:
    """Poll as a sidecar does until the outlook is no longer a plan. Return the outlook."""
    deadline_s = time.monotonic() + 300
    while (
        tap.describe_tap_for_report(name, wanted=True) == PLANNED and time.monotonic() < deadline_s
    ):
        tap.start_if_due(LASTS_S)
        time.sleep(0.02)
    return tap.describe_tap_for_report(name, wanted=True)


# -- time of the build


def test_tap_is_built_once_after_two_minutes_of_a_long_run(node: Node) -> None:
    tap = TapBuilder(builds=True)
    assert tap.describe_tap_for_report(node.name, wanted=True) == PLANNED
    tap.start_if_due(119.0)
    assert tap._child is None
    assert wait_until_built(tap, node.name) == BUILT
    tap.start_if_due(LASTS_S)
    tap.finish()

    assert (node.cache / node.name).is_file()
    assert len(runs(node.cxx)) == 1


def test_tap_is_built_at_the_end_of_a_short_run(node: Node) -> None:
    """finish() waits for the build."""
    tap = TapBuilder(builds=True)
    tap.describe_tap_for_report(node.name, wanted=True)
    tap.finish()

    assert (node.cache / node.name).is_file()
    assert tap.describe_tap_for_report(node.name, wanted=True) == BUILT


def test_finish_waits_for_a_running_build(node: Node, tap: Path) -> None:
    """While a build runs, no other build is started."""
    copying(node.cxx, tap, before="sleep 1")
    begun = TapBuilder(builds=True)
    begun.describe_tap_for_report(node.name, wanted=True)
    begun.start_if_due(LASTS_S)
    child = begun._child
    assert child is not None
    begun.finish()

    assert child.returncode == 0
    assert len(runs(node.cxx)) == 1


def test_build_waits_for_the_end_of_the_run_without_free_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler uses 0.9 GB of memory, which could kill a job that is near its memory limit."""
    monkeypatch.setattr(tap_for_next_run, "_NEEDED_BYTES", 1 << 60)
    tap = TapBuilder(builds=True)
    tap.describe_tap_for_report(node.name, wanted=True)
    tap.start_if_due(LASTS_S)
    assert tap._child is None
    tap.finish()

    assert (node.cache / node.name).is_file()


@pytest.mark.parametrize("missed", ["", "the setting", "by hand"])
def test_tap_is_built_only_if_a_rank_lacked_it_and_the_setting_is_on(
    missed: str, node: Node
) -> None:
    """The tap is built only if a rank recorded without it and the setting is on.

    A build at the end of a run is acceptable, because users never wait for the sidecar's end.
    """
    tap = TapBuilder(builds=missed != "by hand")
    outlook = tap.describe_tap_for_report(
        node.name if missed else "", wanted=missed != "the setting"
    )
    tap.start_if_due(LASTS_S)
    tap.finish()

    expected = {
        "": "",
        "the setting": "no native tap is built: TORCHLENS_PERF_BUILD_TAP is off",
        "by hand": "torchlens-perf build-tap builds the native tap",
    }
    assert outlook == expected[missed]
    assert runs(node.cxx) == []
    assert list(node.cache.iterdir()) == []


# -- outlook


def test_obstacle_to_a_build_is_reported_with_a_remedy(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No build is started."""
    monkeypatch.setenv("CXX", "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    tap = TapBuilder(builds=True)
    outlook = tap.describe_tap_for_report(node.name, wanted=True)
    tap.start_if_due(LASTS_S)
    tap.finish()

    assert outlook == "no native tap yet: no C++ compiler: install g++, or name one in CXX"
    assert tap._child is None


@pytest.mark.parametrize("at", ["during the run", "end"])
def test_failed_build_is_reported_with_the_compilers_error(at: str, node: Node) -> None:
    """The next run reports the error without another attempt."""
    compiler(node.cxx, "echo 'tap.cpp:7: error: too old' >&2; exit 1")
    tap = TapBuilder(builds=True)
    tap.describe_tap_for_report(node.name, wanted=True)
    if at == "during the run":
        wait_until_built(tap, node.name)
    tap.finish()

    reason = "no native tap yet: the compiler failed: tap.cpp:7: error: too old"
    assert tap.describe_tap_for_report(node.name, wanted=True) == reason
    assert (
        TapBuilder(builds=True).describe_tap_for_report(node.name, wanted=True)
        == f"{reason}; {tap_requirements.AGAIN}"
    )


def test_exit_status_of_a_killed_build_is_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may kill the build if memory runs out."""
    compiler(node.cxx, "kill -KILL $PPID")
    tap = TapBuilder(builds=True)
    tap.describe_tap_for_report(node.name, wanted=True)
    tap.finish()

    assert (
        tap.describe_tap_for_report(node.name, wanted=True)
        == "no native tap yet: its build has ended with status -9"
    )


# -- priority of the build


def test_tap_build_runs_with_the_lowest_priority(node: Node, tap: Path) -> None:
    """The compiler has SCHED_IDLE and the lowest priorities of thread and session.

    The compiler also has the highest OOM score and a limit of CPU time.
    """
    seen = node.home / "seen"
    me = "/proc/$$"
    copying(
        node.cxx, tap,
        f"cut -d' ' -f6,19,41 {me}/stat > {seen}; cat {me}/oom_score_adj >> {seen}; ulimit -t >> {seen};"
        f"cat {me}/autogroup >> {seen} || true",
    )  # fmt: skip
    # The compiler prints its priority, which must not change before the print.
    environ = {**os.environ, "HOME": f"{node.home}/"}
    program = (
        "import sys; from torchlens_perf.sidecar.tap_for_next_run import TapBuilder\n"
        "tap = TapBuilder(builds=True); tap.describe_tap_for_report(sys.argv[1], wanted=True); tap.finish()"
    )
    subprocess.run([sys.executable, "-c", program, node.name], env=environ, check=True, timeout=390)
    stat, oom_score, cpu_s, *autogroup = seen.read_text().splitlines()

    session, nice, policy = map(int, stat.split())
    assert session not in (os.getsid(0), 0)
    assert (nice, policy, oom_score, cpu_s) == (19, os.SCHED_IDLE, "1000", "600")
    assert all(line.endswith("nice 19") for line in autogroup)


PARENT = """
import sys, time
from torchlens_perf.sidecar.tap_for_next_run import TapBuilder
tap = TapBuilder(builds=True)
tap.describe_tap_for_report(sys.argv[1], wanted=True)
tap._start_child()
print(tap._child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_tap_build_is_killed_with_the_sidecar(sent: signal.Signals, node: Node, tap: Path) -> None:
    """The compiler and its children end too. No partial file is left."""
    pids = node.home / "pids"
    copying(node.cxx, tap, f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    sidecar = subprocess.Popen(
        [sys.executable, "-c", PARENT, node.name], stdout=subprocess.PIPE, text=True
    )
    assert sidecar.stdout is not None
    child = int(sidecar.stdout.readline())
    deadline_s = time.monotonic() + 300
    while not pids.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    sidecar.send_signal(sent)
    sidecar.wait(30)

    # On a busy machine, processes with the lowest priority take a while to end.
    assert [has_ended(pid, 150) for pid in (child, *map(int, pids.read_text().split()))] == [
        True,
        True,
        True,
    ]
    assert [path.name for path in node.cache.iterdir()] == ["tap.lock"]


def test_endless_build_is_killed_at_the_time_limit(node: Node, tap: Path) -> None:
    copying(node.cxx, tap, "sleep 1000")
    begun = TapBuilder(builds=True)
    begun.describe_tap_for_report(node.name, wanted=True)
    begun._start_child()
    child = begun._child
    assert child is not None
    begun.finish(timeout_s=1.0)

    assert has_ended(child.pid)
    assert child.wait(1) == 128 + signal.SIGTERM


# -- report


def reported(
    run: RunDirectory, *outlooks: TapBuilder, groups: bool = True, **settings: bool
) -> list[str]:
    """Return the report's notes on missing taps, with one node for each of the outlooks."""
    for number, outlook in enumerate(outlooks):
        host = f"{HOST}{number}"
        rank = Rank(run, number, len(outlooks), identity={"host": host}, **settings)
        rank.session.publish(missing_tap="a-tap.so")
        if groups:
            rank.session.metadata.add_group("0", list(range(len(outlooks))), "default")
        rank.steps(12, forward=4, host=1)
        rank.close()
        sidecar = Sidecar(run, host, None, lambda run, asked: None, tap=outlook)
        sidecar.read_rings()
        sidecar.count_records()
        sidecar.save_records()
        sidecar.close()
    return [
        note
        for note in build_report(run.run_id, node_state.load_all(run))["quality"]["notes"]
        if "tap" in note
    ]


TAPPED = (
    "collectives were recorded from Python, which costs up to 50 us each and records no end times"
    " of asynchronous collectives"
)


@pytest.mark.parametrize(
    ("builds", "settings", "outlook"),
    [
        (True, {}, PLANNED),
        (False, {}, "torchlens-perf build-tap builds the native tap"),
        (True, {"_build_tap": False}, "no native tap is built: TORCHLENS_PERF_BUILD_TAP is off"),
    ],
)
def test_equal_tap_outlooks_of_nodes_are_reported_in_one_line(
    builds: bool, settings: dict[str, bool], outlook: str, node: Node, tmp_path: Path
) -> None:
    """The line says which tap is used now and what to expect in the next run (the outlook)."""
    with run_without_traces(tmp_path / "run") as run:
        notes = reported(run, TapBuilder(builds=builds), TapBuilder(builds=builds), **settings)

    assert notes == [f"{TAPPED}; {outlook}"]


def test_different_tap_outlooks_of_nodes_are_reported_in_separate_lines(
    node: Node, tmp_path: Path
) -> None:
    with run_without_traces(tmp_path / "run") as run:
        notes = reported(run, TapBuilder(builds=True), TapBuilder(builds=False))

    assert notes == [
        f"{TAPPED}; {PLANNED}",
        f"{TAPPED}; torchlens-perf build-tap builds the native tap",
    ]


def test_tap_missed_before_a_restart_is_not_reported(node: Node, tmp_path: Path) -> None:
    """The ranks after the restart may have the tap."""
    with run_without_traces(tmp_path / "run") as run:
        for attempt, missed in enumerate(("a-tap.so", "")):
            rank = Rank(run, 0, 1, identity={"attempt": attempt})
            rank.session.publish(missing_tap=missed)
            rank.session.metadata.add_group("0", [0], "default")
            rank.steps(12, forward=4, host=1)
            rank.close()
        sidecar = Sidecar(run, HOST, None, lambda run, asked: None, tap=TapBuilder(builds=True))
        sidecar.read_rings()
        sidecar.count_records()
        sidecar.save_records()
        sidecar.close()
        (state,) = node_state.load_all(run)

    assert state.tap_outlook == PLANNED
    assert not any("tap" in note for note in build_report(run.run_id, [state])["quality"]["notes"])


def test_no_tap_is_reported_missing_for_ranks_without_a_common_group(
    node: Node, tmp_path: Path
) -> None:
    outlook = TapBuilder(builds=True)
    with run_without_traces(tmp_path / "run") as run:
        assert reported(run, outlook, groups=False) == []
    outlook.finish()

    assert runs(node.cxx) == []


def test_state_of_an_earlier_version_without_an_outlook_can_be_read(tmp_path: Path) -> None:
    with run_without_traces(tmp_path) as run:
        assert reported(run, TapBuilder(builds=False), groups=False) == []
        (path,) = run.nodes.glob("*.json")
        value = json.loads(path.read_text())
        del value["tap_outlook"]
        for process in value["processes"].values():
            del process["missing_tap"]
        path.write_text(json.dumps(value))

        assert build_report(run.run_id, node_state.load_all(run))["quality"]["records"] > 0
