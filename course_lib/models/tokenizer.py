"""The simplest tokenizer there is: a token is a byte."""

import torch

VOCABULARY = 256


def encode(text: str) -> torch.Tensor:
    """The text's UTF-8 bytes, int64 [length]."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """The text of one sequence of bytes, [length]; bytes that are no UTF-8 become �."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


class ByteTokenizer:
    """The same for an engine, which asks for the text of a list of tokens and for those that end a text: none does."""

    stops: frozenset[int] = frozenset()

    def decode(self, tokens: list[int]) -> str:
        """As `decode` above."""
        return bytes(tokens).decode("utf-8", errors="replace")
