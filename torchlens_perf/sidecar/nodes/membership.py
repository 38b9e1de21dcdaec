"""Agree between nodes on the run's id and on the processes that belong to one generation.

Node 0 decides, and the other nodes accept its decision. Restart counts in the environment cannot be
compared, because each launcher counts its own restarts. When a worker fails, torchrun's agent on
the worker's node reports one restart, and the other agents report none. Start times can be
compared, because all agents start their workers after the same rendezvous.

All processes that a launcher starts on a node at one time form a set. Node 0 numbers its own sets
and sends their ages. A set of another node matches the set of node 0 that has the same number of
ranks and the nearest start. Nodes exchange ages and not times, because their clocks may differ.
This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from torchlens_perf.exporters import MAX_SLOW_RANKS

# A control message contains at most this number of generations, the newest ones.
MAX_GENERATIONS = 8
MAX_CONTROL_BYTES = 1024
_MAX_RUN_ID_BYTES = 240
_VERSION = 3


class ProcessGeneration(msgspec.Struct, array_like=True, frozen=True):
    """Processes that run at the same time, on one node (a set) or on all nodes."""

    number: int
    """Number of the job's generation. A set of one node has the node's own number instead."""
    started_s: float
    """Start time on the clock of this node; in a control message, the negative age."""
    world_size: int


class ControlMessage(msgspec.Struct, array_like=True, frozen=True, tag=_VERSION):
    """Message of node 0 to the other nodes: the run's id, the newest generations and slow ranks."""

    run_id: str
    generations: Annotated[tuple[ProcessGeneration, ...], msgspec.Meta(max_length=MAX_GENERATIONS)]
    slow_ranks: tuple[int, ...] = ()
    """Ranks that have metric series of their own because they have been slow."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ControlMessage:
        """Decode a control message. Raises ValueError for invalid data."""
        try:
            return msgspec.json.decode(data[: MAX_CONTROL_BYTES + 1], type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ValueError(f"not a control message of node 0: {error}") from error


def match_generations(
    sets: Sequence[ProcessGeneration], generations: Sequence[ProcessGeneration]
) -> dict[int, int]:
    """Return the number of the generation that matches each set of a node, by the set's number.

    A set matches the generation that has the same number of ranks and the nearest start. If two
    sets of the node match the same generation, only the nearer set gets it. Sets without a match
    are left out.
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
    """One node's knowledge of the job's generations. All times are of one monotonic clock."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        """Run id of node 0. Before node 0's first message, the id that this node has chosen."""
        self._own: dict[int, ProcessGeneration] = {}
        self._restarts: dict[int, int] = {}  # lower bounds of the generation
        self._numbers: dict[int, int] = {}  # generation of each set of this node, if known
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

        restarts: restarts that the launcher reports. number: the set's generation, if known.
        """
        if local in self._own:
            return
        self._own[local] = ProcessGeneration(local, started_s, world_size)
        self._restarts[local] = restarts
        if number is not None:
            self._numbers[local] = number
        self._number_sets()

    def set_leading(self, leads: bool) -> None:
        """Make this node number new sets if it has rank 0, or stop that if another node has it.

        The numbers continue after those of an earlier node 0.
        """
        self._leads = leads
        if leads:
            self._number_sets()

    def generation_number(self, local: int) -> int:
        """Return the generation of a set of this node, or a guess until node 0 reports it."""
        return self._numbers.get(local, self._guess_number(local))

    def age_of_set_s(self, local: int, now_s: float) -> float:
        """Return the time since the start of a set of this node, or 0 for an unknown set."""
        return now_s - self._own[local].started_s if local in self._own else 0.0

    def is_generation_number_known(self, local: int) -> bool:
        """Return True if the result of generation_number() is not a guess."""
        return self._leads or local in self._numbers

    def build_control_message(
        self, now_s: float, slow_ranks: tuple[int, ...] = ()
    ) -> ControlMessage:
        """Return node 0's message to the other nodes, of at most MAX_CONTROL_BYTES bytes."""
        own = sorted(self._own.values(), key=lambda each: each.number)[-MAX_GENERATIONS:]
        generations = tuple(
            ProcessGeneration(
                self.generation_number(each.number),
                round(each.started_s - now_s, 3),
                each.world_size,
            )
            for each in own
        )
        run_id = self.run_id.encode()[:_MAX_RUN_ID_BYTES].decode(errors="ignore")
        return ControlMessage(run_id, generations, slow_ranks[-MAX_SLOW_RANKS:])

    def apply_control_message(self, control: ControlMessage, now_s: float) -> None:
        """Apply a message that node 0 encoded at `now_s`. Node 0 itself ignores it."""
        if self._leads:
            return
        self.run_id = control.run_id or self.run_id
        self._received = tuple(
            msgspec.structs.replace(each, started_s=now_s + each.started_s)
            for each in control.generations
        )
        self._number_sets()

    def generation_of_remote_set(
        self, node: str, local: int, started_s: float, world_size: int
    ) -> int | None:
        """Return the generation of a set of another node, or None without a match.

        Called on node 0.

        local: the other node's own number of the set, modulo 256.
        """
        sets = self._others.setdefault(node, {})
        sets.setdefault(local, ProcessGeneration(local, started_s, world_size))
        # Remember only the newest sets of a node.
        while len(sets) > MAX_GENERATIONS:
            del sets[min(sets, key=lambda each: sets[each].started_s)]
        own = [
            msgspec.structs.replace(each, number=self.generation_number(each.number))
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
        """Return a number that continues from the last earlier set with a known number."""
        earlier = [each for each in self._numbers if each < local]
        last = max(earlier, default=-1)
        guess = self._numbers[last] + local - last if earlier else local
        if self._leads and self._received:  # Continue after the numbers of an earlier node 0.
            guess = max(guess, self._received[-1].number + 1)
        return max(guess, self._restarts.get(local, 0))
