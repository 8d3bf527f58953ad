"""Keys and values in fewer bits: what the codes of a cache stand for, in plain PyTorch.

    e4m3    x ≈ code · scale             8 bits: 4 of exponent, 3 of mantissa, from -448 to 448
    INT4    x ≈ code · scale + middle    4 bits: -8 to 7, two codes in a byte

An e4m3 cache has one float32 scale for all, for each head, or for each head of each page. Its codes lie as the numbers
did, one byte each: half of a 16-bit cache's bytes.

An INT4 cache has a scale and a middle, float16, for each group of 64 numbers. A few channels of the keys are large in
every token, so keys are grouped by channel: 64 consecutive tokens of one channel. Values have no such channels, and are
grouped by token: 64 consecutive channels of one token. With head dimension 128 that is 4 · 16 bits for every 128 · 4
bits of keys and values each: 4.5 bits a number, 28 % of a 16-bit cache's bytes.

A group of keys is quantised when all of its 64 tokens are there. Until then they wait in a window, whole, in 16 bits,
and so do the values of the same tokens: of a sequence of L tokens the last L mod 64.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; Liu et al., KIVI, arXiv 2402.02750 (the
axes and the window; there the window holds more than one group).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from course_lib.kernels.quantised.fp8 import E4M3_MAX

GROUP = 64  # numbers with one scale; tokens in a page of an INT4 cache, and in its window
LOWEST_CODE, HIGHEST_CODE = -8, 7
INT4_MAX = torch.finfo(torch.float16).max  # the largest number whose middle float16 can hold
GROUP_DTYPE = torch.float16  # of scales and middles


# ------------------------------------------------------------------------------------------------------------- e4m3


def spread_scales(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Scales as they broadcast against codes [pages or batch, key_heads, tokens, head_dim].

    scales: [], one for all; [key_heads]; or [pages or batch, key_heads].
    Raises a ValueError for another shape.
    """
    allowed = (), (codes.shape[1],), tuple(codes.shape[:2])
    if tuple(scales.shape) not in allowed:
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}; for codes of shape {tuple(codes.shape)} they must have "
            f"{allowed[0]}, {allowed[1]} or {allowed[2]}: one for all, for each head, or for each page and head."
        )
    return scales[..., None, None] if scales.dim() else scales


