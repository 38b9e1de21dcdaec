"""Kinds and flags of the records in a ring file, and the states of its writer.

native/layout.h defines the same values for C.
"""

from __future__ import annotations

import functools
from enum import IntEnum, IntFlag


class Kind(IntEnum):
    """Kind of a record.

    DATA to CLOSURE are phases. The time of a phase does not count for its enclosing phase.
    """

    STEP = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    WAIT = 6
    RECOMPUTE = 7
    # A function that an optimizer calls to evaluate the model. The closure's time outside other
    # phases is host time.
    CLOSURE = 8
    MODULE = 16
    MODULE_BACKWARD = 17
    SECTION = 18
    COLLECTIVE = 19
    # CPU time of a step's own work, and the time that its thread was runnable but had no CPU.
    THREAD_TIME = 20
    MERGED = 23  # one row of a window over all ranks, see device/merged_rows.py
    SKETCH = 22  # a part of the statistics of a window, see sketch.py
    # A span by the device's clock. value0 is the kind of the span. value1 is the time by which its
    # end on the device was later than on the host. A span of the kind WAIT is a stall: the compute
    # stream waited for the communication of that name. The stalls of a step do not overlap. Device
    # spans of a step precede its STEP record. If a step has no STEP record yet, device spans may be
    # missing.
    DEVICE = 21
    MEMORY = 28  # one number of the device's allocator, see memory_readings.py
    OPERATORS = 29  # work of a sampled step, see operators.py


@functools.cache
def kind_name(kind: int) -> str:
    """Return the lower-case name of a record kind, or "kind 77" for an unknown kind."""
    return Kind(kind).name.lower() if kind in Kind._value2member_map_ else f"kind {kind}"


class Flag(IntFlag):
    """Flags of a record. EVALUATED and the flags from CAPTURED on are used in STEP records."""

    EXCEPTION = 1
    ASYNC = 2
    NEW_TRAINING = 2  # STEP: the first one of another training, see hooks/loop/training_loop.py
    TAIL = 4  # WAIT: the end of the backward pass, after the last gradient was computed
    WITHOUT_PHASES = 4  # DEVICE, of a step: the device did not time its phases
    WITHOUT_MODULES = 4  # STEP: forward calls of inner modules were not timed in this step
    COMPLETED = 16  # COLLECTIVE: the duration ends with the operation, not with the issuing call
    STOPPED = 16  # STEP, set by the sidecar: its process was stopped, see sidecar/stops.py
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
    """State of a ring file's writer. The state stays OPEN if the writer is killed."""

    OPEN = 0
    CLOSED = 1
