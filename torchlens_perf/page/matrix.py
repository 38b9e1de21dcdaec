"""Encode durations as 16-bit codes on a logarithmic scale, see contents.EncodedMatrix. Pure."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import numpy.typing as npt

from torchlens_perf.page.contents import EncodedMatrix

SMALLEST_S = 1e-9
# The relative error is at most 0.2 %, less than the noise of step times. A coarse scale compresses
# better than a fine one.
LOG_STEP = 0.004
_NOT_MEASURED, _ZERO, _FIRST = 0, 1, 2
_LAST = (1 << 16) - 1


def encode_durations(values_s: npt.NDArray[np.floating]) -> EncodedMatrix:
    """Encode durations in seconds of shape [ranks, columns].

    NaN is encoded as "not measured". Durations below SMALLEST_S are encoded as 0 s.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values_s / SMALLEST_S) / LOG_STEP
    codes = np.full(values_s.shape, _NOT_MEASURED, "<u2")
    codes[values_s < SMALLEST_S] = _ZERO
    known = values_s >= SMALLEST_S
    codes[known] = np.clip(np.rint(logs[known]) + _FIRST, _FIRST, _LAST)
    packed = zlib.compress(codes.tobytes(), 9)
    return {
        "smallest_s": SMALLEST_S,
        "log_step": LOG_STEP,
        "codes": base64.b64encode(packed).decode(),
    }
