"""Damaged files and failing disks cost what they must: a sidecar goes on, a report shows the other nodes."""

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
from tests.support.failing_calls import everything_ended, library
from tests.support.figures import note, share
from tests.support.leftovers import eventually
from tests.support.long import long
from tests.support.processes import wait_for_sidecar
from tests.support.ranks import HOST, Rank
from torchlens_perf.commands.cli import main
from torchlens_perf.errors import RunStoreError
from torchlens_perf.recorder import sidecar
from torchlens_perf.report.run_report import run_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

STATES = 100_000


def finished(run: RunDirectory, steps: int = 50) -> None:
    """A run of one rank that has ended."""
    rank = Rank(run, 0, 1)
    rank.steps(steps, **WORK)
    rank.close()
    finish(run)


# -- files that are damaged, of another version, or somebody else's

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "truncated": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: b"{",
    "another's": lambda text: b'{"hello": 1}',
    "newer": lambda text: text.replace(b'"schema":%d' % node_state.SCHEMA, b'"schema":%d' % (node_state.SCHEMA + 1)),
    "binary": lambda text: bytes(range(256)) * 8,
    "deep": lambda text: b'{"schema":9,"x":' + b"[" * 100_000,
    "other types": lambda text: json.dumps({**json.loads(text), "processes": {"a": 5}}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_report_without_one_node(damage: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """One node's file cannot be read: the report has the others, and says which ranks are missing in it."""
    finished(run)
    broken = run.nodes / "zz.json"
    broken.write_bytes(DAMAGE[damage](run.node_state(HOST).read_bytes()))
    assert main(["report", str(run.path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)

    assert value["steps"]["count"] == 50
    (note,) = [note for note in value["quality"]["notes"] if "zz.json" in note]
    assert note.endswith(": the ranks of that node are missing here")


def test_report_of_nothing_but_damage(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and exit code 2."""
    (run.nodes / "zz.json").write_text("{")
    assert main(["report", str(run.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_state_that_no_report_can_be_made_of(run: RunDirectory) -> None:
    """Each value is of its type, and together they are none: it costs that node only."""
    finished(run)
    state = json.loads(run.node_state(HOST).read_bytes())
    state["host"] = "zz"
    (process,) = state["processes"].values()
    process["identity"]["rank"] = 1
    process["anchor"][0] = 1 << 80
    (run.nodes / "zz.json").write_text(json.dumps(state))
    report = run_report(run)

    assert [rank["rank"] for rank in report["ranks"]] == [0]
    assert any("zz.json" in note for note in report["quality"]["notes"])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("states", [150, *long(STATES)])
def test_states_with_bytes_changed(states: int, run: RunDirectory) -> None:
    """Whatever has become of a node's file, there is a report on the others, or one line."""
    began_s, number = time.monotonic(), states if states < STATES else share(STATES)
    finished(run)
    text, draw = run.node_state(HOST).read_bytes(), random.Random(states)
    broken = run.nodes / "zz.json"
    for _ in range(number):
        damaged = bytearray(text.replace(b'"rank":0', b'"rank":1').replace(b'"host":"node-a"', b'"host":"zz"'))
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        broken.write_bytes(damaged)

        assert 0 in [rank["rank"] for rank in run_report(run)["ranks"]]
    if states == STATES:
        note("node states of any bytes", number, STATES, "0 reports missing", time.monotonic() - began_s, states)


@pytest.mark.parametrize("damage", ["empty", "truncated", "newer"])
def test_a_sidecar_whose_state_is_damaged(damage: str, run: RunDirectory) -> None:
    """It is set aside with a note, and what is still in the rings is counted."""
    rank = Rank(run, 0, 1)
    rank.steps(20, **WORK)
    run.node_state(HOST).write_bytes(DAMAGE[damage](b'{"schema":%d}' % node_state.SCHEMA))
    rank.close()
    finish(run)
    report = run_report(run)

    assert report["ranks"][0]["steps"] == 20
    assert any("It is kept as" in note for note in report["quality"]["notes"])
    assert len(list(run.nodes.glob("*.damaged-*"))) == 1


def test_a_damaged_segment(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """A later sidecar works beside it, a replay leaves it out, and both say so. Foreign files are left alone."""
    finished(run, 20)
    (first,) = run.spans.glob("*.parquet")
    first.write_bytes(first.read_bytes()[:-100])
    (run.spans / "notes.parquet").write_text("somebody else's")
    (run.spans / f"{HOST}-copy.parquet").write_text("somebody else's")
    rank = Rank(run, 0, 1, identity={"attempt": 1})
    rank.steps(30, **WORK)
    rank.close()
    finish(run)
    second = sorted(run.spans.glob(f"{HOST}-0*.parquet"))[1]
    assert main(["sidecar", str(run.path), "--host", HOST]) == 1
    said = capsys.readouterr().out

    assert len(pd.read_parquet(second)) == 30 * 5
    assert "replayed 30 steps, 150 records" in said
    assert said.count(f"{first} cannot be read") == 1
    assert any(str(first) in note for note in run_report(run)["quality"]["notes"])


# -- disks that fail for a while


@pytest.fixture
def failing(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Makes calls of this process's children on paths fail, with this error, as long as a file is there: that file."""

    def make(error: int, *paths: Path) -> Path:
        flag = tmp_path / "fails"
        for variable, value in {
            "LD_PRELOAD": library(), "FAILING_PATHS": ":".join(map(str, paths)), "FAILING_WITH": error,
            "FAILING_WHILE": flag,
        }.items():  # fmt: skip
            monkeypatch.setenv(variable, str(value))
        return flag

    with everything_ended(str(tmp_path)):
        yield make


@pytest.mark.parametrize("error", [errno.ESTALE, *long(errno.EIO, errno.EACCES, errno.ENOSPC)], ids=errno.errorcode.get)
def test_a_disk_that_fails_for_seconds(error: int, run: RunDirectory, failing: Callable[..., Path]) -> None:
    """A live sidecar goes on, and nothing is lost."""
    flag = failing(error, run.spans, run.steps, run.node_state(HOST))  # its log can be written
    rank = Rank(run, 0, 1)
    rank.steps(20, **WORK)
    sidecar.ensure(run, rank.identity)
    assert eventually(run.node_state(HOST).exists)
    flag.touch()
    rank.steps(30, **WORK)
    time.sleep(8)  # more than a segment's period
    rank.steps(40, **WORK)
    flag.unlink()
    rank.close()
    wait_for_sidecar(run)
    report = run_report(run)

    assert (report["ranks"][0]["steps"], report["quality"]["lost"]) == (90, 0)
    assert sorted(pd.read_parquet(run.spans)["sequence"]) == list(range(90 * 5))
    assert os.strerror(error) in run.node_log(HOST).read_text()


def test_a_sidecar_that_cannot_read_its_state_begins_anew(run: RunDirectory, failing: Callable[..., Path]) -> None:
    """A disk's error is no damage: the state stays where it is, and is read as soon as it can be."""
    first = Rank(run, 0, 1)
    first.steps(20, **WORK)
    first.close()
    finish(run)
    flag = failing(errno.EIO, run.node_state(HOST))
    flag.touch()
    rank = Rank(run, 0, 1, identity={"attempt": 1})
    rank.steps(30, **WORK)
    sidecar.ensure(run, rank.identity)
    assert eventually(lambda: run.node_log(HOST).exists() and "begins anew" in run.node_log(HOST).read_text())
    flag.unlink()
    rank.close()
    wait_for_sidecar(run)
    state = node_state.load(run.node_state(HOST))

    assert sorted(process.statistics.counted_steps for process in state.processes.values()) == [20, 30]
    assert list(run.nodes.glob("*.damaged-*")) == []


def test_load_or_new_of_a_disk_that_fails(run: RunDirectory) -> None:
    """Nothing is renamed where the disk, not the file, is at fault."""
    run.node_state(HOST).mkdir()
    with pytest.raises(RunStoreError, match="Is a directory"):
        node_state.load_or_new(run, HOST)
