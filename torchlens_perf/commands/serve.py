"""`torchlens-perf serve`: show runs as live web pages, on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.commands.command import Command, argument, print_note
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import printable, require
from torchlens_perf.run.installation import require_packages

_NEEDS = ("starlette", "uvicorn", "anyio")


def _run_serve(options: argparse.Namespace) -> int:
    """Run the server until Ctrl-C, then return 0. Raises ConfigError or RunStoreError."""
    require_packages("serve", _NEEDS, "serve")
    from torchlens_perf.serve import server as servers
    from torchlens_perf.serve.app import Server
    from torchlens_perf.store.run_folders import find_runs, is_run

    is_open = not servers.is_loopback(options.host)
    require(
        options.allow_remote or not is_open,
        f"--host {options.host} can be reached from other machines: add --allow-remote to allow"
        " that",
    )
    require(0 <= options.port < 1 << 16, f"--port must be from 0 to 65535, got {options.port}")
    folder = _choose_folder(options.folder)
    with servers.open_listening_socket(options.host, options.port) as listening:
        with Progress("looking for runs", quiet=options.quiet) as progress:
            found = find_runs(folder, progress)
        if is_open:
            print(
                f"torchlens-perf: {options.host} can be reached from other machines, and traffic"
                " is not encrypted: anyone who sees the address or a request on the network can"
                " read all runs here and request captures. An SSH tunnel needs no --host:"
                " ssh -L 8000:127.0.0.1:PORT",
                file=sys.stderr,
            )
        print_note(
            options,
            f"{format_count(len(found), 'run')} in {printable(folder)}; Ctrl-C ends the server",
        )
        server = Server(folder, found, is_one=is_run(folder))
        servers.run_until_signal(server, listening, options.host)
    return 0


def _choose_folder(path: Path | None) -> str:
    """Return the folder of runs, by default where runs are recorded. Raises ConfigError."""
    from torchlens_perf.store.run_folders import default_folder

    folder = default_folder() if path is None else path
    require(
        folder.is_dir(),
        f"there is no folder {folder}: name one with runs, torchlens-perf serve DIR",
    )
    return os.path.realpath(folder)


COMMAND = Command(
    name="serve",
    summary="show runs in a browser, live and finished",
    description=(
        "Show the runs of a folder in a browser, live and finished, at an address that ends in"
        " a token. The server only reads run directories: jobs are not disturbed. Ctrl-C"
        " ends it."
    ),
    arguments=(
        argument(
            "folder",
            type=Path,
            nargs="?",
            metavar="DIR",
            help="a folder of runs, or a run; default: the folder where runs are recorded",
        ),
        argument("--port", type=int, default=0, help="default: a free one"),
        argument(
            "--host",
            default="127.0.0.1",
            help="address to listen on; addresses other than 127.0.0.1 need --allow-remote",
        ),
        argument(
            "--allow-remote",
            action="store_true",
            help="allow other machines that have the token (plain HTTP, not encrypted)",
        ),
    ),
    run=_run_serve,
)
