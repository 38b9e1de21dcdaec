"""CPU time of a step's phases, and time runnable without a CPU, from the Linux kernel.

The kernel updates a running thread's time at its ticks, every 1 to
10 ms. The tests compare times of at least 80 ms.
"""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.busy_machine import one_cpu
from tests.support.collective_rig import on_thread
from tests.support.process_state import open_files
from tests.support.processes import ROOT
from tests.support.recorders import Rig
from torchlens_perf.run.ring import Kind

# After a step of at least this duration, the next one is measured.
LONG_NS = 10_000_000
WORK_S = 0.08
CLOSE = pytest.approx
CHUNK = bytes(1 << 20)
COMPETITOR = (
    "import os, time; os.sched_setaffinity(0, {%d}); print(flush=True)\nend = time.monotonic() +"
    " 60\n"
)
COMPETITOR += "while time.monotonic() < end: pass"
PRELOADED = Path(__file__).parents[1] / "support" / "schedstat_text.c"
UNREPORTED = """
import os, sys
from pathlib import Path
from tests.recorder.test_thread_time import LONG_NS, WORK_S, TimedRig, work
from tests.support.process_state import open_files
from torchlens_perf.run.ring import Kind

def measured(text):
    os.environ.pop("SCHEDSTAT", None)
    if text is not None:
        os.environ["SCHEDSTAT"] = text
    with rig.inside(Kind.FORWARD):
        work(WORK_S / 4)
    rig.clock.advance(LONG_NS)
    return bool(rig.thread_times())

(folder := Path(sys.argv[1], "rings")).mkdir()
rig = TimedRig(folder)
before, started = open_files(), []
for text in ("0 0 0\\n", "", "?"):
    os.environ["SCHEDSTAT"] = text
    started.append(rig.recorder.start_thread_time())
print("started", *started)
print("files", len(set(open_files()) - set(before)))
del os.environ["SCHEDSTAT"]
assert rig.recorder.start_thread_time()
rig.measure_next_step()
print("measured", *map(measured, ("fails", "fails", None, None)))
"""


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Switch off garbage collection.

    With torch loaded, a garbage collection can use as much CPU time as the measured work: 90 ms
    were observed.
    """
    gc.disable()
    yield
    gc.enable()


class TimedRig(Rig):
    """A recorder that measures thread times."""

    def measure_next_step(self) -> None:
        """End a step that is long enough for the next one to be measured, and drop its records."""
        if self.clock is None:
            time.sleep(2 * LONG_NS / 1e9)
        else:
            self.clock.advance(LONG_NS)
        self.recorder.next_step()
        self.records()

    def thread_times(self) -> dict[Kind, tuple[int, int]]:
        """End the step and return CPU time and time runnable without a CPU in ns, by phase.

        The key STEP is the time outside phases.
        """
        self.recorder.next_step()
        found = [each for each in self.records() if each["kind"] == Kind.THREAD_TIME]
        return {Kind(each["flags"]): (each["value0"], each["value1"]) for each in found}

    @contextmanager
    def inside(self, kind: Kind) -> Iterator[None]:
        name_id = self.ring.intern(kind.name.lower())
        self.recorder.begin(kind, name_id)
        yield
        self.recorder.end(kind, name_id)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TimedRig]:
    """Return a rig with the real clock."""
    made = TimedRig(tmp_path, clock=None)
    assert made.recorder.start_thread_time()
    made.measure_next_step()
    yield made
    made.close()


@pytest.fixture
def rig_with_clock(tmp_path: Path) -> Iterator[TimedRig]:
    """Return a rig whose clock the test sets. CPU time is still measured by the kernel."""
    made = TimedRig(tmp_path)
    assert made.recorder.start_thread_time()
    yield made
    made.close()


def work(cpu_s: float = WORK_S) -> int:
    """Use the given CPU time, however long that takes, and return the used nanoseconds."""
    begin_ns = time.thread_time_ns()
    while time.thread_time_ns() - begin_ns < cpu_s * 1e9:
        pass
    return time.thread_time_ns() - begin_ns


def test_computation_counts_as_cpu_time_of_its_phase(rig: TimedRig) -> None:
    """The CPU time is the same as on the thread's own clock."""
    with rig.inside(Kind.FORWARD):
        worked_ns = work()
    times = rig.thread_times()

    assert times[Kind.FORWARD][0] == CLOSE(worked_ns, rel=0.1)
    assert (
        sum(cpu_ns for kind, (cpu_ns, _) in times.items() if kind != Kind.FORWARD) < 0.1 * worked_ns
    )


