"""Captures of steps by torch.profiler in a rank: steps, files, other profilers, and failures."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, schedule

from tests.jobs.test_bit_equality import assert_same
from tests.support.recording import Recording, recorded, records_of, ring_of_this_process
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.hooks import capture, capture_trace
from torchlens_perf.recorder import torch_instruments
from torchlens_perf.run import captures
from torchlens_perf.run.captures import (
    FLIGHT_RECORDER,
    RAW_TRACE,
    SNAPSHOT,
    TRACE,
    Outcome,
    Request,
)
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import CAPTURING, Flag, Kind

REQUEST = {
    "id": "one", "asked_by": "user", "asked_unix_s": 0.0, "attempt": 0, "ranks": [0], "from_step": 0, "steps": 2,
    "python": False, "folder": "",
}  # fmt: skip
STARTS = (profiler._prepare_profiler, profiler._enable_profiler)


@pytest.fixture(autouse=True)
def _nothing_profiles():
    """Check after each test that no profiler is on and that torch's functions are unchanged."""
    yield
    assert (profiler._prepare_profiler, profiler._enable_profiler) == STARTS
    assert not profiler._is_profiler_enabled
    assert sys.getprofile() is None


class RequestedCapture:
    """A watch in this process, which receives a capture request before its first step."""

    def __init__(self, folder: Path, **request: Any) -> None:
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.recording: Recording
        self._watching = recorded(folder / "runs", self.model)
        asked = {
            "id": "one",
            "asked_by": "user",
            "asked_unix_s": 0.0,
            "attempt": 0,
            "ranks": (0,),
            **request,
        }
        self.request = Request(
            **{"from_step": 0, "steps": 2, "folder": str(folder / "files"), **asked}
        )

    def __enter__(self) -> RequestedCapture:
        self.recording = self._watching.__enter__()
        self.ring = ring_of_this_process(self.recording.watch.run_dir)
        self.ask()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching.__exit__(*error)

    def ask(self) -> None:
        """Write another capture request."""
        captures.ring_outcome_path(self.ring).unlink(missing_ok=True)
        captures.write_capture_file(captures.ring_request_path(self.ring), self.request)
        self.recording.watch._session.recorder.due_ns = 0

    def step(self, times: int = 1) -> None:
        """Train some steps."""
        for _ in range(times):
            self.model(torch.ones(4, 8)).square().sum().backward()
            self.recording.watch.step()

    @property
    def outcome(self) -> Outcome:
        """Return the rank's response to the request, which must exist."""
        return captures.read_capture_file(captures.ring_outcome_path(self.ring), Outcome)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the events in the trace file."""
        events: list[dict[str, Any]] = json.loads((self.folder / "files" / RAW_TRACE).read_text())[
            "traceEvents"
        ]
        return events

    def traced_steps(self) -> list[str]:
        """Return the numbers of the traced steps, ordered by time."""
        steps = [
            each
            for each in self.events
            if each["name"].startswith("ProfilerStep#") and each.get("ph") == "X"
        ]
        return [each["name"] for each in sorted(steps, key=lambda each: each["ts"])]


def test_exactly_the_requested_steps_are_captured_and_flagged(tmp_path: Path) -> None:
    """The step at whose end the capture began is flagged too.

    The rank's response explains why files are missing.
    """
    with RequestedCapture(tmp_path, from_step=2, steps=3) as asked:
        asked.step(8)
    outcome = asked.outcome

    assert asked.traced_steps() == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert sum(each["name"] == "AddmmBackward0" for each in asked.events) == 2 * 3
    assert (outcome.first_step, outcome.steps, outcome.ended) == (2, 3, "")
    assert outcome.files == {TRACE: (tmp_path / "files" / RAW_TRACE).stat().st_size}
    assert outcome.left_out == {
        FLIGHT_RECORDER: "there is no process group",
        SNAPSHOT: "no GPU is in use",
    }
    assert [bool(step.flags & Flag.CAPTURED) for step in asked.recording.steps] == [False] + [
        True
    ] * 4 + [False] * 3
    assert [each.step for each in asked.recording.of(Kind.SECTION, CAPTURING)] == [1, 4]
    assert not captures.ring_request_path(asked.ring).exists()


def test_trace_file_contains_the_number_of_the_rank(tmp_path: Path) -> None:
    with RequestedCapture(tmp_path) as asked:
        asked.step(4)
    trace = json.loads((tmp_path / "files" / RAW_TRACE).read_text())

    assert trace["distributedInfo"] == {"rank": 0, "world_size": 1}


def test_time_to_write_a_capture_is_overhead_of_one_step(tmp_path: Path) -> None:
    """Writing the files delays one step and not the next one."""
    with RequestedCapture(tmp_path) as asked:
        asked.step(6)
    sections = asked.recording.of(Kind.SECTION, CAPTURING)
    table = assemble_steps(records_of(asked.recording))
    tool_ns = table.parts_ns[:, PARTS.index("tool")]

    assert asked.outcome.paused_s == pytest.approx(
        sum(each.duration_ns for each in sections) / 1e9, rel=0.2
    )
    assert tool_ns[2] > 0.8 * sections[1].duration_ns
    assert tool_ns[3] < 0.5 * sections[1].duration_ns


def test_capture_changes_neither_parameters_nor_random_state(tmp_path: Path) -> None:
    """Parameters, gradients and random state equal those of a run without a capture."""

    def run(folder: Path, from_step: int) -> dict[str, Any]:
        torch.manual_seed(1)
        with RequestedCapture(folder, from_step=from_step, python=True) as asked:
            optimizer = torch.optim.Adam(asked.model.parameters())
            for _ in range(8):
                asked.step()
                optimizer.step()
        return {
            "model": asked.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }

    captured, never_begun = run(tmp_path / "1", 2), run(tmp_path / "2", 1000)

    assert_same(never_begun, captured)
    assert (tmp_path / "1" / "files" / RAW_TRACE).exists()
    assert not (tmp_path / "2" / "files").exists()


def test_python_frames_are_in_the_trace_if_requested(tmp_path: Path) -> None:
    with RequestedCapture(tmp_path, python=True) as asked:
        asked.step(4)

    assert any(each["name"].startswith("nn.Module: Linear") for each in asked.events)


def test_python_frames_are_missing_if_another_tool_traces_python(tmp_path: Path) -> None:
    """A debugger, coverage tool or cProfile uses Python's only profiling hook."""

    def hook(*event: Any) -> None: ...

    with RequestedCapture(tmp_path, python=True) as asked:
        sys.setprofile(hook)
        asked.step(4)
        kept = sys.getprofile()
        sys.setprofile(None)

    assert kept is hook
    assert asked.outcome.steps == 2
    assert "Python frames" in asked.outcome.left_out
    assert not any(each.get("cat") == "python_function" for each in asked.events)


