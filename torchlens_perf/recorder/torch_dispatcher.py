"""torch's dispatcher at BackendSelect, where collectives are tapped.

Uses private names (torch_private.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KEY = "BackendSelect"
_SHOWN = f"{KEY}: registered at "  # The dispatcher's text before the owner of the kernel in use.


def get_remaining_keys() -> torch._C.DispatchKeySet:
    """Return the dispatch keys below BackendSelect, to which a tap passes its call on."""
    import torch

    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def find_kernel_owner(operator: str) -> str:
    """Return who registered the kernel in use for this operator; "" without one.

    The owner is a path and line of code. Kernels of this package have names.
    """
    import torch

    shown = torch._C._dispatch_dump(operator).splitlines()
    return next((line.removeprefix(_SHOWN) for line in shown if line.startswith(_SHOWN)), "")


def create_library(namespace: str, owner: str) -> Any:
    """Return an object with `impl(name, key, function, with_keyset)`. Its kernels stay as long as
    the object.

    torch.library.Library would remove them when the interpreter ends, while other threads may use
    them.
    """
    import torch

    return torch._C._dispatch_library("IMPL", namespace, "", owner, 0)