def test_sleep_is_neither_cpu_time_nor_lack_of_a_cpu(rig: TimedRig) -> None:
    begin_ns = time.monotonic_ns()
    with rig.inside(Kind.DATA):
        time.sleep(3 * WORK_S)
    taken_ns = time.monotonic_ns() - begin_ns
    cpu_ns, ready_ns = rig.thread_times().get(Kind.DATA, (0, 0))

    assert taken_ns - cpu_ns - ready_ns > 0.9 * 3 * WORK_S * 1e9


def test_cpu_times_of_phases_add_up_to_the_step(rig: TimedRig) -> None:
    """Every nanosecond of the thread's CPU time is in one phase.

    An enclosing phase has only its own part.
    """
    begin_ns = time.thread_time_ns()
    outside_ns = work()
    with rig.inside(Kind.BACKWARD):
        backward_ns = work()
        with rig.inside(Kind.RECOMPUTE), rig.inside(Kind.MODULE), rig.inside(Kind.SECTION):
            recompute_ns = work()
        backward_ns += work()
    outside_ns += work()
    times = rig.thread_times()
    whole_ns = time.thread_time_ns() - begin_ns
    cpu_ns = {kind: cpu_ns for kind, (cpu_ns, _) in times.items()}

    assert cpu_ns == {
        Kind.STEP: CLOSE(outside_ns, rel=0.1),
        Kind.BACKWARD: CLOSE(backward_ns, rel=0.1),
        Kind.RECOMPUTE: CLOSE(recompute_ns, rel=0.1),
    }
    assert sum(cpu_ns.values()) == CLOSE(whole_ns, rel=0.1)


def test_cpu_time_of_polling_in_a_wait_is_not_work_of_the_phase(rig: TimedRig) -> None:
    """Polling at the end of a backward pass is not work either."""
    rig.recorder.start_collectives(rig.ring.intern("wait"))
    with rig.inside(Kind.BACKWARD):
        backward_ns = work()
        rig.recorder.begin_wait()
        waited_ns = work()
        rig.recorder.end_wait()
        backward_ns += work()
        rig.recorder.pause_own_work(True)
        waited_ns += work()
        rig.recorder.pause_own_work(False)
        backward_ns += work()
    times = rig.thread_times()

    assert times[Kind.BACKWARD][0] == CLOSE(backward_ns, rel=0.1)
    assert times[Kind.WAIT][0] == CLOSE(waited_ns, rel=0.1)


def test_backward_pass_without_an_end_affects_only_its_own_step(rig: TimedRig) -> None:
    """The end is missing because the backward pass raised."""
    rig.recorder.pause_own_work(True)
    paused_ns = work()
    assert rig.thread_times()[Kind.WAIT][0] == CLOSE(paused_ns, rel=0.1)
    worked_ns = work()

    assert rig.thread_times()[Kind.STEP][0] == CLOSE(worked_ns, rel=0.1)


