"""A model of how a Hopper tensor core adds products of 8-bit floats: with 14 bits, and without rounding.

A tensor core takes 32 products at a time. It shifts each of them to the exponent of the largest, keeps 14 bits and cuts
off the rest, towards 0. Then it adds them, and adds the result to the sums in its registers, of which it keeps 14 bits
too, though the registers have room for the 24 bits of float32. So a sum of positive numbers loses a little in each
step, always in the same direction, and the more the longer it is.

Source: DeepSeek-V3's technical report (arXiv 2412.19437), section 3.5.2; DeepGEMM's issues #37 and #50. What the
hardware does with the lowest bits is not documented: the model has the error's size and its growth, not each bit.
"""

from __future__ import annotations

import torch


def tensor_core(a, b, sums=None, bits=14, step=32):
    """sums + a · bᵀ, as a tensor core of Hopper adds it.

    Args:
        a, b: float8 [rows, n] and [outer, n], with n from 1 to 128.
        sums: float32 [rows, outer], what the registers hold; None for zeros.
        bits: kept of a product and of a sum, its leading one included.
        step: how many products are shifted and added at a time.

    Returns:
        float32 [rows, outer], new.

    Raises:
        ValueError: an argument of another dtype or shape.
    """
    # One function without helpers outside, since the checker sends its source alone to another process.
    for name, part in (("a", a), ("b", b)):
        if part.dtype != torch.float8_e4m3fn or part.dim() != 2 or not 1 <= part.shape[1] <= 128:
            raise ValueError(
                f"{name} is {str(part.dtype).removeprefix('torch.')} {list(part.shape)}. tensor_core takes "
                "float8_e4m3fn [rows, n] with n from 1 to 128: the numbers as they are stored, without their scales."
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has {a.shape[1]} columns and b has {b.shape[1]}. Both must have the same n.")
    shape = (len(a), len(b))
    if sums is not None and (sums.dtype != torch.float32 or sums.shape != shape):
        raise ValueError(
            f"sums is {str(sums.dtype).removeprefix('torch.')} {list(sums.shape)}; it must be float32 {list(shape)}, "
            "or None for zeros."
        )

    def cut(numbers, largest):
        exponent = torch.frexp(largest).exponent.to(torch.float64)  # largest is below 2 to this power
        unit = torch.exp2(exponent - bits)
        return (numbers / unit).trunc() * unit

    total = torch.zeros(shape, dtype=torch.float64, device=a.device) if sums is None else sums.double()
    for begin in range(0, a.shape[1], step):
        part = slice(begin, begin + step)
        products = a[:, None, part].double() * b[None, :, part].double()  # [rows, outer, step], exact
        added = cut(products, products.abs().amax(-1, keepdim=True)).sum(-1)
        total = cut(total + added, total + added)
    return total.float()
