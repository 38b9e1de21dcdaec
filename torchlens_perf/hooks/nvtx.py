"""Emit NVTX ranges through the domain API of the `nvtx` package, with prebuilt attributes.

NVTX looks for an attached tool when the process makes its first NVTX call. The hook therefore
checks for a tool once. Without a tool, the recorder makes no NVTX calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

DOMAIN = "torchlens_perf"
# Path of the tool's library. The CUDA driver may also load a tool if the variable is not set.
_INJECTION_VARIABLE = "NVTX_INJECTION64_PATH"


class NvtxHook:
    """Hook that emits a push/pop range for every span and a start/end range for every step.

    Steps cannot be push/pop ranges, because a section may begin in one step and end in the next.
    """

    name = "nvtx"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch

        if torch.version.cuda is None and _INJECTION_VARIABLE not in os.environ:
            # No tool can be attached here, and importing `nvtx` takes longer than all other hooks.
            yield
            return
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
        attributes: list[Any] = []

        def prepare_attributes(name: str) -> None:
            attributes.append(domain.get_event_attributes(message=name))

        prepare_attributes("step")
        # The package returns None when no tool is attached.
        if attributes[0] is None:
            yield
            return
        session.ring.set_name_listener(prepare_attributes)
        session.recorder.set_nvtx(domain.push_range, domain.pop_range, attributes)
        step = [domain.start_range(attributes[0])]

        def begin_next_range() -> None:
            domain.end_range(step[0])
            step[0] = domain.start_range(attributes[0])

        try:
            with session.running_each_step(self.name, begin_next_range):
                yield
        finally:
            # In a forked child the recorder is closed and the range belongs to the parent process.
            if not session.recorder.closed:
                domain.end_range(step[0])
