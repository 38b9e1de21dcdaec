"""Tests of the static probes (USDT): their notes, their cost, and their arguments under gdb and
bpftrace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.probed import STEPS
from tests.support.code_blocks import blocks
from tests.support.processes import ROOT, clean_environ, run
from torchlens_perf import _native
from torchlens_perf.run.ring import Kind

LIBRARY = _native.__file__
PROVIDER = "torchlens_perf"
ARGUMENTS = {
    "step__begin": 1,
    "step__end": 2,
    "phase__begin": 1,
    "phase__end": 3,
    "collective__begin": 4,
    "collective__end": 6,
}
NOTE = re.compile(r"Provider: (\S+)\s+Name: (\S+)\s+Location: (0x\w+),.*\s+Arguments: ?(.*)")
notes = NOTE.findall(
    subprocess.run(["readelf", "-n", LIBRARY], capture_output=True, text=True, check=True).stdout
)
header = [*Path("/usr/include").glob("sys/sdt.h"), *Path("/usr/include").glob("*/sys/sdt.h")]
pytestmark = pytest.mark.skipif(
    not notes and not header,
    reason="the recorder was built without sys/sdt.h: apt-get install systemtap-sdt-dev",
)
tracer = pytest.mark.skipif(
    shutil.which("bpftrace") is None or os.geteuid() != 0,
    reason="bpftrace is missing, or this is not root",
)


def expected() -> list[tuple[str, ...]]:
    """Return the hits of tests/scripts/probed.py: the probe's name and its arguments."""
    hits: list[tuple[object, ...]] = [("step__begin", 0)]
    for step in range(STEPS):
        for kind, ns in ((Kind.FORWARD, 100 + step), (Kind.OPTIMIZER, 200 + step)):
            hits += [("phase__begin", int(kind)), ("phase__end", int(kind), ns, step)]
        operation = (4, 10 + step, 4096 + step, step)
        hits += [("collective__begin", *operation), ("collective__end", *operation, 7, 0)]
        # Forward, module, section, optimizer, collective and the rest of the step.
        step_ns = 100 + step + 5 + 5 + 200 + step + 7 + 1000
        hits += [("step__end", step, step_ns), ("step__begin", step + 1)]
    return [tuple(map(str, hit)) for hit in hits]


def test_each_probe_has_a_note_with_its_arguments() -> None:
    assert {provider for provider, *_ in notes} == {PROVIDER}, "build the recorder again"
    assert {name: len(arguments.split()) for _, name, _, arguments in notes} == ARGUMENTS


def test_each_probe_is_one_nop() -> None:
    for _, name, location, _ in notes:
        place = int(location, 16)
        command = ["objdump", "-d", "--no-show-raw-insn", LIBRARY]
        limits = [f"--start-address={place}", f"--stop-address={place + 1}"]
        done = subprocess.run([*command, *limits], capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == "nop", f"{name} at {location}"


def test_guide_lists_each_probe_and_its_arguments() -> None:
    guide = (ROOT / "docs" / "guides" / "probes.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", guide, re.MULTILINE))
    assert {name: len(text.split(", ")) for name, text in rows.items()} == ARGUMENTS
    for kind in (Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT):
        assert f"{int(kind)} {kind.name.lower()}" in guide


def test_debugger_stops_at_each_probe_with_the_right_arguments(tmp_path: Path) -> None:
    if shutil.which("gdb") is None:
        pytest.skip("gdb is missing")
    script = ["set pagination off", "set breakpoint pending on", "handle SIG32 nostop"]
    for number, (name, count) in enumerate(ARGUMENTS.items(), 1):
        values = "".join(f", (long)$_probe_arg{each}" for each in range(count))
        script += [
            f"break -probe-stap {PROVIDER}:{name}",
            f"commands {number}",
            "silent",
            f'printf "hit {name}{" %ld" * count}\\n"{values}',
            "continue",
            "end",
        ]
    (tmp_path / "script").write_text("\n".join([*script, "run", ""]))
    command = ["gdb", "-q", "-batch", "-x", str(tmp_path / "script"), "--args", sys.executable]
    folder = tmp_path / "rings"
    folder.mkdir()
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "scripts" / "probed.py"), str(folder)],
        env=clean_environ({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=200,
    )
    hits = [tuple(line.split()[1:]) for line in done.stdout.splitlines() if line[:4] == "hit "]
    assert hits == expected(), done.stderr


@tracer
@pytest.mark.long
def test_bpftrace_reads_each_probe(tmp_path: Path) -> None:
    # The first interval ends after all probes are attached.
    clauses = ['interval:ms:100 { printf("attached\\n"); }']
    for name, count in ARGUMENTS.items():
        values = "".join(f", arg{each}" for each in range(count))
        clauses.append(
            f"usdt:{LIBRARY}:{PROVIDER}:{name}"
            f' {{ printf("hit {name}{" %d" * count}\\n"{values}); }}'
        )
    with subprocess.Popen(
        ["bpftrace", "-e", "\n".join(clauses)], stdout=subprocess.PIPE, text=True
    ) as attached:
        assert attached.stdout is not None
        while (line := attached.stdout.readline()) != "attached\n":
            assert line, "bpftrace ended"
        program = str(ROOT / "tests" / "scripts" / "probed.py")
        (tmp_path / "rings").mkdir()
        done = run([sys.executable, program, "rings"], tmp_path, PYTHONPATH=str(ROOT))
        attached.send_signal(signal.SIGINT)
        printed = attached.stdout.read()
    assert done.returncode == 0, done.stderr
    hits = [tuple(line.split()[1:]) for line in printed.splitlines() if line[:4] == "hit "]
    assert hits == expected()


@tracer
@pytest.mark.long
def test_command_of_the_guide_prints_slow_steps(tmp_path: Path) -> None:
    """A step of 0.7 s is printed, and steps of a few milliseconds are not."""
    program = (
        "import sys, time, torch, torchlens_perf as perf\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with perf.watch(model, optimizer, report='quiet'):\n"
        "    for step in range(200):\n"
        "        if step == 1: print('ready', flush=True); sys.stdin.readline()\n"
        "        model(torch.ones(2, 8)).sum().backward()\n"
        "        time.sleep(0.7 if step == 120 else 0.001)\n"
        "        optimizer.step()\n"
    )
    (command,) = [
        command
        for block in blocks()
        if block.page == "docs/guides/probes.md" and block.language == "sh"
        for command in block.commands()
    ]
    job = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=clean_environ({"PYTHONPATH": str(ROOT)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdin is not None
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    words = [word.replace("PID", str(job.pid)) for word in command.words]
    attached = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert attached.stdout is not None
    assert "Attaching" in attached.stdout.readline()
    job.stdin.write("\n")
    job.stdin.close()
    assert job.wait(100) == 0
    attached.wait(30)
    printed = [line for line in attached.stdout.read().splitlines() if line]
    assert len(printed) == 1
    step, ms = re.fullmatch(r"step (\d+) took (\d+) ms", printed[0]).groups()  # type: ignore[union-attr]
    assert int(step) in (119, 120, 121)
    assert 700 <= int(ms) < 2000
