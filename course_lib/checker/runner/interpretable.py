"""What Triton's interpreter cannot run although a GPU can: no fault of an answer."""

from __future__ import annotations

import re

from course_lib.checker.specification.seen import RaisedError

# What is raised, and what it comes of.
_REASONS = {
    "0 active drivers": "asks Triton for its GPU (a benchmark or a tuner does, and so does every Gluon kernel)",
    "inline_asm not supported": "holds inline assembly",
    "not supported in interpreter mode": "uses a function that Triton's interpreter does not have",
}
_OF_LIBDEVICE = ("Did you forget to add @triton.jit", "'NoneType'")  # its functions do nothing without a GPU


def needs_a_gpu(error: RaisedError, source: str) -> str | None:
    """Why an error in the interpreter says nothing of the answer, as the end of "the answer …"; None where it does.

    Args:
        error: what was raised.
        source: the cell.
    """
    reason = next((reason for told, reason in _REASONS.items() if told in error.text), None)
    line = source.splitlines()[error.line - 1 : error.line] if error.line else []
    if reason is None and re.search(r"\blibdevice\b", source) and any(told in error.text for told in _OF_LIBDEVICE):
        reason = "calls CUDA's libdevice" if any("libdevice" in text for text in line) else None
    return reason
