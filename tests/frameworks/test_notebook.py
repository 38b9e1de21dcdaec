"""Tests of notebooks in a real Jupyter kernel: displayed output, live and at the end.

Nothing else changes.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.test_notebook_cell import Page
from tests.results.test_docs_notebook import blocks
from tests.support.kernel import Kernel
from tests.support.processes import ROOT, clean_environ, report, runs

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        any(
            importlib.util.find_spec(name) is None
            for name in ("nbclient", "nbconvert", "ipykernel")
        ),
        reason=(
            "nbclient, nbconvert and ipykernel are not in this environment: make test-frameworks"
        ),
    ),
]
SETUP = """
import torch
import torchlens_perf as perf
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = {"config": perf.Config(_exit_timeout_s=60.0)}
losses = []

def train(steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

def train_until(done, most_s=60):
    import time
    until_s = time.monotonic() + most_s
    while not done() and time.monotonic() < until_s:
        train(1)
        time.sleep(0.002)
"""
WITH = "\nwith perf.watch(model, optimizer, **settings) as w:\n"
TRAIN = WITH + "    train(30)\n"
LIVE = WITH + "    display(w)\n    train(30)\n"
# Code that prints a digest of all results of training, and the number of threads that a watch has
# added.
SAME_BITS = """
import hashlib, os, random, time

def result(shown):
    torch.manual_seed(1)
    random.seed(1)
    seen = []
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    threads = len(os.listdir("/proc/self/task"))
    with perf.watch(model, optimizer, report="off", **settings) as w:
        if shown:
            display(w)
            w.on_verdict(print)
        for step in range(400):
            loss = model(torch.randn(8, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()) + random.random())
            if shown:
                time.sleep(0.006)
                if step == 200:
                    w.summary()
        more = len(os.listdir("/proc/self/task")) - threads
    seen += [[parameter.tolist() for parameter in model.parameters()], torch.get_rng_state().tolist()]
    return hashlib.sha256(repr((seen, random.getstate())).encode()).hexdigest(), more

result(False)
"""
# Count the updates of a cell's output that IPython receives.
COUNT_UPDATES = """
from IPython import get_ipython
publisher, updates = get_ipython().display_pub, []
def count(message):
    if message["header"]["msg_type"] == "update_display_data":
        updates.append(message)
    return message
publisher.register_hook(count)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Return one kernel, in which all tests run their cells, as in a long notebook."""
    made = Kernel(tmp_path_factory.mktemp("notebook"))
    output = made.run(SETUP)
    assert output.errors == [], output.text
    yield made
    made.close()
    # Wait for the sidecars of the kernel's runs to end.
    runs(made.folder)


def test_each_training_cell_ends_with_one_report(kernel: Kernel) -> None:
    """The report is rich output. The user's output stays."""
    # Run the cell a second time.
    for _ in range(2):
        output = kernel.run(TRAIN + "print('done')")
        found = output.only()
        page = Page(found["text/html"])
        assert "30 steps" in found["text/plain"]
        assert "\n  next  " in found["text/plain"]
        assert "torchlens_perf  notebook  1 rank" in found["text/plain"]
        assert output.text == "done\n"
        assert len(page.images) == 2


def test_no_thread_and_no_hook_is_left_between_cells(kernel: Kernel) -> None:
    kernel.run("import threading; before = threading.active_count()" + TRAIN)
    after = kernel.run(
        "print(threading.active_count() - before, model._forward_hooks, '_compiled_call_impl' in"
        " model.__dict__)"
    )
    assert after.text == "0 OrderedDict() False\n"


def test_live_display_grows_in_place_to_the_report(kernel: Kernel) -> None:
    """display(w) in a running cell first shows a line, then growing results, and the report at the
    end.

    A summary during the run contains the same results.
    """
    output = kernel.run(
        COUNT_UPDATES + "with perf.watch(model, optimizer, **settings) as w:\n"
        "    display(w)\n"
        "    train_until(lambda: len(updates) >= 3)\n"
        "    before = len(losses); s = w.summary()\n"
        "publisher.unregister_hook(count)\nprint(s.running, s.steps > 0)"
    )
    found, texts = (
        output.only(),
        [content["data"]["text/plain"] for kind, content in output.messages if "display" in kind],
    )

    assert output.text == "True True\n"
    assert texts[0] == "torchlens_perf: recording; the first results come with the next steps"
    assert all("1 rank, " in text and ", running for " in text for text in texts[1:-1])
    assert len(texts) >= 5
    assert re.search("1 rank, .* ended after ", found["text/plain"])
    counts = [int(re.findall(r", (\d+) steps?, ", text)[0]) for text in texts[1:]]
    assert counts == sorted(counts)
    assert len(set(counts)) >= 3


def test_live_display_is_updated_at_most_once_a_second(kernel: Kernel) -> None:
    """Steps stay fast, and the time of an update is counted as the tool's overhead."""
    output = kernel.run(
        "import time\n" + COUNT_UPDATES + "with perf.watch(model, optimizer, **settings) as w:\n"
        "    display(w)\n"
        "    began_s = time.monotonic()\n"
        "    train_until(lambda: time.monotonic() - began_s > 5)\n"
        "    took_s = time.monotonic() - began_s\n"
        "publisher.unregister_hook(count)\nprint(len(updates) <= took_s + 2)"
    )
    assert output.text == "True\n"


def test_display_in_another_cell_becomes_the_report(kernel: Kernel) -> None:
    """The cell in which the run ends shows no second report."""
    first = kernel.run("w = perf.watch(model, optimizer, **settings).__enter__()\ndisplay(w)")
    (name,) = first.shown
    middle = kernel.run(
        COUNT_UPDATES + "train_until(lambda: updates)\npublisher.unregister_hook(count);"
    )
    last = kernel.run("w.__exit__(None, None, None)")

    assert (middle.reports, last.reports) == ([], [])
    assert ", running for " in middle.updated[name]["text/plain"]
    assert ", ended after " in last.updated[name]["text/plain"]


def test_watch_as_a_cells_last_line_replaces_the_automatic_report(kernel: Kernel) -> None:
    """Later cells can show the watch again."""
    same = kernel.run(TRAIN + "w")
    later = kernel.run("w")
    assert next(iter(same.shown.values())) == {"text/plain": "", "text/html": ""}
    assert "30 steps" in same.only()["text/plain"]
    assert later.only()["text/plain"] == same.only()["text/plain"]


def test_live_display_reappears_after_the_output_is_cleared(kernel: Kernel) -> None:
    """Loops that clear their cell and display everything again also display the run."""
    output = kernel.run(
        "from IPython.display import clear_output\n"
        "with perf.watch(model, optimizer, **settings) as w:\n"
        "    for _ in range(3):\n        train(10); clear_output(wait=True); display(w)\n"
    )
    assert [kind for kind, _ in output.messages].count("display_data") == 3
    assert "30 steps" in list(output.shown.values())[-1]["text/plain"]


def test_each_of_two_watches_in_a_cell_has_its_report(kernel: Kernel) -> None:
    """The reports have the order of the watches. A watch inside another one has no report."""
    output = kernel.run(
        TRAIN
        + "with perf.watch(model, optimizer, **settings) as v:\n    with perf.watch(model):\n      "
        "  train(12)"
    )
    first, second = output.reports

    assert "30 steps" in first["text/plain"]
    assert "12 steps" in second["text/plain"]


def test_report_precedes_the_traceback_of_a_failed_cell(kernel: Kernel) -> None:
    """The next cell works as usual."""
    output = kernel.run(TRAIN + "    raise ValueError('the user\\'s')")
    kinds = [kind for kind, _ in output.messages if kind in ("display_data", "error")]

    assert kinds == ["display_data", "error"]
    assert output.errors == ["ValueError"]
    assert "30 steps" in output.only()["text/plain"]
    assert "30 steps" in kernel.run(TRAIN).only()["text/plain"]


def test_interrupted_cell_with_a_live_display_ends_with_the_report(kernel: Kernel) -> None:
    """The sidecar is not interrupted."""
    output = kernel.run(
        LIVE + "    print('now', flush=True)\n    train_until(lambda: False)", interrupt_at="now"
    )
    assert output.errors == ["KeyboardInterrupt"]
    assert ", ended after " in output.only()["text/plain"]
    assert "30 steps" in kernel.run(TRAIN).only()["text/plain"]


def test_late_report_is_announced_and_shown_by_the_watch(kernel: Kernel) -> None:
    """A line gives the reason why there is no report yet.

    The watch shows the report as soon as it exists.
    """
    until = "settings['config'] = perf.Config(_exit_timeout_s={})"
    output = kernel.run(until.format(0.0) + TRAIN + until.format(60.0))
    assert "torchlens_perf: the report is not ready after 0.0 s" in output.only()["text/plain"]
    assert output.text == ""
    assert "30 steps" in kernel.run("w").only()["text/plain"]


def test_disabled_report_is_shown_only_on_request(kernel: Kernel) -> None:
    """A watch that records nothing says so."""
    silent = '**settings, report="off"'
    assert kernel.run(TRAIN.replace("**settings", silent)).reports == []
    assert ", ended after " in kernel.run(LIVE.replace("**settings", silent)).only()["text/plain"]
    output = kernel.run("%env TORCHLENS_PERF=0\n" + TRAIN + "w")
    assert output.only()["text/plain"] == "torchlens_perf: nothing is recorded: it is switched off"
    kernel.run("import os; del os.environ['TORCHLENS_PERF']")


def test_section_and_module_names_are_escaped_in_every_format(kernel: Kernel) -> None:
    output = kernel.run(
        "name = '<script>alert(1)</script>\\x1b[2J\"><img src=x onerror=alert(1)>'\nbad ="
        " nn.ModuleDict({'<b>bold</b>': nn.Linear(4, 4)})['<b>bold</b>']\no ="
        " torch.optim.SGD(bad.parameters(), lr=0.1)\nwith perf.watch({name: bad}, o, **settings) as"
        " w:\n    for _ in range(20):\n        with perf.section(name):\n           "
        " bad(torch.ones(2, 4)).sum().backward(); o.step()\n"
    )
    # The cell's end shows the short form, and a request shows the full form.
    for found in (output.only(), whole := kernel.run("w").only()):
        Page(found["text/html"])
        assert "\x1b" not in found["text/plain"]
    assert "<script>alert(1)</script>?[2J" in whole["text/plain"]


def test_live_display_does_not_change_training(kernel: Kernel) -> None:
    """Parameters, losses and random states equal those of an undisplayed run, and no thread is
    added.
    """
    code = COUNT_UPDATES + SAME_BITS + "print(result(False) == result(True), len(updates) > 1)"
    assert kernel.run(code + "\npublisher.unregister_hook(count);").text == "True True\n"


def test_rank_forked_from_the_kernel_prints_its_report(kernel: Kernel) -> None:
    """Launchers in notebooks fork the ranks from the kernel.

    A forked rank does not use the kernel's sockets.
    """
    output = kernel.run(
        "import os, sys\nchild = os.fork()\nif child == 0:\n"
        "    from torchlens_perf.results import last_report, notebook\n"
        "    os._exit(0 if notebook.find_notebook_shell() is None and not last_report.is_in_notebook() else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert output.text == "0\n"


def test_notebook_cells_in_the_docs_run_one_after_another(kernel: Kernel) -> None:
    """docs/guides/notebook.md contains the cells."""
    outputs = [kernel.run(block) for block in blocks()]

    assert [output.errors for output in outputs] == [[]] * len(outputs)
    assert ", ended after " in outputs[0].only()["text/plain"]
    at_end, whole = (output.only()["text/plain"] for output in outputs[:2])
    assert "  full report " in at_end
    # The last output shows the run and the first verdict.
    assert at_end.splitlines()[:3] == whole.splitlines()[:3]
    assert "Typical step" in whole
    assert "200 steps: p50" in outputs[2].text


def test_saved_report_is_shown_after_sanitizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sites sanitize outputs of a saved notebook."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (SETUP, TRAIN, LIVE)]
    )
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    saved = nbformat.reads(nbformat.writes(notebook), as_version=4)
    for cell in saved.cells[1:]:
        (output,) = cell.outputs
        assert output.output_type == "display_data"
        assert ", ended after " in output.data["text/plain"]
        assert len(Page(output.data["text/html"]).images) == 2
    whole, _ = HTMLExporter().from_notebook_node(saved)
    # The sanitizer removes pictures and tables.
    strictest, _ = HTMLExporter(sanitize_html=True).from_notebook_node(saved)
    assert whole.count('src="data:image/svg+xml;base64,') == 4
    assert strictest.count("<b>Next:</b>") >= 2
    reports = [report(directory) for directory in runs(tmp_path)]
    assert [value["steps"]["count"] for value in reports] == [30, 30]


def test_kernel_with_automatic_recording_ends_and_leaves_a_report(tmp_path: Path) -> None:
    """With TORCHLENS_PERF=1 the run ends with the kernel, which ends in time."""
    kernel = Kernel(tmp_path, TORCHLENS_PERF="1")
    assert kernel.run(SETUP + "train(30)").errors == []
    ended = threading.Thread(target=kernel.close)
    began_s = time.monotonic()
    ended.start()
    ended.join(60)

    assert not ended.is_alive(), time.monotonic() - began_s
    (run,) = runs(tmp_path)
    assert report(run)["run"]["live"] is False
    assert "29 steps" in run.report.read_text()


@pytest.mark.parametrize("program", ["IPython", "python"])
def test_report_in_a_terminal_is_text_on_stderr(program: str, tmp_path: Path) -> None:
    """Plain IPython and Python print the report once.

    A display during the run is text on stdout, printed once, because a terminal cannot update
    earlier output.
    """
    show = "display(w)" if program == "IPython" else "print(w._repr_mimebundle_()['text/plain'])"
    code = f"{SETUP}{WITH}    train(30)\n    {show}\n    train_until(lambda: False, most_s=2.5)\n"
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", code]
    done = subprocess.run(
        command if program == "IPython" else [sys.executable, "-c", code],
        cwd=tmp_path, env=clean_environ({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert (done.stderr.count(", ended after "), done.stdout.count(", running for ")) == (1, 1)
    assert len(re.findall("^torchlens_perf  ", done.stderr, re.MULTILINE)) == 1
    assert len(re.findall("^torchlens_perf  ", done.stdout, re.MULTILINE)) == 1
    assert "<div" not in done.stdout + done.stderr
    runs(tmp_path)
