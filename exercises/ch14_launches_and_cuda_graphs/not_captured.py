"""What 14.2 and 14.4 share: why a step cannot be captured, and what shows that it was not written for a replay."""

from __future__ import annotations

from course_lib.checker import Mistake


def _said(words):
    return lambda case, seen, got: seen.error is not None and words in seen.error.text


def _output_untouched(case, seen, got):
    """Whether no replay has written the output: it still holds what it was filled with."""
    outputs = [value for name, value in (got or {}).items() if name.startswith("output")]
    return bool(outputs) and all(bool((output == 777.0).all()) for output in outputs)


NOT_CAPTURED = (
    Mistake(
        "host_waits",
        "The step cannot be recorded: an operation makes the host wait for a number from the GPU (`.item()`, "
        "`int(tensor)`, `.tolist()`, a tensor in an `if` or as the end of a slice, or a boolean mask as an index, "
        "unless a single number is stored there). In a replay no Python runs. Keep the number in its tensor, and use "
        "it in tensor operations.",
        when=_said("makes the host wait"),
    ),
    Mistake(
        "returns_a_tensor",
        "The step returns a tensor. A replay runs no Python, so it cannot return anything, and the result is read from "
        "`output`. Write the result there and return None.",
        when=_said("returns something else"),
    ),
    Mistake(
        "output_untouched",
        "No replay has written to `output`. The result went into a new tensor, which nobody reads. Write it into the "
        "memory that was given, with output.copy_(...).",
        when=_output_untouched,
    ),
)