def test_several_capture_requests_in_a_row_are_answered(tmp_path: Path) -> None:
    with RequestedCapture(tmp_path, steps=1) as asked:
        asked.step(3)
        first = asked.traced_steps()
        asked.ask()
        asked.step(3)

    assert (first, asked.traced_steps()) == (["ProfilerStep#1"], ["ProfilerStep#4"])


# -- other profilers


def test_capture_is_refused_while_the_users_profiler_is_on(tmp_path: Path) -> None:
    """The user's profiler continues, and the rank's response gives the reason for the refusal."""
    with (
        RequestedCapture(tmp_path) as asked,
        profile(activities=[ProfilerActivity.CPU]) as users_profile,
    ):
        asked.step(4)

    assert (asked.outcome.first_step, asked.outcome.ended) == (
        None,
        "torch.profiler is on in this process",
    )
    assert sum(each.name == "aten::addmm" for each in users_profile.events()) == 2 * 4
    assert not (tmp_path / "files").exists()


def test_capture_is_refused_while_the_users_profiler_warms_up(tmp_path: Path) -> None:
    """A second profiler would crash the process when it writes its trace."""
    with (
        RequestedCapture(tmp_path) as asked,
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=3, active=2, repeat=1),
        ) as users_profile,
    ):
        for _ in range(5):
            asked.step()
            users_profile.step()

    assert asked.outcome.ended == "torch.profiler is on in this process"
    assert any(each.name == "aten::addmm" for each in users_profile.events())


