"""Test of the package with the lowest declared and the newest versions of its dependencies."""

from __future__ import annotations

import email
import json
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support import installations
from tests.support.installations import Environment
from tests.support.otlp_receiver import Receiver
from tests.support.processes import only_report
from tests.support.servers import wait_for

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(900)]
IMPORT_ALL = """
import importlib, pathlib
import torchlens_perf
top = pathlib.Path(torchlens_perf.__file__).parent
for path in sorted(top.rglob("*.py")):
    parts = path.relative_to(top.parent).with_suffix("").parts
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
print(top)
"""
VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


def requirements(wheel: Path) -> list[Requirement]:
    """Return the wheel's requirements, including those of `torchlens-perf[prometheus,top]`."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        declared = email.message_from_bytes(file.read(name)).get_all("Requires-Dist", [])
    extras = ("prometheus", "top")
    return [
        each
        for each in map(Requirement, declared)
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def lowest(requirement: Requirement) -> str:
    """Return the lowest version that a requirement allows."""
    (found,) = [each.version for each in requirement.specifier if each.operator == ">="]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return installations.make_wheel(installations.copy_tree(folder / "checkout"), folder / "dist")


@pytest.fixture(params=["lowest", "newest"])
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Environment:
    """Install the wheel with the given versions, using the tests' torch."""
    made = installations.empty_environment(tmp_path)
    installations.share_packages(made, [])
    wanted = requirements(wheel)
    if request.param == "lowest":
        pinned = [f"{each.name}=={lowest(each)}" for each in wanted]
    else:
        pinned = [str(each).partition(";")[0] for each in wanted]
    done = installations.pip(made, "install", "-q", "--upgrade", str(wheel), *pinned)
    if "No matching distribution" not in done.stderr and (
        "ConnectionError" in done.stderr or "ProxyError" in done.stderr
    ):
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    installed = json.loads(made.succeeds("python", "-c", VERSIONS, *(each.name for each in wanted)))
    if request.param == "lowest":
        assert {name: Version(version) for name, version in installed.items()} == {
            each.name: Version(lowest(each)) for each in wanted
        }
    print(request.param, installed)
    return made


def test_package_works_with_lowest_and_newest_dependency_versions(
    environment: Environment, receiver: Receiver, tmp_path: Path
) -> None:
    """Every module imports.

    A simulated run is reported and replayed. Runs are recorded and sent over HTTP and over gRPC.
    """
    assert (
        Path(environment.succeeds("python", "-W", "error::ImportWarning", "-c", IMPORT_ALL).strip())
        == environment.package
    )
    out = environment.work / "simulated"
    options = ("--ranks", "4", "--steps", "400", "--fault", "constant:rank=1,share=1", "--out", out)
    assert "rank 1" in environment.succeeds("torchlens-perf", "simulate", *options)
    value = json.loads(environment.succeeds("torchlens-perf", "report", out, "--json"))
    assert value["verdicts"][0]["rank"] == 1
    assert "replayed 1600 steps" in environment.succeeds("torchlens-perf", "sidecar", out)
    assert json.loads(environment.succeeds("torchlens-perf", "report", "--schema"))["$defs"]
    assert "rank 1 (" in environment.succeeds("torchlens-perf", "top", "--once", out)
    assert environment.succeeds("python", "-c", TOP, str(out)) == "drawn\n"
    broken = [
        line
        for line in environment.succeeds("torchlens-perf", "doctor").splitlines()
        if line.startswith("broken")
    ]
    assert broken == []

    for protocol in ("http/protobuf", "grpc"):
        receiver.clear()
        folder = tmp_path / protocol.replace("/", "-")
        folder.mkdir()
        (folder / "watched.py").write_text(WATCH)
        sends = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint(protocol),
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }
        done = environment.run(
            "python",
            str(folder / "watched.py"),
            folder=folder,
            **sends,
            OTEL_EXPORTER_OTLP_INSECURE="true",
        )
        assert done.returncode == 0, done.stderr
        assert [rank["steps"] for rank in only_report(folder)["ranks"]] == [12]
        assert wait_for(lambda: receiver.spans() and receiver.points(), 20), done.stderr


TOP = """
import asyncio, pathlib, sys
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.app import Top
from torchlens_perf.top.text import Terminal
async def draw():
    run = RunDirectory(pathlib.Path(sys.argv[1]))
    app = Top(run, run.path.parent, Terminal())
    async with app.run_test(size=(80, 24)) as pilot:
        while "step" not in app.export_screenshot():
            await pilot.pause(0.1)
        await pilot.press("enter")
asyncio.run(asyncio.wait_for(draw(), 60))
print("drawn")
"""
WATCH = """
import torch
import torchlens_perf as perf
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, trace_every=1):
    for _ in range(12):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
