"""The server's process: start, output, end, and a disk that does not respond."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.failing_calls import kill_all_at_end, library
from tests.support.leftovers import eventually
from tests.support.long import long
from tests.support.page_server import ENDS_WITHIN_S, IS_READ, ClientWithoutToken, PageServer
from tests.support.processes import ROOT, clean_environ
from torchlens_perf.run.installation import build_install_command

pytestmark = pytest.mark.distributed


def serve(
    *arguments: str, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command for a server that fails to start."""
    return subprocess.run(
        [sys.executable, "-m", "torchlens_perf", "serve", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=ENDS_WITHIN_S, env=clean_environ(environment),
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_server_at_once(runs: Path, number: signal.Signals) -> None:
    """The server prints nothing and leaves no process."""
    with PageServer(runs) as server:
        viewer = server.viewer()
        viewer.poll_changes("done").next()
        readers = server.children()
        assert readers
        server.process.send_signal(number)
        assert server.process.wait(ENDS_WITHIN_S) == 0
        assert server.read_stderr() == ""
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in readers))


def test_server_has_a_low_priority_and_its_readers_the_lowest(runs: Path) -> None:
    with PageServer(runs, lowers_priority=True) as server:
        server.viewer().page("done")
        priorities = [
            os.getpriority(os.PRIO_PROCESS, pid) for pid in (server.process.pid, *server.children())
        ]
    assert priorities[0] >= 10
    assert set(priorities[1:]) == {19}


def test_killed_server_leaves_no_reader_process(runs: Path) -> None:
    with PageServer(runs) as server:
        server.viewer().page("done")
        readers = server.children()
        server.process.kill()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in readers))


def test_server_listens_on_loopback_by_default(runs: Path) -> None:
    """Each start uses a free port and a new token."""
    with PageServer(runs) as server, PageServer(runs) as other:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{43}", server.address)
        assert server.address.partition("token")[2] != other.address.partition("token")[2]
        port = server.client_without_token().address.port
        listening = f"{port:04X} 00000000:0000 0A"
        found = [
            line for line in Path("/proc/net/tcp").read_text().splitlines() if listening in line
        ]
        assert [line.split()[1].partition(":")[0] for line in found] == ["0100007F"]


def test_stderr_has_the_number_of_runs_and_how_to_end_the_server(runs: Path) -> None:
    """stdout has only the address, for scripts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchlens_perf", "serve", str(runs)],
        cwd=ROOT, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://")
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=ENDS_WITHIN_S)
    assert (out, process.returncode) == ("", 0)
    assert said == f"torchlens-perf: 1 run in {runs}; Ctrl-C ends the server\n"


def test_reader_processes_do_not_import_modules_from_the_current_folder(
    runs: Path, tmp_path: Path
) -> None:
    """The folder may have files with the names of standard modules."""
    for name in ("pickle", "queue", "random", "types", "anyio", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    script = tmp_path / "bin" / "start.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom torchlens_perf.commands.cli import main\nif __name__ == '__main__':"
        " sys.exit(main())\n"
    )
    with PageServer(runs, cwd=tmp_path, script=str(script)) as server:
        assert server.viewer().page("done")


def test_remote_access_needs_two_options(runs: Path) -> None:
    """With both options the server prints a warning, and accepts the names of this host."""
    with PageServer(runs, "--host", "0.0.0.0", "--allow-remote") as server:
        assert server.client_without_token().address.hostname == socket.gethostname().lower()
        port = server.client_without_token().address.port
        stranger = ClientWithoutToken(server.address.replace(socket.gethostname(), "127.0.0.1"))
        for host in ("127.0.0.1", socket.gethostname()):
            assert stranger.ask("/api/counts", Host=f"{host}:{port}").status == 403
        assert stranger.ask("/", Host="evil.example").status == 421
        server.process.terminate()
        said = server.read_stderr()
    assert said.count("\n") == 1
    assert "can be reached from other machines" in said


def test_invalid_arguments_fail_with_one_line_and_exit_code_2(runs: Path, tmp_path: Path) -> None:
    """Examples are a used port, a missing folder, and a public address without its option."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, word in (
            ([str(runs), "--port", str(taken.getsockname()[1])], "--port 0 selects a free port"),
            ([str(runs), "--port", "70000"], "from 0 to 65535"),
            ([str(tmp_path / "none")], "torchlens-perf serve DIR"),
            ([str(runs), "--host", "0.0.0.0"], "--allow-remote"),
            ([str(runs), "--host", "no.such.host.invalid", "--allow-remote"], "cannot listen on"),
        ):
            done = serve(*arguments)
            assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (
                2,
                "",
                1,
            ), done.stderr
            assert word in done.stderr
    assert "there is no folder torchlens-perf" in serve(folder=tmp_path).stderr
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('starlette', 'uvicorn'): sys.modules[name] = None\nimport"
        " importlib.util as util\nfind = util.find_spec\nutil.find_spec = lambda name, *rest: None"
        " if name in ('starlette', 'uvicorn') else find(name, *rest)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = serve(str(runs), PYTHONPATH=path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert build_install_command("serve") in done.stderr


