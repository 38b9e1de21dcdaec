"""NVTX ranges, through prebuilt attributes of the `nvtx` package's domain API.

Whether a tool listens is fixed when the process makes its first NVTX call, so it is asked once; without a tool the
recorder makes no NVTX call at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

DOMAIN = "torchlens_perf"
_TOOL = "NVTX_INJECTION64_PATH"  # the tool's library; but CUDA's driver may bring one, too


class NvtxHook:
    """A push and a pop for every span, and a start and an end for every step, which sections may straddle."""

    name = "nvtx"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch

        if torch.version.cuda is None and _TOOL not in os.environ:
            yield  # nobody can listen, and importing the package takes longer than all other hooks together
            return
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
        attributes: list[Any] = []

        def prepare(name: str) -> None:
            attributes.append(domain.get_event_attributes(message=name))

        prepare("step")
        if attributes[0] is None:  # the package's sign that no tool listens
            yield
            return
        session.ring.set_name_listener(prepare)
        session.recorder.set_nvtx(domain.push_range, domain.pop_range, attributes)
        step = [domain.start_range(attributes[0])]

        def next_step() -> None:
            domain.end_range(step[0])
            step[0] = domain.start_range(attributes[0])

        try:
            with session.each_step(self.name, next_step):
                yield
        finally:
            if not session.recorder.closed:  # in a forked child the range is the parent's
                domain.end_range(step[0])
