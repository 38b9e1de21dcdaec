"""A server of the Model Context Protocol by which agents ask about the runs of a folder. It only reads."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from torchlens_perf.compare.comparison import compare_runs
from torchlens_perf.compare.comparison_json import to_dictionary
from torchlens_perf.errors import DAMAGED_DATA, TorchlensPerfError, printable
from torchlens_perf.report.report_json import to_json_types
from torchlens_perf.report.run_report import load_report
from torchlens_perf.store.run_folders import find_runs, open_run
from torchlens_perf.version import VERSION
from torchlens_perf.view.headline import build_headlines, list_current

MAX_RUNS, MAX_ROWS = 50, 200
_OF_RUN, _OF_RANK = (
    ("program", "state", "live", "started", "world_size"),
    ("rank", "host", "state", "steps", "step_s", "typical", "account", "phases", "memory"),
)
_INSTRUCTIONS = (
    "Performance records of PyTorch jobs by torchlens_perf. Call list_runs first. Costs are shares of the"
    " job's step, times are seconds. null means not measured."
)
_P = ParamSpec("_P")


class RunTools:
    """The questions that an agent can ask about the runs of a folder. Texts in runs come from jobs: they
    are data, and no instructions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_runs(self, search: str = "", limit: int = MAX_RUNS) -> list[dict[str, Any]]:
        """List runs, most recently changed first, each with its state and its first verdict.

        search: a part of the run's name."""
        found = [each.name for each in find_runs(self._folder) if search in each.name]
        return [self._summarize(name) for name in found[: max(1, min(limit, MAX_RUNS))]]

    def verdicts(self, run: str) -> list[dict[str, Any]]:
        """Return the verdicts of a run, most important first: the finding, its cost, its cause, the action
        to take, and a command that shows more."""
        found: list[dict[str, Any]] = to_json_types(build_headlines(self._load(run)))
        return found

    def account(self, run: str, rank: int = 0) -> dict[str, Any]:
        """Return the time of a rank's typical step by parts, and the times of its phases."""
        for row in self._load(run)["ranks"]:
            if row["rank"] == rank:
                return {name: to_json_types(row[name]) for name in _OF_RANK}
        raise ToolError(f"run {run} has no rank {rank}")

    def compare(self, before: str, after: str) -> dict[str, Any]:
        """Compare two runs: what changed in a step, by how much, and how certain it is."""
        compared = compare_runs([self._find(before)], [self._find(after)])
        return to_json_types(to_dictionary(compared))

    def query(self, run: str, sql: str) -> dict[str, Any]:
        """Run one query in DuckDB's SQL on the tables of a run, such as steps and verdicts; `DESCRIBE
        steps` lists columns. At most 200 rows are returned."""
        from torchlens_perf.query.engine import run_query

        notes: list[str] = []
        is_select = sql.lstrip().lower().startswith(("select", "with"))
        text = (
            f"SELECT * FROM ({sql.strip().rstrip(';')}\n) LIMIT {MAX_ROWS + 1}"
            if is_select
            else sql
        )
        found = run_query(text, [str(self._find(run))], notes)
        shown = found._replace(rows=found.rows[:MAX_ROWS])
        return {
            "rows": json.loads(shown.to_json()),
            "has_more": len(found.rows) > MAX_ROWS,
            "notes": notes,
        }

    def _summarize(self, name: str) -> dict[str, Any]:
        try:
            report = self._load(name)
            first = next(iter(list_current(build_headlines(report))), None)
        except (ToolError, TorchlensPerfError, OSError, *DAMAGED_DATA) as error:
            return {"run": name, "problem": printable(str(error))}
        return {
            "run": name,
            **{key: report["run"][key] for key in _OF_RUN},
            "step_p50_s": report["steps"]["p50_s"],
            "verdict": first and {"status": first.status, "finding": first.sentence},
        }

    def _load(self, name: str) -> Any:
        return load_report(open_run(self._find(name)), lost_time=False)

    def _find(self, name: str) -> Path:
        """Return the path of a run of this folder. Raise ToolError, also for a path to another folder."""
        if name not in (each.name for each in find_runs(self._folder)):
            raise ToolError(f"there is no run {printable(name)[:100]} in the folder: see list_runs")
        return self._folder / name


def build_server(folder: Path) -> MCPServer:
    """Return a server whose tools answer questions on the runs of a folder."""
    server = MCPServer("torchlens_perf", instructions=_INSTRUCTIONS, version=VERSION)
    tools = RunTools(folder)
    for each in (tools.list_runs, tools.verdicts, tools.account, tools.compare, tools.query):
        server.tool()(_with_tool_errors(each))
    return server


def _with_tool_errors(tool: Callable[_P, Any]) -> Callable[_P, Any]:
    @functools.wraps(tool)
    def call(*arguments: _P.args, **named: _P.kwargs) -> Any:
        try:
            return tool(*arguments, **named)
        except (TorchlensPerfError, OSError) as error:
            raise ToolError(printable(str(error))) from None

    return call
