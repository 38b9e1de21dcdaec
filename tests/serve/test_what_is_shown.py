"""The list of runs, a run's page and its data, as sent by the server, also for damaged folders."""

from __future__ import annotations

import gzip
import html
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.support.live_simulation import LiveSimulation
from tests.support.page_server import PageServer, Viewer, links
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.page.document.html import contents_as_json
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.serve.run_list import SORTS
from torchlens_perf.serve.run_names import parse_run_name, quote_name
from torchlens_perf.view.headline import build_headlines, list_current

pytestmark = pytest.mark.distributed


def cells(page: str) -> list[dict[str, str]]:
    """Return the rows of the list as text by column."""
    rows = re.findall(r"<tr>(<td.*?)</tr>", page)
    found = [re.findall(r'<td class="run-(?!tick)(\w+)">(.*?)</td>', row) for row in rows]
    return [{key: re.sub(r"(<[^>]*>)+", " ", text).strip() for key, text in row} for row in found]


def test_run_list_has_status_cost_step_time_and_verdict_of_each_run(
    viewer: Viewer, runs: Path
) -> None:
    """All values equal those of the report."""
    text = viewer.list()
    (row,) = cells(text)
    held = gather_contents(RunDirectory(runs / "done"))["report"]
    problems = list_current(build_headlines(held))

    assert links(text, "runs/") == ["runs/done/"]
    assert "simulation <small>1 run</small>" in text.replace("</span>", "")
    started = (held["run"]["started"] or "").replace("T", " ")[:16]
    assert row.pop("started") == f"{started} UTC"
    facts = [dict(each.facts) for each in problems]
    assert facts[0]["rank"].startswith("3")
    assert row == {
        "program": "done", "status": " ".join(each.status for each in problems),
        "rank": facts[0]["rank"], "since": facts[0]["steps"].removeprefix("since "),
        "cost": format_percent(problems[0].cost_share or 0),
        "verdict": " ".join(html.escape(each.sentence, quote=False) for each in problems),
        "step": format_duration(held["steps"]["p50_s"] or 0), "steps": "96", "ranks": "4", "state": "ended",
    }  # fmt: skip
    assert f'title="{problems[0].cost}"' in text
    assert "Next:" not in text


def test_served_page_equals_the_page_file(viewer: Viewer, runs: Path) -> None:
    """The page and the JSON have the contents of the file.

    Unlike the file, the page loads its scripts and styles from addresses.
    """
    held = json.loads(contents_as_json(gather_contents(RunDirectory(runs / "done"))))
    shown = viewer.json("/runs/done/api/contents")
    text = viewer.page("done")
    found = re.search(
        r'<script type="application/json" id="contents">(.*?)</script>', text, re.DOTALL
    )
    assert found is not None
    for each in (shown, json.loads(found[1])):
        assert {**each, "written": ""} == {**held, "written": ""}
    assert 'data-live="ended"' in text
    addresses = re.findall(r'(?:src|href)="(\.\./\.\./static/[^"]*)"', text)
    assert len(addresses) >= 3
    for each in addresses:
        answer = viewer.ask(each.removeprefix("../.."))
        assert answer.status == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-type"].startswith(("text/css", "text/javascript"))


def test_client_without_gzip_receives_uncompressed_data(viewer: Viewer) -> None:
    plain, packed = viewer.ask("/runs/done/"), viewer.ask("/runs/done/", accept_encoding="gzip, br")
    assert plain.body == gzip.decompress(packed.body)
    assert (plain.headers.get("content-encoding"), packed.headers["content-encoding"]) == (
        None,
        "gzip",
    )


def test_any_recorded_step_is_served_with_all_its_spans(viewer: Viewer) -> None:
    """A step that was not recorded has an empty result."""
    step = viewer.json("/runs/done/api/step/50")
    (row,) = step["steps"]
    assert (row["step"], [each["rank"] for each in row["ranks"]]) == (50, [0, 1, 2, 3])
    assert viewer.json("/runs/done/api/step/5000")["steps"] == []
    assert viewer.ask("/runs/done/api/step/-1").status == 404
    assert viewer.ask("/runs/done/api/step/99999999999999999999999").status < 600


