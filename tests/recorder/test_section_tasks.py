"""Sections of one name in tasks that take turns on a thread: each record has its own task's times, or is counted."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recorders import IDS, IMPLEMENTATIONS, Rig
from torchlens_perf.run import ring

pytestmark = pytest.mark.skipif(IDS[0] != "native", reason="the native recorder is missing: there is no C compiler")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(IMPLEMENTATIONS[0], tmp_path)
    made.recorder.activate()
    yield made
    made.close()


def durations(rig: Rig) -> list[int]:
    return [record["duration_ns"] for record in rig.records()]


def run(rig: Rig, *turns: int) -> None:
    """Tasks that are all inside of the section at once: each enters and, after so many nanoseconds, leaves in order."""

    async def task(before_ns: int, number: int) -> None:
        with rig.implementation.section("part"):
            await asyncio.sleep(0)  # the others enter
            for _ in range(number):
                await asyncio.sleep(0)
            rig.clock.advance(before_ns)

    async def all_tasks() -> None:
        await asyncio.gather(*(task(turn, number) for number, turn in enumerate(turns)))

    asyncio.run(all_tasks())


def test_first_in_first_out(rig: Rig) -> None:
    """The first task leaves first: its record has its time, and what was above it is lost and counted."""
    run(rig, 5, 70)

    assert durations(rig) == [5]
    assert rig.reader.counter(ring.UNBALANCED) == 1


def test_three_tasks(rig: Rig) -> None:
    run(rig, 5, 70, 300)

    assert durations(rig) == [5]
    assert rig.reader.counter(ring.UNBALANCED) == 2


def test_one_after_the_other(rig: Rig) -> None:
    """Nothing is lost where they are not interleaved."""

    async def task(nanoseconds: int) -> None:
        with rig.implementation.section("part"):
            rig.clock.advance(nanoseconds)
            with rig.implementation.section("part"):
                rig.clock.advance(nanoseconds)

    async def all_tasks() -> None:
        await asyncio.gather(*(task(nanoseconds) for nanoseconds in (3, 40)))

    asyncio.run(all_tasks())

    assert durations(rig) == [3, 6, 40, 80]
    assert rig.reader.counter(ring.UNBALANCED) == 0


def test_awaiting_inside_of_a_section(rig: Rig) -> None:
    """A section around what runs tasks of its own is closed where it was opened."""

    async def child() -> None:
        with rig.implementation.section("child"):
            rig.clock.advance(4)

    async def parent() -> None:
        with rig.implementation.section("part"):
            await asyncio.create_task(child())
            rig.clock.advance(1)

    with rig.implementation.section("around"):
        asyncio.run(parent())

    assert durations(rig) == [4, 5, 5]
    assert rig.reader.counter(ring.UNBALANCED) == 0


def test_first_context_variable_inside_of_a_section(tmp_path: Path) -> None:
    """Where a thread has no context yet, setting a variable makes one."""
    rig = Rig(IMPLEMENTATIONS[0], tmp_path)
    rig.recorder.activate()
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("set inside")

    def work() -> None:
        with rig.implementation.section("part"):
            variable.set(1)
            rig.clock.advance(9)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert durations(rig) == [9]
    rig.close()


def test_generator_that_another_context_goes_on_with(rig: Rig) -> None:
    """It is left in another context than it was entered in: its record is lost, and counted with the span around it."""

    def parts() -> Iterator[None]:
        with rig.implementation.section("part"):
            yield

    with rig.implementation.section("around"):
        running, first, second = parts(), contextvars.copy_context(), contextvars.copy_context()
        first.run(next, running)
        rig.clock.advance(3)
        second.run(lambda: next(running, None))

    assert durations(rig) == [3]
    assert rig.reader.counter(ring.UNBALANCED) == 1
