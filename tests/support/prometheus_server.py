"""A real Prometheus server on loopback with the alert rules of this package.

The server stores its data in a given folder and ends with its context.
"""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT
from tests.support.servers import Server, free_port, wait_for

DEPLOY = ROOT / "torchlens_perf" / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
MISSING = "there is no prometheus here: make test-prometheus installs Debian's (as root)"
IS_THERE = shutil.which("prometheus") is not None and shutil.which("promtool") is not None


class Prometheus:
    """A Prometheus that runs inside the context and scrapes every second."""

    def __init__(self, folder: Path, *targets: str, scrape_configs: str = "") -> None:
        """Set up the server. `targets` are addresses such as "127.0.0.1:9464".

        `scrape_configs` in the form of prometheus.yml replaces `targets`.
        """
        self._folder, self._port = folder, free_port()
        given = ", ".join(f'"{target}"' for target in targets)
        scraped = (
            scrape_configs
            or f"  - job_name: training\n    static_configs:\n      - targets: [{given}]\n"
        )
        self.config = folder / "prometheus.yml"
        self.config.write_text(
            "global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\n  evaluation_interval: 1s\n"
            f"rule_files: ['{RULES}']\nscrape_configs:\n{scraped}"
        )

    def __enter__(self) -> Prometheus:
        command = [
            "prometheus", f"--config.file={self.config}", f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}", "--enable-feature=exemplar-storage", "--log.level=warn",
        ]  # fmt: skip
        self._server = Server(command, self._folder, self._is_ready)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def api(self, path: str, **query: str) -> Any:
        """Return the data of /api/v1/PATH.

        Raises AssertionError with the message if a query is invalid.
        """
        address = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Return the current labels and values of an expression."""
        found = self.api("query", query=expression)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    def firing(self) -> dict[str, Any]:
        """Return the firing alerts by name."""
        alerts = self.api("alerts")["alerts"]
        return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}

    def wait_for(self, found: Callable[[], Any], timeout_s: float) -> Any:
        """Poll until the function's result is true, and return the result."""
        answer = wait_for(found, timeout_s)
        assert answer, f"alerts: {self.api('alerts')}; targets: {self.api('targets')}"
        return answer

    def _is_ready(self) -> bool:
        address = f"http://127.0.0.1:{self._port}/-/ready"
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