@pytest.mark.parametrize(
    "path",
    [
        "/runs/../", "/runs/%2e%2e/", "/runs/..%2f..%2fetc/", "/runs/%00/", "/runs//", "/runs/%2f/", "/runs/nothing/",
        "/runs/" + "x" * 5000 + "/", "/runs/%ff%fe/", "/runs/done%0a/", "/runs/done/api/captures/..%2f..",
        "/runs/done/captures/../../nodes/x", "/runs/done/captures/a/%2e%2e/b", "/runs/done/captures/a/0/..%2f..%2fx",
        "/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/live.css/", "/favicon.ico",
    ],
)  # fmt: skip
def test_request_paths_cannot_leave_the_folder(viewer: Viewer, path: str) -> None:
    answer = viewer.ask(path)
    # 307 redirects to the address with a slash.
    assert answer.status in (404, 307)
    assert b"import " not in answer.body


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (b"/runs/a%20b/api/x", "a b"), (b"/runs/%ff/", "\udcff"), (b"/runs/..%2f..%2fetc/", ""), (b"/runs/%2e%2e/", ""),
        (b"/runs/./", ""), (b"/runs/a%00/", ""), (b"/runs", ""), (b"/", ""), (b"/runs/" + b"x" * 256 + b"/", ""),
    ],
)  # fmt: skip
def test_run_names_in_addresses_cannot_leave_the_folder(path: bytes, name: str) -> None:
    assert parse_run_name(path) == name
    assert name == "" or parse_run_name(f"/runs/{quote_name(name)}/".encode()) == name


def test_unreadable_run_is_listed_and_folder_names_are_text(tmp_path: Path, runs: Path) -> None:
    """An unreadable run is listed with the reason. Any folder name is shown as text.

    Links are not runs.
    """
    folder = tmp_path / "runs"
    shutil.copytree(runs / "done", folder / "good")
    for name in (
        "<b>bold",
        'quote"&amp;',
        "line\nline",
        "\x1b[2J",
        "a b?c#d",
        "percent%2e",
        "\u202eexe",
    ):
        shutil.copytree(runs / "done", folder / name)
    shutil.copytree(os.fsencode(runs / "done"), os.fsencode(folder) + b"/not\xffutf8")
    (folder / "bad" / "nodes").mkdir(parents=True)
    (folder / "bad" / "nodes" / "n.json").write_text("{")
    (folder / "fifo" / "nodes").mkdir(parents=True)
    os.mkfifo(folder / "fifo" / "nodes" / "n.json")
    (folder / "begins" / "nodes").mkdir(parents=True)
    (folder / "nodes is a file").mkdir()
    (folder / "nodes is a file" / "nodes").touch()
    (folder / "no run").mkdir()
    (folder / "file").touch()
    (folder / "link").symlink_to(runs / "done")
    loop = folder / "loop"
    loop.mkdir()
    (loop / "nodes").symlink_to("nodes")
    with PageServer(folder) as server:
        viewer = server.viewer()
        text = viewer.list()
        found = links(text, "runs/")
        assert len(found) == 12
        assert all(raw not in text for raw in ("<b>bold", "\x1b", "\u202e", "line\nline"))
        rows = cells(text)
        assert [row["verdict"] for row in rows if row["status"] == "STARTING"] == [
            "No step has been recorded yet."
        ]
        assert sum(row["status"] == "UNREADABLE" for row in rows) == 2
        shown = {address: viewer.answer_of_page(f"/{address}") for address in found}
        unreadable = {address: answer for address, answer in shown.items() if answer.status != 200}
        assert set(unreadable) == {"runs/bad/", "runs/fifo/", "runs/begins/"}
        assert viewer.json("/api/counts")["runs"].keys() >= {"good", "not%FFutf8", "line%0Aline"}
        assert "has no data yet. A run that starts" in unreadable["runs/begins/"].text
        for address, answer in unreadable.items():
            assert answer.status == 503
            assert len(answer.text.splitlines()) == 1
            page = viewer.answer_of_page(f"/{address}", accept="text/html")
            # Browsers log each response that is an error.
            assert page.status == 202
            assert html.escape(answer.text.strip(), quote=False) in page.text
            assert "This page renews itself." in page.text
        for name in ("link", "loop", "file", "no%20run", "nodes%20is%20a%20file"):
            assert viewer.ask(f"/runs/{name}/").status == 404
        assert viewer.ask("/?search=bad").text.count('href="runs/') == 1
        assert "No run matches" in viewer.ask("/?search=%3Cscript%3E").text
        assert "<script>alert" not in viewer.ask('/?search="><script>alert(1)</script>').text


