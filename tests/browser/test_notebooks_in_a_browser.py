"""Each notebook, run from its first cell to its last by a real browser in the JupyterLab that `make lab` serves.

    .venv/bin/python -m pytest tests/browser --browser [--screenshot DIR] [-k 01]

Copies of the notebooks are run, since JupyterLab saves what it shows. With --screenshot each is pictured to its full
length, a screen at a time, in the light theme and in the dark one.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

from course_lib.home import ROOT, course_home

pytestmark = pytest.mark.browser
COPIES = ROOT / "build" / "browser"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
STARTS_WITHIN, RUNS_WITHIN = 60, 300  # seconds
WIDTH, HEIGHT, MARGIN = 1280, 1800, 150  # pixels; the margin is more than what is not the notebook
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab that `make lab` serves, with copies of the notebooks in build/browser."""
    shutil.rmtree(COPIES, ignore_errors=True)
    COPIES.mkdir(parents=True)
    for path in NOTEBOOKS:
        shutil.copy(path, COPIES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"--no-browser --port {port} --ServerApp.port_retries=0 --IdentityProvider.token=t"
    options += " --expose-app-in-browser"
    # The folder of the notebook that it opens is the one that JupyterLab shows.
    command = ["make", "lab", f"NOTEBOOK={COPIES.relative_to(ROOT) / NOTEBOOKS[0].name}", f"LAB_ARGS={options}"]
    home, models = tmp_path_factory.mktemp("home"), course_home() / "models"
    models.mkdir(exist_ok=True)
    (home / "models").symlink_to(models)  # what was fetched once is not fetched again
    environment = {**os.environ, "COURSE_HOME": str(home)}
    with open(tmp_path_factory.mktemp("log") / "lab.txt", "w+") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_served(f"{address}/api?token=t", server, log)
            yield address
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def wait_until_served(address, server, log):
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.3)
    log.seek(0)
    pytest.fail(f"make lab served nothing:\n{log.read()[-2000:]}")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here: install it, or name it with the variable CHROMIUM")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


# The notebook that JupyterLab shows, once its kernel is up. The names are JupyterLab's own.
READY = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.content?.model?.cells?.length && panel.sessionContext.session?.kernel?.status === "idle";
}"""
RUN_ALL = """async () => {
    await window.jupyterapp.commands.execute("notebook:run-all-cells");
    await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestKernelInfo();
}"""
CELLS = "() => window.jupyterapp.shell.currentWidget.context.model.toJSON().cells"
THEME = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
UNFOLD = """() => {  // every cell drawn, however far down
    window.jupyterapp.shell.currentWidget.content.notebookConfig = {
        ...window.jupyterapp.shell.currentWidget.content.notebookConfig, windowingMode: "none"};
    window.jupyterapp.shell.collapseLeft();
}"""
SCROLL = "top => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = top; }"
LENGTH = "() => Math.ceil(document.querySelector('.jp-WindowedPanel-outer').scrollHeight)"


@pytest.mark.timeout(STARTS_WITHIN + RUNS_WITHIN + 120)
@pytest.mark.parametrize("notebook", [path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_to_its_end_in_a_browser(lab, browser, notebook, request):
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(RUNS_WITHIN * 1000)
    try:
        page.goto(f"{lab}/lab/tree/{notebook}.ipynb?token=t&reset")
        page.wait_for_function(READY, timeout=STARTS_WITHIN * 1000)
        page.evaluate(UNFOLD)
        started = time.monotonic()
        page.evaluate(RUN_ALL)
        print(f"{notebook}: run in {time.monotonic() - started:.1f} s")
        cells = [cell for cell in page.evaluate(CELLS) if cell["cell_type"] == "code" and "".join(cell["source"])]
        if folder := request.config.getoption("--screenshot"):
            take_pictures(page, Path(folder), notebook)
        failed = [
            f"{''.join(cell['source'])[:80]!r}: {output['ename']}: {output['evalue']}"
            for cell in cells
            for output in cell["outputs"]
            if output["output_type"] == "error"
        ]
        assert not failed
        assert all(cell["execution_count"] for cell in cells), "cells were left out"
        assert page.get_by_text("Error displaying widget").count() == 0
        assert page.get_by_text("Loading widget...").count() == 0
    finally:
        page.close()


def run_of(lab, browser, name, code):
    """The page of a notebook with this one cell, which has run."""
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    setup = next(cell for cell in notebook.cells if cell.cell_type == "code")  # finds the course
    notebook.cells = [setup, nbformat.v4.new_code_cell(code.strip())]
    nbformat.write(notebook, COPIES / f"{name}.ipynb")
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(RUNS_WITHIN * 1000)
    page.goto(f"{lab}/lab/tree/{name}.ipynb?token=t&reset")
    page.wait_for_function(READY, timeout=STARTS_WITHIN * 1000)
    page.evaluate(UNFOLD)
    page.evaluate(RUN_ALL)
    return page


WATCHED = """
from course_lib import default_device, watch
import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + offsets, mask=offsets < length)
    tl.store(result_pointer + offsets, 2 * x)


