"""When hosts are asked whether they wait for their devices, and what is taken for an answer."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.progress import behind, found, rank
from torchlens_perf.analysis.collectives.device_progress import DevicePlace
from torchlens_perf.analysis.collectives.hang import Hang
from torchlens_perf.sidecar.device_waits import SAMPLES, DeviceWaits
from torchlens_perf.sidecar.host.stacks import Stack

ITEM, SLEEP = "loss.item()", "time.sleep(60)"
IN_ITEM = "`loss.item()`, train (gpt.py:31)"


def stands(source: str, line: int = 31) -> Stack:
    """What py-spy says; the file is not read here."""
    return Stack((f"train (gpt.py:{line})", "<module> (gpt.py:50)"), "", innermost=(source, line))


def pause(since_s: float = 12.0, step: int = 100) -> Hang:
    """Of two ranks, whose devices nobody has looked at since."""
    return found(
        *(
            rank(each, inside=(), step=step, since_step_s=since_s, since_mark_s=since_s,
                 device=DevicePlace(step - 1, 7, "", 0.0))
            for each in range(2)
        ),
        count=2,
    )  # fmt: skip


def asked() -> DeviceWaits:
    waits = DeviceWaits(lambda stack: stack.innermost[0] if stack.innermost else "")
    assert waits.is_due(pause())
    return waits


def test_hosts_that_stay_in_one_line_wait_there() -> None:
    """Known after some looks, and not before; then nobody is asked any more."""
    waits = asked()
    for _ in range(SAMPLES):
        assert waits.known == {}
        assert waits.is_due(pause())
        waits.add_sample({0: stands(ITEM), 1: stands(ITEM)})
    assert waits.known == {0: IN_ITEM, 1: IN_ITEM}
    assert not waits.is_due(pause())


@pytest.mark.parametrize("second", [stands(SLEEP), stands(ITEM, line=40)], ids=["no wait", "another line"])
def test_hosts_that_go_on_do_not_wait(second: Stack) -> None:
    """An evaluation reads a value here and there: the first look that differs is the last one."""
    waits = asked()
    waits.add_sample({0: stands(ITEM), 1: stands(ITEM)})
    waits.add_sample({0: stands(ITEM), 1: second})
    assert set(waits.known.values()) == {""}
    assert not waits.is_due(pause())


def test_a_checkpoint_is_asked_once() -> None:
    """A host that stands in no such line."""
    waits = asked()
    waits.add_sample({0: stands(SLEEP), 1: stands(SLEEP)})
    assert set(waits.known.values()) == {""}
    assert not waits.is_due(pause(since_s=19.0))


def test_hosts_are_asked_again_when_it_lasts_twice_as_long() -> None:
    """What they did then is not what they do now, whichever it was."""
    waits = asked()
    waits.add_sample({0: stands(SLEEP), 1: stands(SLEEP)})
    assert waits.is_due(pause(since_s=21.0))
    for _ in range(SAMPLES):
        waits.add_sample({0: stands(ITEM), 1: stands(ITEM)})
    assert set(waits.known.values()) == {IN_ITEM}
    assert waits.is_due(dataclasses.replace(pause(since_s=41.0), kind="blocked"))
    waits.add_sample({0: stands(SLEEP), 1: stands(SLEEP)})
    assert set(waits.known.values()) == {""}


def test_another_step_is_another_pause() -> None:
    """What is known goes with the steps."""
    waits = asked()
    for _ in range(SAMPLES):
        waits.add_sample({0: stands(ITEM), 1: stands(ITEM)})
    assert waits.is_due(pause(step=101))
    waits.forget()
    assert waits.known == {}


def test_who_cannot_be_read_says_nothing() -> None:
    """py-spy is not there, or not permitted: that the others wait counts."""
    waits = asked()
    for _ in range(SAMPLES):
        waits.add_sample({0: stands(ITEM), 1: Stack((), "not permitted")})
    assert waits.known == {0: IN_ITEM}


def test_a_rank_that_did_not_enter_a_collective_is_asked() -> None:
    """If it has a device: it may be that which keeps it."""
    place = DevicePlace(99, 7, "", 0.0)
    assert DeviceWaits().is_due(found(behind(2, inside=(), device=place)))
    assert not DeviceWaits().is_due(found(behind(2, inside=())))


def test_only_a_pause_on_devices_is_asked_about() -> None:
    """No device, no hang, or one whose finding is clear."""
    waits = asked()
    assert not waits.is_due(None)
    assert not waits.is_due(found())
    assert not waits.is_due(dataclasses.replace(pause(), devices=None))
