"""The sidecar's log without credentials, which libraries put into their messages."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from torchlens_perf.exporters.delivery.endpoint_address import parsed

_SHORTEST_SECRET = 4  # shorter ones, like the 0 in experiment-id=0, guard nothing and would tear other words apart


def keep_secrets_out_of_the_log(environ: Mapping[str, str]) -> None:
    """From here on, what OTEL_* variables hold in headers, and in addresses beside host and path, is logged as ***."""
    # Filters of a logger do not see its children's records; those of its handlers do.
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None:
            handler.addFilter(Redaction(environ))


class Redaction(logging.Filter):
    """Changes records; drops none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        secrets = {secret for secret in _secrets(environ) if len(secret) >= _SHORTEST_SECRET}
        longest_first = sorted(secrets, key=len, reverse=True)
        self._secret = re.compile("|".join(map(re.escape, longest_first))) if secrets else None

    def filter(self, record: logging.LogRecord) -> bool:
        if self._secret is not None:
            record.msg, record.args = self._secret.sub("***", record.getMessage()), None
            if record.exc_info:
                text = "".join(traceback.format_exception(*record.exc_info))
                record.exc_text, record.exc_info = self._secret.sub("***", text.rstrip()), None
        return True


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    """Every word of a header's value: a library may show it quoted, decoded or broken into lines."""
    for name, value in environ.items():
        if not name.startswith("OTEL_EXPORTER_OTLP_"):
            continue
        if name.endswith("_HEADERS"):
            for header in value.split(","):
                # A user who wrote "Authorization: Bearer ..." meant a header too.
                _, separator, content = re.sub("[:=]", "=", header, count=1).partition("=")
                yield from _words(content if separator else header)
        elif name.endswith("_ENDPOINT"):
            address = parsed(value)
            for part in (address.user_info, address.query, address.fragment):
                yield from _words(re.sub("[:&=]", " ", part))


def _words(text: str) -> Iterator[str]:
    for form in (text, unquote(text)):
        yield from form.split()
