"""A site of one small chapter, built; and what a chapter that fails gets."""

import pytest

from course_lib import cli
from course_lib.home import ROOT
from course_lib.site.building import CannotBuild, build_site, not_run
from course_lib.site.inspecting import problems_of

for module in ("sphinx", "myst_nb", "sphinx_book_theme"):
    pytest.importorskip(module, reason="the pages need requirements-site.txt")

SAMPLE = """# %% [markdown]
# # 07 · A sample
#
# With a formula, $x^2$.

# %%
print("forty-two is", 6 * 7)

# %% [markdown]
# ## A section
"""
FAILING = SAMPLE + "\n# %%\n# the cell that fails\nzero = 0\n1 / zero\n"


def sample(folder, text):
    (folder / "solutions").mkdir(exist_ok=True)
    (folder / "solutions" / "07_sample.py").write_text(text, encoding="utf-8")
    return folder / "solutions"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(the site, its folder, what was said while it was built)."""
    folder, said = tmp_path_factory.mktemp("site"), []
    return build_site(work=folder / "work", sources=sample(folder, SAMPLE), say=said.append), folder, said


def test_a_site_says_where_it_lies_how_large_it_is_and_how_long_it_took(site):
    built, folder, said = site
    assert str(folder / "work" / "pages") in str(built) and "MB" in str(built) and "s to build" in str(built)
    assert [line.rpartition(":")[0] for line in said] == ["07_sample, as given", "07_sample, solved"]


def test_a_chapters_page_shows_what_its_cells_gave(site):
    page = (site[0].folder / "notebooks" / "07_sample.html").read_text(encoding="utf-8")
    assert "forty-two is 42" in page and "COURSE_REPOSITORY" not in page and "COURSE_STRICT" not in page


def test_the_readme_is_the_front_and_leads_to_chapters_and_documents(site):
    page = (site[0].folder / "index.html").read_text(encoding="utf-8")
    title = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    assert title in page and "notebooks/07_sample.html" in page and "docs/instructors.html" in page


def test_no_page_asks_another_host_and_the_mathematics_comes_along(site):
    folder = site[0].folder
    assert problems_of(folder) == []
    scripts = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.html"))
    assert "_static/mathjax/tex-chtml.js" in scripts and "cdn." not in scripts and "unpkg" not in scripts
    assert list((folder / "_static" / "mathjax").rglob("*.woff"))


def test_the_notebook_to_take_home_is_the_learners(site):
    [taken] = site[0].folder.rglob("07_sample.ipynb")
    assert "_downloads" in taken.parts and "forty-two is 42" not in taken.read_text(encoding="utf-8")


def test_a_chapter_that_did_not_change_is_not_run_again(site):
    _, folder, _ = site
    said = []
    again = build_site(work=folder / "work", sources=folder / "solutions", say=said.append)
    assert said == [] and "no chapter had to be run again" in str(again)


def test_a_chapter_that_is_not_run_shows_what_it_gave_while_that_is_good(site, tmp_path):
    """`make site CHAPTER=00` took the outputs off all other pages."""
    _, folder, _ = site
    source = folder / "solutions" / "07_sample.py"
    assert "forty-two is 42" in str(not_run(source, folder / "work").solved)
    changed = sample(tmp_path, SAMPLE + "\n# %%\n1\n") / source.name
    chapter = not_run(changed, folder / "work")
    assert chapter.name == "07_sample" and chapter.given is None and chapter.solved is None


def test_a_cell_that_fails_is_told_with_its_chapter_and_ends_with_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("course_lib.builder.keeping.SOURCES", sample(tmp_path, FAILING))
    assert cli.main(["site", "--out", str(tmp_path / "work")]) == 1
    said = capsys.readouterr().err
    assert "07_sample, as given: the cell that begins with `# the cell that fails` failed." in said
    assert "ZeroDivisionError: division by zero" in said
    assert not (tmp_path / "work" / "pages").exists()


def test_a_cell_that_ends_the_kernel_is_told_too(tmp_path):
    text = SAMPLE + "\n# %%\nimport os\n\nos._exit(1)\n"
    with pytest.raises(CannotBuild, match="begins with `import os` failed.\n *The notebook's kernel died"):
        build_site(work=tmp_path / "work", sources=sample(tmp_path, text), say=print)


def test_a_chapter_that_does_not_exist_is_refused_in_words(tmp_path, capsys):
    assert cli.main(["site", "77", "--out", str(tmp_path)]) == 2
    assert "There is no chapter '77'" in capsys.readouterr().err
