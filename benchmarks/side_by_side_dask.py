"""The job of side_by_side.py on a Dask cluster of this machine: each rank is a task on a separate
worker.

    python -m benchmarks.side_by_side_dask OUT STEPS PORT

While the job runs, the dashboard is at http://127.0.0.1:PORT/status. The performance report is
OUT/report.html.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.side_by_side_training import main as train
from tests.support.servers import free_port


def rank(number: int, port: int, out: str, steps: int) -> None:
    """Run one rank on a worker."""
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    train("dask", Path(out), steps)


def main(out: Path, steps: int, port: int) -> None:
    from distributed import Client, LocalCluster, performance_report

    local = {
        "host": "127.0.0.1",
        "dashboard_address": f"127.0.0.1:{port}",
        "local_directory": str(out),
    }
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, **local) as cluster,
        Client(cluster) as client,
    ):
        workers, meeting = sorted(client.scheduler_info()["workers"]), free_port()
        with performance_report(filename=str(out / "report.html")):
            tasks = [
                client.submit(rank, number, meeting, str(out), steps, workers=[worker], pure=False)
                for number, worker in enumerate(workers)
            ]
            client.gather(tasks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
