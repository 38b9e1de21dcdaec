"""Receivers of reports on nodes: Slurm, a list of excluded nodes, a webhook. Others have own modules."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Protocol

from torchlens_perf.actions.nodes import NamedNode
from torchlens_perf.errors import TorchlensPerfError, require

TIMEOUT_S = 10.0
_MAX_REASON = 300
SLURM_NAME, KUBERNETES_NAME = "slurm.node.name", "k8s.node.name"


class NotSentError(TorchlensPerfError):
    """The report of a node was not sent. The message is the reason."""


class Target(Protocol):
    """One receiver of reports on nodes."""

    drains: bool
    """True if the node gets no new work then."""
    while_live: bool
    """True if it drains while the job runs, too."""
    attribute: str
    """Attribute with the node's name here; "" for its host name."""

    def describe(self, node: NamedNode) -> str:
        """Return what send() does, in one line. Raise NotSentError if it cannot be done from here."""

    def send(self, node: NamedNode) -> str:
        """Report a node, and return the answer in one line. Raise NotSentError or OSError."""


class Slurm:
    """The comment of a node in Slurm; or its state DRAIN with the reason, if it drains. Slurm forgets the
    reason of a node that is not drained."""

    while_live, attribute = False, SLURM_NAME

    def __init__(self, *, drains: bool) -> None:
        require(shutil.which("scontrol") is not None, "--to slurm: scontrol is not in PATH")
        self.drains = drains

    def describe(self, node: NamedNode) -> str:
        return " ".join(self._arguments(node))

    def send(self, node: NamedNode) -> str:
        done = subprocess.run(
            self._arguments(node), capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise NotSentError((done.stderr or done.stdout).strip())
        return done.stdout.strip()

    def _arguments(self, node: NamedNode) -> list[str]:
        reason = node.reason[:_MAX_REASON]
        what = ["State=DRAIN", f"Reason={reason}"] if self.drains else [f"Comment={reason}"]
        return ["scontrol", "update", f"NodeName={node.name_for(SLURM_NAME)}", *what]


class ExclusionList:
    """A file of node names, which `sbatch --exclude=./FILE` and `srun --exclude=./FILE` read."""

    drains, while_live, attribute = False, False, SLURM_NAME

    def __init__(self, path: Path) -> None:
        require(path.parent.is_dir(), f"--to exclude={path}: there is no folder {path.parent}")
        self._path = path

    def describe(self, node: NamedNode) -> str:
        return f"add {node.name_for(SLURM_NAME)} to {self._path}"

    def send(self, node: NamedNode) -> str:
        name = node.name_for(SLURM_NAME)
        with self._path.open("a+") as file:
            file.seek(0)
            if name not in file.read().split():
                file.write(f"{name}\n")
        return f"{name} is in the list"


class Webhook:
    """An address that takes alerts as Prometheus' Alertmanager sends them to webhooks (version 4)."""

    drains, while_live, attribute = False, False, ""

    def __init__(self, url: str) -> None:
        require(
            url.startswith(("http://", "https://")),
            f"--to webhook={url}: this is no http:// or https:// address",
        )
        self._url = url

    def describe(self, node: NamedNode) -> str:
        return f"POST a firing alert on {node.host} to {self._url}"

    def send(self, node: NamedNode) -> str:
        import requests

        try:
            # A redirect could send it to another server.
            answer = requests.post(
                self._url, json=build_alerts(node), timeout=TIMEOUT_S, allow_redirects=False
            )
        except requests.RequestException as error:
            raise NotSentError(f"{self._url} cannot be reached: {type(error).__name__}") from None
        if not answer.ok or answer.is_redirect:
            raise NotSentError(f"HTTP status {answer.status_code}")
        return f"HTTP status {answer.status_code}"


def build_alerts(node: NamedNode) -> dict[str, Any]:
    """Return the body of Alertmanager's webhook for one firing alert."""
    labels = {
        "alertname": "TorchlensSlowNode",
        "node": node.host,
        "run": node.run,
        "kind": node.kind,
        "severity": "warning",
    }
    group = {name: labels[name] for name in ("alertname", "node")}
    key = hashlib.sha256(json.dumps(labels, sort_keys=True).encode()).hexdigest()[:16]
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    alert = {
        "status": "firing",
        "labels": labels,
        "annotations": {"summary": node.text},
        "startsAt": node.since or now,
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "",
        "fingerprint": key,
    }
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="TorchlensSlowNode", node="{node.host}"}}',
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "torchlens_perf",
        "groupLabels": group,
        "commonLabels": labels,
        "commonAnnotations": alert["annotations"],
        "externalURL": "",
        "alerts": [alert],
    }
