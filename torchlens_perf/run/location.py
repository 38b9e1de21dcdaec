"""Detect the location of a rank's machine: switch, rack, Kubernetes node, container and cloud.

No network requests are made. Attributes have OpenTelemetry's names if it defines one (cloud.*,
host.*, container.id, k8s.*). A cloud is recognized by DMI fields of the firmware. Each cloud
documents these fields for identifying its instances.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from torchlens_perf.run.processes import read_kernel_text

MAX_CHARACTERS = 64
# Attributes in a location's text with their titles, from the nearest to the farthest place.
_SHOWN = (
    ("network.switch", "switch"),
    ("host.rack", "rack"),
    ("k8s.node.name", "Kubernetes node"),
    ("host.id", "instance"),
    ("host.type", ""),
    ("cloud.availability_zone", "zone"),
)
_OURS = frozenset(name for name, _ in _SHOWN)
_CONTAINER = {
    "cgroup": re.compile(r"[/-]([0-9a-f]{64})\b"),
    # The folder name distinguishes the container's id from digests of image layers.
    "mountinfo": re.compile(r"/containers/([0-9a-f]{64})/"),
}
# Providers by the chassis' asset tag.
_PROVIDERS = {"7783-7084-3265-9085-8269-3286-77": "azure", "OracleCloud.com": "oracle_cloud"}


def detect_location_attributes(
    environ: Mapping[str, str], sys: Path = Path("/sys"), proc: Path = Path("/proc")
) -> dict[str, str]:
    """Return the attributes found in the environment, the firmware and the kernel."""
    found = {
        **_detect_cloud(sys / "class/dmi/id"),
        **_detect_container(proc),
        **_read_network_switch(environ),
    }
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        name, _, value = pair.partition("=")
        if name.strip() in _OURS and value.strip():
            # Values that the user has set override detected values.
            found[name.strip()] = unquote(value.strip())
    return found


def describe_location(known: Mapping[str, str]) -> str:
    """Return the location as text, such as "switch leaf3, instance i-0abc"; "" if it is not known.

    known: attributes of a rank's Identity.
    """
    words = [f"{title} {known[name]}".strip() for name, title in _SHOWN if known.get(name)]
    return ", ".join(words)[:MAX_CHARACTERS]


def _read_network_switch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the node's switch from Slurm's topology address, such as "core.leaf3.node12".

    SLURM_TOPOLOGY_ADDR_PATTERN contains the kind of each part of SLURM_TOPOLOGY_ADDR, see srun(1).
    """
    address = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    switches = [
        part
        for part, kind in zip(address, pattern, strict=False)
        if kind in ("switch", "block") and part
    ]
    return {"network.switch": switches[-1]} if switches else {}


def _detect_cloud(dmi: Path) -> dict[str, str]:
    vendor, product = read_kernel_text(dmi / "sys_vendor"), read_kernel_text(dmi / "product_name")
    if vendor == "Amazon EC2":
        found = {"cloud.provider": "aws", "host.type": product}
        instance = read_kernel_text(dmi / "board_asset_tag")
        return {**found, "host.id": instance} if instance.startswith("i-") else found
    if product == "Google Compute Engine":
        return {"cloud.provider": "gcp"}
    provider = _PROVIDERS.get(read_kernel_text(dmi / "chassis_asset_tag"))
    return {} if provider is None else {"cloud.provider": provider}


def _detect_container(proc: Path) -> dict[str, str]:
    """Return the id of the container in which this process runs, if any.

    Docker, containerd and CRI-O use the 64 digits of the id in names of control groups or mounts.
    """
    for name, pattern in _CONTAINER.items():
        found = pattern.search(read_kernel_text(proc / "self" / name))
        if found:
            return {"container.id": found[1]}
    return {}
