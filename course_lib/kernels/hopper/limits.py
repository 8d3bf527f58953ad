"""What the Hopper kernel of attention asks of its inputs, each refusal in a sentence; no Gluon needed to ask."""

from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES, HOPPER_DTYPES, Refusal, machine_refusal, stride_refusal


def hopper_refusal(query, key, value) -> Refusal | None:
    """What stands against the Hopper kernel for these inputs; None if nothing.

    The inputs, of shape [batch, heads, length, head_dim], are taken to have passed `check_attention_inputs`.
    """
    return machine_refusal(query.device) or input_refusal(query, key, value)


def input_refusal(query, key, value, generation: str = "Hopper") -> Refusal | None:
    """What about the inputs this generation's kernel cannot take, though the portable one can; None if nothing."""
    if query.dtype not in HOPPER_DTYPES:
        return Refusal(
            ValueError,
            f"query has dtype {query.dtype}; the {generation} kernel takes torch.float16 and torch.bfloat16.",
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.data_ptr() % COPY_ENGINE_BYTES:
            return Refusal(
                ValueError,
                f"{name} begins {tensor.data_ptr() % COPY_ENGINE_BYTES} bytes after a multiple of {COPY_ENGINE_BYTES}; "
                f"the copy engine wants none. Call {name}.clone() first.",
            )
        refusal = stride_refusal(name, tensor.shape, tensor.stride(), tensor.element_size())
        if refusal is not None:
            return refusal
    row_bytes = query.shape[3] * query.element_size()
    if row_bytes % COPY_ENGINE_BYTES:
        return Refusal(
            ValueError,
            f"query has head dimension {query.shape[3]}; rows of the output would be {row_bytes} bytes, and the copy "
            f"engine wants multiples of {COPY_ENGINE_BYTES}.",
        )
    return None
