"""Measure collectives in process groups, and transfers between pairs of ranks."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from torchlens_perf.analysis.collectives.semantics import bus_bandwidth
from torchlens_perf.analysis.statistics.quantities import format_bytes
from torchlens_perf.check.figures import COLLECTIVES, TRANSFERS
from torchlens_perf.check.judge import find_floor
from torchlens_perf.check.links import Rates
from torchlens_perf.check.machine import ROUNDS, time_calls
from torchlens_perf.check.ranks import Ranks
from torchlens_perf.check.tournament import Pair, Rounds, Transfer, measure_rounds
from torchlens_perf.errors import ConfigError, require

_SIZES = {"cpu": (1 << 14, 1 << 19, 1 << 22), "cuda": (1 << 16, 1 << 22, 1 << 27)}
"""Sizes of collectives by device, in bytes."""
_TRANSFER_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
_FIRST_ROUNDS = 64


def parse_mesh(text: str, size: int) -> dict[str, int]:
    """Return the dimensions of a mesh, such as "dp=4,tp=2". Raise ConfigError for a wrong text."""
    try:
        mesh = {name: int(number) for part in text.split(",") for name, number in [part.split("=")]}
    except ValueError:
        raise ConfigError(f"--mesh {text}: must be names and sizes, such as dp=4,tp=2") from None
    product = torch.Size(mesh.values()).numel()
    require(product == size, f"--mesh {text}: has {product} ranks, but {size} ranks run")
    return mesh


def measure_groups(
    ranks: Ranks, mesh: dict[str, int], budget_s: float
) -> Iterator[tuple[str, list[int], list[float]]]:
    """Yield names, ranks and bus bandwidths of collectives in the groups of a mesh with this rank."""
    made = dist.init_device_mesh(
        ranks.device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh)
    )
    sizes = _SIZES[ranks.device.type]
    for name, size in itertools.product((each for each in mesh if mesh[each] > 1), sizes):
        group = made.get_group(name)
        members = dist.get_process_group_ranks(group)
        # All ranks have the same bytes, which divide by the number of ranks.
        part = torch.zeros(max(1, size // 4 // len(members)), device=ranks.device)
        whole = part.repeat(len(members))
        calls: tuple[Callable[[], object], ...] = (
            partial(dist.all_reduce, whole, group=group),
            partial(dist.all_gather_into_tensor, whole, part, group=group),
            partial(dist.reduce_scatter_tensor, part, whole, group=group),
            partial(dist.all_to_all_single, whole.clone(), whole, group=group),
            partial(dist.broadcast, whole, members[0], group=group),
        )
        for operation, call in zip(COLLECTIVES, calls, strict=True):
            ranks.meet(f"{operation} in {name}")
            time_calls(call, 2, ranks.device)
            slowest_s = torch.tensor(time_calls(call, 3, ranks.device))
            dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
            repeats = int(
                budget_s / len(mesh) / len(sizes) / len(calls) / ROUNDS / float(slowest_s)
            )
            rates = [
                bus_bandwidth(
                    operation,
                    len(members),
                    whole.nbytes,
                    1e9 * time_calls(call, max(1, min(repeats, 200)), ranks.device),
                )
                or 0.0
                for _ in range(ROUNDS)
            ]
            yield f"{operation}, {format_bytes(whole.nbytes, 'B')}, {name}", members, rates


def measure_links(ranks: Ranks, nodes: Sequence[Sequence[int]], seconds: float) -> list[Transfer]:
    """Return the transfers between pairs of ranks. All ranks make the same plan of the same values."""
    begin_s, rounds = time.monotonic(), 0
    payload = torch.zeros(
        _TRANSFER_BYTES[ranks.device.type], dtype=torch.uint8, device=ranks.device
    )
    floor = find_floor(TRANSFERS, ranks.device_name)

    def count_possible() -> int:
        """Return rank 0's value."""
        left = 1 - (time.monotonic() - begin_s) / seconds
        possible = int(rounds * left / max(1e-6, 1 - left)) if rounds else _FIRST_ROUNDS
        return ranks.gather(max(0, possible))[0]

    def measure(batch: Rounds) -> list[Transfer]:
        nonlocal rounds
        ranks.meet("transfers between pairs")
        mine = [pair for each in batch for pair in each if ranks.rank in pair]
        own = [each for pair in mine for each in _measure_pair(ranks, pair, payload)]
        rounds += len(batch)
        return [row for each in ranks.gather(own, list[Transfer]) for row in each]

    return measure_rounds(nodes, count_possible, measure, lambda rows: Rates(rows, floor).bad)


def _measure_pair(ranks: Ranks, pair: Pair, payload: torch.Tensor) -> Iterator[Transfer]:
    """Measure both directions, and yield the one that this rank sends.

    The sender's time ends with the receiver's answer. The receiver's time may begin after data has
    arrived, so that a busy node would have the faster links.
    """
    for sender, receiver in (pair, pair[::-1]):
        sends, peer = ranks.rank == sender, receiver if ranks.rank == sender else sender
        token, before = torch.zeros(1, device=ranks.device), _read_segments()
        _exchange(payload[:1], token, peer, sends=sends)
        spent_s = time_calls(partial(_exchange, payload, token, peer, sends=sends), 1, ranks.device)
        sent, again = (after - at for at, after in zip(before, _read_segments(), strict=True))
        if sends:
            yield Transfer(sender, receiver, payload.nbytes / spent_s, again / max(1, sent + again))


def _exchange(tensor: torch.Tensor, answer: torch.Tensor, peer: int, *, sends: bool) -> None:
    """Send a tensor and receive an answer, or the reverse, in the communicator of all ranks."""
    for each, is_sent in (tensor, sends), (answer, not sends):
        operation = dist.P2POp(dist.isend if is_sent else dist.irecv, each, peer)
        dist.batch_isend_irecv([operation])[0].wait()


def _read_segments() -> tuple[int, int]:
    """Return the TCP segments that this process has sent once, and sent again, by its open sockets.

    The counters of the node contain the transfers of its other ranks.
    """
    rows = [(int(name), (ctypes.c_uint32 * 35)()) for name in os.listdir("/proc/self/fd")]
    of_sockets = [
        info
        for fd, info in rows
        if not ctypes.CDLL(None).getsockopt(
            fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(ctypes.c_uint32(140))
        )
    ]
    # tcpi_total_retrans and tcpi_segs_out of struct tcp_info in <linux/tcp.h>.
    again = sum(info[25] for info in of_sockets)
    return sum(info[34] for info in of_sockets) - again, again
