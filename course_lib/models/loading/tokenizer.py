"""Tokens of a published model: text to tokens and back, and a conversation as it was taught."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

import tokenizers
import torch
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, so tokens that may end within one
UNFINISHED = "\ufffd"  # what bytes that are no whole character decode to


class Tokenizer:
    """What lies beside a model's weights for its text.

    Args:
        tokens: the `tokenizers` library's.
        template: a conversation's form, a Jinja template; None where the model was not taught conversations.
        special: "bos_token" and "eos_token", where there are any, for the template.
        stops: tokens that end an answer.
    """

    def __init__(
        self, tokens: tokenizers.Tokenizer, template: str | None, special: Mapping[str, str], stops: Iterable[int]
    ):
        self.tokens, self.template, self.special, self.stops = tokens, template, dict(special), frozenset(stops)

    def encode(self, text: str) -> torch.Tensor:
        """The text's tokens, int64 [length], without any that the text does not hold."""
        return torch.tensor(self.tokens.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def decode(self, tokens: Sequence[int] | torch.Tensor) -> str:
        """The text of one sequence, without special tokens; bytes that are no UTF-8 become \ufffd."""
        return self.tokens.decode([int(token) for token in tokens])

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> torch.Tensor:
        """The tokens of a conversation up to where the model's next answer begins, int64 [length].

        messages: each with "role" ("system", "user" or "assistant") and "content".

        Raises:
            ValueError: the model has no template, or its template refuses these messages.
        """
        if self.template is None:
            raise ValueError("This model has no chat template: it continues texts. Encode a text instead.")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        try:
            text = environment.from_string(self.template).render(
                messages=list(messages), add_generation_prompt=True, **self.special
            )
        except TemplateError as error:
            raise ValueError(f"The model's chat template refuses these messages: {error}") from error
        return self.encode(text)


def _refuse(message: str):
    raise TemplateError(message)
