"""What the taps on collectives call an operation, and where the ring shows how far its group is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_groups
from torchlens_perf.run.ring import MAX_GROUPS

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

# How C++ names what Python calls torch.float32.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
# Backends whose future is complete when the operation is. NCCL's is when it has been enqueued.
_FUTURE_IS_COMPLETION = ("gloo",)


class Groups:
    """Names for what is issued, and a row in the ring's table of groups for each group and pair of peers."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next: dict[str, int] = {}  # sequence number of each group's next operation (the Python tap)

    def describe_native(
        self, operator: str, group: str, dtype: str, peer: int, device: str, backend_sequence: int
    ) -> tuple[int, int, int, bool, bool]:
        """For the native tap, with the GIL: name id, slot, first sequence number, whether the future tells the end, and
        whether the end of a wait does.

        device: "cpu", "cuda", ... of the tensors. On others than the CPU, a wait only orders streams: its end is not
        the operation's.
        """
        with guard("naming a collective"):
            on_cpu = device == "cpu"
            if not on_cpu:
                self._session.metadata.add_device_group(group, device)
            calls_back = on_cpu and torch_groups.backend_of_group(group, device) in _FUTURE_IS_COMPLETION
            name_id, slot = self.describe(operator, group, _DTYPES.get(dtype, dtype.lower()), peer)
            return name_id, slot, max(0, backend_sequence), calls_back, on_cpu
        return 0, 1 << 16, 0, False, False

    def describe(self, operator: str, group: str, dtype: str, peer: int) -> tuple[int, int]:
        """The name's id, and the slot in the table of groups."""
        operation = operator.partition("::")[2].strip("_")
        text = f"{operation} group={group}" + (f" dtype={dtype}" if dtype else "")
        point_to_point = operation in ("send", "recv", "recv_any_source")
        if peer >= 0:
            text += f" {'peer' if point_to_point else 'root'}={peer}"
        row = f"{operation} group={group} peer={peer}" if point_to_point else group
        slot = MAX_GROUPS if self._session.recorder.closed else self._session.ring.add_group(row)
        if group not in self._session.metadata.groups:
            self._session.metadata.add_group(group, *torch_groups.members_of_group(group))
        return self._session.intern(text), slot

    def next_sequence(self, key: str, backend_sequence: int) -> int:
        """The sequence number of the next operation of a group, or of a pair of peers."""
        sequence = self._next.get(key, max(0, backend_sequence))
        self._next[key] = sequence + 1
        return sequence
