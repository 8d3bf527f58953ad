"""Runs the chapters, lays out their pages, has Sphinx build them, and reads what was built."""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from course_lib.builder import build_notebook, chapters
from course_lib.home import ROOT
from course_lib.site.executing import FailedCell, Kept, execute, sources_of
from course_lib.site.inspecting import problems_of
from course_lib.site.pages import Chapter, lay_out

WORK = ROOT / "build" / "site"
STATIC = Path(__file__).parent / "static"
TITLE = "Attention kernels"
TERMINAL = re.compile(r"\x1b\[[0-9;]*m")

# What MathJax needs to set a page: the rest of its 24 MB are other outputs, and speech.
MATHJAX = ("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions")

SETTINGS = {
    "project": TITLE,
    "author": "",
    "html_title": TITLE,
    "extensions": ["myst_nb", "sphinx.ext.mathjax"],
    "suppress_warnings": ["misc.highlighting_failure"],  # "…" in a listing is for the reader
    "exclude_patterns": ["given"],  # the notebooks to take home: files, no pages
    "myst_enable_extensions": ["dollarmath", "amsmath"],
    "myst_heading_anchors": 4,
    "myst_dmath_double_inline": True,
    "nb_execution_mode": "off",  # they were run, by `executing`
    "nb_merge_streams": True,
    "nb_ipywidgets_js": {},  # its default asks two other hosts
    "nb_render_image_options": {"alt": "The figure that the cell above draws"},
    "mathjax_path": "mathjax/tex-chtml.js",
    "mathjax3_config": {"options": {"enableMenu": False}},  # the menu would fetch the parts that are left out
    "html_theme": "sphinx_book_theme",
    "html_static_path": [str(STATIC)],
    "html_css_files": ["course.css"],
    "html_copy_source": False,  # a page's source holds the answers; the notebook to take home does not
    "html_show_sourcelink": False,
    "html_show_copyright": False,
    "html_show_sphinx": False,
    "html_last_updated_fmt": None,
    "html_theme_options": {
        "use_download_button": False,
        "use_fullscreen_button": False,
        "show_toc_level": 2,
        "show_navbar_depth": 1,
        "home_page_in_toc": True,
        "navbar_persistent": [],  # the sidebar has the search already
        "extra_footer": "Code under the MIT licence, prose under CC BY 4.0.",
    },
}


class CannotBuild(Exception):
    """No pages, and the text says why."""


@dataclass(frozen=True)
class Site:
    """What was built: the folder, its size, and the seconds for running the chapters and for building the pages."""

    folder: Path
    files: int
    size: int
    running: float
    building: float

    def __str__(self) -> str:
        minutes = f"{self.running / 60:.1f} min" if self.running >= 100 else f"{self.running:.0f} s"
        ran = f"{minutes} to run the chapters" if self.running else "no chapter had to be run again"
        return (
            f"The pages are in {self.folder}: open index.html there. {self.files:,} files, {self.size / 1e6:.1f} MB; "
            f"{ran}, {self.building:.0f} s to build the pages."
        )


