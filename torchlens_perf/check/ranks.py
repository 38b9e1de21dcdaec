"""The ranks of a check: how they meet, exchange values, and notice a rank that does not respond."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist

from torchlens_perf.errors import ConfigError
from torchlens_perf.run.place.launcher import JobPlace

_T = TypeVar("_T")

FOUND, UNKNOWN = 1, 3
"""Exit codes, as of other commands: something is slow; too little was measured to tell."""
_SILENT_S = 10.0
"""A rank whose process gives no sign of life for this long does not respond."""
_BEAT_S = 1.0
_PREFIX = "torchlens_perf/check"
_PORT_OF_JOB = 20_000


class Ranks:
    """This process as a rank of the check, in a process group of all ranks if there are several."""

    def __init__(
        self, place: JobPlace, limit_s: float, missing: Callable[[list[int], str], int]
    ) -> None:
        """Join the other ranks. Raise ConfigError if their address is not known.

        limit_s: time after which the check ends. missing: is called in one rank if ranks do not
        respond, with these ranks and the reason. It returns the exit code of the process.
        """
        self.rank, self.size = place.rank, place.world_size
        is_on_device = torch.cuda.is_available()
        if is_on_device:
            torch.cuda.set_device((place.local_rank or 0) % torch.cuda.device_count())
        self.device = torch.device("cuda" if is_on_device else "cpu")
        self._attendance = None
        if self.size == 1:
            return
        host, port = _find_store(place)
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        limit = timedelta(seconds=limit_s + _SILENT_S)
        store = dist.TCPStore(
            host, port, None, self.rank == 0 and not is_hosted, limit, wait_for_workers=False
        )
        attempt = f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self._attendance = _Attendance(
            dist.PrefixStore(attempt, store.clone()), self.rank, self.size, limit_s, missing
        )
        self._attendance.start()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_on_device else "gloo",
            store=dist.PrefixStore(attempt, store),
            rank=self.rank, world_size=self.size, timeout=limit,
        )  # fmt: skip

    def gather(self, value: _T, kind: Any = Any) -> list[_T]:
        """Return the values of all ranks. kind: their type, which msgspec can encode."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        longest = torch.tensor(len(data))
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        rows = torch.empty(self.size, int(longest), dtype=torch.uint8)
        padded = torch.full((int(longest),), ord(" "), dtype=torch.uint8)
        padded[: len(data)] = data
        dist.all_gather_into_tensor(rows.view(-1), padded)
        return [msgspec.json.decode(row.numpy().tobytes(), type=kind) for row in rows]

    def share(self, value: _T | None, kind: Any = Any) -> _T:
        """Return rank 0's value. Other ranks pass None."""
        found: Any = self.gather(value, kind | None)[0]
        return found

    def meet(self, stage: str) -> None:
        """Wait for all ranks. stage: what they do next, for the report on a rank that does not come."""
        if self._attendance is not None:
            self._attendance.enter(stage)
            dist.all_reduce(torch.zeros(1))

    def fail(self, error: RuntimeError) -> NoReturn:
        """End the process after an error, when the rank that caused it has been named."""
        if self._attendance is None:
            raise error
        self._attendance.give_up(error)
        self._attendance.join()
        os._exit(UNKNOWN)

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        if self._attendance is not None:
            self._attendance.enter("the end")
            dist.destroy_process_group()


class _Attendance(threading.Thread):
    """Shows the other ranks that this process lives. Ranks 0 and 1 look for ranks that do not.

    A launcher sends SIGTERM to all ranks when one has ended, so this signal is blocked until the
    missing rank is named.
    """

    def __init__(
        self, store: Any, rank: int, size: int, limit_s: float,
        missing: Callable[[list[int], str], int],
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        store.set_timeout(timedelta(seconds=_SILENT_S))
        self._store, self._rank, self._missing = store, rank, missing
        # Rank 0 watches all ranks, and rank 1 watches rank 0.
        self._watched = [*range(1, size)] if rank == 0 else [0] if rank == 1 else []
        self._end_s = time.monotonic() + limit_s
        self._counts = dict.fromkeys(self._watched, -1)
        self._seen_s = dict.fromkeys(self._watched, time.monotonic())
        self._stage = "the start"

    def enter(self, stage: str) -> None:
        self._stage = stage
        self._store.add(f"stage/{self._rank}", 1)

    def give_up(self, error: RuntimeError) -> None:
        """End the check as soon as ranks that do not respond are known."""
        self._stage += f" ({error})"
        self._end_s = time.monotonic() + _SILENT_S

    def run(self) -> None:
        while True:
            signal.sigtimedwait([signal.SIGTERM], _BEAT_S)
            now_s = time.monotonic()
            try:
                self._store.add(f"beat/{self._rank}", 1)
                for rank in self._watched:
                    count = self._store.add(f"beat/{rank}", 0)
                    if count != self._counts[rank]:
                        self._counts[rank], self._seen_s[rank] = count, now_s
            except RuntimeError:
                if self._rank == 1:
                    self._end([0], "its store does not respond")
                os._exit(UNKNOWN)
            silent = [rank for rank, seen_s in self._seen_s.items() if now_s - seen_s > _SILENT_S]
            never = [rank for rank in silent if not self._counts[rank]]
            # Processes may start late, but not later than the end of the check.
            if late := [rank for rank in silent if rank not in never]:
                self._end(late, f"gave no sign of life for {_SILENT_S:.0f} s during {self._stage}")
            if now_s > self._end_s:
                self._end(never or self._find_behind(), f"did not finish {self._stage}")

    def _find_behind(self) -> list[int]:
        stages = {
            rank: self._store.add(f"stage/{rank}", 0) for rank in (*self._watched, self._rank)
        }
        first = min(stages.values())
        return [rank for rank, stage in stages.items() if stage == first < max(stages.values())]

    def _end(self, ranks: list[int], reason: str) -> None:
        if self._watched and (self._rank == 0 or ranks == [0]):
            code = self._missing(ranks, reason)
            sys.stdout.flush()
            os._exit(code)
        time.sleep(2 * _BEAT_S)
        os._exit(UNKNOWN)


def _find_store(place: JobPlace) -> tuple[str, int]:
    """Return the address of the job's store, by the variables of torch, or of a single node."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host and place.local_world_size == place.world_size:
        host = "127.0.0.1"
    if not host:
        raise ConfigError(
            "MASTER_ADDR is not set: set it to the host name of rank 0 on all ranks, and MASTER_PORT"
            " to a free port there"
        )
    return host, int(port or _PORT_OF_JOB + os.getppid() % 10_000)
