"""A logging filter that masks credentials in the log messages of libraries."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from torchlens_perf.exporters.delivery.endpoint_address import parse_endpoint_address

# Shorter values, such as 0 in experiment-id=0, would also occur in other words.
_SHORTEST_SECRET = 4


def add_redaction_to_log_handlers(environ: Mapping[str, str]) -> None:
    """Mask the header values and address credentials that OTEL_* variables contain."""
    # Add the filter to handlers, because a filter on a logger is not applied to records of child
    # loggers.
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None:
            handler.addFilter(RedactionFilter(environ))


class RedactionFilter(logging.Filter):
    """Replaces secrets in log records with ***."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        secrets = {secret for secret in _find_secrets(environ) if len(secret) >= _SHORTEST_SECRET}
        longest_first = sorted(secrets, key=len, reverse=True)
        self._secret = re.compile("|".join(map(re.escape, longest_first))) if secrets else None

    def filter(self, record: logging.LogRecord) -> bool:
        if self._secret is not None:
            record.msg, record.args = self._secret.sub("***", record.getMessage()), None
            if record.exc_info:
                text = "".join(traceback.format_exception(*record.exc_info))
                record.exc_text, record.exc_info = self._secret.sub("***", text.rstrip()), None
        return True


def _find_secrets(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of header values and of credentials in addresses.

    Words are masked one by one, because libraries may quote or wrap the values.
    """
    for name, value in environ.items():
        if not name.startswith("OTEL_EXPORTER_OTLP_"):
            continue
        if name.endswith("_HEADERS"):
            for header in value.split(","):
                # Some users write "Authorization: Bearer ...", with a colon.
                _, separator, content = re.sub("[:=]", "=", header, count=1).partition("=")
                yield from _split_words(content if separator else header)
        elif name.endswith("_ENDPOINT"):
            address = parse_endpoint_address(value)
            for part in (address.user_info, address.query, address.fragment):
                yield from _split_words(re.sub("[:&=]", " ", part))


def _split_words(text: str) -> Iterator[str]:
    for form in (text, unquote(text)):
        yield from form.split()
