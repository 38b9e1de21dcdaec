"""Tests that execute, check, or skip with a reason every code block of the README and docs/.

Python is executed page by page. Shell commands are parsed by the program's own parser.

Commands that end by themselves are also executed: those of the README in `make test`, others in
`make test-long`.

SQL queries read a recorded run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from tests.support.code_blocks import Block, Command, blocks
from tests.support.processes import ROOT, clean_environ, only_report, run_warm, runs
from torchlens_perf.commands import cli, run
from torchlens_perf.errors import TorchlensPerfError
from torchlens_perf.exporters import semantics

BLOCKS = blocks()
# Names that the examples of all pages use without defining them.
SETUP = """
import torch, pandas
from torch import nn
import torchlens_perf as perf
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = [torch.randn(8, 16) for _ in range(12)]
requests = [torch.randn(1, 16) for _ in range(6)]
"""
SETUP_OF_PAGE = {
    "README.md": (
        """
class Answer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, batch):
        from types import SimpleNamespace
        return SimpleNamespace(loss=self.layer(batch).square().mean())
model = Answer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
    ),
}
PYTHON_NOT_RUN = {
    "docs/guides/frameworks.md": (
        "needs the frameworks: tests/frameworks/test_jobs.py compares it with its jobs"
    ),
    "docs/guides/gpu.md": "needs a CUDA device: run by tests/device and `make gpu-check`",
    "docs/guides/notebook.md": (
        "see tests/results/test_docs_notebook.py, tests/frameworks/test_notebook.py"
    ),
}
# First words of commands that are parsed and not executed.
NOT_EXECUTED = {
    "make": "installs an environment, or runs for minutes to hours; checked by `make --dry-run`",
    "pip install": "downloads; its extras are in pyproject.toml",
    "python -m benchmarks": "runs for minutes to hours; its options are in its source",
    "torchlens-perf report --fail-on": (
        "exits with the run's result: tests/commands/test_fail_on.py"
    ),
    "torchlens-perf serve": "serves until it is interrupted: tests/serve",
    "torchlens-perf capture": "needs a live run: tests/distributed/test_capture_live.py",
    "torchlens-perf compare": "compares runs of a user's program: tests/compare",
    "torchlens-perf query": "reads a user's run: tests/query",
    "torchlens-perf report RUN_DIR --perfetto": "writes a large file: tests/timeline",
    "torchlens-perf sidecar": "needs an endpoint: tests/exporters/test_otlp_export.py",
    "torchrun --nproc-per-node 8 -m torchlens_perf check": "takes long: tests/check",
}
# Other programs and shell keywords, which are neither parsed nor executed here.
ELSEWHERE = {
    "while": "a loop over lines: tests/backends/test_autotel.py",
    "printf": "a loop over lines: tests/backends/test_autotel.py",
    "done": "a loop over lines: tests/backends/test_autotel.py",
    "curl": "run by tests/prometheus/test_docs.py",
    "vllm": "an engine is started by tests/roles/test_serving.py",
    "promtool": "run by tests/prometheus/test_docs.py",
    "ls": "run by tests/prometheus/test_docs.py",
    "sh": "run by tests/prometheus/test_docs.py",
    "ssh": "needs another machine",
    "bpftrace": "needs root and the tracer: tests/native/test_probes.py",
}
# Pages whose commands another test executes.
PAGES_ELSEWHERE = {
    "docs/guides/actions.md": "tests/actions",
    "docs/guides/prometheus.md": "tests/prometheus/test_docs.py",
    "docs/guides/kubernetes.md": "tests/prometheus/test_docs.py",
    "docs/guides/slurm.md": "tests/prometheus/test_docs.py",
}
SQL_ELSEWHERE = {
    "docs/guides/backends.md": "for ClickHouse: tests/backends/test_clickhouse.py",
    "docs/guides/queries.md": "for DuckDB: tests/docs/test_queries.py",
    "docs/guides/perfetto.md": "for Perfetto: tests/page/browser/test_perfetto.py",
}
# Blocks that contain no code: page and first words, with the command or file that the text comes
# from.
NO_CODE = {
    ("docs/guides/compare.md", "SLOWER"): "the result of one comparison, whose times vary",
    ("docs/guides/compare.md", "jobs:"): "a CI job: tests/docs/test_ci_examples.py",
    ("docs/guides/compare.md", "performance:"): "a CI job: tests/docs/test_ci_examples.py",
    (
        "docs/tutorials/quickstart.md",
        "torchlens_perf  train.py",
    ): "the report of one run, whose times vary",
    (
        "docs/guides/recipes.md",
        "BOTTLENECK  data",
    ): "the report of the run in docs/tutorials/quickstart.md",
    (
        "docs/explanation/utilization.md",
        "Utilization",
    ): "a part of the report of one run, whose times vary",
    ("docs/guides/recipes.md", "SLOW RANK"): "a report on examples/train_gpt.py on a busy machine",
    (
        "docs/guides/recipes.md",
        "HANG",
    ): "a report on a run whose rank 1 slept: tests/distributed/test_hang_live.py",
    (
        "docs/guides/recipes.md",
        "BOTTLENECK  CPU",
    ): "a report on examples/train_gpt.py on a busy machine",
    ("docs/guides/what-if.md", "If rank 3"): "an answer: tests/commands/test_what_if.py",
    ("docs/guides/troubleshooting.md", "system"): "output of doctor: tests/commands/test_doctor.py",
    (
        "docs/guides/read-the-report.md",
        "torchlens_perf  simulation",
    ): "reports: tests/docs/test_shown_reports.py",
    (
        "docs/guides/slurm.md",
        "# slurm.conf",
    ): "lines for a cluster's configuration: tests/prometheus/test_slurm.py",
    ("docs/explanation/how-it-works.md", "training process"): "a drawing",
    (
        "docs/guides/gpu.md",
        "Typical step of each rank",
    ): "part of a report: tests/simulate/test_simulated_devices.py",
    ("CONTRIBUTING.md", "training process"): "a drawing",
    ("README.md", "torchlens_perf  simulation"): "a report: tests/docs/test_shown_reports.py",
    ("docs/guides/opentelemetry.md", "train step"): "a drawing",
    (
        "docs/reference/run-directory.md",
        "/dev/shm/",
    ): "a listing of files that are deleted when a run ends: tests/run",
}
SHELL = [block for block in BLOCKS if block.language in ("sh", "bash", "shell", "console")]
# Pattern of indented blocks that begin with a program, or with a variable before a program.
SHELL += [
    b
    for b in BLOCKS
    if b.language == "indented" and re.match(r"[A-Z_]+=\S+ \w|torch|python|make", b.text)
]
COMMANDS = list({str(command): command for block in SHELL for command in block.commands()}.values())
OTHERS = [
    block for block in BLOCKS if block not in SHELL and block.language not in ("python", "sql")
]
LISTING = "torchlens-perf/20261121-013205-3fa9c1d2/\n"


