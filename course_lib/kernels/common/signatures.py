"""The types of a kernel's arguments, for the compile gate, as their names say them."""

import torch

KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}  # dtypes by the compiler's names

# What a name means in every kernel of the course. Other pointers are to the kernel's own kind of numbers, and what is
# no pointer is a 32-bit integer: a size or a stride.
USUAL = {
    **dict.fromkeys(("epsilon", "scale", "scale_log2"), "fp32"),
    **dict.fromkeys(("lse_pointer", "sink_pointer", "delta_pointer", "partial_outputs", "partial_lses"), "*fp32"),
    **dict.fromkeys(
        ("statistics_pointer", "means_pointer", "numbers_pointer", "partial_sums_pointer", "partial_squares_pointer"),
        "*fp32",
    ),
    **dict.fromkeys(("tables_pointer", "starts_pointer", "lengths_pointer", "positions_pointer", "arrivals"), "*i32"),
}


def signature_of(kernel, kind: str, **types: str | None) -> dict[str, str]:
    """The type of each argument that is no constant of the compiler's (those are in capitals).

    kind: of the numbers that the kernel is about, such as "bf16". types: what its names don't say; None for an argument
    that has no type, because the case gives it a value.
    """
    names = [name for name in kernel.arg_names if not name.isupper()]
    unknown = types.keys() - set(names)
    if unknown:
        raise ValueError(f"{kernel.__name__} has no argument {', '.join(sorted(unknown))}; it has {', '.join(names)}.")
    said = {name: USUAL.get(name) or (f"*{kind}" if name.endswith("_pointer") else "i32") for name in names} | types
    return {name: given for name, given in said.items() if given is not None}
