"""Check the abilities that a device needs for recording its times, by torch's public API.

CUDA, ROCm and XPU devices have all abilities. Out-of-tree backends may lack some abilities.
`torchlens-perf doctor` checks each ability.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torchlens_perf.interruption import ours

_TIMEOUT_S = 1.0


class Ability(NamedTuple):
    """One ability: how to check it, and what is not measured without it."""

    name: str
    works: Callable[[Any], bool]
    """Check of the device, which creates a context on it."""
    without: str


def find_ability_problem(ability: Ability, device: Any) -> str:
    """Return why the device lacks an ability, or "".

    The check creates a context and waits at most a second for the device.
    """
    try:
        return "" if ability.works(device) else "it gives a wrong answer"
    except ours(RuntimeError, AttributeError, TypeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"


def _record_event(device: Any) -> Any:
    import torch

    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _wait_for_event(event: Any) -> bool:
    until = time.monotonic() + _TIMEOUT_S
    while not event.query():
        if time.monotonic() > until:
            return False
    return True


def _has_timed_events(device: Any) -> bool:
    first, second = _record_event(device), _record_event(device)
    return _wait_for_event(second) and first.elapsed_time(second) >= 0


def _can_compare_streams(device: Any) -> bool:
    import torch

    other, current = torch.Stream(device), torch.accelerator.current_stream(device)
    again = torch.accelerator.current_stream(device)
    return other != current and again == current and hash(again) == hash(current)


def _can_wait_for_events(device: Any) -> bool:
    import torch

    other, event = torch.Stream(device), _record_event(device)
    other.wait_event(event)
    return _wait_for_event(other.record_event())


ABILITIES = (
    Ability("timed events", _has_timed_events, "the device is not timed"),
    Ability(
        "events that tell whether they were reached",
        lambda device: _record_event(device).query() in (True, False),
        "the device is not timed",
    ),
    Ability("streams that can be distinguished", _can_compare_streams, "the device is not timed"),
    Ability(
        "streams that wait for events",
        _can_wait_for_events,
        "what FSDP2 waits for counts as the device's work",
    ),
)
