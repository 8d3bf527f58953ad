"""The pages that were built are read: nothing is asked of another host, and no link leads nowhere."""

import pytest

from course_lib.site.inspecting import problems_of


def pages(folder, **files):
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return problems_of(folder)


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        '<script src="//cdn.example.org/x.js"></script>',
        '<script type="module" src="http://cdn.example.org/x.js"/>',
        '<link rel="stylesheet" href="https://fonts.example.org/css">',
        '<link rel="preconnect" href="https://fonts.example.org">',
        '<img alt="" src="https://example.org/badge.svg">',
        '<iframe src="https://example.org"></iframe>',
        '<p style="background: url(https://example.org/a.png)">',
        "<style>@import 'https://example.org/a.css';</style>",
    ],
)
def test_a_page_that_asks_another_host_is_found(tmp_path, text):
    [problem] = pages(tmp_path, index__html=text)
    assert problem.startswith("index.html asks another host for ")


def test_a_stylesheet_that_asks_another_host_is_found(tmp_path):
    [problem] = pages(tmp_path, a__css="@font-face { src: url('https://fonts.example.org/a.woff2') }")
    assert problem.startswith("a.css asks")


@pytest.mark.parametrize(
    "link, reason",
    [
        ("gone.html", "which is not there"),
        ("../outside.html", "which is not there"),
        ("other.html#gone", "there is no #gone there"),
        ("#gone", "there is no #gone there"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, link, reason):
    [problem] = pages(tmp_path, index__html=f'<a href="{link}">x</a>', other__html='<p id="here">')
    assert problem.startswith(f"index.html links to {link}") and reason in problem


def test_a_picture_that_is_not_there_is_found(tmp_path):
    [problem] = pages(tmp_path, index__html='<img src="gone.png">')
    assert "gone.png" in problem


def test_what_a_reader_may_follow_passes(tmp_path):
    text = (
        '<link rel="canonical" href="https://example.org/"><a href="https://example.org/paper">paper</a>'
        '<a href="other.html#here">x</a><a href="#top">x</a><h1 id="top">x</h1><img src="data:image/png;base64,AA">'
        '<a href="mailto:a@example.org">x</a>'
    )
    assert pages(tmp_path, index__html=text, other__html='<p id="here">') == []