def double(x):
    result = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 32),)](x, result, x.numel(), BLOCK=32)
    return result


watch(double, torch.rand(100, device=default_device()), program=0)
"""


@pytest.mark.timeout(STARTS_WITHIN + RUNS_WITHIN + 120)
def test_a_slider_of_watch_moves_its_picture(lab, browser, request):
    page = run_of(lab, browser, "watched", WATCHED)
    try:
        image = page.locator("img.widget-image")
        image.wait_for()
        assert page.locator("[class^=watched-]").is_hidden(), "the still picture is for where no slider is"
        program, step = page.locator(".widget-slider .noUi-handle").all()
        shown = [image.get_attribute("src")]
        for slider, key in ((step, "ArrowLeft"), (program, "ArrowRight")):
            slider.press(key)
            page.wait_for_function("before => document.querySelector('img.widget-image').src !== before", arg=shown[-1])
            shown.append(image.get_attribute("src"))
        assert program.get_attribute("aria-valuenow") == step.get_attribute("aria-valuenow") == "1.0"
        if folder := request.config.getoption("--screenshot"):
            take_pictures(page, Path(folder), "watched")
    finally:
        page.close()


CHAT = """
from course_lib.models.loading.pretrained import load
from course_lib.serving.chat_box import chat_box
from course_lib.serving.conversation import Conversation, new_engine

chat_box(Conversation(new_engine(*load())))
"""


@pytest.mark.timeout(STARTS_WITHIN + RUNS_WITHIN + 120)
def test_a_question_is_answered_in_a_box(lab, browser, request):
    page = run_of(lab, browser, "chat", CHAT)
    try:
        line = page.get_by_placeholder("Ask something")
        questions = "What is the capital of France?", "Write <b>two</b> lines about the sea."
        for number, question in enumerate(questions, 1):
            line.fill(question)
            line.press("Enter")
            page.wait_for_function(f"() => document.querySelectorAll('.widget-html').length > {2 * number}")
            page.wait_for_function("() => !document.querySelector('.widget-text input').disabled")
        assert page.get_by_text("The capital of France is Paris.").count() == 1
        assert page.get_by_text("Write <b>two</b> lines").count() == 1, "a question is text, and no page"
        if folder := request.config.getoption("--screenshot"):
            take_pictures(page, Path(folder), "chat")
    finally:
        page.close()


def take_pictures(page, folder, notebook):
    """The whole notebook in both themes, screen by screen from the top, as NAME-light-01.png and on."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{notebook}-*.png"):
        old.unlink()
    for name, theme in (("light", "JupyterLab Light"), ("dark", "JupyterLab Dark")):
        page.evaluate(THEME, theme)
        page.wait_for_timeout(1500)
        for part, top in enumerate(range(0, page.evaluate(LENGTH), HEIGHT - MARGIN), 1):
            page.evaluate(SCROLL, top)
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"{notebook}-{name}-{part:02}.png")
