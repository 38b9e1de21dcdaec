"""The scripts of the CI examples in docs/guides/compare.md run in a shell, on a real repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.long import long

GUIDE = Path(__file__).parents[2] / "docs/guides/compare.md"
GITHUB, GITLAB = (
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
)
TRAINING = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
"""


def github_script() -> str:
    steps = GITHUB["jobs"]["performance"]["steps"]
    return "\n".join(step["run"] for step in steps if "run" in step)


def gitlab_script() -> str:
    return "\n".join(GITLAB["performance"]["script"])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a clone with the branch `main` of its origin, and a commit on another branch."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")

    def git(folder: Path, *arguments: str) -> None:
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    origin.mkdir()
    git(origin, "init", "-b", "main")
    (origin / "train.py").write_text(TRAINING)
    git(origin, "add", ".")
    git(origin, "commit", "-m", "Train")
    git(tmp_path, "clone", str(origin), str(clone))
    git(clone, "checkout", "-b", "change")
    git(clone, "commit", "--allow-empty", "-m", "Change nothing")
    return clone


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "output"),
    [(github_script(), "summary.md"), *long((gitlab_script(), "compare.html"))],
    ids=["GitHub Actions", "GitLab"],
)
def test_script_of_a_ci_job_compares_two_commits(
    script: str, output: str, repository: Path
) -> None:
    script = script.replace("pip install ${{ vars.TORCHLENS_PERF }}", "true")
    script = script.replace("${{ github.base_ref }}", "main")
    # Ten runs would take a minute. One run a side is too few for a result.
    script = script.replace("torchlens-perf compare", "torchlens-perf compare --times 1")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(repository / "summary.md"),
        "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
    )
    # 1 and 3 are results: the machine of this test may be busy.
    assert done.returncode in (0, 1, 3), done.stderr
    assert "typical step" in (repository / output).read_text()
