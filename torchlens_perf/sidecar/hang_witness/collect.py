"""Collect what PyTorch and NCCL have recorded about a hang."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from torchlens_perf.sidecar.hang_witness.flight_recorder import find_dumps, read_dump
from torchlens_perf.sidecar.hang_witness.judge import RankDump
from torchlens_perf.sidecar.hang_witness.nccl_ras import ask_ras

_ROOT_UID = 0
_POLL_INTERVAL_S = 5.0
# Ranks of other nodes may have started earlier than those of this node.
_START_MARGIN_S = 300.0


class HangWitness(threading.Thread):
    """Thread that asks NCCL once, and reads new dumps until the hang is over.

    Nothing waits for the thread, because the disk of the dumps may hang.
    """

    def __init__(
        self,
        prefix: str,
        ras_port: int,
        world_size: int,
        started_s: float,
        hung_s: float,
    ) -> None:
        """prefix: path of the dumps without the rank; "" for none. ras_port: 0 without NCCL.

        started_s, hung_s: start of this node's first process, and of the hang, in Unix time.
        """
        super().__init__(name="torchlens_perf hang", daemon=True)
        self.dumps: Mapping[int, RankDump] = {}
        """The dumps by rank. Each change is a new mapping."""
        self.ras = ""
        """NCCL's answer; "" without one."""
        self._prefix, self._ras_port, self._world_size = prefix, ras_port, world_size
        self._started_s, self._hung_s = started_s, hung_s
        self._changed_ns: dict[int, int] = {}
        self._over = threading.Event()

    def close(self) -> None:
        """Let the thread end. Does not wait for it."""
        self._over.set()

    def run(self) -> None:
        if self._ras_port:
            self.ras = ask_ras(self._ras_port)
        while self._prefix and not self._over.is_set():
            with contextlib.suppress(OSError):
                for rank, path in find_dumps(self._prefix):
                    self._read_if_new(rank, path)
            self._over.wait(_POLL_INTERVAL_S)

    def _read_if_new(self, rank: int, path: Path) -> None:
        # While torch writes the file, it is incomplete.
        with contextlib.suppress(OSError, ValueError):
            found = path.lstat()
            is_new = found.st_mtime_ns > max(self._changed_ns.get(rank, 0), self._hung_s * 1e9)
            if is_new and found.st_uid in (_ROOT_UID, os.geteuid()):
                since_ns = int((self._started_s - _START_MARGIN_S) * 1e9)
                dump = read_dump(path, rank, self._world_size, since_ns)
                self._changed_ns[rank] = found.st_mtime_ns
                if dump is not None:
                    self.dumps = {**self.dumps, rank: dump}
