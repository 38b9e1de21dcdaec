"""Where hosts that stand still wait for their devices, by their Python stacks, for hang.py.

Asked only where a pause of all ranks is found whose devices nobody has looked at since, or ranks with devices that did
not enter a collective. A host that stands in one line in all of some looks, a round apart, waits in it; it is asked
again whenever the stand-still is twice as long. By py-spy alone: a pause is no hang yet, and no process is sent a
signal for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchlens_perf.analysis.collectives.device_progress import is_device_wait
from torchlens_perf.analysis.collectives.hang import MIN_S, Hang
from torchlens_perf.sidecar.host.stacks import Stack, source_line

LOOKS = 3


class DeviceWaits:
    """Of the ranks of this node."""

    def __init__(self, source: Callable[[Stack], str] = source_line) -> None:
        """source: the line that the innermost frame stands in."""
        self._source = source
        self.forget()

    def forget(self) -> None:
        """Steps are made."""
        self.known: Mapping[int, str] = {}
        """By rank that was asked: Progress.waits_in."""
        self._period: tuple[int, int] | None = None
        self._looks = 0
        self._seen: dict[int, str] = {}

    def is_due(self, hang: Hang | None) -> bool:
        """Whether to look."""
        if hang is None:
            return False
        if hang.kind == "missing":
            if all(each.progress.device is None for each in hang.blocking):
                return False
        elif hang.kind not in ("pause", "blocked") or hang.devices is None:
            return False
        period = hang.step, int(hang.since_s / MIN_S).bit_length()
        if period != self._period:
            self._period, self._looks, self._seen = period, 0, {}
        return self._looks < LOOKS

    def look(self, stacks: Mapping[int, Stack]) -> None:
        """By rank. What is known changes with the last look, or with one that differs."""
        seen = {}
        for rank, stack in stacks.items():
            if stack.lines:
                source = self._source(stack)
                seen[rank] = f"`{source}`, {stack.lines[0]}" if is_device_wait(source) else ""
        stays = self._looks == 0 or seen == self._seen
        self._seen = seen if stays else dict.fromkeys(seen, "")
        self._looks = self._looks + 1 if any(self._seen.values()) else LOOKS
        if self._looks == LOOKS:
            self.known = self._seen
