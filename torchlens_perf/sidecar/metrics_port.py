"""/metrics of this node, while its sidecar works and until the last values were fetched. Only where it was asked for.

The port may be another job's on this node: then that is said, and tried again now and then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.run.installation import install_command
from torchlens_perf.sidecar import termination

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.exporters import Assessment, ExportBatch, Exporter, JobPart
    from torchlens_perf.exporters.prometheus.endpoint import Address
    from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.sidecar.node import Sidecar

logger = logging.getLogger("torchlens_perf.sidecar")

_AGAIN_S = 5.0  # between two tries to get the port
_LOOK_S = 0.1

Spans = Mapping[int, tuple[int, int]]
"""By step that is sent as spans: the ids of its trace, and of the rank's span in it."""


class MetricsPort:
    """Belongs to the sidecar's thread."""

    def __init__(
        self,
        sent: Callable[[], Spans] = dict,
        clock: Callable[[], float] = time.monotonic,
        last_scrape_timeout_s: float = 70.0,
    ) -> None:
        """sent: of the batch that was exported last, what went to a tracing backend. clock: seconds.

        last_scrape_timeout_s: after the run's end, for one more scrape, where only one was seen. Scrapers that ask
        less than once a minute are rare.
        """
        self._last_scrape_timeout_s = last_scrape_timeout_s
        self._sent = sent
        self._clock = clock
        self._exporter: PrometheusExporter | None = None
        self._due_s = float("-inf")
        self._note = ""
        self._given_up = False

    @property
    def address(self) -> Address | None:
        """Where it listens; None while it does not."""
        return None if self._exporter is None else self._exporter.address

    def update(self, sidecar: Sidecar) -> None:
        """Once in each round of the sidecar: opens the port where a rank asks for it, and shows what is known."""
        if self._exporter is not None:
            self._exporter.look(sidecar.state)
        elif not self._given_up and self._clock() >= self._due_s:
            wanted = next((text for each in sidecar.sources if (text := each.settings.get("prometheus"))), "")
            if wanted:
                with guard("opening the port for /metrics"):
                    self._open(str(wanted), sidecar)

    def show_last(self, sidecar: Sidecar) -> None:
        """What is known when the run has ended."""
        if self._exporter is not None:
            self._exporter.look(sidecar.state, final=True)

    def finish(self, *, lingers: bool) -> None:
        """Closes the port. lingers: before that, waits for somebody who has asked until now to ask once more, for at
        most twice as long as it took until now. Nobody waits for this."""
        if self._exporter is None:
            return
        scrapes, began_s, longest_s = self._exporter.scrapes, self._clock(), self._last_scrape_timeout_s
        if scrapes and lingers:
            interval_s = scrapes[-1] - scrapes[0]
            until_s = began_s + min(longest_s, 2 * interval_s + 1 if interval_s else longest_s)
            while self._exporter.scrapes[-1] < began_s and self._clock() < until_s and not termination.is_asked():
                time.sleep(_LOOK_S)
        self._exporter.shutdown(0)
        self._exporter = None

    def _open(self, wanted: str, sidecar: Sidecar) -> None:
        from torchlens_perf.exporters.prometheus.endpoint import Address

        self._due_s = self._clock() + _AGAIN_S
        try:
            from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter

            self._exporter = PrometheusExporter(Address.of(wanted))
        except ImportError:
            self._given_up = True
            self._say(sidecar, f"there is no /metrics: it needs prometheus_client: {install_command('prometheus')}")
        except OSError as error:
            why = error.strerror or str(error)
            self._say(
                sidecar, f"there is no /metrics at {Address.of(wanted)}: {why}. It is tried again every {_AGAIN_S:g} s"
            )
        else:
            logger.info("/metrics at http://%s/metrics", self._exporter.address)
            if self._note:
                sidecar.state.notes = [each for each in sidecar.state.notes if each != self._note]
            port = self._exporter
            sidecar.also_export_to(lambda first: Both(first, port, self._sent))

    def _say(self, sidecar: Sidecar, note: str) -> None:
        if note != self._note:
            self._note = note
            logger.warning("%s", note)
            sidecar.state.notes.append(note)


class Both:
    """An Exporter: one that may send spans, and the port, which leads to these."""

    def __init__(self, first: Exporter | None, port: PrometheusExporter, sent: Callable[[], Spans]) -> None:
        self._first, self._port, self._sent = first, port, sent

    def export(self, batch: ExportBatch) -> None:
        if self._first is not None:
            self._first.export(batch)
        self._port.export_with(batch, self._sent() if self._first is not None else {})

    def on_assessment(self, assessment: Assessment) -> None:
        if self._first is not None:
            self._first.on_assessment(assessment)
        self._port.on_assessment(assessment)

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        if self._first is not None:
            self._first.measured(identity, hardware)
        self._port.measured(identity, hardware)

    def take_part(self, part: JobPart) -> bytes:
        """Who asks the port asks each node, and is given this node's ranks: the part in the job is the first one's."""
        return b"" if self._first is None else self._first.take_part(part)

    def wait_for_room(self, timeout_s: float) -> bool:
        return self._first is None or self._first.wait_for_room(timeout_s)

    def shutdown(self, timeout_s: float) -> list[str]:
        """Of the first alone: the port stays until the last values were fetched."""
        return [] if self._first is None else self._first.shutdown(timeout_s)