@contextmanager
def competitor(cpu: int) -> Iterator[None]:
    """Run a busy process on the given CPU."""
    process = subprocess.Popen([sys.executable, "-c", COMPETITOR % cpu], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        # The process is running.
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def test_time_without_a_cpu_is_measured_next_to_a_busy_process(rig: TimedRig) -> None:
    """A thread that shares its CPU with a busy process is runnable about as long as it runs.

    Only the time in which the thread itself runs is CPU time.
    """
    with one_cpu() as cpu, competitor(cpu):
        begin_ns = time.monotonic_ns()
        with rig.inside(Kind.FORWARD):
            worked_ns = work(3 * WORK_S)
        taken_ns = time.monotonic_ns() - begin_ns
        cpu_ns, ready_ns = rig.thread_times()[Kind.FORWARD]

    assert cpu_ns == CLOSE(worked_ns, rel=0.1)
    assert ready_ns > 0.5 * worked_ns
    assert cpu_ns + ready_ns < 1.1 * taken_ns


def test_very_short_phases_have_no_thread_time_record(rig: TimedRig) -> None:
    """The kernel has counted no CPU time by the end of a very short phase."""
    for kind in (Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT):
        with rig.inside(kind):
            pass
    work()
    times = rig.thread_times()

    assert Kind.STEP in times
    assert (0, 0) not in times.values()


def test_times_that_the_kernel_does_not_report_count_as_not_measured(tmp_path: Path) -> None:
    """Without scheduling statistics in the kernel, the file has only zeros.

    A step in which a read fails is not measured, nor is the next one. No error reaches the user's
    code, and no file stays open.
    """
    library = tmp_path / "schedstat_text.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, PRELOADED, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", UNREPORTED, str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": str(library)}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.splitlines() == [
        "started False False False", "files 0", "measured False False False True"
    ]  # fmt: skip


def test_short_steps_are_not_measured(rig_with_clock: TimedRig) -> None:
    """Reading would cost more than a thousandth of the step.

    The previous step's duration decides.
    """
    rig = rig_with_clock
    found = []
    for duration_ns in (LONG_NS - 1, LONG_NS, LONG_NS - 1, LONG_NS - 1, 5 * LONG_NS, LONG_NS):
        work()
        rig.clock.advance(duration_ns)
        found.append(bool(rig.thread_times()))

    assert found == [False, False, True, False, False, True]


def test_step_after_an_unmeasured_one_has_only_its_own_time(rig_with_clock: TimedRig) -> None:
    """Time that passed without a reading is in no phase."""
    rig = rig_with_clock
    work(3 * WORK_S)
    rig.measure_next_step()
    worked_ns = work()

    assert rig.thread_times()[Kind.STEP][0] == CLOSE(worked_ns, rel=0.1)


SHORT_S, ROUNDS = 0.0005, 200


@pytest.mark.parametrize("phases", [31, 32, 100, 1000])
def test_step_is_measured_whatever_the_number_of_its_phases(
    phases: int, rig_with_clock: TimedRig
) -> None:
    """In an episode, an agent may act hundreds of times."""
    rig = rig_with_clock
    rig.measure_next_step()
    for _ in range(phases):
        with rig.inside(Kind.DATA):
            pass
    worked_ns = work()
    rig.clock.advance(LONG_NS)

    assert rig.thread_times()[Kind.STEP][0] == CLOSE(worked_ns, rel=0.1)


def test_short_phases_share_a_reading_by_their_durations(rig: TimedRig) -> None:
    """A reading takes some microseconds, so phases of less than 10 ms have none of their own. All
    of the CPU time is in one of the phases.
    """
    begin_ns = time.thread_time_ns()
    for _ in range(ROUNDS):
        with rig.inside(Kind.FORWARD):
            work(SHORT_S)
        with rig.inside(Kind.BACKWARD):
            work(2 * SHORT_S)
    used_ns = time.thread_time_ns() - begin_ns
    times = rig.thread_times()

    assert times[Kind.BACKWARD][0] == CLOSE(2 * times[Kind.FORWARD][0], rel=0.2)
    assert sum(cpu_ns for cpu_ns, _ in times.values()) == CLOSE(used_ns, rel=0.1)