def test_capture_is_refused_while_torch_emits_ranges(tmp_path: Path) -> None:
    """torch.autograd.profiler can emit ranges for VTune or Nsight."""
    with RequestedCapture(tmp_path) as asked, profiler.emit_itt():
        asked.step(4)

    assert asked.outcome.first_step is None


@pytest.mark.parametrize(
    "variable", ["NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "KINETO_USE_DAEMON"]
)
def test_capture_is_refused_if_an_external_profiler_is_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Nsight and dynolog are recognized by environment variables."""
    monkeypatch.setenv(variable, "1")
    with RequestedCapture(tmp_path) as asked:
        asked.step(3)

    assert asked.outcome.first_step is None
    assert asked.outcome.ended.endswith("is on in this process")


def on_another_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("where", [lambda work: work(), on_another_thread])
def test_profiler_of_the_user_works_if_it_starts_during_a_capture(
    tmp_path: Path, where: Callable[[Callable[[], None]], None]
) -> None:
    """The capture ends early and keeps its complete steps."""
    users_profile: list[profile] = []

    def profiles() -> None:
        with profile(activities=[ProfilerActivity.CPU]) as each:
            torch.ones(3).cumsum(0)
        users_profile.append(each)

    with RequestedCapture(tmp_path, steps=6) as asked:
        asked.step(4)
        where(profiles)
        asked.step(3)
    outcome = asked.outcome

    assert [each.name for each in users_profile[0].events() if each.name == "aten::cumsum"] == [
        "aten::cumsum"
    ]
    assert (outcome.first_step, outcome.steps, outcome.ended) == (1, 3, "another profiler began")
    assert asked.traced_steps()[:3] == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert not any(each["name"] == "aten::cumsum" for each in asked.events)


def test_profiler_of_the_user_is_undisturbed_while_the_capture_is_written(tmp_path: Path) -> None:
    with RequestedCapture(tmp_path, steps=6) as asked:
        asked.step(3)
        with profile(activities=[ProfilerActivity.CPU]) as users_profile:
            asked.step(3)

    assert asked.traced_steps()[:2] == ["ProfilerStep#1", "ProfilerStep#2"]
    assert sum(each.name == "aten::addmm" for each in users_profile.events()) == 2 * 3


# -- limits and failures


@pytest.fixture
def swallowing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the errors in this package instead of raising them, as in a job."""
    with monkeypatch.context() as patches:
        patches.setenv(RAISE, "0")
        patches.setattr(swallowed, "by_place", Counter())
        yield swallowed.by_place


def out_of_host_memory(*, with_history: bool = False) -> str:
    raise MemoryError("no more")


def test_error_while_a_capture_file_is_written_is_reported(
    tmp_path: Path, swallowing: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is counted, files written before the error are kept, and the next request works."""
    with RequestedCapture(tmp_path) as asked:
        with monkeypatch.context() as broken:
            broken.setattr(torch_instruments, "dump_memory_snapshot", out_of_host_memory)
            asked.step(4)
        failed, on = asked.outcome, profiler._is_profiler_enabled
        asked.ask()
        asked.step(4)

    assert failed.ended == "it failed: MemoryError: no more"
    assert (set(failed.files), failed.steps, on) == ({TRACE}, 2, False)
    assert swallowing == {"a capture": 1}
    assert (asked.outcome.steps, asked.outcome.ended) == (2, "")
    assert not [note for note in asked.recording.notes if "switched off" in note]


@pytest.mark.parametrize("name", ["begin_next_step", "stop"])
def test_profiler_is_off_after_an_error_while_the_trace_is_written(
    tmp_path: Path, swallowing: Counter[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No part of the failed trace's file is kept."""

    def broken(*arguments: Any) -> None:
        raise KeyError(name)

    with RequestedCapture(tmp_path) as asked:
        asked.step()
        with monkeypatch.context() as breaking:
            if name == "stop":
                breaking.setattr(profiler.record_function, "__exit__", broken)
            else:
                breaking.setattr(capture_trace.ProfilerTrace, name, broken)
            asked.step(2)
        on = profiler._is_profiler_enabled
        asked.ask()
        asked.step(4)

    assert not on
    assert swallowing["a capture"] >= 1
    assert (asked.outcome.steps, asked.outcome.ended) == (2, "")


def test_profiler_is_off_if_the_response_to_a_request_cannot_be_written(
    tmp_path: Path, swallowing: Counter[str]
) -> None:
    with RequestedCapture(tmp_path) as asked:
        in_the_way = captures.ring_outcome_path(asked.ring)
        in_the_way.mkdir()
        asked.step(5)
        on = profiler._is_profiler_enabled
        in_the_way.rmdir()
        asked.ask()
        asked.step(4)

    assert not on
    # The second error is raised while the first one is reported.
    assert swallowing == {"a capture": 2}
    assert asked.outcome.steps == 2


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"id": "one"}',
        *(json.dumps({**REQUEST, **wrong}) for wrong in (
            {"steps": "3"}, {"steps": 0}, {"steps": 21}, {"steps": True}, {"ranks": 3}, {"id": "../../elsewhere"},
            {"asked_unix_s": "yesterday"}, {"from_step": None}, {"folder": 5},
        )),
    ],
)  # fmt: skip
def test_unreadable_capture_request_is_rejected_and_removed(tmp_path: Path, text: str) -> None:
    """The next request is accepted."""
    with RequestedCapture(tmp_path) as asked:
        captures.ring_request_path(asked.ring).write_text(text)
        asked.step()
        refused = asked.outcome
        asked.ask()
        asked.step(4)

    assert refused.ended.startswith("the request cannot be read: ")
    assert (asked.outcome.steps, asked.outcome.ended) == (2, "")


