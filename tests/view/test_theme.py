"""The theme has a colour for all parts of a step, in the style sheet and for scripts."""

from __future__ import annotations

import re

from torchlens_perf.run.records import PARTS
from torchlens_perf.view import theme


def test_each_part_of_a_step_has_a_name_and_a_color() -> None:
    assert set(PARTS) <= set(theme.PARTS)


def test_no_two_meanings_share_a_color() -> None:
    for ground in ("light", "dark"):
        colors = [getattr(part.color, ground) for part in theme.PARTS.values()]
        colors += [
            getattr(each, ground)
            for each in (theme.SLOWER, theme.FASTER, *theme.SEVERITIES.values())
        ]
        assert len(set(colors)) == len(colors)


def test_style_sheet_has_each_color_for_light_dark_and_chosen_theme() -> None:
    text = theme.css_variables()

    for key in [*(f"part-{part}" for part in theme.PARTS), *theme.SEVERITIES, "slower", "faster"]:
        assert len(re.findall(rf"--{key}: #[0-9a-f]{{6}};", text)) == 3


def test_each_part_of_a_step_has_a_character_of_its_own() -> None:
    glyphs = [part.glyph for part in theme.PARTS.values()]

    assert len(set(glyphs)) == len(glyphs)
    assert all(len(glyph) == 1 for glyph in glyphs)
