"""Record collectives from Python, for the Python tap and for the hooks of torch's process groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.hooks.collectives.groups import CollectiveGroups, is_point_to_point
from torchlens_perf.recorder import torch_groups
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_ASYNC, _EXCEPTION = int(Flag.ASYNC), int(Flag.EXCEPTION)
# Plain integers: looking up a member of an enumeration costs as much as recording an operation.
_BY_WAIT, _UNKNOWN = int(EndDetection.BY_WAIT), int(EndDetection.UNKNOWN)
_BY_RETURN = int(EndDetection.BY_RETURN)


class Issued(NamedTuple):
    """An operation that has been issued and has not returned."""

    ticket: Any
    end: int
    end_timing: Callable[[], None] | None


class PythonRecording:
    """Records the operations of one watch."""

    def __init__(self, groups: CollectiveGroups, session: Session) -> None:
        self._groups, self._session, self._recorder = groups, session, session.recorder
        self._known: dict[tuple[str, str, Any, int], tuple[int, int, Iterator[int]]] = {}
        self._counters: dict[str, Iterator[int]] = {}

    def issue(
        self,
        operator: str,
        group: str,
        payload: Any,
        device: str,
        peer: int,
        *,
        is_async: bool,
        blocking: bool = False,
    ) -> Issued | None:
        """Record that an operation is about to be issued. Return None if nothing is recorded.

        payload: tensors in nested lists. device: type of the device on which the operation runs.
        blocking: True if the call blocks until the operation's end.
        """
        key = operator, group, getattr(find_first_tensor(payload), "dtype", None), peer
        name_id, slot, numbers = self._known.get(key) or self._describe(key)
        # On a device, waiting for a Work only orders streams. The operation may end later.
        on_cpu = device == "cpu"
        end = _BY_RETURN if blocking else _BY_WAIT if on_cpu and not is_async else _UNKNOWN
        ticket = self._recorder.issue(
            name_id, slot, next(numbers), _ASYNC if is_async else 0, count_payload_bytes(payload)
        )
        if ticket is None:
            return None
        if on_cpu:
            return Issued(ticket, end, None)
        self._session.metadata.device_groups.add((group, device))
        stalls = None if is_async else self._session.clocks.stalls
        return Issued(ticket, end, None if stalls is None else stalls.begin_collective())

    def end_call(self, issued: Issued, *, raised: bool = False) -> None:
        """Record that the issuing call has returned or raised."""
        if issued.end_timing is not None:
            issued.end_timing()
        if raised:
            self._recorder.returned(issued.ticket, _UNKNOWN, _EXCEPTION)
        else:
            self._recorder.returned(issued.ticket, issued.end)

    def _describe(self, key: tuple[str, str, Any, int]) -> tuple[int, int, Iterator[int]]:
        operator, group, dtype, peer = key
        name_id, slot = self._groups.register_operation(
            operator, group, str(dtype).removeprefix("torch.") if dtype else "", peer
        )
        counter, first = group, 0
        if is_point_to_point(operator):
            counter = f"{operator}/{group}/{peer}"
        elif counter not in self._counters:
            first = max(0, torch_groups.get_group_sequence_number(group))
        numbers = self._counters.setdefault(counter, itertools.count(first))
        self._known[key] = name_id, slot, numbers
        return name_id, slot, numbers


def find_first_tensor(value: Any) -> Any:
    """Return the first tensor in nested lists, or None."""
    while isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value


def find_device(*tensors: Any) -> str:
    """Return the device type of the first tensor, or "cpu". tensors: nested lists or None."""
    found = next((each for each in map(find_first_tensor, tensors) if each is not None), None)
    return getattr(getattr(found, "device", None), "type", "cpu")


def count_payload_bytes(value: Any) -> int:
    """Return the size in bytes of the tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        return sum(map(count_payload_bytes, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0
