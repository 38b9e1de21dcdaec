"""Build the pip command that installs this package or its extras from the original source."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from torchlens_perf.errors import ConfigError

NAME = "torchlens-perf"


def build_install_command(extra: str = "", *, options: str = "") -> str:
    """Return a pip command that installs the package from where it was installed before.

    direct_url.json (PEP 610) names this source: a clone, a repository, an archive or an index.
    """
    return " ".join(["pip install", *filter(None, [options]), *_install_arguments(extra)])


def require_packages(user: str, packages: Iterable[str], extra: str) -> None:
    """Raise ConfigError with the pip command if a package is not installed.

    user: the command or option that needs the packages of the extra.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{user} needs {' and '.join(missing)}, not installed here:"
            f" {build_install_command(extra)}"
        )


def _install_arguments(extra: str) -> list[str]:
    # importlib.metadata is imported late because its import is slow.
    import importlib.metadata

    wanted = f"[{extra}]" if extra else ""
    try:
        distribution = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        clone = Path(__file__).parents[2]
        return [
            shlex.quote(
                f"{clone}{wanted}" if (clone / "pyproject.toml").exists() else f"{NAME}{wanted}"
            )
        ]
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    if not url.startswith("file:"):
        return [shlex.quote(f"{NAME}{wanted} @ {url}" if url else f"{NAME}{wanted}")]
    path = unquote(urlsplit(url).path)
    if os.path.exists(path):
        editable = origin.get("dir_info", {}).get("editable", False)
        return [*["-e"] * editable, shlex.quote(f"{path}{wanted}")]
    # Container images often lack the clone or wheel from which the package was installed. Return
    # the requirements of the extra, which a package index has.
    needed = [
        each
        for each in distribution.requires or ()
        if re.search(rf"extra == ['\"]{extra}['\"]", each)
    ]
    return [shlex.quote(each.split(";")[0].strip()) for each in needed] or [NAME]
