"""Find a hang in progress, and read the Python stacks of this node's hung ranks."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.analysis.collectives.hang import ENDED, MIN_S, Hang, find_hang
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.processes import process_age_s
from torchlens_perf.run.rank_facts import decode_path
from torchlens_perf.sidecar.device_waits import DeviceWaitSampler
from torchlens_perf.sidecar.hang_witness.collect import HangWitness
from torchlens_perf.sidecar.hang_witness.judge import judge_dumps
from torchlens_perf.sidecar.hang_witness.words import describe_dumps, describe_ras
from torchlens_perf.sidecar.host.stacks import Stack, read_main_stack, request_stack_by_signal
from torchlens_perf.verdicts.words.hang import (
    HangEvidence,
    RankStack,
    build_hang_verdict,
    describe_hang,
)

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.rank_facts import RankFacts

MAX_STACKS = 3
# Limits of reading stacks: ranks, and seconds for all of them.
_MAX_READ, _MAX_READING_S = 16, 5.0


class HangDetector:
    """Detector of hangs in one process generation. Not thread-safe."""

    def __init__(self, silent_s: float) -> None:
        """silent_s: time without reports after which a node counts as silent."""
        self.hang: HangEvidence | None = None
        """The hang in progress, or None while the job makes steps."""
        self.user_lines: dict[int, str] = {}
        """For some ranks of this node, the line of the user's code, read together with the stacks."""
        self._remote_lines: Mapping[int, str] = {}
        self._witness: HangWitness | None = None
        self._key: object = None
        # Key of the newest finding, and the time at which it was first made.
        self._seen: tuple[object, float] = (None, 0.0)
        self._waits = DeviceWaitSampler()
        self._silent_s = silent_s

    def update_hang(
        self,
        local: Mapping[int, RankProgress],
        remote: Mapping[int, RankProgress],
        ages_s: Mapping[int, float],
        groups: Mapping[str, tuple[int, ...]],
        processes: Mapping[int, tuple[Identity, RankFacts]],
        now_s: float,
        remote_lines: Mapping[int, str] | None = None,
    ) -> None:
        """Look for a hang and update `hang`.

        local, remote: the progress of this node's ranks and of other nodes' ranks.
        ages_s: ages of the remote reports.
        groups: ranks of each process group, by name.
        processes: identities and facts of this node's ranks.
        now_s: a monotonic clock.
        remote_lines: lines of the user's code for some ranks of other nodes.
        """
        self._remote_lines = remote_lines or {}
        ranks = dict(local)
        if not ranks and not remote:
            return
        # Skip the full search while all ranks make steps, because it is slow for many ranks.
        longest_s = max(
            (each.since_step_s + ages_s[rank] - each.report_age_s for rank, each in remote.items()),
            default=0.0,
        )
        if max([longest_s, *(each.since_step_s for each in ranks.values())]) <= MIN_S:
            self._reset()
            self._waits.reset()
            return
        for rank, each in remote.items():
            since_step_s = each.since_step_s
            # A silent node may still make steps, so its missing reports do not count as time
            # without a step.
            if ages_s[rank] <= self._silent_s or each.state in ENDED:
                since_step_s += ages_s[rank] - each.report_age_s
            ranks[rank] = dataclasses.replace(
                each, report_age_s=ages_s[rank], since_step_s=since_step_s
            )
        waits = self._waits.known
        hang = find_hang(_add_device_waits(ranks, waits), groups, silent_s=self._silent_s)
        if hang is None:
            self._waits.reset()
        elif self._waits.is_due(hang):
            here = [rank for rank in hang.look_at if rank in processes][:MAX_STACKS]
            self._waits.add_sample({rank: read_main_stack(processes[rank][0].pid) for rank in here})
            if self._waits.known != waits:
                hang = find_hang(
                    _add_device_waits(ranks, self._waits.known), groups, silent_s=self._silent_s
                )
        if hang is None or not hang.needs_action:
            self._reset()
        elif self.hang is not None and hang.key == self._key:
            # The known hang goes on: update its description, but keep its stacks.
            self.hang = self._describe(hang, ranks, self.hang.stacks, processes)
        elif (self.hang is None and not hang.moving) or self._is_confirmed(hang, ranks, now_s):
            self._key = hang.key
            stacks = _read_stacks(hang, processes)
            self.user_lines = {
                rank: each.user_line for rank, each in stacks.items() if each.user_line
            }
            reported = {
                rank: RankStack(tuple(stacks[rank].lines), stacks[rank].reason)
                for rank in [rank for rank in hang.look_at if rank in stacks][:MAX_STACKS]
            }
            self._start_witness(hang, processes)
            self.hang = self._describe(hang, ranks, reported, processes)
            logger.warning("%s", build_hang_verdict(self.hang).sentence)

    def _is_confirmed(self, hang: Hang, ranks: Mapping[int, RankProgress], now_s: float) -> bool:
        """Return True if all other reports are newer than the first finding of this hang.

        When a hang ends, reports of other nodes are older than this node's rings for a moment.
        Ranks of other nodes may seem to hang until new reports arrive.
        """
        if self._seen[0] != hang.key:
            self._seen = hang.key, now_s
        oldest_s = max(
            (each.report_age_s for rank, each in ranks.items()
             if rank not in hang.moving and each.report_age_s <= self._silent_s),
            default=0.0,
        )  # fmt: skip
        return now_s - self._seen[1] > oldest_s

    def _start_witness(
        self, hang: Hang, processes: Mapping[int, tuple[Identity, RankFacts]]
    ) -> None:
        """Start to collect what PyTorch and NCCL have recorded, on the node of rank 0."""
        if self._witness is None and 0 in processes:
            identity, facts = processes[0]
            now_s = time.time()
            self._witness = HangWitness(
                decode_path(facts.dump_prefix),
                facts.nccl_ras_port,
                identity.world_size,
                now_s - process_age_s(identity.process_started),
                now_s - hang.since_s,
            )
            self._witness.start()
            # A restart of the job replaces this detector.
            weakref.finalize(self, self._witness.close)

    def _describe(
        self,
        hang: Hang,
        ranks: Mapping[int, RankProgress],
        stacks: Mapping[int, RankStack],
        processes: Mapping[int, tuple[Identity, RankFacts]],
    ) -> HangEvidence:
        lines, sentences, answer = dict[int, str](), list[str](), ""
        if self._witness is not None:
            dumps, answer = self._witness.dumps, self._witness.ras
            lines = {rank: dump.line for rank, dump in dumps.items() if dump.line}
            pids = {identity.pid: rank for rank, (identity, _) in processes.items()}
            world_size = processes[0][0].world_size
            sentences = [
                describe_dumps(hang, judge_dumps(ranks, dumps), dumps),
                describe_ras(hang, answer, world_size, pids),
            ]
        return describe_hang(
            hang,
            stacks,
            {**lines, **self._remote_lines, **self.user_lines},
            tuple(filter(None, sentences)),
            answer,
        )

    def _reset(self) -> None:
        self.hang, self._key, self._seen, self.user_lines = None, None, (None, 0.0), {}
        if self._witness is not None:
            self._witness.close()
            self._witness = None


def _read_stacks(
    hang: Hang, processes: Mapping[int, tuple[Identity, RankFacts]]
) -> dict[int, Stack]:
    """Read the stacks of ranks of this node: those to look at, then others while there is time."""
    stacks: dict[int, Stack] = {}
    deadline_s = time.monotonic() + _MAX_READING_S
    others = (rank for ranks in hang.places.values() for rank in ranks)
    for rank in dict.fromkeys((*hang.look_at, *others)):
        if rank in processes and len(stacks) < _MAX_READ and time.monotonic() < deadline_s:
            identity, facts = processes[rank]
            stack = read_main_stack(identity.pid)
            if not stack.lines and facts.stack_file:
                stack = request_stack_by_signal(
                    identity.pid, Path(decode_path(facts.stack_file)), identity.process_started
                )
            stacks[rank] = stack
    return stacks


def _add_device_waits(
    ranks: Mapping[int, RankProgress], waits: Mapping[int, str]
) -> Mapping[int, RankProgress]:
    known = {
        rank: dataclasses.replace(ranks[rank], waits_in=there)
        for rank, there in waits.items()
        if rank in ranks
    }
    return {**ranks, **known}
