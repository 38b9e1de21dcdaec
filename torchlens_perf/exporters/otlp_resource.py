"""Build the OpenTelemetry resources of a rank's spans and of a node's metrics."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from torchlens_perf.exporters import semantics
from torchlens_perf.run.identity import Identity
from torchlens_perf.version import VERSION

SCOPE = InstrumentationScope(semantics.SCOPE, VERSION)
_OF_A_PROCESS = (
    "process.pid", semantics.RANK, semantics.LOCAL_RANK, semantics.RESTART_COUNT, semantics.LENS_RANK,
    semantics.LENS_LOCAL_RANK,
)  # fmt: skip


def build_rank_resource(identity: Identity) -> Resource:
    """Build the resource of one process of a rank."""
    known: dict[str, Any] = {
        **_attributes_of_run(identity),
        "service.instance.id": f"{identity.host}/{identity.key}",
        semantics.RANK: identity.rank,
        semantics.LENS_RANK: identity.rank,
        semantics.RESTART_COUNT: identity.attempt,
    }
    if identity.local_rank is not None:
        known[semantics.LOCAL_RANK] = known[semantics.LENS_LOCAL_RANK] = identity.local_rank
    # The pid is unknown in a replay of records without the node's state.
    if identity.pid:
        known["process.pid"] = identity.pid
    return _make_resource(known)


def build_node_resource(identity: Identity) -> Resource:
    """Build the resource of the node, which stays the same when processes restart."""
    known = _make_resource(
        {
            **_attributes_of_run(identity),
            "service.instance.id": f"{identity.node or identity.host}/node",
        }
    )
    # Resource detectors that the user has enabled describe the sidecar's process, not the node.
    return Resource(
        {name: value for name, value in known.attributes.items() if name not in _OF_A_PROCESS}
    )


def _attributes_of_run(identity: Identity) -> dict[str, Any]:
    known = {
        "host.name": identity.host,
        semantics.RUN_ID: identity.run_id,
        semantics.WORLD_SIZE: identity.world_size,
        semantics.LENS_WORLD_SIZE: identity.world_size,
        **identity.attributes,
    }
    service = identity.attributes.get("slurm.job.name") or identity.program.removesuffix(
        ".py"
    ).removesuffix(".ipynb")
    return {**known, "service.name": service} if service else known


def _make_resource(known: dict[str, Any]) -> Resource:
    """Build a resource. OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence."""
    return Resource.create().merge(Resource(known)).merge(OTELResourceDetector().detect())