def test_profiler_of_the_user_starts_even_if_ending_the_capture_fails(
    tmp_path: Path, swallowing: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not reach the user's call of profile()."""
    with RequestedCapture(tmp_path, steps=6) as asked:
        asked.step(3)
        with monkeypatch.context() as breaking:
            breaking.setattr(
                capture_trace.ProfilerTrace, "_end_step", lambda self: out_of_host_memory()
            )
            with profile(activities=[ProfilerActivity.CPU]) as users_profile:
                torch.ones(3).cumsum(0)
        asked.step(2)

    assert [each.name for each in users_profile.events() if each.name == "aten::cumsum"] == [
        "aten::cumsum"
    ]
    assert swallowing["ending a capture for another profiler"] >= 1
    assert asked.outcome.ended == "another profiler began"


def test_capture_ends_with_the_current_step_at_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RequestedCapture(tmp_path, steps=10) as asked:
        asked.step(2)
        monkeypatch.setattr(capture, "LONGEST_S", 0.0)
        asked.step(3)

    assert (asked.outcome.steps, asked.traced_steps()[-1]) == (2, "ProfilerStep#2")
    assert asked.outcome.ended.startswith("it took longer than")


def test_trace_over_the_size_limit_is_removed_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "MAX_TRACE_BYTES", 1000)
    with RequestedCapture(tmp_path) as asked:
        asked.step(4)

    assert asked.outcome.steps == 2
    assert asked.outcome.files == {}
    assert "request fewer steps" in asked.outcome.left_out[TRACE]
    assert list((tmp_path / "files").iterdir()) == []


def test_training_continues_if_the_capture_folder_is_not_writable(tmp_path: Path) -> None:
    """The response lists the missing files."""
    (tmp_path / "files").write_text("in the way")
    with RequestedCapture(tmp_path) as asked:
        asked.step(4)

    assert asked.outcome.left_out[TRACE].startswith("it could not be written")
    assert len(asked.recording.steps) == 4


def test_complete_steps_of_a_capture_are_kept_if_the_watch_ends(tmp_path: Path) -> None:
    with RequestedCapture(tmp_path, steps=10) as asked:
        asked.step(4)

    assert (asked.outcome.steps, asked.outcome.ended) == (3, "the watch ended")
    assert asked.traced_steps()[:3] == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown_bytes(operations: int) -> int:
    """Return how many bytes the memory of this process grows during some operations.

    A running profiler stores about 1 KB per operation.
    """
    value = torch.ones(2)
    for _ in range(
        operations
    ):  # A child of a large process grows as it touches pages of files that its parent has mapped.
        value.add_(0.0)
    before = resident_bytes()
    for _ in range(operations):
        value.add_(0.0)
    return resident_bytes() - before


