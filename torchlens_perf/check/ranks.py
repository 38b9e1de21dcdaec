"""The ranks of a check: how they meet, exchange values, and notice a rank that does not respond."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist

from torchlens_perf.errors import require
from torchlens_perf.run.place.launcher import JobPlace

_T = TypeVar("_T")

FOUND, UNKNOWN = 1, 3
"""Exit codes, as of other commands: something is slow; too little was measured to tell."""
_SILENT_S = 10.0
"""A rank whose process gives no sign of life for this long does not respond."""
_BEAT_S = 1.0
_ENDED = 1 << 40
"""Added to the beats of a rank that ends the check."""
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
        is_on_device = torch.cuda.is_available()
        if is_on_device:
            torch.cuda.set_device((place.local_rank or 0) % torch.cuda.device_count())
        self.rank, self.size = place.rank, place.world_size
        self.device = torch.device("cuda" if is_on_device else "cpu")
        self.device_name = torch.cuda.get_device_name() if is_on_device else "CPU"
        self._missing, self._stage, self._beat = missing, "the start", 1
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and self.size > 1
        # Rank 0 judges first.
        self._end_s = time.monotonic() + limit_s + _SILENT_S * (self.rank > 0)
        # Rank 0 watches all ranks, and they watch rank 0. A lost store silences rank 0, too.
        self._seen = dict.fromkeys(range(self.size if self.rank == 0 else 1), (0, time.monotonic()))
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        limit = timedelta(seconds=limit_s + 2 * _SILENT_S)
        first = dist.TCPStore(
            *_find_store(place),
            None,
            self.rank == 0 and not is_hosted,
            limit,
            wait_for_workers=False,
        )
        self._store = dist.PrefixStore(
            f"torchlens_perf/check/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", first
        )
        self._beats = threading.Thread(target=self._exchange_beats, daemon=True)
        self._beats.start()
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_on_device else "gloo",
                store=self._store.clone(), rank=self.rank, world_size=self.size, timeout=limit,
            )  # fmt: skip
        except RuntimeError as error:
            self.fail(error)

    def gather(self, value: _T, kind: Any = Any) -> list[_T]:
        """Return the values of all ranks. kind: their type, which msgspec can encode."""
        rows: list[Any] = [None] * self.size
        dist.all_gather_object(rows, msgspec.json.encode(value))
        return [msgspec.json.decode(row, type=kind) for row in rows]

    def meet(self, stage: str) -> None:
        """Wait for all ranks. stage: what they do next, for the report on a rank that does not come."""
        self._stage = stage
        # On busy CPUs, a check takes longer than planned. It goes on while stages end.
        self._end_s = max(self._end_s, time.monotonic() + _SILENT_S * (6 + (self.rank > 0)))
        self._store.add(f"stage/{self.rank}", 1)
        dist.all_reduce(torch.zeros(1))

    def fail(self, error: Exception) -> NoReturn:
        """End the process after an error, as soon as the ranks that caused it are known."""
        self._stage += f" ({str(error).partition('. ')[0]})"
        self._end_s = time.monotonic() + _SILENT_S * (1 + (self.rank > 0))
        self._watcher.join()
        os._exit(UNKNOWN)

    def close(self) -> None:
        """Wait for all ranks, then leave them. Until then, rank 0's store has users."""
        self._is_over.set()
        self._beats.join()
        dist.barrier()
        dist.destroy_process_group()

    def _exchange_beats(self) -> None:
        """Show that this process lives, and read the beats of others.

        This has a thread of its own, because the store of a rank 0 that is stopped never responds.
        """
        while not self._is_over.wait(_BEAT_S):
            with contextlib.suppress(RuntimeError):
                self._store.add(f"beat/{self.rank}", self._beat)
                for rank, (count, _) in self._seen.items():
                    if (beats := self._store.add(f"beat/{rank}", 0)) != count:
                        self._seen[rank] = beats, time.monotonic()
            if self.rank and self._seen[0][0] >= _ENDED:
                os._exit(UNKNOWN)

    def _watch(self) -> None:
        """Look for ranks that do not live.

        A launcher sends SIGTERM to all ranks when one has ended, so this signal is blocked until
        the missing rank is named.
        """
        now_s = time.monotonic()
        while not self._is_over.is_set():
            signal.sigtimedwait([signal.SIGTERM], _BEAT_S)
            before_s, now_s = now_s, time.monotonic()
            # A process that was stopped has not seen the beats of the others.
            if now_s - before_s > _SILENT_S:
                self._end([self.rank], f"was stopped for {now_s - before_s:.0f} s")
            silent = {
                rank: count for rank, (count, at) in self._seen.items() if now_s - at > _SILENT_S
            }
            # Processes may start late, but not later than the end of the check.
            if late := [rank for rank, count in silent.items() if count]:
                self._end(late, f"gave rank {self.rank} no sign of life for {_SILENT_S:.0f} s")
            if now_s > self._end_s:
                self._end([*silent] or self._find_behind(), "did not respond in time")

    def _find_behind(self) -> list[int]:
        stages = {rank: self._store.add(f"stage/{rank}", 0) for rank in self._seen}
        first, last = min(stages.values()), max(stages.values())
        return [rank for rank, stage in stages.items() if stage == first < last]

    def _end(self, ranks: list[int], reason: str) -> NoReturn:
        """End the check. One rank reports why: rank 0, or other ranks if it is missing.

        All ranks of the first node may be missing, so ranks 1, 2, 4, 8 and so on report then.
        """
        code = UNKNOWN
        if self.rank == 0 or (ranks == [0] and not self.rank & (self.rank - 1)):
            code = self._missing(ranks, f"{reason} during {self._stage}")
        self._beat = _ENDED
        # The other ranks see this in time, or rank 0 reports.
        time.sleep(2 * _BEAT_S)
        os._exit(code)


def _find_store(place: JobPlace) -> tuple[str, int]:
    """Return the address of the job's store, by the variables of torch, or of a single node."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if place.world_size == 1:
        return "127.0.0.1", 0
    require(
        bool(host) or place.local_world_size == place.world_size,
        "MASTER_ADDR is not set: set it to the host name of rank 0 on all ranks, and MASTER_PORT to a"
        " free port there",
    )
    return host or "127.0.0.1", int(port or _PORT_OF_JOB + os.getppid() % 10_000)
