"""torch's dispatcher at BackendSelect, where collectives are tapped, by private names: see torch_private.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KEY = "BackendSelect"
_SHOWN = f"{KEY}: registered at "  # by the dispatcher, with who has done it, of the kernel that is in use


def rest_of_dispatch() -> torch._C.DispatchKeySet:
    """The dispatch keys below BackendSelect: where a tap there sends its call on to."""
    import torch

    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def owner_of_tap(operator: str) -> str:
    """Who has put the kernel there that is in use for this operator, the last one; "" where there is none.

    A path and a line, of a tool that registers in Python or C++; ours have names.
    """
    import torch

    shown = torch._C._dispatch_dump(operator).splitlines()
    return next((line.removeprefix(_SHOWN) for line in shown if line.startswith(_SHOWN)), "")


def library(namespace: str, owner: str) -> Any:
    """Has `impl(name, key, function, with_keyset)`, which puts kernels there that stay for as long as this object.

    torch.library.Library would take them away when the interpreter ends, while other threads may use them.
    """
    import torch

    return torch._C._dispatch_library("IMPL", namespace, "", owner, 0)
