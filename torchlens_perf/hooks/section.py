"""Sections inside compiled code: without this, Dynamo would break the graph at `with section(...)`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torchlens_perf.recorder.device_sections import device_section
from torchlens_perf.recorder.recorder import section

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_declared = False


def tell_dynamo() -> None:
    """Makes Dynamo trace section(name), and device_section(name), as a null context: there are no times inside a
    graph. Public API; once."""
    global _declared
    if _declared or "torch._dynamo" not in sys.modules:
        return
    import torch

    def traced(name: str) -> Any:
        return nullcontext()

    torch.compiler.substitute_in_graph(section, skip_signature_check=True)(traced)
    torch.compiler.substitute_in_graph(device_section, skip_signature_check=True)(traced)
    _declared = True


class SectionHook:
    """Stays for the life of the process: a graph may outlive the watch, and Dynamo offers no way back."""

    name = "section"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        tell_dynamo()
        # torch.compile may be imported later.
        with nullcontext() if _declared else session.each_step(self.name, tell_dynamo):
            yield
