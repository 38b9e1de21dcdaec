"""Run one node of an exchange that posts a number ten times a second.

The node prints the messages that it collects, and closes at the end of its input.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from msgspec import structs

from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.exchange import Exchange
from torchlens_perf.sidecar.nodes.timing import ExchangeTiming


def main(settings: dict[str, Any]) -> None:
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    host, port = settings["job_store"]
    places = Endpoints((host, port))
    exchange = Exchange(
        places,
        settings["key"],
        settings["node"],
        settings["merges"],
        timing=ExchangeTiming(**settings["timing"]),
    )
    number, longest_s = 0, 0.0
    while not stop.wait(0.1):
        started_s = time.monotonic()
        if not settings["merges"]:  # Node 0 sends nothing to itself.
            exchange.post({settings["rank"]: str(number).encode()})
        collected, notes = exchange.collect_posts(), exchange.notes()
        longest_s = max(longest_s, time.monotonic() - started_s)
        number += 1
        payloads: dict[int, list[int]] = {}
        for post in collected.posts:
            for rank, payload in post.payloads.items():
                payloads.setdefault(rank, []).append(int(payload))
        say(
            payloads=payloads,
            ages=[post.age_s for post in collected.posts for _ in post.payloads],
            nodes={name: structs.asdict(contact) for name, contact in collected.nodes.items()},
            notes=notes,
        )
    started_s = time.monotonic()
    in_time = exchange.close(settings["close_s"])
    say(
        payloads={},
        nodes={},
        in_time=in_time,
        close_s=time.monotonic() - started_s,
        longest_s=longest_s,
    )


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
