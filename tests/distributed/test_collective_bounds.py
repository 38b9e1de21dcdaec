"""Tests of ranks with different operations: no deadlock, the job's own results, and consistent
numbers.

Each call's payload has a unique size, so a collective's record identifies the job's call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.test_bit_equality_distributed import Collective, Collectives
from tests.support.gloo import run_ranks
from tests.support.long import long
from tests.support.recording import Record, Recording, recorded, records_of
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import SEMANTICS, parse_collective_name
from torchlens_perf.commands import tap_build
from torchlens_perf.recorder import native_tap
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.distributed

RANKS = 3
PAIRS = ((0, 1), (1, 2), (0, 2))
BETWEEN_TWO = ("send", "recv", "recv_any_source")
# Number of floats in the first call's payload.
SMALLEST = 16

Watching = Callable[[], AbstractContextManager[None]]
SCENARIOS: dict[str, Callable[[Job, Watching], None]] = {}
GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def scenario(run: Callable[[Job, Watching], None]) -> Callable[[Job, Watching], None]:
    """Register a scenario that all ranks run once without and once with a watch."""
    SCENARIOS[run.__name__] = run
    return run


class Job:
    """Collectives whose payloads identify the call, and their results."""

    def __init__(self, folder: Path) -> None:
        self.rank = dist.get_rank()
        self.folder = folder
        self.results: list[Tensor] = []
        self.called: Counter[str] = Counter()

    def payload(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the payload of a group's next call, with a unique size and unique values."""
        name = (group or dist.group.WORLD).group_name
        self.called[name] += 1
        return torch.full(
            (SMALLEST + self.called[name],), float(10 * self.called[name] + self.rank)
        )

    def all_reduce(
        self, group: dist.ProcessGroup | None = None, *, asynchronous: bool = False
    ) -> None:
        """Run an all-reduce. Raises AssertionError if the members did not all make the same call."""
        payload = self.payload(group)
        number = self.called[(group or dist.group.WORLD).group_name]
        work = dist.all_reduce(payload, group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        assert set(payload.tolist()) == {float(10 * number * len(members) + sum(members))}
        self.results.append(payload)


@scenario
def one_rank_stops_earlier(job: Job, watching: Watching) -> None:
    """Let rank 2 make three steps, leave its watch and wait.

    The other ranks continue in a separate group.
    """
    pair = GROUPS[0, 1]
    with watching():
        for _ in range(3):
            job.all_reduce()
        if job.rank != 2:
            for _ in range(4):
                job.all_reduce(pair, asynchronous=True)
    job.all_reduce()


@scenario
def uneven_inputs_with_join(job: Job, watching: Watching) -> None:
    """Give each rank one batch more than the previous rank.

    DDP shadows the collectives of ended ranks.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), bucket_cap_mb=1e-4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(), model.join():
        for _ in range(2 + job.rank):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    job.results += [parameter.detach().clone() for parameter in model.parameters()]


@scenario
def groups_that_some_ranks_use(job: Job, watching: Watching) -> None:
    """Let each pair of ranks use its own group at its own pace.

    One of the groups was created by its members alone.
    """
    with watching():
        for step in range(6):
            for number, members in enumerate(PAIRS):
                if job.rank in members and step % (number + 1) == 0:
                    job.all_reduce(GROUPS[members], asynchronous=step % 2 == 1)
            if step == 3:
                job.all_reduce()


@scenario
def barriers(job: Job, watching: Watching) -> None:
    """Run barriers of every kind between other collectives, on groups of some ranks and of all."""
    pair = GROUPS[1, 2]
    with watching():
        for _ in range(3):
            dist.barrier()
            job.all_reduce()
            if job.rank != 0:
                dist.barrier(group=pair)
                job.all_reduce(pair)
                dist.monitored_barrier(group=pair)
            dist.barrier(async_op=True).wait()
            dist.monitored_barrier()
            job.all_reduce()


@scenario
def ring(job: Job, watching: Watching) -> None:
    """Send messages around the ranks: batched, asynchronous, blocking, with tags, and from any
    source.
    """
    after, before = (job.rank + 1) % RANKS, (job.rank - 1) % RANKS
    with watching():
        for _ in range(4):
            job.all_reduce()
        for number in range(4):
            mine, theirs = (
                torch.full((SMALLEST + number,), float(job.rank)),
                torch.empty(SMALLEST + number),
            )
            operations = [
                dist.P2POp(dist.isend, mine, after),
                dist.P2POp(dist.irecv, theirs, before),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            again = torch.empty(2 * SMALLEST + number)
            if job.rank == 0:
                dist.send(torch.cat([theirs, mine[:SMALLEST]]), after, tag=number)
                assert dist.recv(again, tag=number) == before
            else:
                dist.recv(again, before, tag=number)
                dist.send(torch.cat([theirs, mine[:SMALLEST]]), after, tag=number)
            job.results += [theirs, again]
        job.all_reduce()


@scenario
def watches_that_begin_at_different_calls(job: Job, watching: Watching) -> None:
    """Start the watch on rank r after the first r rounds of every form.

    On each rank, sequence numbers continue the backend's count of operations.
    """
    with watching() if job.rank == 0 else nullcontext():
        every_form(job)
        with watching() if job.rank == 1 else nullcontext():
            every_form(job)
            with watching() if job.rank == 2 else nullcontext():
                every_form(job)


def every_form(job: Job) -> None:
    """Run every collective of gloo with a unique payload each."""
    job.all_reduce()
    one = job.payload()
    dist.broadcast(one, 1)
    parts = [torch.empty_like(one) for _ in range(RANKS)]
    dist.all_gather(parts, one)
    two = job.payload()
    dist.reduce(two, 2)
    gathered = [torch.empty_like(two) for _ in range(RANKS)] if job.rank == 0 else None
    dist.gather(two, gathered)
    dist.scatter(two, parts_like(two) if job.rank == 1 else None, 1)
    three = torch.cat([job.payload()] * RANKS)
    dist.reduce_scatter_tensor(torch.empty(len(three) // RANKS), three)
    dist.all_gather_into_tensor(torch.empty(RANKS * len(three)), three)
    exchanged = torch.empty_like(three)
    dist.all_to_all_single(exchanged, three)
    dist.barrier()
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, job.rank)
    if job.rank != 1:
        job.all_reduce(GROUPS[0, 2])
    job.all_reduce()
    job.results += [*parts, exchanged, torch.tensor(objects)] + ([two] if job.rank == 2 else [])


def parts_like(tensor: Tensor) -> list[Tensor]:
    return [torch.full_like(tensor, float(number)) for number in range(RANKS)]


@scenario
def group_that_is_made_again(job: Job, watching: Watching) -> None:
    """Destroy the default group inside a watch and create it again, twice."""
    with watching():
        job.all_reduce()
        for again in range(2):
            make_groups(f"{job.folder}-{again}")
            job.all_reduce()
            if job.rank != 1:
                job.all_reduce(GROUPS[0, 2])
            job.all_reduce()


@scenario
def watch_after_what_only_some_ranks_count(job: Job, watching: Watching) -> None:
    """Start the watch after messages and barriers that only some ranks have counted.

    Before the watch, two ranks exchange messages, and a barrier needs more messages on rank 0. gloo
    counts both kinds.
    """
    if job.rank != 2:
        one = torch.ones(1)
        dist.send(one, 1) if job.rank == 0 else dist.recv(one, 0)
    dist.monitored_barrier()
    job.all_reduce()
    same = torch.ones(SMALLEST)
    with watching():
        for _ in range(6):
            dist.all_reduce(same)
            time.sleep(0.01)
    job.results.append(same)


class Outcome(NamedTuple):
    """The result of one scenario on one rank."""

    same_results: bool
    """True if the run with a watch had bit-equal results to the one without."""
    plain: list[Collective]
    watched: list[Collective]
    """Operations, groups and sizes in order, from c10d's flight recorder."""
    recording: Recording


def make_groups(path: str) -> None:
    """Create a new world and a group for each pair of ranks.

    One of the groups is created by its members alone.
    """
    rank, store = dist.get_rank(), dist.FileStore(path, RANKS)
    # Close no old connections while another rank still waits in the last collective.
    store.set(f"arrived {rank}", "")
    store.wait([f"arrived {other}" for other in range(RANKS)])
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=RANKS
    )
    for members in PAIRS[:2]:
        GROUPS[members] = dist.new_group(list(members))
    if rank in PAIRS[2]:
        GROUPS[PAIRS[2]] = dist.new_group(list(PAIRS[2]), use_local_synchronization=True)


