"""The live page's server in a separate process, and clients that use plain HTTP."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from tests.support.processes import ROOT, clean_environ
from torchlens_perf.serve.access import TOKEN_HEADER

# The limit is long, because the processes that read runs are slow on a busy machine.
ENDS_WITHIN_S = 240
# Readers of the lowest priority get no CPU as long as other tests keep all busy.
KEEP_PRIORITY = Path(__file__).with_name("keep_priority")
IS_READ = "<h1>Reading</h1>"


class Answer:
    """A response of the server."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        self.body = answer.read()

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ClientWithoutToken:
    """A client that knows the address but not the token."""

    def __init__(self, address: str) -> None:
        self.address = urlsplit(address)
        self.host = self.address.netloc
        self.token = ""

    def ask(self, path: str, method: str = "GET", body: str = "", **headers: str) -> Answer:
        """Send a request with the path unchanged.

        Header names have underscores for hyphens, and "" omits a default header.
        """
        given = {"Host": self.host, TOKEN_HEADER: self.token}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self.host, timeout=ENDS_WITHIN_S)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value:
                    connection.putheader(name, value)
            if method == "POST":
                connection.putheader("Content-Length", str(len(body)))
                connection.putheader("Content-Type", "application/x-www-form-urlencoded")
            connection.endheaders(body.encode() or None)
            return Answer(connection.getresponse())
        finally:
            connection.close()


class Viewer(ClientWithoutToken):
    """A client with the token from the printed address."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.token = self.address.fragment.removeprefix("token=")
        assert self.ask("/api/counts").status == 200

    def json(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status == 200, (path, answer.text)
        return answer.json

    def list(self) -> str:
        """Return the list of runs once all shown runs are read."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while "Still reading" in (text := self.ask("/").text):
            assert time.monotonic() < deadline_s, "they were not read"
            time.sleep(0.2)
        return text

    def page(self, run: str) -> str:
        """Return the page of a run."""
        answer = self.answer_of_page(f"/runs/{run}/", accept_encoding="gzip")
        assert answer.status == 200, answer.text
        return gzip.decompress(answer.body).decode()

    def answer_of_page(self, path: str, **headers: str) -> Answer:
        """Return the response once the run is read.

        Before that, the page says that the run is being read.
        """
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while (answer := self.ask(path, **headers)).status == 200:
            if answer.headers.get("content-encoding") == "gzip" or IS_READ not in answer.text:
                break
            assert time.monotonic() < deadline_s, "it was not read"
            time.sleep(0.2)
        return answer

    def comparison(self, query: str, **headers: str) -> Answer:
        """Return the page that compares runs once they are read."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while (answer := self.ask(f"/compare?{query}", **headers)).status in (202, 503):
            assert time.monotonic() < deadline_s, "the runs were not read"
            time.sleep(0.2)
        return answer

    def post(self, path: str, **fields: str) -> Answer:
        return self.ask(f"{path}?{urlencode(fields)}", "POST", Origin=f"http://{self.host}")

    def poll_changes(self, run: str) -> ChangePoller:
        """Return a poller of changes to a run. The poller returns each change once."""
        return ChangePoller(self, f"/runs/{run}/api/news")


class ChangePoller:
    """Polls for changes as the page's script does."""

    def __init__(self, viewer: Viewer, path: str) -> None:
        self._viewer, self._path = viewer, path
        self._last: dict[str, Any] = {"version": "", "is_live": True, "problem": ""}

    def next(self) -> dict[str, Any]:
        """Wait for the next change."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while (news := self._viewer.json(self._path)) == self._last:
            assert time.monotonic() < deadline_s, "nothing has changed"
            time.sleep(0.1)
        self._last = news
        return dict(news)

    def wait_for(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the page's data has changed to the given values."""
        while True:
            news = self.next()
            if all(news[key] == value for key, value in wanted.items()):
                return news


class PageServer:
    """One server, whose process ends with the context."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        cwd: Path = ROOT,
        script: str = "",
        lowers_priority: bool = False,
        **environment: str,
    ) -> None:
        """Set up the server.

        script: replaces `-m torchlens_perf`. lowers_priority: True for the priorities that users
        get, with which a busy machine delays the server for minutes.
        """
        self.folder = folder
        command = [
            sys.executable,
            *([script] if script else ["-m", "torchlens_perf"]),
            "serve",
            str(folder),
            "--quiet",
            *arguments,
        ]
        environ = {**clean_environ(environment), "PYTHONPATH": _python_path(lowers_priority)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environ
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            _, said = self.process.communicate()
            raise AssertionError(f"the server has not begun: {said}")

    def viewer(self) -> Viewer:
        return Viewer(self.address)

    def client_without_token(self) -> ClientWithoutToken:
        return ClientWithoutToken(self.address)

    def children(self) -> list[int]:
        """Return the pids of the processes that read runs."""
        pids = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return [int(pid) for pid in pids]

    def read_stderr(self) -> str:
        """Return the server's stderr once the server has ended."""
        _, text = self.process.communicate(timeout=ENDS_WITHIN_S)
        return str(text)

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def _python_path(lowers_priority: bool) -> str:
    """Return a PYTHONPATH with this checkout before the caller's entries."""
    first = [str(ROOT)] if lowers_priority else [str(ROOT), str(KEEP_PRIORITY)]
    return os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH", "")])])


def links(page: str, prefix: str) -> list[str]:
    """Return the addresses in a page that begin with the prefix."""
    return [found for found in re.findall(r'href="([^"]*)"', page) if found.startswith(prefix)]
