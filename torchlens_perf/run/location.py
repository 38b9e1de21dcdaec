"""Location and owner of a rank's machine: switch or rack, scheduler's node, container, cloud.

No network requests are made. Names are OpenTelemetry's where it defines one (cloud.*, host.*,
container.id, k8s.*). Clouds are recognized by DMI fields of the firmware that their documentation
on identifying instances names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from torchlens_perf.run.processes import read_kernel_text

MAX_CHARACTERS = 64
# Attributes that people look for, from the nearest to the farthest, with their titles in sentences.
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
    # Mounts of image layers look similar but have another path.
    "mountinfo": re.compile(r"/containers/([0-9a-f]{64})/"),
}
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


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
            # Values set by the user override detected ones.
            found[name.strip()] = unquote(value.strip())
    return found


def describe_location(known: Mapping[str, str]) -> str:
    """Return the location as text, such as "switch leaf3, instance i-0abc"; "" if it is not known.

    known: attributes of an identity.
    """
    words = [f"{title} {known[name]}".strip() for name, title in _SHOWN if known.get(name)]
    return ", ".join(words)[:MAX_CHARACTERS]


def _read_network_switch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the node's switch from Slurm's path, such as "core.leaf3.node12".

    A second variable has the kind of each part.

    Documentation: srun(1), SLURM_TOPOLOGY_ADDR, SLURM_TOPOLOGY_ADDR_PATTERN.
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
    if read_kernel_text(dmi / "chassis_asset_tag") == _AZURE_TAG:
        return {"cloud.provider": "azure"}
    if read_kernel_text(dmi / "chassis_asset_tag") == "OracleCloud.com":
        return {"cloud.provider": "oracle_cloud"}
    return {}


def _detect_container(proc: Path) -> dict[str, str]:
    """Return the container's id.

    Docker, containerd and CRI-O put its 64 digits into the names of control groups or mounts.
    """
    for name, pattern in _CONTAINER.items():
        found = pattern.search(read_kernel_text(proc / "self" / name))
        if found:
            return {"container.id": found[1]}
    return {}
