"""Report a node to Kubernetes: a condition and an event of the node. No pod is evicted, and no node
cordoned."""

from __future__ import annotations

import datetime
import os
from typing import Any

from torchlens_perf.actions.nodes import NamedNode
from torchlens_perf.actions.targets import KUBERNETES_NAME, TIMEOUT_S, NotSentError
from torchlens_perf.run.installation import require_packages

_CONDITION, _REASON, _COMPONENT = "TorchlensSlowNode", "SlowRanks", "torchlens-perf"
_MAX_MESSAGE = 1024
"""Kubernetes' limit of an event's message."""


class Kubernetes:
    """The API server of this pod's cluster, or of the usual kubeconfig file."""

    drains, while_live, attribute = False, False, KUBERNETES_NAME

    def __init__(self) -> None:
        require_packages("--to kubernetes", ["kubernetes"], "kubernetes")
        from kubernetes import client, config

        is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            (config.load_incluster_config if is_pod else config.load_kube_config)()
        except (config.ConfigException, OSError) as error:
            raise NotSentError(f"--to kubernetes: {error}") from None
        self._api = client.CoreV1Api()

    def describe(self, node: NamedNode) -> str:
        return (
            f"set the condition {_CONDITION} of {node.name_for(KUBERNETES_NAME)}, and add an event"
        )

    def send(self, node: NamedNode) -> str:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        if KUBERNETES_NAME not in node.scheduler_names:
            raise NotSentError(f"{node.host} has no known node: set K8S_NODE_NAME in the pod")
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        name = node.name_for(KUBERNETES_NAME)
        try:
            # The default type of patch would remove all other conditions.
            self._api.patch_node_status(
                name,
                build_condition(node, now),
                _content_type="application/strategic-merge-patch+json",
                _request_timeout=TIMEOUT_S,
            )
            self._api.create_namespaced_event(
                "default", build_event(node, name, now), _request_timeout=TIMEOUT_S
            )
        except ApiException as error:
            raise NotSentError(f"HTTP status {error.status}: {error.reason}") from None
        except HTTPError as error:
            raise NotSentError(
                f"the API server cannot be reached: {type(error).__name__}"
            ) from None
        return "condition set, event added"


def build_condition(node: NamedNode, now: str) -> dict[str, Any]:
    """Return the patch of the node's status."""
    condition = {
        "type": _CONDITION,
        "status": "True",
        "reason": _REASON,
        "message": node.reason[:_MAX_MESSAGE],
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {"status": {"conditions": [condition]}}


def build_event(node: NamedNode, name: str, now: str) -> dict[str, Any]:
    """Return the event on the node. Events of nodes are in the namespace "default"."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{_COMPONENT}-", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name},
        "type": "Warning",
        "reason": _REASON,
        "message": node.reason[:_MAX_MESSAGE],
        "source": {"component": _COMPONENT, "host": os.uname().nodename},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
