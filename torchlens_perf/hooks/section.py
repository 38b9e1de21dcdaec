"""Support for sections in compiled code. Without it, Dynamo breaks the graph at `section()`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torchlens_perf.recorder.device_sections import device_section
from torchlens_perf.recorder.recorder import section

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_registered = False


def register_with_dynamo() -> None:
    """Make Dynamo trace section() and device_section() as a null context, once per process.

    No times are recorded inside a graph. Uses a public API of torch.compiler.
    """
    global _registered
    if _registered or "torch._dynamo" not in sys.modules:
        return
    import torch

    def traced(name: str) -> Any:
        return nullcontext()

    torch.compiler.substitute_in_graph(section, skip_signature_check=True)(traced)
    torch.compiler.substitute_in_graph(device_section, skip_signature_check=True)(traced)
    _registered = True


class SectionHook:
    """Hook that registers sections with Dynamo until the process ends.

    A graph may outlive the watch, and Dynamo cannot undo the registration.
    """

    name = "section"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        register_with_dynamo()
        # Dynamo may be imported later, so each step's end tries again.
        with nullcontext() if _registered else session.each_step(self.name, register_with_dynamo):
            yield
