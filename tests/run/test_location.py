"""Tests of a machine's location, read from files of clouds, container runtimes and Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchlens_perf.run.location import (
    MAX_CHARACTERS,
    describe_location,
    detect_location_attributes,
)

ID = "ab12" * 16


def machine(folder: Path, dmi: dict[str, str] | None = None, **proc: str) -> tuple[Path, Path]:
    (folder / "sys/class/dmi/id").mkdir(parents=True)
    (folder / "proc/self").mkdir(parents=True)
    for name, text in (dmi or {}).items():
        (folder / "sys/class/dmi/id" / name).write_text(f"{text}\n")
    for name, text in proc.items():
        (folder / "proc/self" / name).write_text(text)
    return folder / "sys", folder / "proc"


@pytest.mark.parametrize(
    ("dmi", "found"),
    [
        (
            {
                "sys_vendor": "Amazon EC2",
                "product_name": "p5.48xlarge",
                "board_asset_tag": "i-0abc",
            },
            {"cloud.provider": "aws", "host.type": "p5.48xlarge", "host.id": "i-0abc"},
        ),
        (
            {"sys_vendor": "Google", "product_name": "Google Compute Engine"},
            {"cloud.provider": "gcp"},
        ),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, {"cloud.provider": "azure"}),
        ({"chassis_asset_tag": "OracleCloud.com"}, {"cloud.provider": "oracle_cloud"}),
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge XE9680"}, {}),
        ({}, {}),
    ],
)
def test_cloud_is_detected_from_firmware_fields(
    tmp_path: Path, dmi: dict[str, str], found: dict[str, str]
) -> None:
    """A machine outside of clouds gets no attributes."""
    assert detect_location_attributes({}, *machine(tmp_path, dmi)) == found


@pytest.mark.parametrize(
    "text",
    [
        f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope",
        f"12:memory:/docker/{ID}\n0::/\n",
        f"0::/machine.slice/libpod-{ID}.scope",
    ],
)
def test_container_id_is_read_from_the_control_group_or_mounts(tmp_path: Path, text: str) -> None:
    """Mounts are read if the name of the control group is hidden."""
    assert detect_location_attributes({}, *machine(tmp_path / "a", cgroup=text)) == {
        "container.id": ID
    }
    layer = "cd34" * 16
    mounts = (
        f"699 5 0:50 / / rw - overlay overlay rw,upperdir=/var/lib/docker/overlay2/{layer}/diff\n"
        f"700 5 8:1 /var/lib/docker/containers/{ID}/hostname /etc/hostname rw - ext4 /dev/sda1 rw\n"
    )
    hidden = machine(tmp_path / "b", cgroup="0::/", mountinfo=mounts)
    assert detect_location_attributes({}, *hidden) == {"container.id": ID}


def test_users_location_attributes_override_slurms(tmp_path: Path) -> None:
    """Other attributes in OTEL_RESOURCE_ATTRIBUTES are left to the exporter."""
    slurm = {
        "SLURM_TOPOLOGY_ADDR": "core.leaf3.node12",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    nothing = machine(tmp_path)

    assert detect_location_attributes(slurm, *nothing) == {"network.switch": "leaf3"}
    assert (
        detect_location_attributes(
            {"SLURM_TOPOLOGY_ADDR": "node12", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, *nothing
        )
        == {}
    )
    told = {"OTEL_RESOURCE_ATTRIBUTES": "team=a,host.rack=r%2012, network.switch=s7 ,host.id="}
    assert detect_location_attributes({**slurm, **told}, *nothing) == {
        "network.switch": "s7",
        "host.rack": "r 12",
    }


def test_location_text_is_short_and_begins_with_switch_or_rack() -> None:
    """The text is short."""
    known = {
        "host.id": "i-0abc",
        "network.switch": "leaf3",
        "host.type": "p5.48xlarge",
        "slurm.job.id": "7",
    }

    assert describe_location(known) == "switch leaf3, instance i-0abc, p5.48xlarge"
    assert describe_location({}) == ""
    assert len(describe_location({"host.rack": "r" * 200})) == MAX_CHARACTERS
