"""OPERATORS records: the work of one sampled step, as hooks/operators.py counts it.

Each record is a sum over the calls of one module, pass, kind of work and precision. duration_ns is
host time, value0 floating-point operations, value1 bytes of operands and results. A record of
Work.OTHER is about the operators of one name that have no formula: value1 is the number of calls.
A record of Work.STEP is about the step: duration_ns is the time of all operators, value0 the
samples in its batches plus 1 or 0 if not known, value1 the number of calls.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

PRECISIONS = ("other", "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""Precisions of products, in the order of their numbers in records."""
_PRECISION_BEGINNINGS = (
    ("Double", "fp64"), ("Float8", "fp8"), ("Float4", "fp4"), ("Float", "fp32"), ("BFloat16", "bf16"),
    ("Half", "fp16"), ("Char", "int8"), ("Byte", "int8"),
)  # fmt: skip
_WORK_SHIFT, _PRECISION_SHIFT, _MASK = 3, 6, 7


class Pass(IntEnum):
    """Pass in which an operator is called. native/collective.h holds the same numbers."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    """Repeats a part of the forward pass: activation checkpointing, scores of fused attention."""
    OPTIMIZER = 3


class Work(IntEnum):
    """Kind of work. native/operators.h holds the same numbers."""

    OTHER = 0
    PRODUCT = 1
    CONVOLUTION = 2
    ATTENTION = 3
    CAUSAL_ATTENTION = 4
    RECURRENT = 5
    STEP = 6
    TOKEN_STEP = 7
    """As STEP, in a job whose batches consist of tokens."""


class OperatorKey(NamedTuple):
    """Properties that the operators of one record share."""

    in_pass: Pass
    work: Work
    precision: str

    def to_flags(self) -> int:
        return (
            self.in_pass
            | self.work << _WORK_SHIFT
            | PRECISIONS.index(self.precision) << _PRECISION_SHIFT
        )

    @classmethod
    def from_flags(cls, flags: int) -> OperatorKey:
        precision = flags >> _PRECISION_SHIFT
        return cls(
            Pass(flags & 3),
            Work(flags >> _WORK_SHIFT & _MASK),
            PRECISIONS[precision] if precision < len(PRECISIONS) else PRECISIONS[0],
        )


def precision_of(dtype: str, *, tf32: bool) -> str:
    """Return the precision of a product of this dtype.

    dtype: c10's name. tf32: True if products of float32 run in TF32.
    """
    found = next(
        (name for begin, name in _PRECISION_BEGINNINGS if dtype.startswith(begin)), "other"
    )
    return "tf32" if tf32 and found == "fp32" else found
