"""An agent asks about runs by a real client of the Model Context Protocol, and can change nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.support.simulated_runs import simulate_run


def ask_all(folder: Path, *questions: tuple[str, dict[str, Any]]) -> list[Any]:
    """Return the answer to each question: its JSON values, or the text of an error."""

    async def run() -> list[Any]:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "torchlens_perf", "mcp", str(folder)]
        )
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            found = []
            for name, arguments in questions:
                answer = await session.call_tool(name, arguments)
                texts = [each.text for each in answer.content]
                found.append(
                    "".join(texts) if answer.is_error else [json.loads(text) for text in texts]
                )
            return found

    return asyncio.run(asyncio.wait_for(run(), 120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    simulate_run(found / "clean", ranks=4)
    simulate_run(found / "slow", "--fault", "constant:rank=3,share=0.4", ranks=4)
    (found / "broken" / "nodes").mkdir(parents=True)
    return found


def test_answers_are_those_of_the_report_and_nothing_outside_is_read(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    listed, verdicts, account, compared, rows, outside, file, none = ask_all(
        folder,
        ("list_runs", {}),
        ("verdicts", {"run": "slow"}),
        ("account", {"run": "slow", "rank": 3}),
        ("compare", {"before": "clean", "after": "slow"}),
        ("query", {"run": "slow", "sql": "SELECT rank, step FROM steps -- all"}),
        ("verdicts", {"run": f"../{folder.name}/slow"}),
        ("query", {"run": "slow", "sql": "SELECT * FROM read_text('/etc/hostname')"}),
        ("account", {"run": "slow", "rank": 99}),
    )
    by_name = {each["run"]: each for each in listed}
    assert by_name["slow"]["verdict"]["status"] == "SLOW RANK"
    assert by_name["clean"]["verdict"]["status"] == "OK"
    assert "problem" in by_name["broken"]
    assert verdicts[0]["kind"] == "straggler"
    assert "Rank 3" in verdicts[0]["sentence"]
    assert account[0]["rank"] == 3
    assert account[0]["typical"]["s"] > 0
    assert compared[0]["status"] == "CHANGED"
    assert len(rows[0]["rows"]) == 200
    assert rows[0]["has_more"] is True
    assert "there is no run" in outside
    assert "Permission Error" in file
    assert "no rank 99" in none
    assert sorted(folder.rglob("*")) == before