def test_every_block_has_a_known_language_and_every_exception_is_used() -> None:
    """An exception in the tables above must match a block."""
    assert len(BLOCKS) > 30
    assert len(COMMANDS) > 30
    known = {"python", "sh", "bash", "shell", "console", "sql", "plain", "indented", "yaml"}
    assert {block.place: block.language for block in BLOCKS if block.language not in known} == {}
    unused = set(PYTHON_NOT_RUN) - {block.page for block in BLOCKS if block.language == "python"}
    unused |= {
        begin for begin in NOT_EXECUTED if not any(shell(c).startswith(begin) for c in COMMANDS)
    }
    programs = {command.words[0] for command in COMMANDS if command.words}
    unused |= ELSEWHERE.keys() - programs
    unused |= PAGES_ELSEWHERE.keys() - {command.block.page for command in COMMANDS}
    unused |= SQL_ELSEWHERE.keys() - {block.page for block in BLOCKS if block.language == "sql"}
    unused |= {
        begin for page, begin in NO_CODE if not any(is_at(block, page, begin) for block in OTHERS)
    }
    assert unused == set()


def is_at(block: Block, page: str, begin: str) -> bool:
    return block.page == page and block.text.strip().startswith(begin)


def shell(command: Command) -> str:
    return " ".join(command.words)


