"""`torchlens-perf deploy-files`: alert rules, dashboards, manifests and snippets, as files to
adapt.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torchlens_perf
from torchlens_perf.errors import TorchlensPerfError, printable

_SHIPPED = Path(torchlens_perf.__file__).parent / "deploy"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "deploy-files",
        description=(
            "Write alert rules, dashboards, Kubernetes manifests and Slurm snippets into a folder."
            " A file that you have changed is kept, unless --force is given."
        ),
    )
    parser.add_argument(
        "--out", type=Path, default=Path("torchlens-perf-deploy"), help="default: %(default)s"
    )
    parser.add_argument("--force", action="store_true", help="replace files that have been changed")
    parser.set_defaults(command=run_deploy_files)


def run_deploy_files(options: argparse.Namespace) -> int:
    """Run the command. Raises TorchlensPerfError for changed files and if writing fails."""
    shipped = {
        path.relative_to(_SHIPPED): path.read_bytes()
        for path in sorted(_SHIPPED.rglob("*"))
        if path.is_file()
    }
    try:
        changed = [
            path
            for path, content in shipped.items()
            if (options.out / path).exists() and (options.out / path).read_bytes() != content
        ]
        if changed and not options.force:
            names = ", ".join(map(str, changed))
            raise TorchlensPerfError(
                f"{options.out} contains files with changes: {names}. --force replaces them"
            )
        for path, content in shipped.items():
            target = options.out / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            if path.suffix == ".sh":
                target.chmod(0o755)
            if not options.quiet:
                print(printable(str(target)))
    except OSError as error:
        raise TorchlensPerfError(
            f"{options.out} cannot be written: {error.strerror or error}"
        ) from None
    return 0