def test_run_list_can_be_sorted_and_filtered(tmp_path: Path, runs: Path) -> None:
    """Each column sorts in both directions. A run without a value comes last."""
    shutil.copytree(runs / "done", tmp_path / "slow")
    with LiveSimulation(tmp_path / "live", 2) as live:
        live.add_blocks()
        (tmp_path / "begins" / "nodes").mkdir(parents=True)
        with PageServer(tmp_path) as server:
            viewer = server.viewer()
            viewer.list()

            def names(query: str) -> list[str]:
                return [
                    link.split("/")[1] for link in links(viewer.ask(f"/?{query}").text, "runs/")
                ]

            assert names("sort=ranks") == ["slow", "live", "begins"]
            assert names("sort=-ranks") == ["live", "slow", "begins"]
            assert names("sort=cost")[0] == "slow"
            for key in SORTS:
                assert (
                    sorted(names(f"sort={key}"))
                    == sorted(names(f"sort=-{key}"))
                    == ["begins", "live", "slow"]
                )
            assert names("sort=nothing") == names("")
            assert names("sort=rank")[0] == names("sort=since")[0] == "slow"
            assert names("pin=begins&pin=gone&sort=ranks") == ["begins", "slow", "live"]
            assert ">Pinned</span> <small>1 run" in viewer.ask("/?pin=begins").text
            assert names("search=SLOW+rank") == ["slow"]
            assert set(names("search=live")) == {"live"}
            page = viewer.ask("/?sort=-ranks&search=l").text
            assert 'aria-sort="ascending"' in page
            assert "2 of 3 runs match, updated" in page
            assert 'href="?search=l&amp;sort=ranks"' in page


@pytest.mark.parametrize("path", ["/runs/nothing/", "/nothing", "/runs/done/nothing"])
def test_address_without_a_page_leads_to_the_list(viewer: Viewer, path: str) -> None:
    answer = viewer.answer_of_page(path, accept="text/html")
    assert answer.status == 404
    assert "<h1>Not found</h1>" in answer.text
    (link,) = re.findall(r'<a href="([^"]*)">All runs', answer.text)
    assert urljoin(f"http://host{path}", link) == "http://host/"
    assert "<html" not in viewer.ask(path).text


def test_served_folder_can_be_a_single_run(runs: Path) -> None:
    """The run is listed by its name, and no other name is accepted."""
    with PageServer(runs / "done") as server:
        viewer = server.viewer()
        page = viewer.ask("/").text
        assert links(page, "runs/") == ["runs/done/"]
        assert ">1 run, updated" in page
        assert "contents" in viewer.page("done")
        assert viewer.ask("/runs/nodes/").status == 404


def test_list_of_many_runs_is_shown_in_pages(tmp_path: Path, runs: Path) -> None:
    """The newest runs come first.

    Only visible runs are read, so a folder of many thousand is listed at once.
    """
    state = next((runs / "done" / "nodes").glob("*.json"))
    for number in range(120):
        nodes = tmp_path / f"run-{number:03d}" / "nodes"
        nodes.mkdir(parents=True)
        if number >= 115:
            os.link(state, nodes / state.name)
        os.utime(nodes, (number, number))
    with PageServer(tmp_path) as server:
        viewer = server.viewer()
        first = viewer.list()
        assert links(first, "runs/") == [f"runs/run-{number:03d}/" for number in range(119, 69, -1)]
        assert "page 1 of 3" in first
        assert [row["status"] for row in cells(first)][:6] == ["SLOW RANK"] * 5 + ["STARTING"]
        assert cells(viewer.ask("/?sort=-ranks").text)[-1]["ranks"] == ""
        last = viewer.ask("/?page=2").text
        assert links(last, "runs/")[-1] == "runs/run-000/"
        for page in ("99999999", "-1", "x", "9" * 400):
            assert viewer.ask(f"/?page={page}").status == 200
