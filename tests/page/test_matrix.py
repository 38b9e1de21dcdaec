"""Durations as 16-bit codes have the stated accuracy, and missing ones stay missing."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.page_matrices import decoded
from torchlens_perf.page.matrix import SMALLEST_S, encode_durations

DURATIONS = st.one_of(
    st.floats(0, 1e7, allow_nan=False), st.just(float("nan")), st.floats(1e-9, 1e-3)
)


@given(arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=DURATIONS))
def test_decoded_durations_are_within_the_stated_error(values: np.ndarray) -> None:
    """The range is from a nanosecond to months. Smaller values become 0 s, and NaN stays NaN."""
    matrix = encode_durations(values)
    back = decoded(matrix, len(values))

    assert back.shape == values.shape
    assert (np.isnan(back) == np.isnan(values)).all()
    tiny = values < SMALLEST_S
    assert (back[tiny] == 0).all()
    large = values >= SMALLEST_S
    off = np.abs(np.log(back[large] / values[large]))
    assert (off <= matrix["log_step"] / 2 * 1.0001).all()


def test_matrix_codes_have_the_documented_format() -> None:
    matrix = encode_durations(np.array([[np.nan, 0.0], [SMALLEST_S, 1.0]]))
    codes = np.frombuffer(zlib.decompress(base64.b64decode(matrix["codes"])), "<u2")

    assert codes.tolist()[:3] == [0, 1, 2]
    one_s = matrix["smallest_s"] * np.exp((int(codes[3]) - 2) * matrix["log_step"])
    assert abs(np.log(one_s)) <= matrix["log_step"] / 2
