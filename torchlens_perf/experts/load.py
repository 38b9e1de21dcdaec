"""The tokens of a rank's experts, and the time that the experts take, from COLLECTIVE records. Pure.

In each layer, a rank first receives the tokens for its experts and then sends their results back,
so that it receives as many rows as it had tokens. In the backward pass, the gradients of the
results arrive first. In both passes, every first exchange therefore receives the experts' tokens,
and every second one the rank's own. A token that is sent to two experts counts twice.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import Flag, Kind

SAMPLED_EVERY = 4
"""Exchanges are examined in every fourth step."""
_NAME = re.compile(r"alltoall_base .* row=(\d+)")


class ExpertLoad:
    """Sums over the exchanges of one process since the last call of take_signals()."""

    def __init__(self) -> None:
        self._row_bytes: dict[int, int] = {}
        """By name id, for exchanges that are split by rows."""
        self._names_seen = 0
        self._reset()

    def _reset(self) -> None:
        self._exchanges = self._tokens = self._timed = self._experts_ns = self._steps_ns = 0

    def add_steps(self, records: npt.NDArray[np.void], names: list[str], steps: StepTable) -> None:
        """Add the exchanges of complete steps. names: the names of records by their ids."""
        for name_id in range(self._names_seen, len(names)):
            if found := _NAME.fullmatch(names[name_id]):
                self._row_bytes[name_id] = int(found[1])
        self._names_seen = len(names)
        if not self._row_bytes:
            return
        exchanges = records[records["kind"] == Kind.COLLECTIVE]
        exchanges = exchanges[exchanges["step"] % SAMPLED_EVERY == 0]
        exchanges = exchanges[np.isin(exchanges["name_id"], list(self._row_bytes))]
        for step in np.unique(exchanges["step"]).tolist():
            row = int(np.searchsorted(steps.step, step))
            if row < len(steps) and steps.step[row] == step:
                in_step = exchanges[exchanges["step"] == step]
                self._add_step(in_step, int(steps.duration_ns[row]))

    def _add_step(self, exchanges: npt.NDArray[np.void], step_ns: int) -> None:
        ids, at = np.unique(exchanges["name_id"], return_inverse=True)
        # Probabilities, if they are exchanged apart, have smaller rows than the tokens.
        largest = int(ids[np.bincount(at, exchanges["value0"].astype(np.float64)).argmax()])
        of_tokens = exchanges[exchanges["name_id"] == largest]
        of_tokens = of_tokens[np.argsort(of_tokens["start_ns"], kind="stable")]
        first, second = of_tokens[::2], of_tokens[1::2]
        own = len(np.unique(second["value0"]))
        if len(first) != len(second) or (own > 1 and own >= len(np.unique(first["value0"]))):
            return  # The exchanges have another order, so their meaning is not known.
        self._exchanges += len(first)
        self._tokens += int(first["value0"].sum()) // self._row_bytes[largest]
        if (first["flags"] & Flag.COMPLETED).all():
            received_ns = first["start_ns"] + first["duration_ns"]
            self._timed += len(first)
            self._experts_ns += int((second["start_ns"] - received_ns).clip(min=0).sum())
            self._steps_ns += step_ns

    def take_signals(self) -> dict[str, float]:
        """Return the signals since the last call; {} if no exchange was examined.

        expert_ktokens: thousands of tokens that the experts receive in one exchange.
        expert_share: share of the steps' time between the exchanges of a layer. It is missing if
        the end of the exchanges is not known, as on a GPU.
        """
        signals = {}
        if self._exchanges:
            signals["expert_ktokens"] = self._tokens / self._exchanges / 1e3
        if self._timed and self._timed == self._exchanges and self._steps_ns:
            signals["expert_share"] = self._experts_ns / self._steps_ns
        self._reset()
        return signals