def test_capture_in_the_parent_does_not_profile_a_forked_child(tmp_path: Path) -> None:
    """A long-lived DataLoader worker restores torch's functions and neither writes nor records.

    The capture in the parent process continues.
    """
    with RequestedCapture(tmp_path, python=True) as asked:
        asked.step(2)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            clean = {
                "functions": (profiler._prepare_profiler, profiler._enable_profiler) == STARTS,
                "off": not profiler._is_profiler_enabled,
                "hook": sys.getprofile() is None,
                "grown": grown_bytes(30_000),
                "answered": captures.ring_outcome_path(asked.ring).exists(),
            }
            os.write(write, json.dumps(clean).encode())
            os._exit(0)
        os.waitpid(child, 0)
        state = json.loads(os.read(read, 4096))
        asked.step(2)

    grown = state.pop("grown")
    assert state == {"functions": True, "off": True, "hook": True, "answered": False}
    assert grown < 4 << 20
    assert (asked.outcome.steps, asked.outcome.ended) == (2, "")


def read_c_environment(name: str) -> str | None:
    """Return a variable as Kineto, which is C++, reads it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return None if value is None else value.decode()


@pytest.mark.parametrize(
    ("cuda", "chosen", "during", "after"),
    [
        ("13.0", None, "1", None),
        ("12.6", None, "1", None),
        ("13.0", "0", "0", "0"),
        ("13.0", "1", "1", "1"),
        ("12.4", None, None, None),
        (None, None, None, None),
    ],
)
def test_cupti_is_detached_after_a_capture_unless_the_job_has_decided(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    chosen: str | None,
    during: str | None,
    after: str | None,
) -> None:
    """Kineto reads the setting when a trace ends, and in the next call of CUDA."""
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", chosen)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(capture, "_is_cuda_used", lambda torch: cuda is not None)
    monkeypatch.setattr(capture, "_is_capturing_graph", lambda: False)
    end, at_the_end = profiler._disable_profiler, []

    def disable() -> Any:
        at_the_end.append(read_c_environment("TEARDOWN_CUPTI"))
        return end()

    monkeypatch.setattr(profiler, "_disable_profiler", disable)
    with RequestedCapture(tmp_path, steps=1) as asked:
        assert read_c_environment("TEARDOWN_CUPTI") == chosen
        for _ in range(2):
            asked.step(2)
            assert asked.outcome.steps == 1
            assert read_c_environment("TEARDOWN_CUPTI") == during
            asked.ask()

    assert at_the_end == [during, during]
    assert read_c_environment("TEARDOWN_CUPTI") == after


def test_setting_of_cupti_that_torch_makes_during_a_watch_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch sets 0 where CUDA graphs and a detached CUPTI do not work together."""
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(capture, "_is_cuda_used", lambda torch: True)
    monkeypatch.setattr(capture, "_is_capturing_graph", lambda: False)
    with RequestedCapture(tmp_path, steps=1) as asked:
        asked.step(2)
        os.environ["TEARDOWN_CUPTI"] = "0"
    assert os.environ.pop("TEARDOWN_CUPTI") == "0"


def test_capture_request_is_ignored_if_captures_are_off(tmp_path: Path) -> None:
    with recorded(tmp_path, capture="off") as recording:
        ring = ring_of_this_process(recording.watch.run_dir)
        captures.write_capture_file(
            captures.ring_request_path(ring), Request("one", "user", 0.0, 0, (0,), 0, 1)
        )
        recording.watch.step()

    assert captures.ring_request_path(ring).exists()


def test_capture_does_not_recompile_a_compiled_model(tmp_path: Path) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ x).relu()

    x = torch.ones(4, 4, requires_grad=True)
    with RequestedCapture(tmp_path, from_step=4) as asked:
        for _ in range(8):
            function(x).sum().backward()
            asked.recording.watch.step()

    compiled = [bool(step.flags & Flag.COMPILED) for step in asked.recording.steps]
    assert compiled == [True] + [False] * 7
    assert asked.outcome.steps == 2