# -- Python


@pytest.mark.parametrize(
    "page", sorted({block.page for block in BLOCKS if block.language == "python"})
)
def test_python_blocks_of_each_page_run_without_errors(
    page: str, recorded: Path, tmp_path: Path
) -> None:
    """All blocks of a page run in one process, in their order."""
    code = "\n".join(
        block.text for block in BLOCKS if block.page == page and block.language == "python"
    )
    compile(code, page, "exec")
    if page in PYTHON_NOT_RUN:
        pytest.skip(f"{page}: {PYTHON_NOT_RUN[page]}")
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True, symlinks=True)
    code = code.replace("20261121-013205-3fa9c1d2", run_id(recorded))
    done = run_warm([sys.executable, "-c", SETUP + SETUP_OF_PAGE.get(page, "") + code], tmp_path)
    assert done.returncode == 0, done.stderr
    runs(tmp_path)


# -- a recorded run and the blocks that read it


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one recorded run and the scripts that the commands start."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        shutil.copy(ROOT / "tests" / "scripts" / "train.py", folder / name)
    (folder / "examples").symlink_to(ROOT / "examples")
    done = run_warm([sys.executable, "train.py"], folder, TORCHLENS_PERF="1")
    assert done.returncode == 0, done.stderr
    assert len(runs(folder)) == 1
    return folder


def run_id(folder: Path) -> str:
    (one,) = (path.parent.name for path in folder.glob("torchlens-perf/*/nodes"))
    return one


