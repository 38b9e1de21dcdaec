"""The message that node 0's sidecar sends to all other nodes to select traces. Pure."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

from torchlens_perf.run.records import TracedStep

# Reasons why a step is sent.
FIRST, NUMBER, SLOW, VERDICT = "first", "number", "slow", "verdict"
# Reasons why a rank of the step is sent, if not all ranks are sent.
NAMED, LAST, MOST_WORK, REFERENCE, ONLY_KNOWN = (
    "slow",
    "arrived last",
    "most work",
    "reference",
    "known",
)
EVERYTHING = (1 << 62) - 1
_VERSION = 1
_MAX_SAID_STEPS = 64
_Number = Annotated[int, msgspec.Meta(ge=-1, le=EVERYTHING)]
_Word = Annotated[str, msgspec.Meta(max_length=32)]
_Ranks = Annotated[tuple[_Number, ...], msgspec.Meta(max_length=256)]
_Roles = Annotated[tuple[tuple[_Word, _Ranks], ...], msgspec.Meta(max_length=8)]
_Steps = Annotated[
    list[tuple[_Number, _Word, _Roles, _Number, _Number]], msgspec.Meta(max_length=_MAX_SAID_STEPS)
]
_SAID = tuple[_Number, _Number, _Number, _Ranks, _Steps]


@dataclasses.dataclass(frozen=True)
class TraceDecision:
    """The decisions of node 0, with which all nodes send the same ranks of the same steps."""

    attempt: int
    decided_to: int
    """Last step up to which node 0 has decided about all steps."""
    standing: tuple[int, ...]
    """Ranks that have metric series of their own."""
    steps: tuple[TracedStep, ...]
    """The newest selected steps."""

    def encode(self, max_bytes: int) -> bytes:
        """Encode the decision in at most `max_bytes`. The oldest steps are left out if needed.
        Return b"" if this is impossible.
        """
        for first in range(max(0, len(self.steps) - _MAX_SAID_STEPS), len(self.steps) + 1):
            steps = [dataclasses.astuple(each)[1:] for each in self.steps[first:]]
            found = msgspec.json.encode(
                (_VERSION, self.attempt, self.decided_to, self.standing, steps)
            )
            if len(found) <= max_bytes:
                return found
        return b""

    @classmethod
    def decode(cls, data: bytes) -> TraceDecision:
        """Decode a message. Raises ValueError if the message is invalid."""
        try:
            version, attempt, decided_to, standing, steps = msgspec.json.decode(data, type=_SAID)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ValueError(f"invalid selection of traces from node 0: {error}") from error
        if version != _VERSION:
            raise ValueError(f"invalid selection of traces from node 0: unknown version {version}")
        return cls(
            attempt, decided_to, standing, tuple(TracedStep(attempt, *each) for each in steps)
        )
