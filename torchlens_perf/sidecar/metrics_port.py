"""Serve /metrics of this node if a rank's settings request it.

The port stays open until the last values have been scraped. If another job on this node uses the
port, a note reports it, and the sidecar tries again every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.run.installation import build_install_command
from torchlens_perf.sidecar import termination

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.hardware import HardwareSamples
    from torchlens_perf.exporters import Assessment, ExportBatch, Exporter, NodeRole
    from torchlens_perf.exporters.prometheus.endpoint import ListenAddress
    from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.undelivered import Undelivered
    from torchlens_perf.sidecar.node import Sidecar

logger = logging.getLogger("torchlens_perf.sidecar")

_RETRY_INTERVAL_S = 5.0
_POLL_INTERVAL_S = 0.1

Spans = Mapping[int, tuple[int, int]]
"""Trace id and id of the rank's span, for each step that is sent as spans."""


class MetricsPort:
    """The HTTP port for /metrics of a sidecar. Not thread-safe."""

    def __init__(
        self,
        sent: Callable[[], Spans] = dict,
        clock: Callable[[], float] = time.monotonic,
        last_scrape_timeout_s: float = 70.0,
    ) -> None:
        """sent: returns the ids of the last batch of spans that was sent to a tracing backend.

        clock: a clock in seconds. last_scrape_timeout_s: longest time to wait for another scrape
        after the run's end. Few scrapers have an interval of more than a minute.
        """
        self._last_scrape_timeout_s = last_scrape_timeout_s
        self._sent = sent
        self._clock = clock
        self._exporter: PrometheusExporter | None = None
        self._due_s = float("-inf")
        self._note = ""
        self._given_up = False

    @property
    def address(self) -> ListenAddress | None:
        """The address of the open port, or None while it is closed."""
        return None if self._exporter is None else self._exporter.address

    def open_or_update(self, sidecar: Sidecar) -> None:
        """Open the port if a rank's settings request it. Update its values if it is open.

        Called in each round of the sidecar.
        """
        if self._exporter is not None:
            self._exporter.update_node_points(sidecar.state)
        elif not self._given_up and self._clock() >= self._due_s:
            wanted = next(
                (text for each in sidecar.sources if (text := each.settings.get("prometheus"))), ""
            )
            if wanted:
                with guard("opening the port for /metrics"):
                    self._open_port(str(wanted), sidecar)

    def show_final_values(self, sidecar: Sidecar) -> None:
        """Update the values for the last time. Called when the run has ended."""
        if self._exporter is not None:
            self._exporter.update_node_points(sidecar.state, final=True)

    def close(self, *, lingers: bool) -> None:
        """Close the port. lingers: if the port has been scraped, wait for one more scrape first.

        The wait lasts at most about twice the last interval between scrapes. No rank waits for
        this.
        """
        if self._exporter is None:
            return
        scrapes, began_s, longest_s = (
            self._exporter.scrapes,
            self._clock(),
            self._last_scrape_timeout_s,
        )
        if scrapes and lingers:
            # After a single scrape, the interval is not known, so the whole timeout is used.
            interval_s = scrapes[-1] - scrapes[0]
            until_s = began_s + min(longest_s, 2 * interval_s + 1 if interval_s else longest_s)
            while (
                self._exporter.scrapes[-1] < began_s
                and self._clock() < until_s
                and not termination.is_requested()
            ):
                time.sleep(_POLL_INTERVAL_S)
        self._exporter.shutdown(0)
        self._exporter = None

    def _open_port(self, wanted: str, sidecar: Sidecar) -> None:
        from torchlens_perf.exporters.prometheus.endpoint import ListenAddress

        self._due_s = self._clock() + _RETRY_INTERVAL_S
        try:
            from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter

            self._exporter = PrometheusExporter(ListenAddress.parse(wanted))
        except ImportError:
            self._given_up = True
            self._note_error(
                sidecar,
                "there is no /metrics: it needs prometheus_client:"
                f" {build_install_command('prometheus')}",
            )
        except OSError as error:
            why = error.strerror or str(error)
            retry = f"It is tried again every {_RETRY_INTERVAL_S:g} s"
            self._note_error(
                sidecar, f"there is no /metrics at {ListenAddress.parse(wanted)}: {why}. {retry}"
            )
        else:
            logger.info("/metrics at http://%s/metrics", self._exporter.address)
            if self._note:
                sidecar.state.notes = [each for each in sidecar.state.notes if each != self._note]
            port = self._exporter
            sidecar.combine_exporter(lambda first: CombinedExporter(first, port, self._sent))

    def _note_error(self, sidecar: Sidecar, note: str) -> None:
        if note != self._note:
            self._note = note
            logger.warning("%s", note)
            sidecar.state.notes.append(note)


class CombinedExporter:
    """Exporter that passes all data to another exporter and to the /metrics port.

    The port's metrics link to the spans that the other exporter has sent.
    """

    def __init__(
        self, first: Exporter | None, port: PrometheusExporter, sent: Callable[[], Spans]
    ) -> None:
        self._first, self._port, self._sent = first, port, sent

    def export(self, batch: ExportBatch) -> None:
        if self._first is not None:
            self._first.export(batch)
        self._port.export_with_spans(batch, self._sent() if self._first is not None else {})

    def on_assessment(self, assessment: Assessment) -> None:
        if self._first is not None:
            self._first.on_assessment(assessment)
        self._port.on_assessment(assessment)

    def record_hardware(self, identity: Identity, hardware: HardwareSamples) -> None:
        if self._first is not None:
            self._first.record_hardware(identity, hardware)
        self._port.record_hardware(identity, hardware)

    def update_role(self, part: NodeRole) -> bytes:
        """Set the node's part in the job for the first exporter only.

        A scraper reads the port of each node, so the port always serves this node's own ranks.
        """
        return b"" if self._first is None else self._first.update_role(part)

    def wait_for_room(self, timeout_s: float) -> bool:
        return self._first is None or self._first.wait_for_room(timeout_s)

    def shutdown(self, timeout_s: float) -> list[str]:
        """Shut down the first exporter. MetricsPort.close() closes the port later."""
        return [] if self._first is None else self._first.shutdown(timeout_s)

    def find_undelivered(self) -> Undelivered | None:
        return None if self._first is None else self._first.find_undelivered()
