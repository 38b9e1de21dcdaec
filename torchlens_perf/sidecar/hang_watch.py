"""The hang in progress, as this node sees it: looks for one, and reads the stacks that say where its ranks stand."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.hang import ENDED, MIN_S, Hang, Progress, find_hang
from torchlens_perf.sidecar.device_waits import DeviceWaits
from torchlens_perf.sidecar.host.stacks import python_stack, stack_by_signal
from torchlens_perf.verdicts.words.hang import OpenHang, RankStack, described

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity

logger = logging.getLogger("torchlens_perf.sidecar")

MAX_STACKS = 3


class HangWatch:
    """Belongs to the sidecar's thread. Of one set of processes."""

    def __init__(self, silent_s: float) -> None:
        """silent_s: a node whose reports are missing for so long is silent."""
        self.hang: OpenHang | None = None
        """The hang in progress; None while the job moves."""
        self._key: object = None
        self._seen: tuple[object, float] = (None, 0.0)  # the newest finding, and since when it has been found
        self._waits = DeviceWaits()
        self._silent_s = silent_s

    def look(
        self,
        local: Mapping[int, Progress],
        remote: Mapping[int, Progress],
        ages_s: Mapping[int, float],
        groups: Mapping[str, tuple[int, ...]],
        processes: Mapping[int, tuple[Identity, str]],
        now_s: float,
    ) -> None:
        """Whether the job hangs now.

        local, remote: how far the ranks are, of this node and of others, and how old the latter's reports are. groups:
        members by name. processes: of this node's ranks, and the files to which they write their stacks when asked.
        now_s: a monotonic clock.
        """
        ranks = dict(local)
        if not ranks and not remote:
            return
        # With many ranks it saves time to examine none closely while all make steps.
        longest_s = max(
            (each.since_step_s + ages_s[rank] - each.report_age_s for rank, each in remote.items()), default=0.0
        )
        if max([longest_s, *(each.since_step_s for each in ranks.values())]) <= MIN_S:
            self._forget()
            self._waits.forget()
            return
        for rank, each in remote.items():
            since_step_s = each.since_step_s
            # A silent node may still make steps: that no step is reported does not show that none is made.
            if ages_s[rank] <= self._silent_s or each.state in ENDED:
                since_step_s += ages_s[rank] - each.report_age_s
            ranks[rank] = dataclasses.replace(each, report_age_s=ages_s[rank], since_step_s=since_step_s)
        waits = self._waits.known
        hang = find_hang(_with_waits(ranks, waits), groups, silent_s=self._silent_s)
        if hang is None:
            self._waits.forget()
        elif self._waits.is_due(hang):
            here = [rank for rank in hang.look_at if rank in processes][:MAX_STACKS]
            self._waits.look({rank: python_stack(processes[rank][0].pid) for rank in here})
            if self._waits.known != waits:
                hang = find_hang(_with_waits(ranks, self._waits.known), groups, silent_s=self._silent_s)
        if hang is None or not hang.alarm:
            self._forget()
        elif self.hang is not None and hang.key == self._key:
            self.hang = described(hang, self.hang.stacks)  # it lasts longer, and its description changes
        elif (self.hang is None and not hang.moving) or self._is_found_again(hang, ranks, now_s):
            self._key = hang.key
            self.hang = described(hang, _stacks(hang, processes))
            logger.warning("%s", self.hang.text)

    def _is_found_again(self, hang: Hang, ranks: Mapping[int, Progress], now_s: float) -> bool:
        """Whether reports that were made since it was found first show it too.

        When a hang ends, other nodes' reports are older than this node's rings for a moment. Their ranks then seem to
        stand where these go on, which is no other hang.
        """
        if self._seen[0] != hang.key:
            self._seen = hang.key, now_s
        oldest_s = max(
            (each.report_age_s for rank, each in ranks.items()
             if rank not in hang.moving and each.report_age_s <= self._silent_s),
            default=0.0,
        )  # fmt: skip
        return now_s - self._seen[1] > oldest_s

    def _forget(self) -> None:
        self.hang, self._key, self._seen = None, None, (None, 0.0)


def _stacks(hang: Hang, processes: Mapping[int, tuple[Identity, str]]) -> dict[int, RankStack]:
    stacks: dict[int, RankStack] = {}
    for rank in hang.look_at:
        if rank in processes and len(stacks) < MAX_STACKS:
            identity, stack_file = processes[rank]
            stack = python_stack(identity.pid)
            if not stack.lines and stack_file:
                stack = stack_by_signal(identity.pid, Path(stack_file), identity.process_started)
            stacks[rank] = RankStack(tuple(stack.lines), stack.reason)
    return stacks


def _with_waits(ranks: Mapping[int, Progress], waits: Mapping[int, str]) -> Mapping[int, Progress]:
    known = {rank: dataclasses.replace(ranks[rank], waits_in=there) for rank, there in waits.items() if rank in ranks}
    return {**ranks, **known}
