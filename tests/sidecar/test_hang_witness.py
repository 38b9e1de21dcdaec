"""Dumps of PyTorch's Flight Recorder and the status of NCCL in the verdict on a hang.

The dumps in flight_recorder/ are those of three ranks over gloo with torch 2.13. Ranks 0 and 1 wait in
their fourth all_reduce, which rank 2 did not call. NCCL also records members and states, in the format
of FlightRecorderDetail.hpp in torch.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.report.test_held import node, usual
from tests.sidecar.test_nccl_ras import SUMMARY, WARNINGS, service
from tests.support import progress
from tests.support.findings import hang
from tests.support.progress import behind, found, rank
from tests.support.ranks import identity_of, make_run
from tests.support.servers import wait_for
from torchlens_perf.analysis.collectives.hang import Hang
from torchlens_perf.page.sections.verdicts import build_verdicts_section
from torchlens_perf.report.build import build_report
from torchlens_perf.run.rank_facts import RankFacts, encode_path
from torchlens_perf.sidecar import hang_watch
from torchlens_perf.sidecar.hang_witness import flight_recorder
from torchlens_perf.sidecar.hang_witness.collect import HangWitness
from torchlens_perf.sidecar.hang_witness.flight_recorder import find_dumps, read_dump
from torchlens_perf.sidecar.hang_witness.judge import RankDump, judge_dumps
from torchlens_perf.sidecar.hang_witness.words import describe_dumps
from torchlens_perf.sidecar.host.stacks import Stack
from torchlens_perf.view.headline import build_headlines
from torchlens_perf.view.markup import to_html
from torchlens_perf.view.terminal import render_short

DUMPS = Path(__file__).parent / "flight_recorder"
PROCESSES = {number: rank(number) for number in range(3)}
Edit = Callable[[int, dict[str, Any]], object]


def read(folder: Path = DUMPS, world_size: int = 3, since_ns: int = 0) -> dict[int, RankDump]:
    found = {
        number: read_dump(path, number, world_size, since_ns)
        for number, path in find_dumps(str(folder / "trace_"))
    }
    return {number: dump for number, dump in found.items() if dump is not None}


def edited(folder: Path, edit: Edit) -> dict[int, RankDump]:
    """Return the dumps after a change of each. edit: gets the rank and the content of its dump."""
    for number, path in find_dumps(str(DUMPS / "trace_")):
        content = pickle.loads(path.read_bytes())
        edit(number, content)
        (folder / path.name).write_bytes(pickle.dumps(content))
    return read(folder)


def text_of(hang: Hang, dumps: dict[int, RankDump]) -> str:
    return describe_dumps(hang, judge_dumps(PROCESSES, dumps), dumps)


def test_dump_shows_the_missing_rank_and_the_line_of_the_pending_call() -> None:
    dumps = read()
    assert [dump.line for dump in dumps.values()] == ["make.py:15 in train_step"] * 2 + [""]
    did = "rank 2 did not enter collective 3 of group 0 (all_reduce of [4,8] Float)."
    unknown = found(count=3)
    assert text_of(unknown, dumps) == f"PyTorch's Flight Recorder shows: {did}"
    same = found(behind(2), count=3)
    assert text_of(same, dumps) == f"PyTorch's Flight Recorder confirms it: {did}"
    stopped = {**PROCESSES, 1: rank(1, state="stopped")}
    judged = judge_dumps(stopped, dumps)
    assert judged is not None
    assert progress.named(judged) == [2]
    other = found(behind(1), count=3)
    assert text_of(other, dumps) == (
        f"PyTorch's Flight Recorder shows: {did} This differs from the finding on rank 1."
    )


def test_ranks_without_a_dump_are_named() -> None:
    dumps = read()
    assert text_of(found(count=3), {0: dumps[0]}) == (
        "PyTorch's Flight Recorder shows no rank that is behind. No dump of ranks 1-2 was found."
    )
    assert text_of(found(count=3), {}) == ""


def test_other_size_of_the_same_call_is_a_mismatch(tmp_path: Path) -> None:
    def call(number: int, dump: dict[str, Any]) -> None:
        if number == 2:
            dump["entries"].append({**dump["entries"][-1], "collective_seq_id": 4})
            dump["entries"][-1]["input_sizes"] = [[4, 9]]

    assert text_of(found(count=3), edited(tmp_path, call)) == (
        "PyTorch's Flight Recorder shows: Ranks 0-1 called all_reduce of [4,8] Float, rank 2"
        " called all_reduce of [4,9] Float as collective 3 of group 0: the calls differ."
    )


def test_kernel_that_has_not_begun_is_named_with_the_members_of_its_group(tmp_path: Path) -> None:
    def begin(number: int, dump: dict[str, Any]) -> None:
        dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
        dump["entries"] = dump["entries"][:3]
        for each in dump["entries"][: 3 - (number == 1)]:
            each["state"] = "started"

    assert text_of(found(count=3), edited(tmp_path, begin)) == (
        "PyTorch's Flight Recorder shows: the kernel of collective 2 of group 0 of ranks 0-2"
        " (all_reduce of [4,8] Float) has not begun on rank 1."
    )


def test_json_dump_equals_the_pickle_but_for_its_line(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes((DUMPS / "trace_0.json").read_bytes())
    assert read(tmp_path)[0].calls == read()[0].calls


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    "make",
    [
        write(pickle.dumps(Attack())), write(pickle.dumps({"entries": Attack()})), write(b""),
        write(b"{}"), write(b"\x80\x02K\x01."), write((DUMPS / "trace_0").read_bytes()[:900]),
        write(b"[" * 100_000), os.mkfifo, lambda path: path.symlink_to(DUMPS / "trace_0"),
        lambda path: path.mkdir(), write(b"{" + b" " * (1 << 20)),
    ],
)  # fmt: skip
def test_other_files_are_no_dumps_and_run_no_code(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_MAX_BYTES", 1 << 20)
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "trace_0")
    with pytest.raises((ValueError, OSError)):
        read(tmp_path)
    assert not (tmp_path / "attacked").exists()


def test_dump_of_another_run_or_format_is_ignored(tmp_path: Path) -> None:
    created_ns = min(
        each["time_created_ns"]
        for each in json.loads((DUMPS / "trace_0.json").read_text())["entries"]
    )
    assert sorted(read(since_ns=created_ns - 10**9)) == [0, 1, 2]
    assert read(since_ns=created_ns + 10**9) == {}
    assert sorted(read(world_size=2)) == [0, 1]
    assert edited(tmp_path, lambda _, dump: dump.update(version="3.0")) == {}
    assert edited(tmp_path, lambda _, dump: dump.update(entries=[])) == {}


def test_only_new_dumps_of_this_user_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trace_0", "trace_1", "trace_2"):
        (tmp_path / name).write_bytes((DUMPS / name).read_bytes())
    os.utime(tmp_path / "trace_1", (1, 1))
    os.chown(tmp_path / "trace_2", 1234, -1)
    monkeypatch.setattr("torchlens_perf.sidecar.hang_witness.collect._POLL_INTERVAL_S", 0.01)
    witness = HangWitness(str(tmp_path / "trace_"), 0, 3, 0.0, time.time() - 60)
    witness.start()
    assert wait_for(lambda: 0 in witness.dumps, 10)
    assert list(witness.dumps) == [0]
    os.utime(tmp_path / "trace_1")
    assert wait_for(lambda: 1 in witness.dumps, 10)
    witness.close()
    witness.join(10)
    assert not witness.is_alive()


@pytest.mark.parametrize("ends", [True, False])
def test_hang_has_the_lines_of_dumps_and_the_answer_of_nccl(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is left after the hang, or after its detector was replaced.

    Node 0 has rank 0. Rank 1 is on another node, whose sidecar has sent its line."""
    earlier = threading.enumerate()  # Hangs of other tests may be watched for some seconds.
    monkeypatch.setattr(hang_watch, "read_main_stack", lambda pid: Stack((), "none"))
    for name in ("trace_0", "trace_1", "trace_2"):
        (tmp_path / name).write_bytes((DUMPS / name).read_bytes())
    monkeypatch.setattr("torchlens_perf.sidecar.hang_witness.collect._START_MARGIN_S", 1e9)
    watch, identity = hang_watch.HangDetector(6.0), identity_of(make_run(tmp_path), 0, 3)
    remote = {1: progress.rank(1), 2: progress.behind(2)}
    lines = {1: "train.py:7 in main"}
    answer = (SUMMARY + WARNINGS).replace("       32       32\n", "        3        3\n", 1)

    with service(answer.replace("32", "3")) as (port, _):
        facts = RankFacts(dump_prefix=encode_path(str(tmp_path / "trace_")), nccl_ras_port=port)

        def update() -> bool:
            watch.update_hang(
                {0: rank(0)}, remote, {1: 0.0, 2: 0.0}, {}, {0: (identity, facts)}, 100.0, lines
            )
            return watch.hang is not None and len(watch.hang.witnesses) == 2

        assert wait_for(update, 20)
    assert watch.hang is not None
    confirmed, ras = watch.hang.witnesses
    assert confirmed.startswith("PyTorch's Flight Recorder confirms it: rank 2 did not enter")
    assert ras.startswith("NCCL's RAS service reports no missing process")
    assert "Job summary" in watch.hang.nccl_status
    places = "\n".join(watch.hang.places)
    assert "rank 0: allreduce 57 of group 0, inside backward, make.py:15 in train_step" in places
    assert "rank 1: allreduce 57 of group 0, inside backward, train.py:7 in main" in places
    threads = [
        each
        for each in threading.enumerate()
        if isinstance(each, HangWitness) and each not in earlier
    ]
    assert len(threads) == 1
    if ends:
        going_on = {0: rank(0, since_step_s=0.1, since_mark_s=0.0)}
        watch.update_hang(going_on, {}, {}, {}, {0: (identity, facts)}, 101.0)
        assert watch.hang is None
    else:
        del update, watch
    assert wait_for(lambda: not threads[0].is_alive(), 10)


def test_sentences_are_in_the_report_and_the_status_of_nccl_on_the_page() -> None:
    waiting = structs.replace(
        hang(57), witnesses=("PyTorch confirms it.",), nccl_status="Job <summary>\n==="
    )
    report = build_report("r", [node([usual(57)] * 2, hang=waiting, ended="")])
    assert "PyTorch confirms it." in render_short(report, "/r", columns=100, color=False)
    contents: Any = {"headlines": build_headlines(report), "report": report}
    section = to_html(build_verdicts_section(contents))
    assert "Status of NCCL" in section
    assert "Job &lt;summary&gt;<br>===" in section
