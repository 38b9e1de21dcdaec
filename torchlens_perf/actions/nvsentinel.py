"""Report a node to NVSentinel's platform connector by gRPC on its Unix socket.

Source of names and numbers: NVSentinel, data-models/protobufs/health_event.proto.
"""

from __future__ import annotations

import time
from typing import Any

from torchlens_perf.actions.nodes import NamedNode
from torchlens_perf.actions.targets import KUBERNETES_NAME, TIMEOUT_S, NotSentError

_METHOD = "/datamodels.PlatformConnector/HealthEventOccurredV1"
_FIELDS = {
    "version": (1, "uint32"), "agent": (2, "string"), "componentClass": (3, "string"),
    "checkName": (4, "string"), "isFatal": (5, "bool"), "message": (7, "string"),
    "recommendedAction": (8, "int32"), "nodeName": (13, "string"), "processingStrategy": (16, "int32"),
}  # fmt: skip
"""The fields of an event that are sent, with number and type. On the wire, enums are as int32."""
_NO_ACTION, _CONTACT_SUPPORT = 0, 5
_REMEDIATE, _STORE_ONLY = 1, 2


class NVSentinel:
    """NVSentinel on this node. Events are stored only, or quarantine the node if it drains."""

    while_live, attribute = False, KUBERNETES_NAME

    def __init__(self, socket: str, *, drains: bool) -> None:
        self._socket, self.drains = socket, drains

    def describe(self, node: NamedNode) -> str:
        what = "quarantines the node" if self.drains else "is stored only"
        return f"a health event on {node.name_for(KUBERNETES_NAME)} that {what}"

    def send(self, node: NamedNode) -> str:
        import grpc

        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            call = channel.unary_unary(_METHOD)
            try:
                call(self.encode(node), timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                raise NotSentError(f"{error.code().name}: {error.details()}") from None
        return "accepted"

    def encode(self, node: NamedNode) -> bytes:
        """Return a message HealthEvents with one event."""
        events = _build_message_class()(version=1)
        events.events.add(
            version=1,
            agent="torchlens-perf",
            componentClass="Node",
            checkName="TorchlensSlowNode",
            isFatal=self.drains,
            message=node.reason,
            recommendedAction=_CONTACT_SUPPORT if self.drains else _NO_ACTION,
            nodeName=node.name_for(KUBERNETES_NAME),
            processingStrategy=_REMEDIATE if self.drains else _STORE_ONLY,
            generatedTimestamp={"seconds": int(time.time())},
        )
        return bytes(events.SerializeToString())


def _build_message_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

    event = [
        {"name": name, "number": number, "label": 1, "type": f"TYPE_{kind.upper()}"}
        for name, (number, kind) in _FIELDS.items()
    ]
    stamp = {
        "name": "generatedTimestamp", "number": 12, "label": 1, "type": "TYPE_MESSAGE",
        "type_name": ".google.protobuf.Timestamp",
    }  # fmt: skip
    events = {
        "name": "events", "number": 2, "label": 3, "type": "TYPE_MESSAGE",
        "type_name": ".datamodels.HealthEvent",
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(
        name="health_event",
        package="datamodels",
        syntax="proto3",
        dependency=["google/protobuf/timestamp.proto"],
        message_type=[
            {"name": "HealthEvent", "field": [*event, stamp]},
            {"name": "HealthEvents", "field": [event[0], events]},
        ],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("datamodels.HealthEvents"))
