"""Tests that names and metadata in the ring file stay valid with threads and signals."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.interruptions import Interruption, interrupted_at_each_line
from torchlens_perf.run import ring
from torchlens_perf.run.ring import RingFile, RingReader

SETTING = {RingFile.set_metadata.__code__, RingFile._store_metadata.__code__}
NAMING = {RingFile.intern.__code__, RingFile._intern_new.__code__}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[RingFile]:
    made = RingFile(tmp_path / "r", 1024)
    yield made
    made.close()


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Make threads switch after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: object) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_names_interned_by_several_threads_keep_their_ids(
    made: RingFile, often_switched: None
) -> None:
    """Eight threads intern partly equal names at the same time."""
    given: list[dict[str, int]] = [{} for _ in range(8)]

    def meet(number: int) -> None:
        for i in range(400):
            for name in (f"shared {i}", f"thread {number} {i}"):
                given[number][name] = made.intern(name)

    in_threads(8, meet)
    reader = RingReader(made.path)
    names = reader.names()
    reader.close()

    assert len(names) == 1 + 400 + 8 * 400
    for each in given:
        assert {name: names[name_id] for name, name_id in each.items()} == {
            name: name for name in each
        }


def test_group_added_by_several_threads_has_one_row(made: RingFile, often_switched: None) -> None:
    rows: list[dict[str, int]] = [{} for _ in range(8)]

    def use(number: int) -> None:
        for i in range(ring.MAX_GROUPS + 10):
            rows[number][f"group {i}"] = made.add_group_row(f"group {i}")

    in_threads(8, use)
    reader = RingReader(made.path)
    groups = [group.name for group in reader.read_group_progress()]
    reader.close()

    assert all(each == rows[0] for each in rows)
    assert len(groups) == ring.MAX_GROUPS == len(set(groups))
    assert [name for name, row in rows[0].items() if row == ring.MAX_GROUPS] == [
        f"group {i}" for i in range(48, 58)
    ]
    assert all(groups[row] == name for name, row in rows[0].items() if row < ring.MAX_GROUPS)


def test_metadata_published_by_several_threads_are_complete(
    made: RingFile, often_switched: None
) -> None:
    """The last metadata stay. A reader sees only complete metadata."""
    seen: list[int] = []
    reader = RingReader(made.path)

    def publish(number: int) -> None:
        for i in range(300):
            made.set_metadata(
                {"rank": number, "again": number, "notes": ["x" * ((number * 37 + i) % 200)]}
            )
            found = reader.read_metadata()
            seen.append(1 if not found or found["rank"] == found["again"] else 0)

    in_threads(6, publish)

    assert all(seen)
    assert reader.read_metadata()["rank"] in range(6)
    reader.close()


@pytest.mark.parametrize("longer", [True, False])
def test_metadata_stay_complete_if_a_signal_handler_raises(longer: bool, made: RingFile) -> None:
    """The handler raises before each line in turn. The reader sees the old or the new metadata."""
    old, new = {"rank": 1, "notes": ["short"]}, {"rank": 2, "notes": ["x" * (300 if longer else 0)]}
    reader = RingReader(made.path)

    def interrupt() -> None:
        raise Interruption

    cases = 0
    made.set_metadata(old)
    for _ in interrupted_at_each_line(SETTING, lambda: made.set_metadata(new), interrupt):
        assert reader.read_metadata() in (old, new)
        made.set_metadata(old)
        cases += 1
    assert cases >= 10
    assert reader.read_metadata() == old
    reader.close()


def test_metadata_published_by_a_signal_handler_are_kept(made: RingFile) -> None:
    """The handler's metadata are newer than the interrupted ones."""
    reader = RingReader(made.path)
    cases = 0

    def work() -> None:
        made.set_metadata({"rank": 1, "notes": ["x" * 200]})

    for _ in interrupted_at_each_line(
        SETTING, work, lambda: made.set_metadata({"rank": 2, "from": "a handler"})
    ):
        # The handler may have run before the change started.
        assert reader.read_metadata()["rank"] in (1, 2)
        assert made._words[ring.METADATA_REVISION] % 2 == 0
        cases += 1
    assert cases >= 8
    reader.close()


def test_interned_names_stay_valid_if_a_signal_handler_raises(made: RingFile) -> None:
    """The handler raises before each line in turn. Each returned id keeps its name."""
    reader, given = RingReader(made.path), {}
    numbers = iter(range(10**6))

    def interrupt() -> None:
        raise Interruption

    cases = 0
    for _ in interrupted_at_each_line(
        NAMING, lambda: made.intern(f"name {next(numbers)}"), interrupt
    ):
        after = f"after {next(numbers)}"
        given[after] = made.intern(after)
        cases += 1
    for i in range(next(numbers)):
        given[f"name {i}"] = made.intern(f"name {i}")
    names = reader.names()
    reader.close()

    assert cases >= 8
    assert {name: names[name_id] for name, name_id in given.items()} == {
        name: name for name in given
    }


def test_ring_stays_valid_with_signals_at_any_line(made: RingFile) -> None:
    """A timer's handler raises some thousand times."""
    reader, raised, given = RingReader(made.path), 0, {}

    def interrupt(number: int, frame: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (5 + i % 60))
                made.set_metadata({"rank": i, "again": i, "notes": ["x" * (i % 300)]})
                given[f"name {i % 900}"] = made.intern(f"name {i % 900}")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interruption:
                raised += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            found = reader.read_metadata()
            assert not found or found["rank"] == found["again"]
            assert found or i < 50, "a reader waits for ever"
    except Interruption:
        pytest.fail("the timer was off")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    names = reader.names()
    reader.close()

    assert raised > 100
    assert {name: names[name_id] for name, name_id in given.items()} == {
        name: name for name in given
    }


def test_failed_creation_of_a_ring_leaves_no_file(tmp_path: Path) -> None:
    """An error before each line in turn ends the creation."""
    left: list[int] = []

    def interrupt() -> None:
        raise Interruption

    def work() -> None:
        made.append(RingFile(tmp_path / "r", 1024))

    made: list[RingFile] = []
    lines = 0
    for lines in interrupted_at_each_line({RingFile.__init__.__code__}, work, interrupt):
        if not made and (tmp_path / "r").exists():
            left.append(lines)
        (tmp_path / "r").unlink(missing_ok=True)
        made.clear()

    assert lines > 20
    assert len(left) <= 2, "only in the instant in which it was opened"
    assert max(left, default=0) < 8