def one_rank(folder: Path) -> dict[str, Outcome]:
    """Run every scenario without and with a watch."""
    return {name: one_scenario(run, folder / name) for name, run in SCENARIOS.items()}


def one_rank_in_python(folder: Path) -> dict[str, Outcome]:
    """Run with the Python tap, which is used if the native tap is not built."""
    native_tap.tap_folders = lambda: ()
    assert native_tap.load_tap() is None
    return one_rank(folder)


def one_scenario(run: Callable[[Job, Watching], None], folder: Path) -> Outcome:
    recordings: list[Recording] = []

    @contextmanager
    def watching() -> Iterator[None]:
        with recorded(folder) as recording:
            yield
        recordings.append(recording)

    results, seen = [], []
    for watch in (nullcontext, watching):
        torch.manual_seed(dist.get_rank())
        # Use fresh groups, in which the backend has counted no operation yet.
        make_groups(f"{folder}-{len(results)}")
        collectives, job = Collectives(), Job(Path(f"{folder}-{len(results)}-again"))
        run(job, watch)
        seen.append(collectives.take())
        results.append(job.results)
    same = len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    (recording,) = recordings
    return Outcome(same, *seen, recording)


@pytest.fixture(scope="module", params=["native", *long("python")])
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    """Return the outcomes by rank and scenario, for each tap.

    One set of processes runs all scenarios, because its start is slow.
    """
    if request.param == "native":
        tap_build.build_tap()
    function = one_rank if request.param == "native" else one_rank_in_python
    return run_ranks(function, tmp_path_factory.mktemp("ranks"), RANKS)


