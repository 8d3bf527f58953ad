"""The simplest tokenizer there is: a token is a byte."""

import torch

VOCABULARY = 256


def encode(text: str) -> torch.Tensor:
    """The text's UTF-8 bytes, int64 [length]."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """The text of one sequence of bytes, [length]; bytes that are no UTF-8 become �."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")
