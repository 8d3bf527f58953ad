"""What the latent kernels ask of their arguments, and the sentences they answer with when they don't comply."""

import math

from course_lib.kernels.common.checks import check_rows, check_runnable, check_same
from course_lib.kernels.common.machine import architecture_of

VALUE_DIMS = (16, 32, 64, 128, 256, 512)
MIN_ROPE_DIM, MAX_ROPE_DIM = 16, 64
MOST_VALUES_ON_TURING = 256
MOST_SEQUENCES = 65535  # of the grid's last axis


def check_query(query, value_dim, scale) -> None:
    """Raise a ValueError unless they are a query [batch, query_tokens, heads, value_dim + rope_dim] and its options."""
    check_rows("query", query, "[batch, query_tokens, heads, value_dim + rope_dim]")
    check_runnable("query", query)
    if value_dim not in VALUE_DIMS:
        raise ValueError(f"value_dim is {value_dim!r}; it must be one of {', '.join(map(str, VALUE_DIMS))}.")
    if value_dim > MOST_VALUES_ON_TURING and (architecture_of(query.device) or 80) < 80:
        raise ValueError(
            f"value_dim is {value_dim}; GPUs before compute capability 8.0 have shared memory for at most "
            f"{MOST_VALUES_ON_TURING}."
        )
    rope_dim = query.shape[3] - value_dim
    if not MIN_ROPE_DIM <= rope_dim <= MAX_ROPE_DIM:
        raise ValueError(
            f"query has rows of {query.shape[3]} numbers, which leaves {rope_dim} for the rotary part beside "
            f"value_dim = {value_dim}; it must have {MIN_ROPE_DIM} to {MAX_ROPE_DIM}."
        )
    if query.shape[0] > MOST_SEQUENCES:
        raise ValueError(f"query has batch size {query.shape[0]}; a launch takes at most {MOST_SEQUENCES} sequences.")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale!r}; it must be a number that is finite and above 0.")


def check_cache(name: str, cache, dimensions: str, query) -> None:
    """Raise a ValueError unless it is a cache or a pool of pages for that query."""
    check_rows(name, cache, dimensions)
    check_same(name, cache, "query", query, row_size=(cache.shape[2], query.shape[3]))


def check_output(output, query, value_dim: int) -> None:
    """Raise a ValueError unless a given output takes the result for the query."""
    if output is None:
        return
    check_rows("output", output, "[batch, query_tokens, heads, value_dim]")
    check_same("output", output, "query", query)
    if tuple(output.shape) != (*query.shape[:3], value_dim) or not output.is_contiguous():
        raise ValueError(
            f"output has shape {tuple(output.shape)} and strides {output.stride()}; it must be contiguous, of shape "
            f"{(*query.shape[:3], value_dim)}."
        )
