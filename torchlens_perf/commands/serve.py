"""`torchlens-perf serve`: runs as live pages, on this machine."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import ConfigError

_NEEDS = ("starlette", "uvicorn")


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="runs as live pages, on this machine",
        description="Prints an address that ends in a token, and shows the runs of a folder there, live and finished. "
        "Reads run directories only: the jobs notice nothing.",
    )
    parser.add_argument("folder", type=Path, nargs="?", help="of runs, or a run; default: torchlens-perf here")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on; another than 127.0.0.1 needs --share")
    parser.add_argument("--share", action="store_true", help="let other machines in, who know the token")
    parser.set_defaults(command=serve)


def serve(options: argparse.Namespace) -> int:
    """Runs the command until it is ended: 0. Raises ConfigError."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f'serve needs {" and ".join(missing)}: pip install "torchlens-perf[serve]"')
    from torchlens_perf.serve import server as servers
    from torchlens_perf.serve.app import Server

    if not servers.is_loopback(options.host) and not options.share:
        raise ConfigError(f"--host {options.host} can be reached from other machines: add --share if they may look")
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port}: must be from 0 to 65535")
    server = Server(servers.folder_of(options.folder))
    with Progress("looking for runs", quiet=options.quiet) as progress:
        server.index(progress)
    servers.serve(server, options.host, options.port, quiet=options.quiet)
    return 0
