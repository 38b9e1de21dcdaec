"""A verdict on an earlier part of the run is left out of the short report where it is true now, too."""

from __future__ import annotations

import dataclasses

from torchlens_perf.view.headline import Headline
from torchlens_perf.view.terminal import _other_verdict_lines

NOW = Headline(
    kind="data_bound", status="BOTTLENECK", severity="warning", facts=(("bound by", "data loading"),),
    cost_s_per_step=0.1, cost_share=0.5, sentence="Data.", cause="", action="", command="", is_over=False,
)  # fmt: skip
EARLIER = dataclasses.replace(NOW, kind="data_bound_ended", is_over=True)


def shown(*found: Headline) -> str:
    return "\n".join(line.plain for line in _other_verdict_lines(found, found[0], 100))


def test_earlier_verdict_is_shown_only_if_it_is_over_for_good() -> None:
    assert "earlier" not in shown(NOW, EARLIER)
    other = dataclasses.replace(EARLIER, kind="straggler_ended", facts=(("rank", "3"),))
    assert "earlier" in shown(NOW, EARLIER, other)
    assert "more" not in shown(NOW, EARLIER, other)
