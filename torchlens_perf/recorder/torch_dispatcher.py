"""Use torch's dispatcher at the key BackendSelect, where collectives are tapped.

The functions use private names of torch (torch_private.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KEY = "BackendSelect"
_SHOWN = f"{KEY}: registered at "  # The dispatcher's text before the owner of the kernel in use.


def get_remaining_keys() -> torch._C.DispatchKeySet:
    """Return the dispatch keys below BackendSelect, to which a tap forwards calls."""
    import torch

    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def find_kernel_owner(operator: str) -> str:
    """Return the owner of the operator's kernel at BackendSelect, or "" without a kernel.

    The owner is a path and line of code, or a name for kernels of this package.
    """
    import torch

    shown = torch._C._dispatch_dump(operator).splitlines()
    return next((line.removeprefix(_SHOWN) for line in shown if line.startswith(_SHOWN)), "")


def create_library(namespace: str, owner: str) -> Any:
    """Create a library, whose `impl(name, key, function, with_keyset)` registers a kernel.

    torch.library.Library would remove the kernels when the interpreter exits, while other threads
    may still use them.
    """
    import torch

    return torch._C._dispatch_library("IMPL", namespace, "", owner, 0)
