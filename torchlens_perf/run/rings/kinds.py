"""What a ring's records are about, their flags, and who ended the writing. native/layout.h has the same as C."""

from __future__ import annotations

import functools
from enum import IntEnum, IntFlag


class Kind(IntEnum):
    """What a record is about. From DATA to CLOSURE: phases, whose time is taken out of the phase around them."""

    STEP = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    WAIT = 6
    RECOMPUTE = 7
    CLOSURE = 8  # that an optimizer calls to evaluate the model: what it does outside of other phases is the host's
    MODULE = 16
    MODULE_BACKWARD = 17
    SECTION = 18
    COLLECTIVE = 19
    THREAD_TIME = 20  # of a step's own work: CPU time, and time ready without a CPU
    MERGED = 23  # a device section, or a part of steps, over all ranks in one window, see device/merged_rows.py
    SKETCH = 22  # a part of the statistics of a window, see sketch.py
    # A span as the device's clock has it; value0: its kind, value1: how long after the host it ended there. Of the kind
    # WAIT: a stall, for which the compute stream waited for communication, with what it waited in as its name. A step's
    # stalls do not overlap, and lie with its phases before its record of the kind STEP, which completes it: without
    # that record, some may be missing.
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
    COMPLETED = 16  # COLLECTIVE: the duration goes until the operation's end; else it is the issuing call's
    DEVICE = 32  # by the device's clock: MODULE_BACKWARD; COLLECTIVE, from its kernel's start
    OTHER_THREAD = 8  # on a thread other than the training thread: no part of the step's time
    EVALUATED = 64  # STEP: the user or a framework's callback has tagged it as an evaluation
    CAPTURED = 128  # the step is in a capture, or held up by its beginning or end
    EVALUATION = 256  # the step held unusual forward passes without gradients, or has the flag EVALUATED
    INFERENCE = 512  # the step is a forward pass, no optimizer has stepped
    SKIPPED = 1024  # GradScaler skipped the optimizer
    SAMPLED = 2048  # observers were on: module backward times were taken
    MANUAL = 4096  # the boundary is the user's w.step()
    CHECKPOINT = 8192  # something was saved
    COMPILED = 16384  # torch.compile was at work
    COLLECTED = 32768  # Python's garbage collector went through its oldest generation


class State(IntEnum):
    """Who ended the writing. A writer that died leaves OPEN."""

    OPEN = 0
    CLOSED = 1
