"""Tests of finding hosts that wait for a device, from samples of the hosts' stacks."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.progress import behind, found, rank
from torchlens_perf.analysis.collectives.device_progress import LastDeviceMark
from torchlens_perf.analysis.collectives.hang import Hang
from torchlens_perf.sidecar.device_waits import SAMPLES, DeviceWaitSampler
from torchlens_perf.sidecar.host.stacks import Stack

ITEM, SLEEP = "loss.item()", "time.sleep(60)"
IN_ITEM = "`loss.item()`, train (gpt.py:31)"


def stack_in(source: str, line: int = 31) -> Stack:
    """Return a stack like that of py-spy. The function does not read the source file of the stack."""
    return Stack((f"train (gpt.py:{line})", "<module> (gpt.py:50)"), "", innermost=(source, line))


def pause(since_s: float = 12.0, step: int = 100) -> Hang:
    """Return a pause of two ranks whose device progress was not read since its start."""
    return found(
        *(
            rank(each, inside=(), step=step, since_step_s=since_s, since_mark_s=since_s,
                 device=LastDeviceMark(step - 1, 7, "", 0.0))
            for each in range(2)
        ),
        count=2,
    )  # fmt: skip


def sampler_after_a_pause() -> DeviceWaitSampler:
    waits = DeviceWaitSampler(lambda stack: stack.innermost[0] if stack.innermost else "")
    assert waits.is_due(pause())
    return waits


def test_host_waits_for_the_device_if_all_stack_samples_show_the_same_line() -> None:
    """Sampling stops after the last of the required samples."""
    waits = sampler_after_a_pause()
    for _ in range(SAMPLES):
        assert waits.known == {}
        assert waits.is_due(pause())
        waits.add_sample({0: stack_in(ITEM), 1: stack_in(ITEM)})
    assert waits.known == {0: IN_ITEM, 1: IN_ITEM}
    assert not waits.is_due(pause())


@pytest.mark.parametrize(
    "second", [stack_in(SLEEP), stack_in(ITEM, line=40)], ids=["no wait", "another line"]
)
def test_host_does_not_wait_for_the_device_if_stack_samples_differ(second: Stack) -> None:
    """In an evaluation, for example, the host reads values in several places. Sampling stops at the
    first different line.
    """
    waits = sampler_after_a_pause()
    waits.add_sample({0: stack_in(ITEM), 1: stack_in(ITEM)})
    waits.add_sample({0: stack_in(ITEM), 1: second})
    assert set(waits.known.values()) == {""}
    assert not waits.is_due(pause())


def test_stack_is_sampled_once_if_the_host_does_not_wait_for_a_device() -> None:
    """Such a host may be writing a checkpoint, for example."""
    waits = sampler_after_a_pause()
    waits.add_sample({0: stack_in(SLEEP), 1: stack_in(SLEEP)})
    assert set(waits.known.values()) == {""}
    assert not waits.is_due(pause(since_s=19.0))


def test_sampling_starts_again_after_twice_the_duration() -> None:
    """The second result may differ from the first one in either direction."""
    waits = sampler_after_a_pause()
    waits.add_sample({0: stack_in(SLEEP), 1: stack_in(SLEEP)})
    assert waits.is_due(pause(since_s=21.0))
    for _ in range(SAMPLES):
        waits.add_sample({0: stack_in(ITEM), 1: stack_in(ITEM)})
    assert set(waits.known.values()) == {IN_ITEM}
    assert waits.is_due(dataclasses.replace(pause(since_s=41.0), kind="blocked"))
    waits.add_sample({0: stack_in(SLEEP), 1: stack_in(SLEEP)})
    assert set(waits.known.values()) == {""}


def test_new_step_discards_the_stack_samples() -> None:
    waits = sampler_after_a_pause()
    for _ in range(SAMPLES):
        waits.add_sample({0: stack_in(ITEM), 1: stack_in(ITEM)})
    assert waits.is_due(pause(step=101))
    waits.reset()
    assert waits.known == {}


def test_waits_of_other_ranks_count_if_one_rank_has_no_stack() -> None:
    """py-spy may be missing or not permitted on a rank."""
    waits = sampler_after_a_pause()
    for _ in range(SAMPLES):
        waits.add_sample({0: stack_in(ITEM), 1: Stack((), "not permitted")})
    assert waits.known == {0: IN_ITEM}


def test_rank_missing_in_a_collective_is_sampled_if_it_has_a_device() -> None:
    """A rank that is missing in a collective may be blocked by its own device."""
    place = LastDeviceMark(99, 7, "", 0.0)
    assert DeviceWaitSampler().is_due(found(behind(2, inside=(), device=place)))
    assert not DeviceWaitSampler().is_due(found(behind(2, inside=())))


def test_no_stack_is_sampled_without_a_pause_of_ranks_with_devices() -> None:
    """Nothing is sampled without a device, or if a rank is already named."""
    waits = sampler_after_a_pause()
    assert not waits.is_due(found())
    assert not waits.is_due(dataclasses.replace(pause(), devices=None))
