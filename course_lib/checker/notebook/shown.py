"""What a command gives back: text in a terminal, HTML in a notebook."""

from __future__ import annotations


class Shown:
    """Text in a terminal, HTML in a notebook."""

    def __init__(self, text: str, markup: str):
        self._text, self._markup = text, markup

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._markup
