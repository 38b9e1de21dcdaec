"""The wait for data that a rank would have without waits for other ranks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.run.records import OWN_COLUMNS, PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

DATA, COMMUNICATION = PARTS.index("data"), PARTS.index("communication")


def move_hidden_data_waits(
    parts_ns: npt.NDArray[Any], periods_ns: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the parts of the same steps of several ranks, with the hidden waits for data.

    parts_ns: [ranks, steps, len(PARTS)], NaN if missing. periods_ns: [ranks]. The rank that waits
    least shows which communication is no wait for other ranks.
    """
    return move_hidden_data_wait(
        parts_ns, periods_ns[:, None], np.fmin.reduce(parts_ns[..., COMMUNICATION], axis=0)
    )


def hidden_data_wait(own: Any, communication: Any, period: Any) -> Any:
    """Return the part of the time in communication in which a rank would wait for data instead, if it
    did not wait for other ranks.

    All arguments have one unit and are arrays or numbers. own: the step's time without communication.
    communication: the time in communication that may be a wait for other ranks.
    period: time in which the rank's loader makes a batch; 0 if not measured.
    """
    return np.clip(period - own, 0, communication)


def move_hidden_data_wait(
    parts_ns: npt.NDArray[Any],
    period_ns: npt.NDArray[Any] | int,
    exposed_ns: npt.NDArray[Any] | int = 0,
) -> npt.NDArray[Any]:
    """Return the parts of steps, with the wait for data that waits for other ranks hide.

    parts_ns: [..., len(PARTS)]. period_ns: see hidden_data_wait(). exposed_ns: communication that is
    no wait for other ranks. The hidden wait is moved from communication to data, so that the parts
    still add up to the step.
    """
    own_ns = parts_ns[..., OWN_COLUMNS].sum(axis=-1)
    hidden_ns = hidden_data_wait(own_ns, parts_ns[..., COMMUNICATION] - exposed_ns, period_ns)
    found = parts_ns.copy()
    found[..., DATA] += hidden_ns.astype(parts_ns.dtype)
    found[..., COMMUNICATION] -= hidden_ns.astype(parts_ns.dtype)
    return found
