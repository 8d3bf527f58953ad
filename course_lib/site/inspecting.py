"""Reads the pages that were built: links that lead nowhere, and whatever would ask another host when one is opened."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches without being asked, by element; a link's `href` is fetched where its `rel` says so.
FETCHED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
FETCHING_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch"}
OTHER_HOST = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
# In a stylesheet, or in the style of an element.
FETCHED_BY_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s;]+)""", re.IGNORECASE)


class _Page(HTMLParser):
    """What a page links to, fetches, and can be jumped to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.styles: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.styles.append(given.get("style", ""))
        self._in_style = tag == "style"
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        self.fetched += [given[name] for name in FETCHED.get(tag, ()) if given.get(name)]
        if tag == "link" and FETCHING_RELATIONS & set(given.get("rel", "").lower().split()):
            self.fetched.append(given.get("href", ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._in_style = False

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles.append(data)


def problems_of(folder: Path) -> list[str]:
    """A sentence for each link within the site that leads nowhere, and for whatever another host is asked for."""
    found = (path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts)  # templates lie there
    pages = {path.resolve(): _read(path) for path in found}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        asked = [address for address in page.fetched if OTHER_HOST.match(address)]
        asked += [address for style in page.styles for address in FETCHED_BY_STYLE.findall(style)]
        problems += [f"{name} asks another host for {address}." for address in asked]
        local = [address for address in page.fetched if not urlsplit(address).scheme and not OTHER_HOST.match(address)]
        for address in dict.fromkeys([*page.links, *local]):
            if reason := _leads_nowhere(address, path, pages):
                problems.append(f"{name} links to {address}, {reason}.")
    for path in sorted(folder.rglob("*.css")):
        for address in FETCHED_BY_STYLE.findall(path.read_text(encoding="utf-8", errors="replace")):
            problems.append(f"{path.relative_to(folder)} asks another host for {address}.")
    return problems


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _leads_nowhere(address: str, path: Path, pages: dict[Path, _Page]) -> str | None:
    """Why a link within the site fails; None for one that does not, or that leads elsewhere."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    target = path
    if parts.path:
        target = (path.parent / unquote(parts.path)).resolve()
        if target.is_dir():
            target = target / "index.html"
        if not target.is_file():
            return "which is not there"
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].anchors:
        return f"and there is no #{fragment} there"
    return None
