"""Tests with damaged files and failing disks.

In each case the sidecar continues, and a report shows the other nodes.
"""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.sidecar.test_node import WORK, finish
from tests.support.failing_calls import kill_all_at_end, library
from tests.support.figures import note, share
from tests.support.leftovers import eventually
from tests.support.long import long
from tests.support.processes import wait_for_sidecar
from tests.support.ranks import HOST, Rank
from torchlens_perf.commands.cli import main
from torchlens_perf.errors import RunStoreError
from torchlens_perf.recorder import sidecar
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

STATES = 100_000


def finished(run: RunDirectory, steps: int = 50) -> None:
    """Record a run of one rank that has ended."""
    rank = Rank(run, 0, 1)
    rank.steps(steps, **WORK)
    rank.close()
    finish(run)


# -- files that are damaged, from another version, or from another program

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "truncated": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: b"{",
    "another's": lambda text: b'{"hello": 1}',
    "newer": lambda text: text.replace(
        b'"schema":%d' % node_state.SCHEMA, b'"schema":%d' % (node_state.SCHEMA + 1)
    ),
    "binary": lambda text: bytes(range(256)) * 8,
    "deep": lambda text: b'{"schema":9,"x":' + b"[" * 100_000,
    "other types": lambda text: json.dumps({**json.loads(text), "processes": {"a": 5}}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_report_lists_the_ranks_of_an_unreadable_node_as_missing(
    damage: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report still contains the other nodes."""
    finished(run)
    broken = run.nodes / "zz.json"
    broken.write_bytes(DAMAGE[damage](run.node_state_path(HOST).read_bytes()))
    assert main(["report", str(run.path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)

    assert value["steps"]["count"] == 50
    (note,) = [note for note in value["quality"]["notes"] if "zz.json" in note]
    assert note.endswith(". The report lacks the ranks of that node")


def test_report_fails_with_one_line_if_no_node_is_readable(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2."""
    (run.nodes / "zz.json").write_text("{")
    assert main(["report", str(run.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_node_with_contradictory_state_is_left_out_of_the_report(run: RunDirectory) -> None:
    """Each value has a valid type, but the values contradict each other."""
    finished(run)
    state = json.loads(run.node_state_path(HOST).read_bytes())
    state["host"] = "zz"
    (process,) = state["processes"].values()
    process["identity"]["rank"] = 1
    process["anchor"][0] = 1 << 80
    (run.nodes / "zz.json").write_text(json.dumps(state))
    report = load_report(run)

    assert [rank["rank"] for rank in report["ranks"]] == [0]
    assert any("zz.json" in note for note in report["quality"]["notes"])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("states", [60, *long(STATES)])
def test_report_is_built_or_fails_with_one_line_if_state_bytes_change(
    states: int, run: RunDirectory
) -> None:
    began_s, number = time.monotonic(), states if states < STATES else share(STATES)
    finished(run)
    text, draw = run.node_state_path(HOST).read_bytes(), random.Random(states)
    broken = run.nodes / "zz.json"
    for _ in range(number):
        damaged = bytearray(
            text.replace(b'"rank":0', b'"rank":1').replace(b'"host":"node-a"', b'"host":"zz"')
        )
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        broken.write_bytes(damaged)

        assert 0 in [rank["rank"] for rank in load_report(run)["ranks"]]
    if states == STATES:
        note(
            "node states of any bytes",
            number,
            STATES,
            "0 reports missing",
            time.monotonic() - began_s,
            states,
        )


@pytest.mark.parametrize("damage", ["empty", "truncated", "newer"])
def test_damaged_state_is_renamed_and_noted(damage: str, run: RunDirectory) -> None:
    """Without the state, records that are still in the rings are counted again."""
    rank = Rank(run, 0, 1)
    rank.steps(20, **WORK)
    run.node_state_path(HOST).write_bytes(DAMAGE[damage](b'{"schema":%d}' % node_state.SCHEMA))
    rank.close()
    finish(run)
    report = load_report(run)

    assert report["ranks"][0]["steps"] == 20
    assert any("It is kept as" in note for note in report["quality"]["notes"])
    assert len(list(run.nodes.glob("*.damaged-*"))) == 1


def test_damaged_segment_is_left_out_and_noted(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later sidecar and a replay report the damaged segment.

    Files of other programs are not changed.
    """
    finished(run, 20)
    (first,) = run.spans.glob("*.parquet")
    first.write_bytes(first.read_bytes()[:-100])
    (run.spans / "notes.parquet").write_text("another program's")
    (run.spans / f"{HOST}-copy.parquet").write_text("another program's")
    rank = Rank(run, 0, 1, identity={"attempt": 1})
    rank.steps(30, **WORK)
    rank.close()
    finish(run)
    second = sorted(run.spans.glob(f"{HOST}-0*.parquet"))[1]
    assert main(["sidecar", str(run.path), "--host", HOST]) == 1
    output = capsys.readouterr().out

    assert len(pd.read_parquet(second)) == 30 * 5
    assert "replayed 30 steps, 150 records" in output
    assert output.count(f"{first} cannot be read") == 1
    assert any(str(first) in note for note in load_report(run)["quality"]["notes"])


# -- disks that fail for a while


@pytest.fixture
def failing(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """Return a function that makes calls of child processes fail for some paths.

    Calls fail with the given error as long as the returned flag file exists.
    """

    def make(error: int, *paths: Path) -> Path:
        flag = tmp_path / "fails"
        for variable, value in {
            "LD_PRELOAD": library(), "FAILING_PATHS": ":".join(map(str, paths)), "FAILING_WITH": error,
            "FAILING_WHILE": flag,
        }.items():  # fmt: skip
            monkeypatch.setenv(variable, str(value))
        return flag

    with kill_all_at_end(str(tmp_path)):
        yield make


@pytest.mark.long
@pytest.mark.parametrize(
    "error", [errno.ESTALE, *long(errno.EIO, errno.EACCES, errno.ENOSPC)], ids=errno.errorcode.get
)
def test_disk_errors_for_some_seconds_lose_no_records(
    error: int, run: RunDirectory, failing: Callable[..., Path]
) -> None:
    # Only the log can still be written.
    flag = failing(error, run.spans, run.steps, run.node_state_path(HOST))
    rank = Rank(run, 0, 1)
    rank.steps(20, **WORK)
    sidecar.ensure_running(run, rank.identity)
    assert eventually(run.node_state_path(HOST).exists)
    flag.touch()
    rank.steps(30, **WORK)
    time.sleep(8)  # The errors last longer than the interval of segments.
    rank.steps(40, **WORK)
    flag.unlink()
    rank.close()
    wait_for_sidecar(run)
    report = load_report(run)

    assert (report["ranks"][0]["steps"], report["quality"]["lost"]) == (90, 0)
    assert sorted(pd.read_parquet(run.spans)["sequence"]) == list(range(90 * 5))
    assert os.strerror(error) in run.node_log_path(HOST).read_text()


def test_unreadable_state_is_read_again_after_a_disk_error(
    run: RunDirectory, failing: Callable[..., Path]
) -> None:
    """A disk error is not damage, so the state is not renamed."""
    first = Rank(run, 0, 1)
    first.steps(20, **WORK)
    first.close()
    finish(run)
    flag = failing(errno.EIO, run.node_state_path(HOST))
    flag.touch()
    rank = Rank(run, 0, 1, identity={"attempt": 1})
    rank.steps(30, **WORK)
    sidecar.ensure_running(run, rank.identity)
    assert eventually(
        lambda: (
            run.node_log_path(HOST).exists()
            and "restarts in" in run.node_log_path(HOST).read_text()
        )
    )
    flag.unlink()
    rank.close()
    wait_for_sidecar(run)
    state = node_state.load(run.node_state_path(HOST))

    assert sorted(process.statistics.counted_steps for process in state.processes.values()) == [
        20,
        30,
    ]
    assert list(run.nodes.glob("*.damaged-*")) == []


def test_loading_a_node_state_raises_after_a_disk_error(run: RunDirectory) -> None:
    run.node_state_path(HOST).mkdir()
    with pytest.raises(RunStoreError, match="Is a directory"):
        node_state.load_or_new(run, HOST)
