"""Names of modules, sections, runs and hosts are text in traces, comparisons and histories."""

from __future__ import annotations

import gzip
import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

from tests.security.test_what_is_printed import _HOSTILE, assert_harmless, planted, texts_in
from tests.support.ranks import HOST, Rank, make_run, read_to_end
from tests.timeline.test_export import decoded
from torchlens_perf.commands.cli import main
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind

NAMES = [
    "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "=cmd|' /C calc'!A0", "+1", "",
    "`rm -rf ~`", "[x](javascript:alert(1))", "a|b\n|c|d|", *_HOSTILE,
]  # fmt: skip
MS = 1_000_000


def record(folder: Path, name: str, module_ms: int = 1, steps: int = 30) -> RunDirectory:
    """Record a run whose modules and sections have hostile names."""
    run = make_run(folder, name)
    rank = Rank(run, 0, 1)
    recorder = rank.session.recorder
    for _ in range(steps):
        for name_id in map(rank.session.intern, NAMES):
            recorder.begin(Kind.FORWARD, name_id)
            rank.clock.advance(module_ms * MS)
            recorder.begin(Kind.SECTION, name_id)
            rank.clock.advance(MS)
            recorder.end(Kind.SECTION, name_id)
            recorder.end(Kind.FORWARD, name_id)
        recorder.next_step(0, 1000, 1)
    rank.close()
    read_to_end(run)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs before a change that slows all modules, and three after."""
    folder = tmp_path_factory.mktemp("runs") / "\x1b[31m<blink>|`"
    for side, module_ms in (("before", 1), ("after", 2)):
        for number in range(3):
            record(folder / side, f"\x1b]0;{number}\x07<blink>", module_ms)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(each) for each in arguments]) == 0
    shown = capsys.readouterr()
    return shown.out + shown.err


class Tags(html.parser.HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, attrs))


def assert_no_markup_of_names(page: str) -> None:
    tags = Tags(page).seen
    images = [dict(attributes)["src"] or "" for tag, attributes in tags if tag == "img"]
    assert all(each.startswith("data:image/svg+xml;base64,") for each in images)
    assert "blink" not in {tag for tag, _ in tags}
    assert not any(name.startswith("on") for _, attributes in tags for name, _ in attributes)
    assert "<script>alert" not in page
    assert_harmless(page)


def texts_of(trace: Any) -> set[str]:
    annotations = [text for _, _, each in trace.instants for text in (*each, *each.values())]
    names = {each[3] for each in trace.slices} | {each[1] for each in trace.instants}
    return (
        names | set(trace.names.values()) | {each for each in annotations if isinstance(each, str)}
    )


def test_perfetto_trace_has_printable_names(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = next((runs / "before").iterdir()), tmp_path / "run.json.gz"
    assert_harmless(printed(capsys, "report", run, "--perfetto", path))
    names = texts_of(decoded(path))

    assert {"?[2J?[31mred", "</script><script>alert(1)</script>"} <= names
    for name in names:
        assert_harmless(name)


def test_any_text_of_a_node_state_can_be_in_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = record(tmp_path, "run", steps=8), tmp_path / "run.json.gz"
    state = json.loads(run.node_state_path(HOST).read_text())
    for where in {tuple(map(type, each)) + each[-1:]: each for each in texts_in(state)}.values():
        value = planted(state, where, "\x1b[31m\ud800\x00")
        run.node_state_path(HOST).write_text(json.dumps(value))
        # Some texts must be ranks, numbers or times. Then the state is damaged.
        main(["report", str(run.path), "--perfetto", str(path)])
        assert_harmless("".join(capsys.readouterr()))
        if path.exists():
            for name in texts_of(decoded(path)):
                assert_harmless(name)
            path.unlink()


def test_trace_is_json_with_all_names(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = next((runs / "before").iterdir())
    assert_harmless(printed(capsys, "report", run, "--perfetto", tmp_path / "trace.gz"))
    path = tmp_path / "trace.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]

    assert {"</script><script>alert(1)</script>", "=cmd|' /C calc'!A0"} <= {
        each.get("name") for each in events
    }


@pytest.mark.parametrize("form", ["text", "--json", "--markdown"])
def test_comparison_escapes_names(
    form: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [] if form == "text" else [form]
    shown = printed(capsys, "compare", runs / "before", runs / "after", *options)

    assert_harmless(shown)
    assert "2J" in shown
    if form == "--markdown":
        rows = [line for line in shown.splitlines() if line.startswith("| module")]
        assert len(rows) >= len(NAMES) - len(_HOSTILE)
        assert {line.replace("\\|", "").count("|") for line in rows} == {8}
        assert "<script" not in shown
        assert "<img" not in shown
        assert "](javascript:" not in shown.replace("\\]", "")


def test_page_of_a_comparison_has_no_markup_of_names(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    command = ["compare", runs / "before", runs / "after"]
    assert_harmless(printed(capsys, *command))
    assert_harmless(printed(capsys, *command, "--html", page))
    assert_no_markup_of_names(page.read_text())