def read_ready_ns() -> int:
    """Return how long this thread has been runnable without a CPU."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def test_lack_of_a_cpu_counts_for_the_short_phase_that_lacks_it(rig: TimedRig) -> None:
    """While the CPU is crowded, phases of 0.5 ms and more have readings of their own.

    The times are those that the kernel reports at both ends of each phase.
    """
    lacking_ns = {Kind.FORWARD: 0, Kind.WAIT: 0}
    phases = (Kind.FORWARD, work, 8 * SHORT_S), (Kind.WAIT, time.sleep, 16 * SHORT_S)
    with one_cpu() as cpu, competitor(cpu):
        for _ in range(ROUNDS // 4):
            for kind, spend, duration_s in phases:
                before_ns = read_ready_ns()
                with rig.inside(kind):
                    spend(duration_s)
                lacking_ns[kind] += read_ready_ns() - before_ns
        times = rig.thread_times()
    all_ns = sum(lacking_ns.values())

    assert lacking_ns[Kind.FORWARD] > 0.2 * 8 * SHORT_S * 1e9 * ROUNDS // 4
    for kind, expected_ns in lacking_ns.items():
        assert times[kind][1] == CLOSE(expected_ns, abs=0.15 * all_ns)


def test_last_short_phase_of_a_step_shares_no_reading_with_the_next_step(rig: TimedRig) -> None:
    with rig.inside(Kind.FORWARD):
        work()
    with rig.inside(Kind.OPTIMIZER):
        worked_ns = work(12 * SHORT_S)
    first = rig.thread_times()
    time.sleep(WORK_S)
    second = rig.thread_times()

    assert first[Kind.OPTIMIZER][0] == CLOSE(worked_ns, rel=0.3)
    assert sum(cpu_ns for cpu_ns, _ in second.values()) < 0.5 * worked_ns


def test_cpu_time_of_other_threads_does_not_count(rig: TimedRig) -> None:
    """The other thread computes in its own phases, which do not end those of the training
    thread.
    """
    worked_ns: list[int] = []

    def elsewhere() -> None:
        for _ in range(4):
            with rig.inside(Kind.FORWARD):
                worked_ns.append(work(WORK_S / 2))

    thread = threading.Thread(target=elsewhere)
    with rig.inside(Kind.OPTIMIZER):
        thread.start()
        mine_ns = work()
        thread.join()
    times = rig.thread_times()

    assert times[Kind.OPTIMIZER][0] == CLOSE(mine_ns, rel=0.15)
    assert sum(cpu_ns for cpu_ns, _ in times.values()) < mine_ns + 0.5 * sum(worked_ns)
    assert Kind.FORWARD not in times


def test_recorder_refuses_to_measure_another_thread(tmp_path: Path) -> None:
    """Otherwise another thread's time would count as that of the training thread."""
    rig = TimedRig(tmp_path)
    told: list[bool] = []
    on_thread(lambda: told.append(rig.recorder.start_thread_time()))
    rig.measure_next_step()
    work()

    assert (told, rig.thread_times()) == ([False], {})
    rig.close()


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_file_of_scheduling_statistics_is_closed_with_the_recorder(
    end: str, tmp_path: Path
) -> None:
    """A forked child closes the file too, and a closed recorder does not open the file again."""
    before = open_files()
    rig = TimedRig(tmp_path)
    assert rig.recorder.start_thread_time()
    getattr(rig.recorder, end)()
    assert rig.recorder.start_thread_time() is False
    rig.close()

    assert open_files() == before


def test_times_of_autograds_thread_count_only_in_the_backward_pass(rig: TimedRig) -> None:
    """The owner waits for autograd's thread, so the lack of a CPU of that thread counts."""
    cpu = min(os.sched_getaffinity(0))
    ready, stop = threading.Event(), threading.Event()

    def compute() -> None:
        # This call pins the current thread only.
        os.sched_setaffinity(0, {cpu})
        rig.recorder.computes_backward()
        ready.set()
        while not stop.is_set():
            # Hashing releases the GIL.
            hashlib.sha256(CHUNK)

    thread = threading.Thread(target=compute)
    with competitor(cpu):
        thread.start()
        ready.wait()
        with rig.inside(Kind.BACKWARD):
            time.sleep(6 * WORK_S)
        with rig.inside(Kind.OPTIMIZER):
            time.sleep(6 * WORK_S)
        times = rig.thread_times()
        stop.set()
        thread.join()

    assert times[Kind.BACKWARD][1] > 0.25 * 6 * WORK_S * 1e9
    assert times.get(Kind.OPTIMIZER, (0, 0))[1] < 0.25 * times[Kind.BACKWARD][1]


def test_new_thread_of_autograd_is_measured_after_the_first_has_ended(rig: TimedRig) -> None:
    """The file of the ended thread is closed."""
    before = open_files()
    for _ in range(3):
        on_thread(rig.recorder.computes_backward)
        with rig.inside(Kind.BACKWARD):
            work()
        assert open_files() == before