def test_sql_queries_run_on_a_recorded_run(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB runs each query."""
    import duckdb

    monkeypatch.chdir(recorded)
    queries = [
        q
        for b in BLOCKS
        if b.language == "sql" and b.page not in SQL_ELSEWHERE
        for q in b.text.split(";")
        if q.strip()
    ]
    answers = [duckdb.sql(query).fetchall() for query in queries]
    # The first query selects the ten slowest steps.
    assert len(answers[0]) == 10


def test_listing_of_a_run_directory_names_every_file(recorded: Path) -> None:
    (listing,) = [block for block in OTHERS if block.text.startswith(LISTING)]
    names = [line.split()[0] for line in listing.text.splitlines()[1:]]
    patterns = [
        re.escape(name).replace("NODE", r"[\w.-]+").replace("000001", r"\d+") for name in names
    ]
    root = recorded / "torchlens-perf" / run_id(recorded)
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert [file for file in files if not any(re.fullmatch(each, file) for each in patterns)] == []


# -- shell commands


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: f"{each.block.place} {each}"[:90])
def test_documented_commands_are_accepted_by_their_parsers(command: Command) -> None:
    """All options and scripts that appear in a command exist."""
    for variable in command.variables:
        name = variable.partition("=")[0]
        assert name.startswith(("TORCHLENS_PERF", "OTEL_")), f"no program reads {name}"
    check_command(command.words)


def check_command(words: Sequence[str]) -> None:
    program, arguments = words[0], list(words[1:])
    if program in ELSEWHERE:
        return
    if program == "torchlens-perf" or words[:3] == ("python", "-m", "torchlens_perf"):
        check_torchlens_perf(arguments if program == "torchlens-perf" else arguments[2:])
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(arguments)
        if options.module:
            assert options.training_script == "torchlens_perf"
            check_torchlens_perf(options.training_script_args)
        else:
            check_script(options.training_script)
    elif program == "opentelemetry-instrument":
        check_instrument(arguments)
    elif program == "export":
        for assigned in arguments:
            assert assigned.startswith(("TORCHLENS_PERF", "OTEL_")), f"no program reads {assigned}"
    elif words[:2] == ("python", "-m"):
        check_benchmark(arguments[1:])
    elif program == "python":
        check_script(arguments[0])
    elif program == "pip":
        check_pip(arguments)
    elif program == "make":
        done = subprocess.run(
            ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    else:
        raise AssertionError(f"no parser is known for {program}: add it here")


def check_torchlens_perf(arguments: list[str]) -> None:
    if arguments[0] == "run":
        assert run.split_python_arguments(arguments[1:])[1]
        return
    try:
        cli._build_parser().parse_args(arguments)
    except (SystemExit, TorchlensPerfError) as error:
        raise AssertionError(f"torchlens-perf {' '.join(arguments)}: {error}") from None


def check_script(name: str) -> None:
    assert name == "train.py" or (ROOT / name).is_file(), name


def check_pip(arguments: list[str]) -> None:
    (wanted,) = arguments[1:]
    if wanted == "torch":
        return
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    name, extra = re.fullmatch(r"([\w.-]+)(?:\[(\w+)\])?", wanted).groups()  # type: ignore[union-attr]
    # The docs install from a clone.
    assert name == "."
    assert extra is None or extra in extras


def check_instrument(arguments: list[str]) -> None:
    # `opentelemetry-instrument` creates its options from these entry points in the same way.
    variables = [
        n
        for each in entry_points(group="opentelemetry_environment_variables")
        for n in dir(each.load())
    ]
    options = {
        "--" + re.sub("^OTEL_(PYTHON_)?", "", name).lower()
        for name in variables
        if name.startswith("OTEL_")
    }
    while arguments[0].startswith("--"):
        assert arguments[0] in options
        arguments = arguments[2:]
    check_command(tuple(arguments))


def check_benchmark(arguments: list[str]) -> None:
    """Check that the benchmark exists and that its source contains the options and parts."""
    module = ROOT.joinpath(*arguments[0].split("."))
    sources = (
        [module.with_suffix(".py")]
        if module.with_suffix(".py").is_file()
        else [*module.glob("*.py")]
    )
    assert sources, arguments[0]
    text = "\n".join(path.read_text() for path in sources)
    # Search all files of benchmarks of one kind, because they share code.
    kind = sources[0].stem.partition("_")[0]
    text += "\n".join(path.read_text() for path in (ROOT / "benchmarks").glob(f"{kind}*.py"))
    for word in arguments[1:]:
        # A word in capitals is a placeholder. A placeholder that is the first argument must be in
        # the usage too.
        if word.isupper():
            assert word != arguments[1] or word in text.split('"""')[1], (
                f"{arguments[0]} takes no {word}"
            )
        elif word.startswith("--") or (word == arguments[1] and arguments[0] != "benchmarks"):
            assert f'"{word}"' in text, f"{arguments[0]} has no {word}"
    if arguments[0] == "benchmarks":
        assert (ROOT / "benchmarks" / f"{arguments[1]}.py").is_file(), arguments[1]


def executed_commands() -> list[object]:
    """Return all commands. Commands outside the README are marked for `make test-long`."""
    return [
        pytest.param(
            command,
            id=f"{command.block.place} {command}"[:90],
            marks=() if command.block.page == "README.md" else pytest.mark.long,
        )
        for command in COMMANDS
    ]


