"""A logging filter that removes credentials, which libraries include in their messages."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from torchlens_perf.exporters.delivery.endpoint_address import parsed

_SHORTEST_SECRET = 4  # Shorter values (0 in experiment-id=0) would occur in other words.


def keep_secrets_out_of_the_log(environ: Mapping[str, str]) -> None:
    """Log *** instead of header values and address credentials in OTEL_* variables."""
    # A filter on a logger does not see the records of child loggers; a filter on a handler does.
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None:
            handler.addFilter(Redaction(environ))


class Redaction(logging.Filter):
    """Masks secrets in log records."""

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
    """Yield the words of header values, as libraries may show them quoted or wrapped."""
    for name, value in environ.items():
        if not name.startswith("OTEL_EXPORTER_OTLP_"):
            continue
        if name.endswith("_HEADERS"):
            for header in value.split(","):
                # Users also write "Authorization: Bearer ...", with a colon.
                _, separator, content = re.sub("[:=]", "=", header, count=1).partition("=")
                yield from _words(content if separator else header)
        elif name.endswith("_ENDPOINT"):
            address = parsed(value)
            for part in (address.user_info, address.query, address.fragment):
                yield from _words(re.sub("[:&=]", " ", part))


def _words(text: str) -> Iterator[str]:
    for form in (text, unquote(text)):
        yield from form.split()
