"""Colours, names and thresholds that terminals, pages and dashboards use for drawing. Pure.

A colour has one meaning. Phases have the colours of Okabe and Ito, which people with colour
blindness can tell apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchlens_perf.verdicts.kinds import BAD, GOOD, NEUTRAL, WARNING


@dataclasses.dataclass(frozen=True)
class Color:
    """A colour on a light and on a dark page, and its name in rich for a terminal."""

    light: str
    dark: str
    terminal: str


@dataclasses.dataclass(frozen=True)
class StepPart:
    """The name, the colour and the character of a part of a step, the same on all screens."""

    name: str
    color: Color
    glyph: str
    """What bars of a terminal are made of, which tells parts apart without colours."""


PARTS: Mapping[str, StepPart] = {
    "data": StepPart("data", Color("#e69f00", "#e69f00", "yellow"), "="),
    "forward": StepPart("forward", Color("#009e73", "#2bb68d", "green"), "█"),
    "recompute": StepPart("recompute", Color("#cc79a7", "#cc79a7", "magenta"), ":"),
    "backward": StepPart("backward", Color("#0072b2", "#3a93cf", "blue"), "▓"),
    "optimizer": StepPart("optimizer", Color("#56b4e9", "#7cc7f2", "cyan"), "▒"),
    "communication": StepPart("comm wait", Color("#b6bcc4", "#5b6570", "bright_black"), "░"),
    "host": StepPart("host code", Color("#8d7b68", "#a8947f", "white"), "▚"),
    "cpu": StepPart("CPU contention", Color("#6f42c1", "#a37eea", "bright_magenta"), "/"),
    "tool": StepPart("torchlens_perf", Color("#8a7a00", "#b3a125", "bright_yellow"), "·"),
}
"""Parts of a step by their names in run.records.PARTS.

`cpu` is time runnable but not scheduled, `host` is Python and other host code between the phases.
"""

SEVERITIES: Mapping[str, Color] = {
    BAD: Color("#b42318", "#ff8a7a", "bold red"),
    WARNING: Color("#8a5a00", "#f0b849", "bold yellow"),
    GOOD: Color("#1a7f37", "#6fd68a", "bold green"),
    NEUTRAL: Color("#555e68", "#a2abb5", "bold"),
}
SLOWER = Color("#d55e00", "#ff8f3f", "red")
"""Colour of more compute time than other ranks. Nothing else is orange."""
FASTER = Color("#3b7fc4", "#6fb1f0", "blue")
SURFACES: Mapping[str, Color] = {
    "ground": Color("#f6f7f9", "#12161b", ""),
    "raised": Color("#ffffff", "#1a2027", ""),
    "text": Color("#1c2024", "#e6e9ec", ""),
    "dim": Color("#555e68", "#a2abb5", ""),
    "rule": Color("#dde2e7", "#343d47", ""),
    "link": Color("#0550ae", "#79b8ff", ""),
}
"""Colours of page backgrounds, text and lines. A terminal has its own."""
EXCESS_BOUNDS = (0.03, 0.06, 0.12, 0.25)
"""Relative excess compute time at which a heat map cell in a terminal becomes one shade darker."""
EXCESS_STYLES = ("dim", "", "yellow", "red", "bold red")
MIN_EXCESS, FULL_EXCESS = 0.03, 0.30
"""Relative excess compute time at which colour begins and at which it is full.

Colour begins at MIN_EXCESS only if the smallest detectable excess is not known.
"""


def css_variables() -> str:
    """Return all colours as CSS custom properties, such as --part-data, --bad and --slower.

    Printed pages use the light colours.
    """
    colors = {f"part-{key}": part.color for key, part in PARTS.items()}
    colors |= {**SURFACES, **SEVERITIES, "slower": SLOWER, "faster": FASTER}
    light = " ".join(f"--{key}: {color.light};" for key, color in colors.items())
    dark = " ".join(f"--{key}: {color.dark};" for key, color in colors.items())
    fills = "\n".join(f"rect.part-{key} {{ fill: var(--part-{key}); }}" for key in PARTS)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        '@media screen and (prefers-color-scheme: dark) { :root:not([data-theme="light"]) {'
        f" {dark} }} }}\n"
        f'@media screen {{ :root[data-theme="dark"] {{ color-scheme: dark; {dark} }} }}\n'
        f':root[data-theme="light"] {{ color-scheme: light; }}\n{fills}\n'
    )


def theme_for_scripts() -> dict[str, Any]:
    """Return names and thresholds for the page's scripts, which receive them as JSON.

    Scripts read colours from the style sheet.
    """
    names = {key: part.name for key, part in PARTS.items()}
    return {"parts": names, "min_excess": MIN_EXCESS, "full_excess": FULL_EXCESS}