def quantise_e4m3_reference(tensor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The codes of [pages or batch, key_heads, tokens, head_dim]: tensor / scales, rounded to e4m3.

    scales: float32, above 0, as `spread_scales` takes them. What lies beyond 448 · scale becomes 448 · scale.
    Raises a ValueError for scales that are not finite and above 0, and for a NaN or an infinity, which e4m3 has no
    code for.
    """
    if not (scales.isfinite() & (scales > 0)).all():
        raise ValueError(f"scales hold {bad_number(scales, positive=True)}; they must be finite and above 0.")
    check_finite("tensor", tensor)
    scaled = tensor.float() / spread_scales(scales, tensor)
    return scaled.clamp(-E4M3_MAX.value, E4M3_MAX.value).to(torch.float8_e4m3fn)


def restored_e4m3(codes: torch.Tensor, scales: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """What e4m3 codes [pages or batch, key_heads, tokens, head_dim] stand for, of that dtype."""
    return codes.to(dtype) * spread_scales(scales, codes).to(dtype)


# ------------------------------------------------------------------------------------------------------------- INT4


class Int4Groups(NamedTuple):
    """Codes int8 of -8 to 7, of the tensor's shape; scales and middles float16, with size 1 where the groups lay."""

    codes: torch.Tensor
    scales: torch.Tensor
    middles: torch.Tensor


class Int4Cache(NamedTuple):
    """Keys and values of a cache in INT4, and the windows of its sequences. All are contiguous.

    In pages of 64 tokens `blocks` is [pages, key_heads]; in a contiguous cache it is [batch, key_heads, capacity / 64],
    capacity being a multiple of 64. A page or such a block is 64 consecutive tokens: one group of keys.
    """

    key_codes: torch.Tensor  # uint8 [*blocks, 64, head_dim / 2]: byte i holds channel 2i in its low half, 2i + 1 above
    key_scales: torch.Tensor  # float16 [*blocks, head_dim]: by channel
    key_middles: torch.Tensor  # float16 [*blocks, head_dim]
    value_codes: torch.Tensor  # uint8 [*blocks, 64, head_dim / 2]
    value_scales: torch.Tensor  # float16 [*blocks, 64, head_dim / 64]: by token
    value_middles: torch.Tensor  # float16 [*blocks, 64, head_dim / 64]
    key_window: torch.Tensor  # 16 bits [batch, key_heads, 64, head_dim]: token t of a sequence at t mod 64
    value_window: torch.Tensor  # 16 bits [batch, key_heads, 64, head_dim]

    @property
    def paged(self) -> bool:
        return self.key_codes.dim() == 4

    def quantised(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Int4Cache":
        """The cache with `change` made to its codes, scales and middles; the windows as they are."""
        return Int4Cache(*(change(part) if place < 6 else part for place, part in enumerate(self)))


def empty_int4_cache(batch, key_heads, head_dim, *, pages=None, capacity=None, dtype=torch.float16, device="cpu"):
    """An Int4Cache with room for `pages` pages, or for `capacity` tokens of each sequence; its windows are of `dtype`.

    Raises a ValueError unless one of pages and capacity is given, head_dim and capacity being multiples of 64.
    """
    if (pages is None) == (capacity is None):
        raise ValueError(f"pages is {pages} and capacity is {capacity}; give the one that the cache is made of.")
    for name, number in (("head_dim", head_dim), ("capacity", capacity or 0)):
        if number % GROUP != 0:
            raise ValueError(f"{name} is {number}; it must be a multiple of {GROUP}, the numbers with one scale.")
    blocks = (pages, key_heads) if capacity is None else (batch, key_heads, capacity // GROUP)
    codes, by_channel, by_token = (GROUP, head_dim // 2), (head_dim,), (GROUP, head_dim // GROUP)
    window = (batch, key_heads, GROUP, head_dim)
    parts = [((*blocks, *codes), torch.uint8), ((*blocks, *by_channel), GROUP_DTYPE),
             ((*blocks, *by_channel), GROUP_DTYPE), ((*blocks, *codes), torch.uint8),
             ((*blocks, *by_token), GROUP_DTYPE), ((*blocks, *by_token), GROUP_DTYPE), (window, dtype),
             (window, dtype)]  # fmt: skip
    return Int4Cache(*(torch.zeros(shape, dtype=kind, device=device) for shape, kind in parts))


def quantise_int4(tensor: torch.Tensor, dim: int) -> Int4Groups:
    """Codes of a tensor whose dimension `dim` is one group.

    Of a group from `lowest` to `highest`: scale = (highest - lowest) / 15, middle = lowest + 8 · scale, so that code -8
    is the lowest number and 7 the highest. Both are rounded to float16 first, and the codes are made with what they
    became. A group of equal numbers has the scale 0, and codes of 0.

    Raises a ValueError for a NaN, an infinity, or a number beyond 65504, which float16 can't hold.
    """
    check_finite("tensor", tensor)
    if (tensor.abs() > INT4_MAX).any():
        raise ValueError(f"tensor holds {tensor.abs().max().item()}; a group's middle can be {INT4_MAX:.0f} at most.")
    numbers = tensor.float()
    lowest, highest = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    # By a tensor: for a number PyTorch multiplies by its reciprocal on a GPU, which now and then rounds otherwise.
    scales = ((highest - lowest) / torch.full_like(highest, 15)).to(GROUP_DTYPE)
    middles = (lowest + 8 * scales.float()).to(GROUP_DTYPE)
    steps = (numbers - middles.float()) / torch.where(scales == 0, 1.0, scales.float())
    codes = torch.where(scales == 0, 0.0, steps.clamp(LOWEST_CODE, HIGHEST_CODE).round())
    return Int4Groups(codes.to(torch.int8), scales, middles)


def restored_int4(groups: Int4Groups, dtype=torch.float32) -> torch.Tensor:
    """What INT4 codes stand for, of that dtype."""
    codes, scales, middles = (part.to(dtype) for part in groups)
    return codes * scales + middles


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes int8 [..., n] of -8 to 7 as bytes uint8 [..., n / 2]: code 2i is the low half of byte i, 2i + 1 the high.

    Raises a ValueError for an odd n, and for a code that 4 bits don't hold.
    """
    if codes.shape[-1] % 2 != 0:
        raise ValueError(f"codes have {codes.shape[-1]} numbers in a row; two share a byte, so it must be even.")
    if not ((codes >= LOWEST_CODE) & (codes <= HIGHEST_CODE)).all():
        raise ValueError(f"codes run from {codes.min()} to {codes.max()}; 4 bits hold {LOWEST_CODE} to {HIGHEST_CODE}.")
    return pack_halves(codes.to(torch.int32) & 15)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The codes int8 [..., 2 · n] in bytes uint8 [..., n]: a half of 8 to 15 is -8 to -1 (two's complement)."""
    halves = unpack_halves(packed).to(torch.int8)
    return torch.where(halves > HIGHEST_CODE, halves - 16, halves)


def pack_halves(halves: torch.Tensor) -> torch.Tensor:
    """Numbers [..., 2 · n] of 0 to 15 as bytes uint8 [..., n]: number 2i is the low half of byte i."""
    low, high = halves.to(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """The halves uint8 [..., 2 · n] of bytes uint8 [..., n], the low one first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def quantise_int4_keys(key: torch.Tensor) -> Int4Groups:
    """Keys [..., 64, head_dim], by channel: packed codes [..., 64, head_dim / 2], scales, middles [..., head_dim]."""
    groups = quantise_int4(key, -2)
    return Int4Groups(pack_int4(groups.codes), groups.scales.squeeze(-2), groups.middles.squeeze(-2))


def quantise_int4_values(value: torch.Tensor) -> Int4Groups:
    """Values [..., head_dim], by token: packed codes [..., head_dim / 2], scales, middles [..., head_dim / 64]."""
    groups = quantise_int4(value.unflatten(-1, (-1, GROUP)), -1)
    return Int4Groups(pack_int4(groups.codes.flatten(-2)), groups.scales.squeeze(-1), groups.middles.squeeze(-1))


def restored_int4_keys(cache: Int4Cache, dtype=torch.float32) -> torch.Tensor:
    """[*blocks, 64, head_dim]: what the codes of all keys stand for, without the window."""
    groups = Int4Groups(unpack_int4(cache.key_codes), cache.key_scales[..., None, :], cache.key_middles[..., None, :])
    return restored_int4(groups, dtype)


def restored_int4_values(cache: Int4Cache, dtype=torch.float32) -> torch.Tensor:
    """[*blocks, 64, head_dim]: what the codes of all values stand for, without the window."""
    codes = unpack_int4(cache.value_codes).unflatten(-1, (-1, GROUP))
    return restored_int4(
        Int4Groups(codes, cache.value_scales[..., None], cache.value_middles[..., None]), dtype
    ).flatten(-2)


# ------------------------------------------------------------------------------------------------------ what is said


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError, with the first such number and its place, if the tensor holds a NaN or an infinity."""
    if not tensor.isfinite().all():
        raise ValueError(f"{name} holds {bad_number(tensor)}; a code stands for a finite number only.")


def bad_number(tensor: torch.Tensor, positive: bool = False) -> str:
    """The first number that is not finite (positive: or not above 0), and its place: "nan at [0, 3]"."""
    bad = ~tensor.isfinite() | (tensor <= 0 if positive else False)
    place = bad.nonzero()[0].tolist()
    return f"{tensor[tuple(place)].item()} at {place}"
