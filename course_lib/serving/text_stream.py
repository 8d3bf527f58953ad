"""Text from tokens as they come: in whole characters, and never a word that ends the text, or its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.models.loading.tokenizer import LONGEST_CHARACTER, UNFINISHED, Tokenizer


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: the model's.
        stops: words that end the text.

    Attributes:
        text: all that was given out.
        stopped: whether a stop word came; nothing comes after it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.text, self.stopped = "", False
        self._tokens: list[int] = []  # that may end within a character
        self._held = ""  # that may be the beginning of a stop word

    def push(self, token: int) -> str:
        """What is known of the text with one token more; "" while a character or a stop word may still be coming."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        piece = self.tokenizer.decode(self._tokens)
        if piece.endswith(UNFINISHED) and len(self._tokens) <= LONGEST_CHARACTER:
            return ""
        self._tokens = []
        return self._given(piece)

    def end(self) -> str:
        """What was held back, when no token comes any more."""
        piece = self.tokenizer.decode(self._tokens) if self._tokens else ""
        self._tokens = []
        given = self._given(piece) if piece else ""
        if not self.stopped:
            given += self._held
            self.text += self._held
        self._held = ""
        return given

    def _given(self, piece: str) -> str:
        if not self.stops:
            self.text += piece
            return piece
        known = self._held + piece
        found = [place for place in map(known.find, self.stops) if place >= 0]
        if found:
            self.stopped, self._held, given = True, "", known[: min(found)]
        else:
            held = max((size for stop in self.stops for size in range(1, len(stop)) if known.endswith(stop[:size])),
                       default=0)  # fmt: skip
            given, self._held = known[: len(known) - held], known[len(known) - held :]
        self.text += given
        return given
