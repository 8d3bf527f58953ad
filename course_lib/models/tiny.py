"""A byte-level model small enough to train in a minute, and the text that it learns. `trained.py` has its weights."""

from pathlib import Path

from course_lib.models.config import ModelConfig
from course_lib.models.tokenizer import VOCABULARY

TEXT = Path(__file__).resolve().parent / "data" / "alice.txt"  # its source is named in the README beside it

TINY = ModelConfig(
    vocabulary=VOCABULARY,
    layers=4,
    width=96,
    query_heads=4,
    key_heads=2,
    head_dim=32,
    hidden=192,
    context=256,
    tied=True,
)  # 394,080 parameters


def tiny_text() -> str:
    """Three chapters of Alice's Adventures in Wonderland, 31 kB of ASCII, one line a paragraph."""
    paragraphs = TEXT.read_text(encoding="ascii").split("\n\n")
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs) + "\n"
