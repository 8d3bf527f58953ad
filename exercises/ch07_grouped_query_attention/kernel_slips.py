"""What a grouped decode kernel shows of its slips: in numbers, in its loads, in accesses beyond a tensor."""

from __future__ import annotations

import math
import re

import torch

from exercises.ch07_grouped_query_attention.slips import grouped, rounding_decides
from exercises.topics.attention import attention, close_to
from exercises.topics.decode import decode, each_sequence

TILE = 64  # keys of a tile in 7.5, as its launcher sets it
GAP = 8  # elements of NaN between the rows of queries and values in one case of 7.5
LAYOUTS = "queries, keys and values each stored in another way"


def clear(slip):
    """The fingerprint where it can be recognised: not of an empty sequence, which is a question of its own, and not
    where scores are so large that roundings decide."""

    def result(query, key, value, lengths):
        if int(lengths.min()) == 0 or rounding_decides(query, key, value, lengths):
            return None
        return slip(query, key, value, lengths)

    return result


def each(function=attention, **slips):
    """A fingerprint of 7.5: `function` of every sequence, with slips in the map."""
    return clear(lambda q, k, v, lengths: each_sequence(function, q, k, v, lengths, **slips))


def scaled(scale):
    """A fingerprint with another scale, a function of head_dim."""
    return each(lambda q, k, v: attention(q, k, v, scale=scale(q.shape[-1])))


def with_lengths(change):
    """A fingerprint with other lengths, held inside the cache."""
    return clear(lambda q, k, v, lengths: decode(q, k, v, change(lengths, k)))


def off_by(shift, *, inside_tiles=False):
    """Lengths off by one; nothing is said of a sequence that would be left without a token."""

    def result(query, key, value, lengths):
        if int(lengths.min()) < 2:
            return None
        moved = lengths + shift
        return decode(query, key, value, torch.where(lengths % TILE == 0, lengths, moved) if inside_tiles else moved)

    return clear(result)


def exponentials(function, **options):
    """A fingerprint of slips that show where exponentials overflow or vanish: it speaks of large scores too."""

    def result(query, key, value, lengths):
        if int(lengths.min()) == 0:
            return None
        return each_sequence(lambda q, k, v: function(q, k, v, **options), query, key, value, lengths)

    return result


def _group_size(query, key):
    return query.shape[1] // key.shape[1]


@clear
def first_rows_only(query, key, value, lengths):
    """Tiles of 16 rows whatever the group: the heads beyond stay unwritten."""
    if _group_size(query, key) <= 16:
        return None
    output = grouped(decode(query, key, value, lengths), key.shape[1]).clone()
    output[:, :, 16:] = math.nan
    return output.flatten(1, 2)


@clear
def group_offset_missing(query, key, value, lengths):
    """Every program takes the query heads of the first group and writes there; the last KV head's result stays."""
    group = _group_size(query, key)
    output = torch.full_like(query, math.nan)
    output[:, :group] = decode(query[:, :group], key[:, -1:], value[:, -1:], lengths)
    return output


def unused_slots_count(query, key, value, lengths):
    """A tile's slots behind the last token weigh 0, and 0 · NaN is NaN: every head of such a sequence."""
    output = decode(query, key, value, lengths)
    for index, length in enumerate(lengths.tolist()):
        if value[index, :, length : -(-length // TILE) * TILE].isnan().any():
            output[index] = math.nan
    return output


def _different_layouts(key):
    """Whether this is the case of three layouts, the only one whose keys are not contiguous."""
    return not key.is_contiguous()


@clear
def queries_as_contiguous(query, key, value, lengths):
    """In the case of three layouts queries lie GAP elements apart; a float64 copy has lost the gaps."""
    if not _different_layouts(key):
        return decode(query, key, value, lengths)
    memory = torch.nn.functional.pad(query, (0, GAP), value=math.nan).flatten()
    return decode(memory[: query.numel()].view(query.shape), key, value, lengths)


@clear
def keys_as_contiguous(query, key, value, lengths):
    heads, capacity, head_dim = key.shape[1:]
    key = key.as_strided(key.shape, (heads * capacity * head_dim, capacity * head_dim, head_dim, 1))
    return decode(query, key, value, lengths)


@clear
def values_misread(query, key, value, lengths):
    """Values read as contiguous, or by the keys' strides: a gap of NaN reaches every output."""
    output = decode(query, key, value, lengths)
    return torch.full_like(output, math.nan) if _different_layouts(key) else output


def rereads_keys(case, seen, got):
    """Right numbers, and keys or values loaded more than once."""
    times = [
        counts["loaded"] / max(counts["distinct_loaded"], 1)
        for name, counts in seen.traffic.items()
        if name.startswith(("key", "value"))
    ]
    return bool(times) and max(times) > 1.5 and close_to(got, decode(*_float64(case.args)))


def _float64(args):
    return [arg.double() if arg.is_floating_point() else arg for arg in args]


def reaches(*words):
    return lambda case, seen, got: any(word in access for access in seen.out_of_bounds for word in words)


def program_beyond_the_key_heads(case, seen, got):
    """A program whose place on the grid's second axis is no KV head reached outside a tensor."""
    key_heads = case.args[1].shape[1]
    programs = [re.search(r"program \(\d+, (\d+)", access) for access in seen.out_of_bounds]
    return any(program and int(program[1]) >= key_heads for program in programs)


def output_strays(case, seen, got):
    """Written outside, and the second head is wrong already: rows were stored further apart than they lie."""
    if case.name != LAYOUTS or not isinstance(got, torch.Tensor) or not reaches("writes output")(case, seen, got):
        return False
    right = decode(*case.args)
    return got.shape == right.shape and not torch.allclose(got[0, 1].double(), right[0, 1].double(), atol=0.02)
