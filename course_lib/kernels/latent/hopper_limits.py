"""What the Hopper kernel of latent decode asks of the machine and its inputs; no Gluon needed to ask."""

from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES, HOPPER_DTYPES, Refusal, stride_refusal

VALUE_DIM, ROPE_DIM = 512, 64
BLOCK_KEYS = 64
MOST_ROWS = 2**24  # of queries of one sequence: far beyond use, and sums with it stay within 32 bits


def latent_input_refusal(query, cache, *, value_dim: int = VALUE_DIM, paged: bool = False) -> Refusal | None:
    """What about the inputs the Hopper kernel cannot take, though the portable one can; None if nothing.

    query [batch, query_tokens, heads, 576] and cache [batch, capacity, 576], or pages [pages, page_size, 576], are
    taken to have passed the portable kernel's checks.
    """
    name = "pages" if paged else "cache"
    if query.dtype not in HOPPER_DTYPES or cache.dtype != query.dtype:
        return Refusal(
            ValueError,
            f"query has dtype {query.dtype} and {name} {cache.dtype}; the Hopper kernel takes torch.float16 or "
            "torch.bfloat16, both the same.",
        )
    if value_dim != VALUE_DIM or query.shape[-1] != VALUE_DIM + ROPE_DIM or cache.shape[-1] != VALUE_DIM + ROPE_DIM:
        return Refusal(
            ValueError,
            f"query has rows of {query.shape[-1]} numbers, {name} of {cache.shape[-1]}, {value_dim} of them values; "
            f"the Hopper kernel takes {VALUE_DIM + ROPE_DIM}, {VALUE_DIM} of them values.",
        )
    if paged and cache.shape[1] % BLOCK_KEYS:
        return Refusal(
            ValueError,
            f"pages has pages of {cache.shape[1]} tokens; the Hopper kernel copies {BLOCK_KEYS} at a time, and takes "
            f"multiples of {BLOCK_KEYS}.",
        )
    if cache.data_ptr() % COPY_ENGINE_BYTES:
        return Refusal(
            ValueError,
            f"{name} begins {cache.data_ptr() % COPY_ENGINE_BYTES} bytes after a multiple of {COPY_ENGINE_BYTES}; the "
            f"copy engine wants none. Call {name}.clone() first.",
        )
    if cache.stride(-1) != 1:
        return Refusal(ValueError, f"{name} has stride {cache.stride(-1)} in its last dimension; it must be 1.")
    # Batch or page, then token: two of the three dimensions that stride_refusal names.
    strides = (cache.stride(0), cache.stride(0), cache.stride(1))
    shape = (cache.shape[0], 1, cache.shape[1])
    return stride_refusal(name, shape, strides, cache.element_size())
