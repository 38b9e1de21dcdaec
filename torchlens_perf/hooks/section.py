"""Keep Dynamo from breaking the graph at `section()` in compiled code."""

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

    Sections inside a graph have no times. The function uses a public API of torch.compiler.
    """
    global _registered
    if _registered or "torch._dynamo" not in sys.modules:
        return
    import torch

    def null_section(name: str) -> Any:
        return nullcontext()

    torch.compiler.substitute_in_graph(section, skip_signature_check=True)(null_section)
    torch.compiler.substitute_in_graph(device_section, skip_signature_check=True)(null_section)
    _registered = True


class SectionHook:
    """Hook that registers sections with Dynamo until the process ends.

    The registration is permanent: a graph may exist longer than the watch, and Dynamo has no undo.
    """

    name = "section"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        register_with_dynamo()
        # Try again once the job has imported Dynamo.
        with (
            nullcontext()
            if _registered
            else session.step_callbacks.running_if_compiled(self.name, register_with_dynamo)
        ):
            yield
