"""The Kubernetes manifests are valid and consistent with each other and with the code.

Resources of operators (PyTorchJob, PodMonitor, PrometheusRule) have no schemas. For such resources,
only pod templates and references are checked.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.prometheus_server import DEPLOY, MISSING, RULES
from torchlens_perf.commands.cli import main
from torchlens_perf.config import from_environment
from torchlens_perf.run.identity import _ATTRIBUTES

_REASON = "is not in this environment: make test-prometheus installs it"
yaml = pytest.importorskip("yaml", reason=f"PyYAML {_REASON}")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason=f"kubernetes-validate {_REASON}"
)
FOLDER = DEPLOY / "kubernetes"
VERSIONS = ["1.31", kubernetes_validate.latest_version()]


def documents(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]


def pods(name: str) -> list[dict[str, Any]]:
    """Return the pod templates of a file's jobs."""
    found = []
    for each in documents(name):
        if each["kind"] == "Job":
            found.append(each["spec"]["template"])
        if each["kind"] == "PyTorchJob":
            found += [
                replica["template"] for replica in each["spec"]["pytorchReplicaSpecs"].values()
            ]
    return found


def as_template(pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "of-an-operator"},
        "template": pod,
    }


JOBS = ["training-job.yaml", "pytorch-job.yaml"]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_resources_match_their_schemas(version: str) -> None:
    """Resources of Kubernetes itself are strictly valid.

    The test also detects an invalid resource.
    """
    valid = [*documents("training-job.yaml"), *documents("network-policy.yaml")]
    valid += [as_template(pod) for name in JOBS for pod in pods(name)]
    assert [each["kind"] for each in valid] == [
        "Service",
        "Job",
        "NetworkPolicy",
        *["PodTemplate"] * 3,
    ]
    for each in valid:
        kubernetes_validate.validate(each, version, strict=True)
        wrong = copy.deepcopy(each)
        pod = wrong.get("template") or wrong["spec"].get("template")
        (pod["spec"]["containers"][0] if pod else wrong["spec"])["nonsense"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_port_is_the_same_in_all_manifests(name: str) -> None:
    """The port is in the setting, the container, the annotation, the monitor and the policy."""
    (monitor,) = documents("pod-monitor.yaml")
    (policy,) = documents("network-policy.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods(name):
        (container,) = pod["spec"]["containers"]
        (port,) = container["ports"]
        variables = {each["name"]: each.get("value", "") for each in container["env"]}
        ours = {key: value for key, value in variables.items() if key.startswith("TORCHLENS_PERF")}
        assert from_environment(ours)["prometheus"] == f"0.0.0.0:{port['containerPort']}"
        assert {key for key in variables if key.startswith("K8S_")} <= set(_ATTRIBUTES.values())
        assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
        assert policy["spec"]["ingress"][1]["ports"][0]["port"] == port["containerPort"]
        assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
        for selector in (monitor["spec"]["selector"], policy["spec"]["podSelector"]):
            assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        mounted = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert variables["TORCHLENS_PERF_DIR"] in mounted


def test_prometheus_rule_has_the_alerts_of_the_alerts_file() -> None:
    """The operator's resource has the groups of alerts.yaml."""
    (rule,) = documents("prometheus-rule.yaml")
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


@pytest.mark.skipif(shutil.which("promtool") is None, reason=MISSING)
def test_scrape_config_relabels_pods(tmp_path: Path) -> None:
    """The pods are described in the same way as by Prometheus' service discovery.

    Prometheus in Debian is built without Kubernetes.
    """
    meta = "__meta_kubernetes_"
    pod = {
        f"{meta}pod_annotation_prometheus_io_scrape": "true", f"{meta}pod_annotation_prometheus_io_port": "9464",
        f"{meta}pod_phase": "Running", f"{meta}pod_container_port_name": "metrics", f"{meta}pod_ip": "10.0.0.7",
        f"{meta}namespace": "ml", f"{meta}pod_name": "training-0-x",
    }  # fmt: skip
    others = [
        {**pod, f"{meta}pod_phase": "Succeeded"}, {**pod, f"{meta}pod_container_port_name": "rendezvous"},
        {**pod, f"{meta}pod_annotation_prometheus_io_scrape": "false"},
    ]  # fmt: skip
    described = [{"targets": ["10.0.0.7:1"], "labels": labels} for labels in (pod, *others)]
    (tmp_path / "pods.json").write_text(json.dumps(described))
    config = (FOLDER / "scrape-config.yaml").read_text()
    discovery = "    kubernetes_sd_configs:\n      - role: pod\n"
    assert discovery in config
    path = tmp_path / "prometheus.yml"
    path.write_text(
        config.replace(discovery, f"    file_sd_configs:\n      - files: [{tmp_path}/pods.json]\n")
    )
    command = ["promtool", "check", "service-discovery", "--timeout=3s", str(path), "training"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = [labels for each in json.loads(done.stdout) if (labels := each.get("labels"))]
    assert [(each["__address__"], each["pod"], each["namespace"]) for each in kept] == [
        ("10.0.0.7:9464", "training-0-x", "ml")
    ]


def test_deploy_files_command_keeps_changed_files_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command can be repeated."""
    out = tmp_path / "out"
    assert main(["deploy-files", "--out", str(out)]) == 0
    written = capsys.readouterr().out.splitlines()
    assert len(written) == len([path for path in DEPLOY.rglob("*") if path.is_file()]) > 10
    assert (out / "prometheus" / "alerts.yaml").read_text() == RULES.read_text()
    assert (out / "slurm" / "epilog.sh").stat().st_mode & 0o111
    assert main(["deploy-files", "--out", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    (out / "prometheus" / "alerts.yaml").write_text("mine")
    assert main(["deploy-files", "--out", str(out)]) == 2
    assert "prometheus/alerts.yaml. --force replaces them" in capsys.readouterr().err
    assert (out / "prometheus" / "alerts.yaml").read_text() == "mine"
    assert main(["deploy-files", "--out", str(out), "--force", "--quiet"]) == 0
    assert (out / "prometheus" / "alerts.yaml").read_text() == RULES.read_text()
    (tmp_path / "file").write_text("")
    assert main(["deploy-files", "--out", str(tmp_path / "file")]) == 2
    assert sys.exc_info() == (None, None, None)
