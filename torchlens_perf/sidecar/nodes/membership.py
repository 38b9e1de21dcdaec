"""Which processes of all nodes run together, and what their run is called: node 0 decides, the others follow. Pure.

A launcher counts restarts for itself: after a worker fails, torchrun's agent on its node says 1 and the others 0, and
an agent that joins later says 0. So no count in the environment is the same on all nodes. What is the same is when the
processes began: all agents start their workers as they leave one rendezvous. Node 0 numbers the sets of processes that
it has had, and says when each began; a set of another node belongs to the nearest of them with as many ranks. Ages
travel, not times: clocks of nodes may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

MAX_SAID = 8  # generations, the newest
MAX_CONTROL_BYTES = 1024
_MAX_RUN_ID = 240  # bytes
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class ProcessGeneration:
    """A set of processes, of one node or of all."""

    number: int
    """Of all nodes' sets: the job's generation. Of one node's: counted there."""
    started_s: float
    """On the clock of whoever compares."""
    world_size: int


@dataclasses.dataclass(frozen=True)
class ControlMessage:
    """What node 0 says to the others."""

    run_id: str
    generations: tuple[ProcessGeneration, ...]
    """`started_s` is how long ago, as a negative number: when it was said is 0."""

    def encode(self) -> bytes:
        """At most MAX_CONTROL_BYTES."""
        said = [(each.number, round(-each.started_s, 3), each.world_size) for each in self.generations[-MAX_SAID:]]
        return msgspec.json.encode((_VERSION, self.run_id.encode()[:_MAX_RUN_ID].decode(errors="ignore"), said))

    @classmethod
    def decode(cls, data: bytes) -> ControlMessage:
        """Raises ValueError for anything that is not a word."""
        try:
            version, run_id, said = msgspec.json.decode(
                data[: MAX_CONTROL_BYTES + 1], type=tuple[int, str, list[tuple[int, float, int]]]
            )
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ValueError(f"not a control message of node 0: {error}") from error
        if version != _VERSION or len(said) > MAX_SAID:
            raise ValueError("not a control message of node 0")
        return cls(run_id, tuple(ProcessGeneration(number, -age_s, world_size) for number, age_s, world_size in said))


def matched(sets: Sequence[ProcessGeneration], generations: Sequence[ProcessGeneration]) -> dict[int, int]:
    """The generation of each of a node's sets, by their numbers; without those that none is known for yet.

    The nearest one of as many ranks. Two sets of a node are never of one generation: then it is that of the nearer.
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
            if number not in found or distance_s < found[number][0]:
                found[number] = distance_s, each.number
    return {of_set: number for number, (_, of_set) in found.items()}


class Membership:
    """One node's view. One thread. Times are of one monotonic clock, in seconds."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        """What node 0 calls the run; until it is heard of, what this node does."""
        self._own: dict[int, ProcessGeneration] = {}
        self._restarts: dict[int, int] = {}  # no generation has a smaller number than its launchers' restarts
        self._numbers: dict[int, int] = {}  # of own sets, as far as they are known
        self._others: dict[str, dict[int, ProcessGeneration]] = {}
        self._said: tuple[ProcessGeneration, ...] = ()
        self._leads = False

    def began(
        self, local: int, started_s: float, world_size: int, *, restarts: int = 0, number: int | None = None
    ) -> None:
        """A set of this node. restarts: as its launcher counts. number: its generation, where that is known already."""
        if local in self._own:
            return
        self._own[local] = ProcessGeneration(local, started_s, world_size)
        self._restarts[local] = restarts
        if number is not None:
            self._numbers[local] = number
        self._match()

    def lead(self) -> None:
        """This node has rank 0 from now on: it numbers the sets that come, on from what was said before."""
        if not self._leads:
            self._leads = True
            for local in self._own:
                self._numbers.setdefault(local, self._guess(local))

    def follow(self) -> None:
        """Another node has rank 0."""
        self._leads = False

    def number(self, local: int) -> int:
        """The generation of a set of this node; where node 0 has not said it, the one that comes next."""
        return self._numbers.get(local, self._guess(local))

    def age_s(self, local: int, now_s: float) -> float:
        """How long ago a set of this node began; 0 for one that is not known."""
        return now_s - self._own[local].started_s if local in self._own else 0.0

    def is_known(self, local: int) -> bool:
        """Whether number() is no guess."""
        return self._leads or local in self._numbers

    def control(self, now_s: float) -> ControlMessage:
        """What to say to the others."""
        own = sorted(self._own.values(), key=lambda each: each.number)[-MAX_SAID:]
        said = [ProcessGeneration(self.number(each.number), each.started_s - now_s, each.world_size) for each in own]
        return ControlMessage(self.run_id, tuple(said))

    def receive(self, control: ControlMessage, now_s: float) -> None:
        """Takes over what node 0 has said at `now_s`."""
        if self._leads:
            return
        self.run_id = control.run_id or self.run_id
        self._said = tuple(dataclasses.replace(each, started_s=now_s + each.started_s) for each in control.generations)
        self._match()

    def of_other(self, node: str, local: int, started_s: float, world_size: int) -> int | None:
        """The generation of a set of another node, which this node 0 has heard of; None: of none so far.

        local: as that node counts its sets, modulo 256.
        """
        sets = self._others.setdefault(node, {})
        sets.setdefault(local, ProcessGeneration(local, started_s, world_size))
        while len(sets) > MAX_SAID:
            del sets[min(sets, key=lambda each: sets[each].started_s)]
        own = [dataclasses.replace(each, number=self.number(each.number)) for each in self._own.values()]
        return matched(list(sets.values()), own).get(local)

    def _match(self) -> None:
        if not self._leads:
            self._numbers.update(matched(list(self._own.values()), self._said))
        else:
            for local in self._own:
                self._numbers.setdefault(local, self._guess(local))

    def _guess(self, local: int) -> int:
        """Counted on from the last one before it that is known."""
        earlier = [each for each in self._numbers if each < local]
        last = max(earlier, default=-1)
        guess = self._numbers[last] + local - last if earlier else local
        if self._leads and self._said:  # on from what another node 0 has said
            guess = max(guess, self._said[-1].number + 1)
        return max(guess, self._restarts.get(local, 0))