SHIMS = {
    "python": '"{python}" "$@"',
    "torchrun": '"{python}" -m torch.distributed.run --standalone "$@"',
    "torchlens-perf": '"{python}" -m torchlens_perf "$@"',
    "opentelemetry-instrument": (
        '"{python}" -c "from opentelemetry.instrumentation.auto_instrumentation import run; '
        'run()" "$@"'
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize("command", executed_commands())
def test_documented_commands_succeed_in_bash(
    command: Command, recorded: Path, tmp_path: Path
) -> None:
    """Each command runs as in the docs, except for few replaced words.

    Jobs have 2 ranks. RUN_DIR is replaced by the recorded run or, for commands about one of several
    ranks, by a simulated run. Addresses of collectors are replaced by an unused port.
    """
    for begin, reason in NOT_EXECUTED.items():
        if shell(command).startswith(begin):
            pytest.skip(f"{command}: {reason}")
    elsewhere = PAGES_ELSEWHERE.get(command.block.page) or ELSEWHERE.get(
        command.words[0] if command.words else ""
    )
    if elsewhere:
        pytest.skip(f"{command}: {elsewhere}")
    if shell(command).startswith("torchlens-perf top") and "--once" not in command.words:
        pytest.skip(f"{command}: needs a terminal: tests/top/test_terminal.py")
    folder = tmp_path / "work"
    shutil.copytree(recorded, folder, symlinks=True)
    shims = tmp_path / "bin"
    shims.mkdir()
    for name, text in SHIMS.items():
        (shims / name).write_text(f"#!/bin/sh\nexec {text.format(python=sys.executable)}\n")
        (shims / name).chmod(0o755)
    line = str(command)
    simulates = "slow-rank" in line or "@median" in line
    shown = "slow-rank" if simulates else f"torchlens-perf/{run_id(folder)}"
    for old, new in (
        (r"--nproc-per-node \d", "--nproc-per-node 2"), (r"\bARGS\b", ""),
        (r"\bRUN_DIR\b", shown), (r"http://collector:\d+", "http://127.0.0.1:9"),
        (r"blocks\.\*\.mlp", "?"),
    ):  # fmt: skip
        line = re.sub(old, new, line)
    if "opentelemetry-instrument" in line:
        line = (
            f"OTEL_TRACES_EXPORTER=none OTEL_METRICS_EXPORTER=none OTEL_LOGS_EXPORTER=none {line}"
        )
    starts = ("train" in line or "serve_model" in line) and "TORCHLENS_PERF=0" not in line
    if starts:
        shutil.rmtree(folder / "torchlens-perf")
    elif simulates and "simulate" not in line:
        line = f"torchlens-perf simulate --ranks 4 --steps 60 --out slow-rank && {line}"
    environ = clean_environ({"PATH": f"{shims}:/usr/bin:/bin"})
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    if starts:
        ranks = only_report(folder)["ranks"]
        assert len(ranks) == (2 if "torchrun" in line and "nproc" in line else 1)
        assert ranks[0]["steps"] >= 12


# -- other blocks


@pytest.mark.parametrize("block", OTHERS, ids=lambda each: each.place)
def test_blocks_that_are_not_executed_are_checked_or_have_a_reason(block: Block) -> None:
    """Rules for Prometheus may use only exported metrics.

    The listing of a run directory is checked by another test.
    """
    if block.text.startswith(LISTING):
        return
    if block.text.startswith("groups:"):
        rules = yaml.safe_load(block.text)["groups"][0]["rules"]
        used = {name for rule in rules for name in re.findall(r"torch_train_\w+", rule["expr"])}
        assert used
        assert used <= set(prometheus_names())
        return
    reasons = [reason for (page, begin), reason in NO_CODE.items() if is_at(block, page, begin)]
    assert reasons, f"{block.place}: unknown block. Execute or check it, or add it to NO_CODE"
    pytest.skip(f"{block.place}: {reasons[0]}")


def prometheus_names() -> Iterator[str]:
    """Return names of metrics and labels in Prometheus, with unit and suffix of the instrument."""
    units = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
    ends = {"histogram": ("_sum", "_count", "_bucket"), "counter": ("_total",)}
    for metric in semantics.METRICS:
        name = metric.name.replace(".", "_") + units.get(metric.unit, "")
        yield from (name + end for end in ends.get(metric.instrument, ("",)))
        yield from (f"{label.replace('.', '_')}" for label in metric.attributes)
