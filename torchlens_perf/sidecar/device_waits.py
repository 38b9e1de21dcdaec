"""Find out from Python stacks whether ranks that make no progress wait for their devices.

The result is used to find hangs (analysis/collectives/hang.py). Stacks are only read in two cases:

- all ranks pause, and their devices' progress has not been read since,
- ranks with devices did not enter a collective.

A host waits in a line if its stack shows this line in SAMPLES samples, one per round. Sampling
starts again each time the duration has doubled. Stacks are read by py-spy only: a pause is not a
hang yet, so no signal is sent to a process.
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
        """Discard all samples, because ranks make steps."""
        self.known: Mapping[int, str] = {}
        """RankProgress.waits_in of each sampled rank."""
        self._period: tuple[int, int] | None = None
        self._samples = 0
        self._seen: dict[int, str] = {}

    def is_due(self, hang: Hang | None) -> bool:
        """Return True if stacks should be sampled now."""
        if hang is None:
            return False
        if hang.kind == "missing":
            if all(each.progress.device is None for each in hang.blocking):
                return False
        elif hang.kind not in ("pause", "blocked") or hang.devices is None:
            return False
        # A new period begins each time the duration has doubled.
        period = hang.step, int(hang.since_s / MIN_S).bit_length()
        if period != self._period:
            self._period, self._samples, self._seen = period, 0, {}
        return self._samples < SAMPLES

    def add_sample(self, stacks: Mapping[int, Stack]) -> None:
        """Add one sample of stacks, by rank.

        `known` changes with the last sample, or a different one.
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
