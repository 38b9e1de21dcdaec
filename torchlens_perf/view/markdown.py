"""Draw tables as Markdown, for comments on pull requests."""

from __future__ import annotations

from collections.abc import Iterator

from torchlens_perf.view.headline import Headline
from torchlens_perf.view.specs import Table, sanitize_line


def headline_lines(head: Headline) -> Iterator[str]:
    """Yield a headline as paragraphs: status and sentence, cause, action, command."""
    yield f"**{head.status}** {escaped(head.sentence)}"
    for text in filter(None, (head.cause, head.action)):
        yield ""
        yield escaped(text)
    if head.command:
        yield ""
        yield f"`{sanitize_line(head.command).replace('`', '')}`"


def table_lines(table: Table) -> Iterator[str]:
    """Yield a table, as many rows as it shows at first."""
    shown = table.first_rows(table.first or table.rows)
    cells = [column.texts() for column in shown.columns]
    yield f"### {escaped(table.title)}"
    yield ""
    yield f"| {' | '.join(escaped(column.heading) for column in shown.columns)} |"
    yield f"|{'|'.join('---' if column.is_text else '--:' for column in shown.columns)}|"
    for row in zip(*cells, strict=True):
        yield f"| {' | '.join(map(escaped, row))} |"
    for text in filter(None, (table.describe_hidden_rows(shown.rows), table.note)):
        yield ""
        yield escaped(text)


def escaped(text: str) -> str:
    """Return one line of text in which no character has a meaning in Markdown or HTML."""
    text = sanitize_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
