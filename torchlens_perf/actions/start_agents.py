"""Start the server for agents, if its package is installed."""

from __future__ import annotations

from pathlib import Path

from torchlens_perf.run.installation import require_packages


def serve_agents(folder: Path) -> int:
    """Answer on stdin and stdout until stdin is closed. Raise ConfigError."""
    require_packages("mcp", ["mcp", "duckdb"], "mcp")
    from torchlens_perf.actions.agents import build_server

    build_server(folder).run()
    return 0