def test_invalid_http_is_refused_without_output(runs: Path) -> None:
    """The server continues to run."""
    with PageServer(runs) as server:
        viewer = server.viewer()
        host, port = viewer.host.split(":")
        for text in (
            b"\x00\xff\x00\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"A" * 100_000,
        ):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), timeout=60) as connection,
            ):
                connection.sendall(text)
                connection.shutdown(socket.SHUT_WR)
                answer = http.client.HTTPResponse(connection)
                with contextlib.suppress(http.client.HTTPException):
                    answer.begin()
                    assert answer.status >= 400
        assert viewer.ask("/").status == 200
        server.process.terminate()
        assert server.read_stderr() == ""


# -- a disk that does not respond


@pytest.fixture
def hanging(tmp_path: Path, runs: Path) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """Return a folder of runs, a file, and an environment.

    Reads of all runs except "well" hang while the file exists.
    """
    folder, flag = tmp_path / "runs", tmp_path / "hangs"
    for name in ("well", "stuck", "stuck-too"):
        shutil.copytree(runs / "done", folder / name)
    with kill_all_at_end(str(flag)):
        yield folder, flag, {
            "LD_PRELOAD": str(library()), "FAILING_PATHS": str(folder / "stuck"), "FAILING_WITH": "hang",
            "FAILING_WHILE": str(flag),
        }  # fmt: skip


@pytest.mark.slow
def test_hanging_disk_affects_only_its_run(hanging: tuple[Path, Path, dict[str, str]]) -> None:
    """Viewers of that run receive an error, while other runs and the list are served.

    The run is served again when the disk responds.
    """
    folder, flag, environment = hanging
    with PageServer(folder, **environment) as server:
        viewer = server.viewer()
        assert viewer.page("well")
        news = viewer.poll_changes("stuck")
        news.next()
        flag.touch()
        event = news.next()
        assert "the disk did not answer within 5 s" in event["problem"]
        assert viewer.page("well")
        assert viewer.ask("/").status == 200
        # The page is the same as before.
        assert viewer.page("stuck")
        assert IS_READ in viewer.ask("/runs/stuck-too/").text
        assert eventually(lambda: viewer.ask("/runs/stuck-too/").status == 503)
        flag.unlink()
        assert news.wait_for(problem="")["version"] == event["version"]
        flag.touch()
        server.process.terminate()
        assert server.process.wait(ENDS_WITHIN_S) == 0
        assert server.read_stderr() == ""


@pytest.mark.parametrize("error", [errno.EIO, *long(errno.ESTALE, errno.EACCES)])
def test_disk_error_is_shown_in_list_and_page(
    hanging: tuple[Path, Path, dict[str, str]], error: int
) -> None:
    folder, flag, environment = hanging
    flag.touch()
    with PageServer(folder, **{**environment, "FAILING_WITH": str(error)}) as server:
        viewer = server.viewer()
        assert viewer.ask("/").text.count('href="runs/') == 3
        assert eventually(lambda: os.strerror(error) in viewer.ask("/").text)
        assert eventually(lambda: viewer.ask("/runs/stuck/").status == 503)
        assert os.strerror(error) in viewer.ask("/runs/stuck/").text
        assert viewer.page("well")
