"""Tests of TLS between nodes, with certificates made for the test."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sidecar.nodes.conftest import Nodes, wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no `openssl` command makes certificates"
)
NAME = "node-0.job"


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True, text=True)


def authority(folder: Path) -> Path:
    """Make the folder of a certificate authority that has one certificate for all nodes."""
    folder.mkdir()
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(
        "req",
        "-x509",
        *key,
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-subj",
        "/CN=CA of the job",
        cwd=folder,
    )
    openssl(
        "req",
        "-new",
        *key[:4],
        "-nodes",
        "-keyout",
        "tls.key",
        "-out",
        "tls.csr",
        "-subj",
        "/CN=n",
        cwd=folder,
    )
    (folder / "names").write_text(f"subjectAltName=DNS:{NAME}")
    signed = (
        "-CA",
        "ca.crt",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "names",
    )
    openssl("x509", "-req", "-in", "tls.csr", *signed, "-out", "tls.crt", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two certificate authorities: that of the job and a foreign one."""
    folder = tmp_path_factory.mktemp("certificates")
    return authority(folder / "ours"), authority(folder / "theirs")


def copy(files: Path, to: Path, *names: str) -> str:
    to.mkdir()
    for name in names:
        shutil.copy(files / name, to / name)
    return str(to)


def test_nodes_without_the_jobs_certificate_are_refused(
    nodes: Nodes, made: tuple[Path, Path], tmp_path: Path
) -> None:
    """The refused nodes have no certificate, a certificate of another authority, or no TLS."""
    ours, theirs = made
    places = dataclasses.replace(nodes.places, tls_folder=str(ours), tls_name=NAME)
    merger = nodes.start("n0", merges=True, places=places)
    other = nodes.start("n1", places=places)
    other.post({1: b"ours"})
    nodes.wait(merger, lambda: 1 in nodes.seen)
    bare = copy(ours, tmp_path / "bare", "ca.crt")
    mixed = copy(theirs, tmp_path / "mixed", "tls.crt", "tls.key")
    shutil.copy(ours / "ca.crt", Path(mixed) / "ca.crt")
    refused = [
        nodes.start(f"n{number}", places=dataclasses.replace(places, tls_folder=folder))
        for number, folder in enumerate([bare, mixed, str(theirs), ""], start=2)
    ]
    for exchange in refused:
        exchange.post({9: b"theirs"})
    for exchange in refused:
        wait_until(
            lambda exchange=exchange: any("UNAVAILABLE" in note for note in exchange.notes())
        )
    other.post({1: b"ours again"})
    nodes.wait(merger, lambda: len(nodes.seen[1]) == 2)

    assert nodes.seen == {1: [b"ours", b"ours again"]}
    assert set(nodes.contacts) == {"n1"}


def test_nodes_need_only_ca_crt_if_node_0_has_no_ca_crt(
    nodes: Nodes, made: tuple[Path, Path], tmp_path: Path
) -> None:
    """Nodes refuse a node 0 with another name."""
    ours, _ = made
    of_node_0 = dataclasses.replace(
        nodes.places, tls_folder=copy(ours, tmp_path / "n0", "tls.crt", "tls.key")
    )
    of_others = dataclasses.replace(
        nodes.places, tls_folder=copy(ours, tmp_path / "others", "ca.crt"), tls_name=NAME
    )
    merger = nodes.start("n0", merges=True, places=of_node_0)
    other = nodes.start("n1", places=of_others)
    other.post({1: b"x"})
    nodes.wait(merger, lambda: 1 in nodes.seen)
    stranger = nodes.start("n2", places=dataclasses.replace(of_others, tls_name=""))
    wait_until(lambda: any("UNAVAILABLE" in note for note in stranger.notes()))

    assert set(merger.collect_posts().nodes) == {"n1"}


def test_missing_certificate_files_are_noted(nodes: Nodes, tmp_path: Path) -> None:
    """Without the certificate files, no node sends data without TLS instead."""
    merger = nodes.start(
        "n0", merges=True, places=dataclasses.replace(nodes.places, tls_folder=str(tmp_path / "no"))
    )
    wait_until(lambda: any("tls.key" in note for note in merger.notes()))

    assert list(tmp_path.glob("exchange-*")) == []
