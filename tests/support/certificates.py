"""Self-signed test certificates, made with `openssl`.

A client that trusts one file trusts only that certificate.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_CONFIGURATION = """
[ca]
default_ca=own
[own]
database=index
serial=serial
new_certs_dir=.
default_md=sha256
policy=any
x509_extensions=extensions
[any]
commonName=optional
[req]
distinguished_name=name
[name]
[extensions]
subjectAltName={names}
basicConstraints=CA:TRUE
"""


class Certificate(NamedTuple):
    """Paths of a certificate's PEM files."""

    path: Path
    key: Path


def certificate(
    folder: Path, names: str = "DNS:localhost,IP:127.0.0.1", *, expired: bool = False
) -> Certificate:
    """Create a certificate for the given names in a new folder.

    The certificate is valid for a long time, or has expired if `expired`.
    """
    folder.mkdir()
    (folder / "configuration").write_text(_CONFIGURATION.format(names=names))
    (folder / "index").touch()
    (folder / "serial").write_text("01")
    until = "20200102000000Z" if expired else "20500101000000Z"
    for command in (
        ["req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-keyout", "key", "-out", "request"],
        [
            "ca", "-batch", "-selfsign", "-in", "request", "-keyfile", "key", "-startdate", "20200101000000Z",
            "-enddate", until, "-out", "certificate", "-notext",
        ],
    ):  # fmt: skip
        command = ["openssl", *command, "-config", "configuration"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Certificate(folder / "certificate", folder / "key")
