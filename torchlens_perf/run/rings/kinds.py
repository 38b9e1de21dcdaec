"""Kinds and flags of a ring's records, and the states of its writer.

native/layout.h has the same values for C.
"""

from __future__ import annotations

import functools
from enum import IntEnum, IntFlag


class Kind(IntEnum):
    """Kind of a record.

    DATA to CLOSURE are phases. Their time is subtracted from the enclosing phase.
    """

    STEP = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    WAIT = 6
    RECOMPUTE = 7
    # A function that an optimizer calls to evaluate the model. Its time outside of other phases is
    # host time.
    CLOSURE = 8
    MODULE = 16
    MODULE_BACKWARD = 17
    SECTION = 18
    COLLECTIVE = 19
    THREAD_TIME = 20  # of a step's own work: CPU time, and time runnable without a CPU
    MERGED = 23  # one row of a window over all ranks, see device/merged_rows.py
    SKETCH = 22  # a part of the statistics of a window, see sketch.py
    # A span by the device's clock. value0: its kind. value1: how much later than on the host it
    # ended on the device. With the kind WAIT it is a stall: the compute stream waited for
    # communication, whose name it has. A step's stalls do not overlap. They come with its phases
    # before the STEP record that completes the step. Without that record, some may be missing.
    DEVICE = 21
    MEMORY = 28  # one number of the device's allocator, see memory_readings.py


@functools.cache
def kind_name(kind: int) -> str:
    """Return the lower-case name of a record kind; "kind 77" for a kind of a newer version."""
    return Kind(kind).name.lower() if kind in Kind._value2member_map_ else f"kind {kind}"


class Flag(IntFlag):
    """Flags of a record. EVALUATED, CAPTURED and the upper eight are for STEP records."""

    EXCEPTION = 1
    ASYNC = 2
    TAIL = 4  # WAIT: the end of the backward pass, after the last gradient was computed
    COMPLETED = 16  # COLLECTIVE: the duration ends with the operation, not with the issuing call
    DEVICE = 32  # device clock: MODULE_BACKWARD; COLLECTIVE, from the start of its kernel
    OTHER_THREAD = 8  # on another thread than the training thread: not in the step's time
    EVALUATED = 64  # STEP: tagged as an evaluation by the user or a framework's callback
    CAPTURED = 128  # the step is in a capture, or delayed by its start or end
    EVALUATION = 256  # the step had unusual forward passes without gradients, or the flag EVALUATED
    INFERENCE = 512  # the step is a forward pass, no optimizer has stepped
    SKIPPED = 1024  # GradScaler skipped the optimizer
    SAMPLED = 2048  # observers were on: module backward times were measured
    MANUAL = 4096  # the user called w.step() at the boundary
    CHECKPOINT = 8192  # a checkpoint was saved
    COMPILED = 16384  # torch.compile was compiling
    COLLECTED = 32768  # Python's garbage collector processed its oldest generation


class State(IntEnum):
    """End state of the writer. A writer that was killed leaves OPEN."""

    OPEN = 0
    CLOSED = 1
