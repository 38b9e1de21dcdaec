"""Agree between nodes on the run's id and on which processes belong to one generation.

Node 0 decides and the other nodes follow. Restart counts in the environment cannot be used, because
each launcher counts for itself: after a worker fails, torchrun's agent on its node reports 1
restart, other agents report 0, and an agent that joins later reports 0. The start times agree,
because all agents start their workers when they leave the same rendezvous.

Node 0 numbers its own sets of processes and sends the age of each. A set of another node belongs to
the set of node 0 with the same number of ranks whose start is nearest. Nodes exchange ages and not
times, because their clocks may differ. This module does no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

# Number of newest generations in a control message.
MAX_GENERATIONS = 8
MAX_CONTROL_BYTES = 1024
_MAX_RUN_ID_BYTES = 240
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class ProcessGeneration:
    """A set of processes that run at the same time, on one node or on all nodes."""

    number: int
    """Number of the job's generation. For the processes of one node, that node's own count."""
    started_s: float
    """Start time, on the clock of the node that compares."""
    world_size: int


@dataclasses.dataclass(frozen=True)
class ControlMessage:
    """A message of node 0 to the other nodes."""

    run_id: str
    generations: tuple[ProcessGeneration, ...]
    """Newest generations. `started_s` is the negative age when the message was made."""

    def encode(self) -> bytes:
        """Return at most MAX_CONTROL_BYTES."""
        newest = self.generations[-MAX_GENERATIONS:]
        generations = [(each.number, round(-each.started_s, 3), each.world_size) for each in newest]
        run_id = self.run_id.encode()[:_MAX_RUN_ID_BYTES].decode(errors="ignore")
        return msgspec.json.encode((_VERSION, run_id, generations))

    @classmethod
    def decode(cls, data: bytes) -> ControlMessage:
        """Decode a control message. Raises ValueError for invalid data."""
        try:
            version, run_id, generations = msgspec.json.decode(
                data[: MAX_CONTROL_BYTES + 1], type=tuple[int, str, list[tuple[int, float, int]]]
            )
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ValueError(f"not a control message of node 0: {error}") from error
        if version != _VERSION or len(generations) > MAX_GENERATIONS:
            raise ValueError("not a control message of node 0")
        return cls(
            run_id,
            tuple(
                ProcessGeneration(number, -age_s, world_size)
                for number, age_s, world_size in generations
            ),
        )


def match_generations(
    sets: Sequence[ProcessGeneration], generations: Sequence[ProcessGeneration]
) -> dict[int, int]:
    """Return the number of the matching generation for each of a node's sets, by the set's number.

    The match is the generation with the same number of ranks whose start is nearest. If two sets of
    the node match one generation, the nearer one gets it. Sets without a match are left out.
    """
    found: dict[int, tuple[float, int]] = {}
    for each in sets:
        near = [
            (abs(each.started_s - known.started_s), known.number)
            for known in generations
            if known.world_size == each.world_size
        ]
        if near:
            distance_s, number = min(near)
            # Two sets of one node cannot belong to one generation, so the nearer set gets it.
            if number not in found or distance_s < found[number][0]:
                found[number] = distance_s, each.number
    return {of_set: number for number, (_, of_set) in found.items()}


class Membership:
    """One node's view of the generations. Not thread-safe. Times are on one monotonic clock."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        """Node 0's id of the run. Before the first message of node 0, this node's own id."""
        self._own: dict[int, ProcessGeneration] = {}
        self._restarts: dict[int, int] = {}  # the launcher's count, a lower bound of the generation
        self._numbers: dict[int, int] = {}  # known generations of this node's sets
        self._others: dict[str, dict[int, ProcessGeneration]] = {}
        self._received: tuple[ProcessGeneration, ...] = ()
        self._leads = False

    def add_set(
        self,
        local: int,
        started_s: float,
        world_size: int,
        *,
        restarts: int = 0,
        number: int | None = None,
    ) -> None:
        """Add a set of this node.

        restarts: its launcher's count. number: its generation, if that is known already.
        """
        if local in self._own:
            return
        self._own[local] = ProcessGeneration(local, started_s, world_size)
        self._restarts[local] = restarts
        if number is not None:
            self._numbers[local] = number
        self._number_sets()

    def start_numbering(self) -> None:
        """Make this node number new sets, because it has rank 0.

        Numbers continue from those of an earlier node 0.
        """
        if not self._leads:
            self._leads = True
            for local in self._own:
                self._numbers.setdefault(local, self._guess_number(local))

    def stop_numbering(self) -> None:
        """Stop numbering sets, because another node has rank 0."""
        self._leads = False

    def generation_number(self, local: int) -> int:
        """Return the generation of a set of this node, or a guess until node 0 has reported it."""
        return self._numbers.get(local, self._guess_number(local))

    def age_of_set_s(self, local: int, now_s: float) -> float:
        """Return how long ago a set of this node began, or 0 if it is not known."""
        return now_s - self._own[local].started_s if local in self._own else 0.0

    def is_number_known(self, local: int) -> bool:
        """Return True if number() is not a guess."""
        return self._leads or local in self._numbers

    def build_control_message(self, now_s: float) -> ControlMessage:
        """Return the message for the other nodes."""
        own = sorted(self._own.values(), key=lambda each: each.number)[-MAX_GENERATIONS:]
        generations = [
            ProcessGeneration(
                self.generation_number(each.number), each.started_s - now_s, each.world_size
            )
            for each in own
        ]
        return ControlMessage(self.run_id, tuple(generations))

    def apply_control_message(self, control: ControlMessage, now_s: float) -> None:
        """Apply a message that node 0 made at `now_s`. Ignored on node 0 itself."""
        if self._leads:
            return
        self.run_id = control.run_id or self.run_id
        self._received = tuple(
            dataclasses.replace(each, started_s=now_s + each.started_s)
            for each in control.generations
        )
        self._number_sets()

    def generation_of_remote_set(
        self, node: str, local: int, started_s: float, world_size: int
    ) -> int | None:
        """Return the generation of a set of another node, or None without a match.

        Called on node 0.

        local: that node's own number of the set, modulo 256.
        """
        sets = self._others.setdefault(node, {})
        sets.setdefault(local, ProcessGeneration(local, started_s, world_size))
        # Remember only the newest sets of a node.
        while len(sets) > MAX_GENERATIONS:
            del sets[min(sets, key=lambda each: sets[each].started_s)]
        own = [
            dataclasses.replace(each, number=self.generation_number(each.number))
            for each in self._own.values()
        ]
        return match_generations(list(sets.values()), own).get(local)

    def _number_sets(self) -> None:
        if not self._leads:
            self._numbers.update(match_generations(list(self._own.values()), self._received))
        else:
            for local in self._own:
                self._numbers.setdefault(local, self._guess_number(local))

    def _guess_number(self, local: int) -> int:
        """Return a number that continues from the last known one before it."""
        earlier = [each for each in self._numbers if each < local]
        last = max(earlier, default=-1)
        guess = self._numbers[last] + local - last if earlier else local
        if self._leads and self._received:  # Continue from the numbers of an earlier node 0.
            guess = max(guess, self._received[-1].number + 1)
        return max(guess, self._restarts.get(local, 0))
