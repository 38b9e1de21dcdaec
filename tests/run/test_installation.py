"""Tests of install hints, which name packages that pip can install.

The packages come from a clone, a repository, a wheel or an index, or are an extra's requirements.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.processes import ROOT
from torchlens_perf.run.installation import build_install_command

REQUIRES = ["numpy>=1.24", 'textual<9,>=1; extra == "top"', 'uvicorn>=0.30; extra == "serve"']


def installed_from(monkeypatch: pytest.MonkeyPatch, direct_url: Any) -> None:
    """Set the direct_url.json of the package's metadata, or remove the file if None."""

    class Distribution:
        requires = REQUIRES

        @staticmethod
        def read_text(name: str) -> str | None:
            assert name == "direct_url.json"
            return None if direct_url is None else json.dumps(direct_url)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution)


def test_command_for_an_installation_from_an_index_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed_from(monkeypatch, None)
    assert build_install_command("top") == "pip install 'torchlens-perf[top]'"
    assert build_install_command() == "pip install torchlens-perf"
    assert (
        build_install_command(options="--force-reinstall")
        == "pip install --force-reinstall torchlens-perf"
    )


@pytest.mark.parametrize("editable", [False, True])
def test_command_for_a_clone_works_in_any_folder(
    editable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An editable installation stays editable."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    installed_from(
        monkeypatch, {"url": clone.as_uri(), "dir_info": {"editable": True} if editable else {}}
    )
    assert shlex.split(build_install_command("top")) == [
        "pip",
        "install",
        *["-e"] * editable,
        f"{clone}[top]",
    ]


def test_command_for_an_installation_from_a_wheel_names_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "torchlens_perf-1-py3-none-any.whl"
    wheel.touch()
    installed_from(monkeypatch, {"url": wheel.as_uri(), "archive_info": {}})
    assert build_install_command("top") == f"pip install '{wheel}[top]'"


@pytest.mark.parametrize(
    ("direct_url", "url"),
    [
        (
            {
                "url": "https://host/o/r",
                "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "abc"},
            },
            "git+https://host/o/r@abc",
        ),
        (
            {"url": "file:///clone", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+file:///clone@abc",
        ),
        ({"url": "https://host/x.whl", "archive_info": {}}, "https://host/x.whl"),
    ],
)
def test_command_for_an_installation_from_a_url_names_the_url(
    direct_url: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(monkeypatch, direct_url)
    (requirement,) = map(Requirement, shlex.split(build_install_command("top"))[2:])
    assert (requirement.name, requirement.extras, requirement.url) == (
        "torchlens-perf",
        {"top"},
        url,
    )


def test_command_for_a_deleted_clone_names_packages_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container image may no longer have the folder from which the package was installed, but
    every package index has the packages of the extra.
    """
    installed_from(monkeypatch, {"url": "file:///deleted", "dir_info": {}})
    assert build_install_command("top") == "pip install 'textual<9,>=1'"
    assert build_install_command() == "pip install torchlens-perf"


def test_command_for_a_clone_without_metadata_names_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clone on PYTHONPATH has no metadata."""

    def distribution(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert build_install_command("top") == f"pip install {shlex.quote(f'{ROOT}[top]')}"


def test_pip_accepts_the_install_command() -> None:
    """The tests' environment has an editable installation."""
    _, *command = shlex.split(build_install_command("top"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, "--dry-run", "--no-deps", "--no-index", "--no-build-isolation"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