def sequence(record: Record) -> int:
    return record.value1 & 0xFFFFFFFF


def numbered(recording: Recording) -> dict[str, dict[int, tuple[str, int]]]:
    """Return operation and bytes by group and number, without operations between two ranks."""
    found: dict[str, dict[int, tuple[str, int]]] = {}
    for each in recording.of(Kind.COLLECTIVE):
        operation = parse_collective_name(each.name)
        assert operation is not None
        if operation.operation not in BETWEEN_TWO:
            group = found.setdefault(operation.group, {})
            assert sequence(each) not in group, f"two operations are number {sequence(each)}"
            # A rank that receives no gathered data records no size.
            size = each.value0 if SEMANTICS[operation.operation].equal_bytes else 0
            group[sequence(each)] = (operation.operation, size)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_tensors_of_every_rank_equal_those_of_the_unwatched_run(
    name: str, outcomes: list[dict[str, Outcome]]
) -> None:
    """The watch causes no deadlock and no error."""
    for rank in outcomes:
        assert rank[name].same_results
        assert (rank[name].recording.internal_errors, rank[name].recording.unbalanced) == (0, 0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_order_group_and_size_of_collectives_are_unchanged(
    name: str, outcomes: list[dict[str, Outcome]]
) -> None:
    """c10d's flight recorder on each rank has the same entries."""
    for rank in outcomes:
        assert rank[name].plain
        assert rank[name].plain == rank[name].watched


@pytest.mark.parametrize(
    "name", sorted(SCENARIOS.keys() - {"watch_after_what_only_some_ranks_count"})
)
def test_collective_has_the_same_number_on_every_member_of_its_group(
    name: str, outcomes: list[dict[str, Outcome]]
) -> None:
    """No other call of the group has this number."""
    compared = 0
    for index, one in enumerate(outcomes):
        for other in outcomes[index + 1 :]:
            mine, theirs = numbered(one[name].recording), numbered(other[name].recording)
            for group in mine.keys() & theirs.keys():
                common = mine[group].keys() & theirs[group].keys()
                assert {number: mine[group][number] for number in common} == {
                    number: theirs[group][number] for number in common
                }
                compared += len(common)
        for numbers in numbered(one[name].recording).values():
            # Once a rank numbers a group, it numbers all of the group's operations without a gap.
            assert sorted(numbers) == list(range(min(numbers), max(numbers) + 1))
    assert compared >= 4


def test_collectives_with_different_counts_on_ranks_are_not_joined(
    outcomes: list[dict[str, Outcome]],
) -> None:
    """Operation and bytes of the calls with the same number match.

    Only the node's clock shows that the calls differ.
    """
    join = CollectiveJoin()
    join.set_ranks(range(RANKS))
    firsts = set()
    for rank, outcome in enumerate(outcomes):
        recording = outcome["watch_after_what_only_some_ranks_count"].recording
        firsts.add(min(map(sequence, recording.of(Kind.COLLECTIVE))))
        join.add_records(
            rank, records_of(recording), recording.interned, recording.metadata["groups"]
        )
    join.join()

    assert len(firsts) > 1
    assert sum(each.joined for each in join.join_counts().values()) == 0
    assert sum(each.unmatched_records for each in join.join_counts().values()) > 0
    assert len(join.uncomparable_groups()) == 1


def test_numbers_of_a_group_ignore_operations_of_other_groups(
    outcomes: list[dict[str, Outcome]],
) -> None:
    """Ranks are in different groups and issue different numbers of operations."""
    found = [numbered(rank["groups_that_some_ranks_use"].recording) for rank in outcomes]
    sizes = [sorted((len(numbers) for numbers in rank.values()), reverse=True) for rank in found]

    assert sizes == [[6, 2, 1], [6, 3, 1], [3, 2, 1]]


def test_message_has_the_same_number_at_its_sender_and_its_receiver(
    outcomes: list[dict[str, Outcome]],
) -> None:
    """The n-th message that a rank sends to a peer is the n-th that the peer receives from it."""
    messages: dict[tuple[int, int], list[dict[int, int]]] = {}
    for rank, outcome in enumerate(outcomes):
        for each in outcome["ring"].recording.of(Kind.COLLECTIVE):
            operation = parse_collective_name(each.name)
            assert operation is not None
            if operation.peer is not None:
                sends = operation.operation == "send"
                way = (rank, operation.peer) if sends else (operation.peer, rank)
                side = messages.setdefault(way, [{}, {}])[not sends]
                side[sequence(each)] = each.value0

    assert set(messages) == {(rank, (rank + 1) % RANKS) for rank in range(RANKS)}
    for sent, received in messages.values():
        assert len(sent) == 8
        # The record of a receive from any source names no peer.
        if len(received) == 8:
            assert sent == received
    assert sum(len(received) == 8 for _, received in messages.values()) == RANKS - 1


def test_members_of_each_used_group_are_recorded(outcomes: list[dict[str, Outcome]]) -> None:
    """A group made by its members alone is recorded too."""
    for rank, outcome in enumerate(outcomes):
        groups = outcome["groups_that_some_ranks_use"].recording.metadata["groups"]
        expected = {"0-2"} | {
            f"{a}-{b}" if b == a + 1 else f"{a},{b}" for a, b in PAIRS if rank in (a, b)
        }
        assert {group["ranks"] for group in groups.values()} == expected
