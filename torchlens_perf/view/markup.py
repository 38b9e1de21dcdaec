"""HTML and SVG elements.

The functions escape text and attributes, and make them printable. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from torchlens_perf.analysis.statistics.quantities import printable
from torchlens_perf.view.specs import sanitize_line

Element = ElementTree.Element
Child = Element | str | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Element:
    """Return an element. Children and attributes that are None are left out.

    A trailing underscore in an attribute's name is dropped, other underscores become hyphens:
    class_, data_chart. Numbers have at most two decimals.
    """
    made = ElementTree.Element(name)
    for key, value in attributes.items():
        if value is not None:
            made.set(
                key.rstrip("_").replace("_", "-"),
                printable(value)
                if isinstance(value, str)
                else f"{value:.2f}".rstrip("0").rstrip("."),
            )
    _append(made, children)
    return made


def _append(parent: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            text = sanitize_line(child)
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + text
            else:
                parent.text = (parent.text or "") + text
        elif isinstance(child, ElementTree.Element):
            parent.append(child)
        else:
            _append(parent, child)


def raw_element(name: str, text: str, **attributes: str) -> Element:
    """Return a script or style element.

    The text is not escaped and must not contain the closing tag.
    """
    assert f"</{name}" not in text.lower()
    made = tag(name, **attributes)
    made.text = text
    return made


def to_html(element: Element) -> str:
    """Return the element as HTML text. The content of scripts and styles is not escaped."""
    return ElementTree.tostring(element, encoding="unicode", method="html")
