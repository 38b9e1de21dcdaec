"""`torchlens-perf deploy-files`: alert rules, dashboards, manifests and snippets, as files to
adapt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torchlens_perf
from torchlens_perf.commands.command import Command, argument
from torchlens_perf.errors import TorchlensPerfError, printable

_SHIPPED = Path(torchlens_perf.__file__).parent / "deploy"


def _run_deploy_files(options: argparse.Namespace) -> int:
    """Run the command. Raises TorchlensPerfError for changed files and if writing fails."""
    shipped = {
        path.relative_to(_SHIPPED): path.read_bytes()
        for path in sorted(_SHIPPED.rglob("*"))
        if path.is_file()
    }
    try:
        names = ", ".join(
            str(path)
            for path, content in shipped.items()
            if (options.out / path).exists() and (options.out / path).read_bytes() != content
        )
        if names and not options.force:
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


COMMAND = Command(
    name="deploy-files",
    summary="write alert rules, dashboards, Kubernetes and Slurm files",
    description=(
        "Write alert rules, dashboards, Kubernetes manifests and Slurm snippets into a folder."
        " A file that you have changed is kept, unless --force is given."
    ),
    arguments=(
        argument(
            "--out", type=Path, default=Path("torchlens-perf-deploy"), help="default: %(default)s"
        ),
        argument("--force", action="store_true", help="replace files that have been changed"),
    ),
    run=_run_deploy_files,
)
