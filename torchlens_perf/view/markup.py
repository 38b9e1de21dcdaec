"""HTML and SVG as elements: text and attributes are escaped and made printable here, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from torchlens_perf.errors import printable

LONGEST_TEXT = 2000  # of one text; more would fill the page

Element = ElementTree.Element
Child = Element | str | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Element:
    """An element. A trailing underscore of an attribute's name is dropped, others become hyphens: class_, data_chart.

    None is no child, and no attribute.
    """
    made = ElementTree.Element(name)
    for key, value in attributes.items():
        if value is not None:
            made.set(key.rstrip("_").replace("_", "-"), printable(value) if isinstance(value, str) else number(value))
    _append(made, children)
    return made


def _append(parent: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            text = safe(child)
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + text
            else:
                parent.text = (parent.text or "") + text
        elif isinstance(child, ElementTree.Element):
            parent.append(child)
        else:
            _append(parent, child)


def safe(text: str) -> str:
    """One line of bounded length in which nothing turns letters round or drives a terminal."""
    text = printable(text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def number(value: float) -> str:
    """For an attribute: at most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def raw(name: str, text: str, **attributes: str) -> Element:
    """A script or style element: its text is not escaped, so that it must not end it."""
    assert f"</{name}" not in text.lower()
    made = tag(name, **attributes)
    made.text = text
    return made


def html(element: Element) -> str:
    """As text. A script or style element is written as it is: its text must be no markup."""
    return ElementTree.tostring(element, encoding="unicode", method="html")


def name(text: str, longest: int = 48) -> Child:
    """A name from outside: a long one is shortened, with the whole of it in a title."""
    text = printable(text)
    if len(text) <= longest:
        return tag("span", text, class_="name")
    half = longest // 2
    return tag("span", f"{text[:half]}…{text[-half:]}", class_="name", title=safe(text))