def build_site(
    names: Iterable[str] = (),
    *,
    work: Path = WORK,
    sources: Path | None = None,
    say: Callable[[str], None] = print,
) -> Site:
    """Runs the chapters named (all without names), and builds the pages of all and of the documents beside them.

    The pages of the others show what an earlier execution gave, if it is still good.

    Args:
        names: chapters to run, as `chapters` of the builder takes them.
        work: where everything lies: the pages in `pages`, executed notebooks in `executed`.
        sources: the folder of the chapters (solutions/).
        say: told of each chapter that is run, since that takes minutes.

    Raises:
        CannotBuild: cells failed, or Sphinx, or its pages have links that lead nowhere or ask other hosts.
    """
    if missing := [name for name in ("sphinx", "myst_nb", "sphinx_book_theme") if find_spec(name) is None]:
        raise CannotBuild(f"{missing[0]} is not installed here: `make site` installs requirements-site.txt.")
    chosen = chapters(names, sources)
    run, failures, running = run_chapters(chosen, work, say)
    if failures:
        raise CannotBuild("\n".join(map(str, failures)))
    started = time.monotonic()
    others = [not_run(path, work) for path in chapters((), sources) if path not in chosen]
    lay_out(work / "sources", sorted([*run, *others], key=lambda chapter: chapter.name))
    pages = work / "pages"
    run_sphinx(work / "sources", pages, work / "doctrees")
    if wrong := problems_of(pages):
        raise CannotBuild("\n".join(wrong))
    files = [path for path in pages.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return Site(pages, len(files), size, running, time.monotonic() - started)


def not_run(path: Path, work: Path) -> Chapter:
    """A chapter with what earlier executions gave, if both are still good, and otherwise without outputs."""
    kept, sources = Kept(work / "executed"), sources_of(path)
    plain = build_notebook(path)
    given = kept.find(plain, path.stem, sources)
    solved = kept.find(build_notebook(path, with_answers=True), f"{path.stem}-solved", sources)
    return Chapter(path.stem, plain, given, solved) if given and solved else Chapter(path.stem, plain)


def run_chapters(
    paths: Iterable[Path], work: Path, say: Callable[[str], None]
) -> tuple[list[Chapter], list[FailedCell], float]:
    """Each chapter as given and solved, the cells that failed, and the seconds that all of it took.

    One after the other: two at once would measure each other's load.
    """
    kept = Kept(work / "executed")
    run, failures, total = [], [], 0.0
    for path in paths:
        both = []
        for solved in (False, True):
            name = f"{path.stem}, {'solved' if solved else 'as given'}"
            notebook = build_notebook(path, with_answers=solved)
            home = work / ("home-solved" if solved else "home")

            def run_it(notebook=notebook, name=name, home=home) -> dict:
                return execute(notebook, name, home, ROOT / "notebooks")

            try:
                executed, seconds = kept.get(
                    notebook, f"{path.stem}{'-solved' if solved else ''}", sources_of(path), run_it
                )
            except FailedCell as failure:
                say(f"{name}: failed.")
                failures.append(failure)
                continue
            both.append(executed)
            total += seconds
            if seconds:
                say(f"{name}: run in {seconds:.0f} s.")
        if len(both) == 2:
            run.append(Chapter(path.stem, build_notebook(path), *both))
    return run, failures, total


def run_sphinx(sources: Path, pages: Path, doctrees: Path) -> None:
    """Static HTML of the sources, from nothing.

    Raises:
        CannotBuild: Sphinx failed, or warned of anything.
    """
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    for folder in (pages, doctrees):
        shutil.rmtree(folder, ignore_errors=True)
    told = io.StringIO()
    try:
        with patch_docutils(), docutils_namespace():  # what Sphinx registers with docutils ends with it
            application = Sphinx(
                sources, None, pages, doctrees, "html", confoverrides=dict(SETTINGS), status=None, warning=told
            )
            application.build()
    except SphinxError as error:
        raise CannotBuild(f"Sphinx: {error}") from error
    warnings = [line for line in TERMINAL.sub("", told.getvalue()).splitlines() if line.strip()]
    if warnings:
        raise CannotBuild("Sphinx warns:\n" + "\n".join(f"    {line}" for line in warnings))
    copy_mathjax(pages / "_static" / "mathjax")


def copy_mathjax(folder: Path) -> None:
    """MathJax beside the pages, so that they ask no other host for it."""
    spec = find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise CannotBuild("sphinx-mathjax-offline is not installed here: `make site` installs requirements-site.txt.")
    origin = Path(spec.origin).parent / "static" / "mathjax"
    for name in MATHJAX:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (origin / name).is_dir():
            shutil.copytree(origin / name, target, dirs_exist_ok=True)
        else:
            shutil.copy(origin / name, target)
