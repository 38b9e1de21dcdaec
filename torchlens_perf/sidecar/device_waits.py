"""Detect from Python stacks whether ranks without progress wait for their devices.

The hang search (analysis/collectives/hang.py) uses the result. Stacks are only read in two cases:

- all ranks have paused, and no newer progress of their devices is known,
- ranks with devices did not enter a collective.

A rank counts as waiting in a source line if all SAMPLES samples show this line, one sample per
round. Sampling starts again each time the hang's duration has doubled. py-spy reads the stacks. A
pause may not be a hang, so no process receives a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchlens_perf.analysis.collectives.device_progress import waits_for_device
from torchlens_perf.analysis.collectives.hang import MIN_S, Hang
from torchlens_perf.sidecar.host.stacks import Stack, read_source_line

SAMPLES = 3


class DeviceWaitSampler:
    """Sampler of the device waits of this node's ranks."""

    def __init__(self, source: Callable[[Stack], str] = read_source_line) -> None:
        """source: returns the source line of a stack's innermost frame."""
        self._source = source
        self.reset()

    def reset(self) -> None:
        """Discard all samples. Called when ranks make steps again."""
        self.known: Mapping[int, str] = {}
        """RankProgress.waits_in of each sampled rank."""
        self._period: tuple[int, int] | None = None
        self._samples = 0
        self._seen: dict[int, str] = {}

    def is_due(self, hang: Hang) -> bool:
        """Return True if stacks should be sampled now."""
        if hang.kind == "missing":
            if all(each.progress.device is None for each in hang.blocking):
                return False
        elif hang.kind not in ("pause", "blocked") or hang.devices is None:
            return False
        # Start sampling again each time the hang's duration has doubled.
        period = hang.step, int(hang.since_s / MIN_S).bit_length()
        if period != self._period:
            self._period, self._samples, self._seen = period, 0, {}
        return self._samples < SAMPLES

    def add_sample(self, stacks: Mapping[int, Stack]) -> None:
        """Add one sample of stacks, by rank.

        `known` changes with the last sample, or with a sample that differs from the one before.
        """
        seen = {}
        for rank, stack in stacks.items():
            if stack.lines:
                source = self._source(stack)
                seen[rank] = f"`{source}`, {stack.lines[0]}" if waits_for_device(source) else ""
        is_same = self._samples == 0 or seen == self._seen
        self._seen = seen if is_same else dict.fromkeys(seen, "")
        self._samples = self._samples + 1 if any(self._seen.values()) else SAMPLES
        if self._samples == SAMPLES:
            self.known = self._seen
