"""Sections of one name in tasks that alternate on a thread.

Each record has its own task's times, or is counted as lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recorders import Rig
from torchlens_perf import _native
from torchlens_perf.run import ring


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    made.recorder.activate()
    yield made
    made.close()


def durations(rig: Rig) -> list[int]:
    return [record["duration_ns"] for record in rig.records()]


def run(rig: Rig, *turns: int) -> None:
    """Run tasks that are inside the section at the same time.

    The tasks leave the section in order after the given times in ns.
    """

    async def task(before_ns: int, number: int) -> None:
        with _native.section("part"):
            # The other tasks enter.
            await asyncio.sleep(0)
            for _ in range(number):
                await asyncio.sleep(0)
            rig.clock.advance(before_ns)

    async def all_tasks() -> None:
        await asyncio.gather(*(task(turn, number) for number, turn in enumerate(turns)))

    asyncio.run(all_tasks())


def test_section_of_the_first_of_two_interleaved_tasks_is_recorded(rig: Rig) -> None:
    """The first task leaves its section first, and the record has that task's time.

    Sections that were opened after the first task's section are lost and counted.
    """
    run(rig, 5, 70)

    assert durations(rig) == [5]
    assert rig.reader.read_counter(ring.UNBALANCED) == 1


def test_section_of_the_first_of_three_interleaved_tasks_is_recorded(rig: Rig) -> None:
    run(rig, 5, 70, 300)

    assert durations(rig) == [5]
    assert rig.reader.read_counter(ring.UNBALANCED) == 2


def test_sections_of_sequential_tasks_are_all_recorded(rig: Rig) -> None:
    """Sections of tasks that run one after the other are not interleaved."""

    async def task(nanoseconds: int) -> None:
        with _native.section("part"):
            rig.clock.advance(nanoseconds)
            with _native.section("part"):
                rig.clock.advance(nanoseconds)

    async def all_tasks() -> None:
        await asyncio.gather(*(task(nanoseconds) for nanoseconds in (3, 40)))

    asyncio.run(all_tasks())

    assert durations(rig) == [3, 6, 40, 80]
    assert rig.reader.read_counter(ring.UNBALANCED) == 0


def test_section_may_await_tasks_with_sections(rig: Rig) -> None:
    """The task that opened a section closes it after the other tasks have ended."""

    async def child() -> None:
        with _native.section("child"):
            rig.clock.advance(4)

    async def parent() -> None:
        with _native.section("part"):
            await asyncio.create_task(child())
            rig.clock.advance(1)

    with _native.section("around"):
        asyncio.run(parent())

    assert durations(rig) == [4, 5, 5]
    assert rig.reader.read_counter(ring.UNBALANCED) == 0


def test_section_may_set_the_first_context_variable_of_a_thread(tmp_path: Path) -> None:
    """If a thread has no context, setting a variable creates one."""
    rig = Rig(tmp_path)
    rig.recorder.activate()
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("set inside")

    def work() -> None:
        with _native.section("part"):
            variable.set(1)
            rig.clock.advance(9)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert durations(rig) == [9]
    rig.close()


def test_section_that_ends_in_another_context_is_counted_as_lost(rig: Rig) -> None:
    """The enclosing section is still recorded."""

    def parts() -> Iterator[None]:
        with _native.section("part"):
            yield

    with _native.section("around"):
        running, first, second = parts(), contextvars.copy_context(), contextvars.copy_context()
        first.run(next, running)
        rig.clock.advance(3)
        second.run(lambda: next(running, None))

    assert durations(rig) == [3]
    assert rig.reader.read_counter(ring.UNBALANCED) == 1
