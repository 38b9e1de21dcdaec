"""Name collective operations, and assign groups to rows of the ring's progress table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_groups
from torchlens_perf.run.ring import MAX_GROUPS

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

# Names of dtypes in Python by their names in C++.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
# Backends whose future completes when the operation ends. NCCL's future completes when the
# operation is enqueued.
_FUTURE_IS_COMPLETION = ("gloo",)


class CollectiveGroups:
    """Assigns names to operations, and rows of the ring's table to groups and pairs of peers."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def describe_for_native_tap(
        self, operator: str, group: str, dtype: str, peer: int, device: str, backend_sequence: int
    ) -> tuple[int, int, int, bool, bool]:
        """Return the description of an operation. The native tap calls this method with the GIL.

        The result is the name's id, the group's slot, the first sequence number, and two flags:
        whether the future completes when the operation ends, and whether a wait ends with the
        operation.

        device: the type of the tensors' device, such as "cpu" or "cuda". On devices other than the
        CPU, a wait only orders streams, so its end is not the operation's end.
        """
        with guard("naming a collective"):
            on_cpu = device == "cpu"
            if not on_cpu:
                self._session.metadata.device_groups.add((group, device))
            calls_back = (
                on_cpu and torch_groups.get_group_backend(group, device) in _FUTURE_IS_COMPLETION
            )
            name_id, slot = self.register_operation(
                operator, group, _DTYPES.get(dtype, dtype.lower()), peer
            )
            return name_id, slot, max(0, backend_sequence), calls_back, on_cpu
        return 0, 1 << 16, 0, False, False

    def register_operation(
        self, operator: str, group: str, dtype: str, peer: int
    ) -> tuple[int, int]:
        """Return the id of the operation's name and its slot in the table of groups.

        peer: position of a peer or a root. For an all-to-all that is split by rows, the bytes of a
        row, from which torchlens_perf/experts computes tokens. -1 for other operations.
        """
        operation = operator.partition("::")[2].strip("_")
        text = f"{operation} group={group}" + (f" dtype={dtype}" if dtype else "")
        role = (
            "peer" if is_point_to_point(operator)
            else "row" if operation == "alltoall_base"
            else "root"
        )  # fmt: skip
        if peer >= 0:
            text += f" {role}={peer}"
        row = f"{operation} group={group} peer={peer}" if role == "peer" else group
        slot = (
            MAX_GROUPS if self._session.recorder.closed else self._session.ring.add_group_row(row)
        )
        if group not in self._session.metadata.groups:
            self._session.metadata.add_group(group, *torch_groups.get_group_members(group))
        return self._session.intern(text), slot


def is_point_to_point(operator: str) -> bool:
    """Return True if an operator of the dispatcher sends or receives a message."""
    return operator.partition("::")[2].strip("_") in ("send", "recv", "recv_any_source")
