"""Serve /metrics of this node if a rank's settings request it.

The port stays open until the last values have been scraped. If another job on this node uses the
port, a note reports it, and the sidecar tries again every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.installation import build_install_command
from torchlens_perf.sidecar import termination

if TYPE_CHECKING:
    from torchlens_perf.exporters.prometheus.endpoint import ListenAddress
    from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter
    from torchlens_perf.sidecar.node import Sidecar


_RETRY_INTERVAL_S = 5.0
_POLL_INTERVAL_S = 0.1


class MetricsPort:
    """The HTTP port for /metrics of a sidecar.

    A scraper reads the port of each node, so the port always serves this node's own ranks. Not
    thread-safe.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        last_scrape_timeout_s: float = 70.0,
    ) -> None:
        """clock: a clock in seconds. last_scrape_timeout_s: longest time to wait for another scrape
        after the run's end. Few scrapers have an interval of more than a minute.
        """
        self._last_scrape_timeout_s = last_scrape_timeout_s
        self._clock = clock
        self._exporter: PrometheusExporter | None = None
        self._due_s = float("-inf")
        self._note = ""
        self._given_up = False

    @property
    def address(self) -> ListenAddress | None:
        """The address of the open port, or None while it is closed."""
        return None if self._exporter is None else self._exporter.endpoint.address

    def open_or_update(self, sidecar: Sidecar) -> None:
        """Open the port if a rank's settings request it. Update its values if it is open.

        Called in each round of the sidecar.
        """
        if self._exporter is not None:
            self._exporter.update_node_points(sidecar.state)
        elif not self._given_up and self._clock() >= self._due_s:
            wanted = next(
                (
                    text
                    for each in sidecar.sources
                    if (text := each.state.facts.settings.prometheus)
                ),
                "",
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
        endpoint, began_s = self._exporter.endpoint, self._clock()
        if endpoint.scrapes and lingers:
            # After a single scrape, the interval is not known, so the whole timeout is used.
            interval_s = (endpoint.scrapes[-1] - endpoint.scrapes[0]) or self._last_scrape_timeout_s
            until_s = began_s + min(self._last_scrape_timeout_s, 2 * interval_s + 1)
            while (
                endpoint.scrapes[-1] < began_s
                and self._clock() < until_s
                and not termination.is_requested()
            ):
                time.sleep(_POLL_INTERVAL_S)
        endpoint.close()
        self._exporter = None

    def _open_port(self, wanted: str, sidecar: Sidecar) -> None:
        from torchlens_perf.exporters.prometheus.endpoint import ListenAddress

        self._due_s = self._clock() + _RETRY_INTERVAL_S
        try:
            from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter

            self._exporter = PrometheusExporter(
                ListenAddress.parse(wanted),
                lambda: {} if sidecar.exporter is None else sidecar.exporter.spans_sent,
            )
        except ImportError:
            self._given_up = True
            self._note_error(
                sidecar,
                "there is no /metrics: it needs prometheus_client:"
                f" {build_install_command('prometheus')}",
            )
        except OSError as error:
            # socket.create_server() adds the address to the reason.
            why = str(error.strerror or error).partition(" (while ")[0]
            self._note_error(
                sidecar,
                f"there is no /metrics at {ListenAddress.parse(wanted)}: {why}. It is tried again"
                f" every {_RETRY_INTERVAL_S:g} s",
            )
        else:
            logger.info("/metrics at http://%s/metrics", self._exporter.endpoint.address)
            if self._note:
                sidecar.state.notes = [each for each in sidecar.state.notes if each != self._note]
            sidecar.receivers.append(self._exporter)

    def _note_error(self, sidecar: Sidecar, note: str) -> None:
        if note != self._note:
            self._note = note
            logger.warning("%s", note)
            sidecar.state.notes.append(note)
