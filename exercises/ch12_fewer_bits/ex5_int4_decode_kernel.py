"""Exercise 12.5: the decode kernel that reads 4-bit keys and values once, and dequantises them in registers."""

from __future__ import annotations

import math
import re

import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Draw,
    Exercise,
    Forbids,
    LaunchesTriton,
    Mistake,
    Moves,
    ReadByKernels,
    edits,
    model_of,
)
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics import attention_sentences as told
from exercises.topics import pointers
from exercises.topics.attention import close_to, in_a_kernel, prescaled_in_a_kernel, rounded_in_a_kernel
from exercises.topics.decode import AS_GOOD, attend, each_sequence
from exercises.topics.decode_inputs import lengths as length_levels
from exercises.topics.decode_slips import EMPTY_SEQUENCE
from exercises.topics.evidence import FAR_END, FIXED_SIZE, NAN_FROM_THE_START, all_nan, in_cases_of

INF = math.inf
WORK = ("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax")


def signed(packed, accurate):
    """Codes [..., n] of bytes [..., n // 2]."""
    nibbles = torch.stack((packed % 16, packed // 16), dim=-1).flatten(-2).to(accurate)
    return nibbles - 16 * (nibbles >= 8)


def dequantised(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle):
    """The two parts of the keys, code · scale and middle, and the values, in float32 at least."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    scale, middle = (part.to(accurate).repeat_interleave(64, 2) for part in (key_scale, key_middle))
    keys = signed(key_codes, accurate) * scale
    scale, centre = (part.to(accurate).repeat_interleave(64, 3) for part in (value_scale, value_middle))
    return keys, middle, signed(value_codes, accurate) * scale + centre


def attention_to_codes(function, *, apart=False, narrow=False):
    """`function(query, keys, values)` of each sequence; the keys' two parts side by side, or all in 16 bits."""

    def decode(query, *cache_and_lengths):
        *cache, lengths = cache_and_lengths
        products, middles, values = dequantised(query, *cache)
        wide = query.to(values.dtype)
        keys = torch.cat((products, middles), -1) if apart else products + middles
        wide = torch.cat((wide, wide), -1) * math.sqrt(2) if apart else wide  # for a scale of 1/√(2 head_dim)
        if narrow:
            wide, keys, values = query, keys.to(query.dtype), values.to(query.dtype)
        return each_sequence(function, wide, keys, values, lengths).to(query.dtype)

    return decode


ORACLE = attention_to_codes(lambda *parts: attend(*parts)[0])
PLAIN = (
    *(attention_to_codes(lambda *parts, way=way: way(*parts)[0], apart=True) for way in AS_GOOD),
    *(attention_to_codes(way, narrow=True) for way in (in_a_kernel, prescaled_in_a_kernel, rounded_in_a_kernel)),
)


def drawn(draw, *, key_heads, group, head_dim, lengths, spare=0, dtype=torch.float32, scales=torch.float32, score=1.0):
    """Arguments of a call. Scores have a deviation of about `score`; behind the tokens there are bytes and NaN."""
    batch, groups = len(lengths), -(-max(*lengths, 1) // 64) + spare
    capacity, parts = 64 * groups, head_dim // 64
    query = draw.normal(batch, key_heads * group, head_dim, dtype=dtype, scale=score)
    shape = batch, key_heads, capacity, head_dim // 2
    codes = [draw.integers(*shape, low=0, high=256, dtype=torch.uint8) for _ in range(2)]
    shapes = (batch, key_heads, groups, head_dim), (batch, key_heads, capacity, parts)
    (key_scale, key_middle), (value_scale, value_middle) = (
        (draw.uniform(*shape, low=0.05, high=0.3, dtype=scales), draw.normal(*shape, dtype=scales)) for shape in shapes
    )
    for sequence, length in enumerate(lengths):
        for key_part, value_part in ((key_scale, value_scale), (key_middle, value_middle)):
            key_part[sequence, :, -(-length // 64) :] = math.nan
            value_part[sequence, :, length:] = math.nan
    counts = torch.tensor(lengths, dtype=torch.int32)
    return query, codes[0], key_scale, key_middle, codes[1], value_scale, value_middle, counts


TOO_LARGE = ": their product has no room in float16"


def large_products(draw):
    """Queries of 400 and -400 in two channels with one code: their scores cancel, and a key of 3,200 fits float16."""
    half = torch.float16
    query, key_codes, key_scale, key_middle, *values = drawn(
        draw, key_heads=1, group=2, head_dim=64, lengths=[70], dtype=half, scales=half
    )
    query[..., 0], query[..., 1] = 400.0, -400.0
    key_codes[..., 0] = 17 * (key_codes[..., 0] % 16)  # both nibbles alike
    key_scale[..., :2], key_middle[..., :2] = 400.0, 0.0
    return query, key_codes, key_scale, key_middle, *values


def nearly_cancelled(draw):
    """Codes of 6 and 7 and middles of -6.5 steps: where products are rounded to 16 bits, few bits of a sum are left."""
    half = torch.float16
    sizes = {"key_heads": 1, "group": 2, "head_dim": 64, "lengths": [5], "dtype": half, "scales": half, "score": 20.0}
    query, key_codes, key_scale, _, value_codes, value_scale, _, lengths = drawn(draw, **sizes)
    codes = (0x66 + part % 2 + 16 * (part // 2 % 2) for part in (key_codes, value_codes))
    key_codes, value_codes = (part.to(torch.uint8) for part in codes)
    return query, key_codes, key_scale, -6.5 * key_scale, value_codes, value_scale, -6.5 * value_scale, lengths


def kernel_cases(draw):
    def case(name, key_heads, group, head_dim, lengths, metered=False, **options):
        sizes = {"key_heads": key_heads, "group": group, "head_dim": head_dim, "lengths": lengths}
        return Case(name, drawn(draw, **sizes, **options), metered=metered)

    half = torch.float16
    return [
        case("1 head of 64, 64 tokens: one group", 1, 1, 64, [64], metered=True),
        case("2 KV heads, 4 query heads, 128 tokens", 2, 2, 64, [128], metered=True),
        case("lengths 63 and 65: the last group is not full", 1, 2, 64, [63, 65], metered=True),
        case("one token", 2, 2, 64, [1]),
        case("one token, so that the scales of the keys are most of the bytes", 2, 1, 64, [1], metered=True),
        case("heads of 128, 70 tokens", 1, 2, 128, [70], metered=True),
        case("a sequence without a token between two others", 1, 3, 64, [20, 0, 70]),
        case("scores of ±150: exp overflows", 1, 4, 64, [200], score=45.0),
        case("20 query heads on one KV head", 1, 20, 64, [66], metered=True),
        case("float16, with scales in float16", 2, 4, 128, [130], spare=1, dtype=half, scales=half, metered=True),
        Case(
            "64 tokens in a cache for 1,024",
            drawn(Draw(1), key_heads=1, group=2, head_dim=64, lengths=[64], spare=15),
            metered=True,
        ),
        case(f"300 sequences, {FAR_END}", 1, 1, 64, [0] * 299 + [5]),
        case(f"300 KV heads, {FAR_END}", 300, 1, 64, [2]),
        Case(f"float16, queries and scales of 400{TOO_LARGE}", large_products(draw)),
        Case("float16, middles that nearly cancel the codes", nearly_cancelled(Draw(5))),
    ]


def cache_bytes(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, lengths):
    """Codes, scales and middles of the tokens once, queries, outputs, and a length for each program."""
    batch, key_heads, _, half = key_codes.shape
    tokens, groups = int(lengths.sum()), int((-(-lengths // 64)).sum())
    numbers = 2 * groups * 2 * half + 2 * tokens * value_scale.shape[3]
    moved = key_heads * (2 * tokens * half + numbers * key_scale.element_size())
    return moved + 2 * query.numel() * query.element_size() + 4 * batch * key_heads


def read(tensor, offsets, mask=None):
    """What `tl.load(pointer + offsets, mask, other=0)` gives, in float32."""
    return pointers.load(tensor, offsets, mask, 0).float()


def codes_of(tensor, rows, channels, mask):
    """The codes of these channels, [tokens, channels], of rows of bytes."""
    numbers = read(tensor, rows + channels // 2, mask)
    nibbles = torch.where(channels % 2 == 0, numbers % 16, numbers // 16)
    return torch.where(nibbles >= 8, nibbles - 16, nibbles)


def int4_attention(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, lengths):
    (batch, heads, head_dim), (key_heads, capacity, half) = query.shape, key_codes.shape[1:]
    group, parts, channels = heads // key_heads, head_dim // 64, torch.arange(head_dim)
    output = torch.zeros(batch * heads, head_dim)
    for cache in range(batch * key_heads):
        length = int(lengths[cache // key_heads])
        members = cache * group + torch.arange(group)
        queries = read(query, members[:, None] * head_dim + channels)
        running_max, running_sum = torch.full((group, 1), -INF), torch.zeros(group, 1)
        accumulator = torch.zeros(group, head_dim)
        for first in range(0, length, 64):
            tokens = first + torch.arange(64)
            present = tokens < length
            loaded = present[:, None]
            rows = (cache * capacity + tokens)[:, None]
            of_group = (cache * (capacity // 64) + first // 64) * head_dim + channels
            keys = codes_of(key_codes, rows * half, channels, loaded)
            keys = keys * read(key_scale, of_group) + read(key_middle, of_group)
            scores = queries @ keys.T * head_dim**-0.5
            scores = torch.where(present, scores, -INF)
            new_max = torch.maximum(running_max, scores.amax(1, keepdim=True))
            weights = torch.exp(scores - new_max)
            rescale = torch.exp(running_max - new_max)
            running_sum = running_sum * rescale + weights.sum(1, keepdim=True)
            of_token = rows * parts + channels // 64
            values = codes_of(value_codes, rows * half, channels, loaded)
            values = values * read(value_scale, of_token, loaded) + read(value_middle, of_token, loaded)
            accumulator = accumulator * rescale + weights @ values
            running_max = new_max
        output[members] = accumulator / torch.where(running_sum == 0, 1.0, running_sum)
    return output.view(query.shape).to(query.dtype)


KEYS = "keys * read(key_scale, of_group) + read(key_middle, of_group)"
VALUES = "values * read(value_scale, of_token, loaded) + read(value_middle, of_token, loaded)"
GROUP_PLACE = "(cache * (capacity // 64) + first // 64) * head_dim"
OF_GROUP = f"{GROUP_PLACE} + channels"
SCALED = "queries @ keys.T * head_dim**-0.5"


def in_dtype(dtype, *sums):
    """The sums code · scale + middle, rounded to this dtype after each step."""
    narrow = (re.sub(r"(read\([^)]*\)|keys|values)(?= [*+]|$)", rf"\1.to({dtype})", each) for each in sums)
    return tuple(part for each, new in zip(sums, narrow) for part in (each, f"({new}).float()"))


KEY_CODES = "codes_of(key_codes, rows * half, channels, loaded)"
VALUE_CODES = "codes_of(value_codes, rows * half, channels, loaded)"
HALVES = (
    "Low nibbles of {} are taken for the first half of the channels, and high ones for the second. Byte c holds the "
    "channels 2c and 2c + 1."
)
FIRST_HALF_LOW = "channels % half * 2 + channels // half"  # the channel whose code is read in this one's place


def sided(sentence, name, keys, values):
    """A mistake made with both, with keys alone and with values alone; {} in the sentence becomes whose it is."""
    return (
        *edits(sentence.format("the keys and the values"), **{name: (*keys, *values)}),
        *edits(sentence.format("the keys"), **{f"{name}__keys": keys}),
        *edits(sentence.format("the values"), **{f"{name}__values": values}),
    )


def codes_sided(sentence, name, channels="channels", then=""):
    """The same, where other channels are read, or something else is made of the codes."""
    calls = ((each, each.replace("channels", channels) + then) for each in (KEY_CODES, VALUE_CODES))
    return sided(sentence, name, *calls)


CHANGES = (
    *codes_sided("The sign of the nibbles of {} is not extended, so -1 counts as 15: (nibble ^ 8) - 8 in a "
        "signed dtype.", "sign_not_extended", then=" % 16"),
    *codes_sided("The nibbles of {} are read as if 8 had been added to each code. They are in two's complement: "
        "(nibble ^ 8) - 8.", "read_with_an_offset", then=" % 16 - 8"),
    *codes_sided("The nibbles of {} are exchanged: the low one is the even channel, and the high one the odd channel.",
        "nibbles_exchanged", "(channels ^ 1)"),
    *codes_sided(HALVES, "halves_for_neighbours", FIRST_HALF_LOW),
    *edits(HALVES.format("the keys and the values"), halves_for_neighbours__scales_by_the_byte=(
        KEY_CODES, KEY_CODES.replace("channels", FIRST_HALF_LOW),
        VALUE_CODES, VALUE_CODES.replace("channels", FIRST_HALF_LOW),
        "rows * parts + channels // 64", "rows * parts + channels % half // 32")),
    *edits(HALVES.format("the values"), halves_for_neighbours__values_and_their_scales=(
        VALUE_CODES, VALUE_CODES.replace("channels", FIRST_HALF_LOW),
        "rows * parts + channels // 64", "rows * parts + channels % half // 32")),
    *edits("The keys' middle is missing, or all tiles read that of the first 64 tokens, which the softmax cancels. "
        "A key is code · scale + middle, and group first // 64 has a middle of its own.",
        key_middle_missing=(KEYS, "keys * read(key_scale, of_group)")),
    *edits("Keys or values are dequantised in float16, which rounds code · scale before the middle is added. Convert "
        "scale and middle to float32 first.",
        dequantised_in_half=in_dtype("torch.float16", KEYS, VALUES),
        dequantised_in_half__as_the_scales=in_dtype("key_scale.dtype", KEYS, VALUES),
        dequantised_in_half__keys=in_dtype("torch.float16", KEYS),
        dequantised_in_half__values=in_dtype("torch.float16", VALUES)),
    *edits("The values' middle is missing: a value is code · scale + middle.",
        value_middle_missing=(VALUES, "values * read(value_scale, of_token, loaded)")),
    *edits("The keys' scale is missing, as if it were 1. A key is code · scale + middle.",
        key_scale_missing=(KEYS, "keys + read(key_middle, of_group)")),
    *edits("The values' scale is missing, as if it were 1. A value is code · scale + middle.",
        value_scale_missing=(VALUES, "values + read(value_middle, of_token, loaded)")),
    *sided("The middle of {} is subtracted before the scale multiplies. A number is code · scale + middle.",
        "middle_as_zero_point",
        (KEYS, "(keys - read(key_middle, of_group)) * read(key_scale, of_group)"),
        (VALUES, "(values - read(value_middle, of_token, loaded)) * read(value_scale, of_token, loaded)")),
    *sided("The middle of {} is multiplied by the scale, too. A number is code · scale + middle.",
        "middle_scaled",
        (KEYS, "(keys + read(key_middle, of_group)) * read(key_scale, of_group)"),
        (VALUES, "(values + read(value_middle, of_token, loaded)) * read(value_scale, of_token, loaded)")),
    *edits("Even and odd channels of the keys share a middle, a scale or both, or exchange them. Those of byte c are "
        "at 2c for the even channel, and at 2c + 1 for the odd one.",
        even_for_odd=("read(key_middle, of_group)", "read(key_middle, of_group - channels % 2)"),
        even_for_odd__scale=("read(key_scale, of_group)", "read(key_scale, of_group - channels % 2)"),
        even_for_odd__both=(OF_GROUP, f"{GROUP_PLACE} + channels // 2 * 2"),
        even_for_odd__odd_middle=("read(key_middle, of_group)", "read(key_middle, of_group + 1 - channels % 2)"),
        even_for_odd__odd_scale=("read(key_scale, of_group)", "read(key_scale, of_group + 1 - channels % 2)"),
        even_for_odd__odd=(OF_GROUP, f"{GROUP_PLACE} + channels // 2 * 2 + 1"),
        even_for_odd__exchanged=(OF_GROUP, f"{GROUP_PLACE} + (channels ^ 1)")),
    *edits("All tiles of keys use the scales of the first 64 tokens. Group first // 64 has its own.",
        first_scales_for_all=(GROUP_PLACE, "cache * (capacity // 64) * head_dim"),
        first_scales_for_all__but_the_middle=("read(key_scale, of_group)",
        "read(key_scale, of_group - first // 64 * head_dim)")),
    *edits("A head's rows of scales begin too late. It has capacity // 64 of them, and not one more.",
        a_group_too_many=("cache * (capacity // 64)", "cache * (capacity // 64 + 1)")),
    *edits("Where a head's scales of the keys begin was counted from the sequence's length. Each head has room for "
        "capacity // 64 groups, however long its sequence is.",
        groups_of_the_length=("cache * (capacity // 64)", "cache * (-(-length // 64))"),
        groups_of_the_length__rounded_down=("cache * (capacity // 64)", "cache * (length // 64)")),
    *edits("Where a head's tokens begin was counted from the sequence's length. Each head has room for `capacity` "
        "tokens, however long its sequence is.", tokens_of_the_length=("cache * capacity", "cache * length")),
    *edits("The row of scales is taken by the token's number and not by the group's: divide by 64.",
        scales_by_token=("+ first // 64", "+ first")),
    *edits("All sequences and KV heads read the first one's scales of the keys. "
        "A program begins at group cache · (capacity // 64).",
        first_head_scales=("cache * (capacity // 64) + first // 64", "first // 64")),
    *edits("All 128 channels use the scale and middle of the first 64. Each 64 channels of a token have their own.",
        first_part_for_all=("rows * parts + channels // 64", "rows * parts")),
    *edits("The values' scales go to the channels in turns. Channels 0 to 63 share one, and 64 to 127 the other.",
        parts_by_turns=("rows * parts + channels // 64", "rows * parts + channels // 2 % parts")),
    *sided("All sequences and KV heads read the first one's codes of {}. Add cache · capacity to the token's number.",
        "first_codes_for_all", *((each, each.replace("rows", "tokens[:, None]")) for each in (KEY_CODES, VALUE_CODES))),
    *edits("All sequences and KV heads read the first one's codes, and the values' scales with them. Add "
        "cache · capacity to the token's number.",
        first_codes_for_all__and_scales=("(cache * capacity + tokens)", "(tokens + 0 * cache)")),
    *edits("The query heads go to the KV heads in turns, by h % key_heads. Neighbours share a KV head: KV head c has "
        "the query heads c · GROUP to c · GROUP + GROUP - 1.",
        heads_by_modulo=("cache * group + torch.arange(group)",
        "cache // key_heads * heads + cache % key_heads + key_heads * torch.arange(group)")),
    *edits("The weights are multiplied by the codes of the keys. The second product takes the values' codes.",
        keys_as_values=("codes_of(value_codes", "codes_of(key_codes")),
    *edits("The scores are not scaled. Multiply them by scale_log2.", scale_missing=(SCALED, "queries @ keys.T"),
        scale_missing__in_base_2=(SCALED, "queries @ keys.T * math.log(2)")),
    *edits(told.NATURAL_EXP, natural_exp=(SCALED, f"{SCALED} * math.log2(math.e)")),
    *edits("The slots behind the last token keep a score. Set it to minus infinity: tokens < length.",
        tail_not_masked=("torch.where(present, scores, -INF)", "scores")),
    *edits("Slots without a token reached the result: 0 · NaN is NaN. Mask the loads of the values' scale and middle, "
        "and of the codes, with tokens < length and other=0.",
        slots_count=("loaded = present[:, None]", "loaded = tokens[:, None] < capacity"),
        slots_count__scale_and_middle=("of_token, loaded", "of_token, tokens[:, None] < capacity"),
        slots_count__scale=("value_scale, of_token, loaded", "value_scale, of_token, tokens[:, None] < capacity"),
        slots_count__middle=("value_middle, of_token, loaded", "value_middle, of_token, tokens[:, None] < capacity")),
    *edits("The last token is left out. Tokens 0 to length - 1 count.", newest_left_out=("tokens < length",
        "tokens < length - 1")),
    *edits("The last group is skipped where it is not full. Loop up to the length, and mask.",
        partial_group_skipped=("range(0, length, 64)", "range(0, length - 63, 64)")),
    *edits(told.FIRST_TILE_ONLY, first_tile_only=("range(0, length, 64)", "range(0, min(length, 64), 64)")),
    *edits(told.NOTHING_RESCALED, nothing_rescaled=("torch.exp(running_max - new_max)", "1.0")),
    *edits(told.SUM_NOT_RESCALED, sum_not_rescaled=("running_sum * rescale", "running_sum")),
    *edits(told.ACCUMULATOR_NOT_RESCALED, accumulator_not_rescaled=("accumulator * rescale", "accumulator")),
    *edits("Only one of the two accumulators is rescaled when the maximum rises. Multiply both by rescale.",
        one_accumulator_rescaled=("accumulator * rescale", "accumulator * torch.where(channels % 2 == 0, rescale, 1)"),
        one_accumulator_rescaled__odd=("accumulator * rescale",
        "accumulator * torch.where(channels % 2 == 1, rescale, 1)")),
    *edits(told.MAXIMUM_NOT_UPDATED, maximum_not_updated=("running_max = new_max", "")),
    *edits(told.NO_RUNNING_MAX,
        no_maximum=("torch.exp(scores - new_max)", "torch.exp(scores)", "torch.exp(running_max - new_max)", "1.0")),
    *edits(told.NOT_DIVIDED, not_divided=(" / torch.where(running_sum == 0, 1.0, running_sum)", "")),
    *edits(EMPTY_SEQUENCE, is_nan=True,
        empty_sequence_nan=("torch.where(running_sum == 0, 1.0, running_sum)", "running_sum")),
)  # fmt: skip


def _loaded(seen, word):
    """How often a byte of the tensors with this word in their name was loaded, on average, at most."""
    counts = [count for name, count in seen.traffic.items() if word in name and "scale_log2" not in name]
    return max((count["loaded"] / max(count["distinct_loaded"], 1) for count in counts), default=0.0)


def _costly(word, least):
    return lambda case, seen, got: _loaded(seen, word) > least and close_to(got, ORACLE(*_exact(case)))


def _exact(case):
    return [arg.double() if arg.is_floating_point() else arg for arg in case.args]


EXERCISE = Exercise(
    id="12.5",
    title="A decode kernel that reads INT4",
    entries=("int4_decode",),
    cases=kernel_cases,
    oracle=ORACLE,
    plain=PLAIN,
    contracts=(
        Contract(
            drawn,
            choices={
                "key_heads": (1, 2),
                "group": (1, 3, 16, 17),
                "head_dim": (64, 128),
                "lengths": length_levels((1,), (0,), (64,), (63, 65), (3, 0, 129), (192,)),
                "spare": (0, 1),
                "dtype": (torch.float32, torch.float16),
                "scales": (torch.float32, torch.float16),
                "score": (Level(1.0, ""), Level(45.0, "scores of ±150")),
            },
            says={
                "lengths": "0 to capacity",
                "group": "up to 32 heads",
                "head_dim": "64 or 128",
                "dtype": "or float16",
            },
            most=8,
        ),
    ),
    models=(model_of(int4_attention, CHANGES, (codes_of,), uses=(read,)),),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda query, *rest: query.numel()),
        Forbids(WORK),
        Moves(cache_bytes),
        ReadByKernels((1, 2, 3, 4, 5, 6)),
    ),
    hints=(
        "cache = sequence · key_heads + key_head numbers the KV heads of all sequences. Token n's row of codes begins "
        "at (cache · capacity + n) · (HEAD_DIM // 2), and the scales of its 64 tokens at "
        "(cache · (capacity // 64) + n // 64) · HEAD_DIM.",
        "Load the bytes [64, HEAD_DIM // 2] once, convert them to int32, and make two tiles: ((codes & 15) ^ 8) - 8 "
        "for the even channels, ((codes >> 4) ^ 8) - 8 for the odd ones.",
        "Scales and middles of the keys are rows [HEAD_DIM // 2], at 2 * columns for even channels and for odd ones "
        "at 2 * columns + 1. Add the dot products of the even and the odd tiles, then scale and mask.",
        "Load the values' scales as a tile [64, HEAD_DIM // 64]. tl.broadcast_to(scale[:, :, None], (64, PARTS, 32)) "
        "repeats each for its 32 bytes, and tl.reshape turns that into [64, HEAD_DIM // 2].",
        "Mask the loads of codes, and of the values' scale and middle, with tokens < length. Keep two accumulators, "
        "and store them at 2 * columns and 2 * columns + 1.",
    ),
    mistakes=(
        FIXED_SIZE,
        Mistake(
            "scaled_in_half",
            "Only queries of 400 with scales of 400 are wrong. Is a scale multiplied with the query in float16? That "
            "ends at 65,504. Dequantise in float32: convert the query, too, before a scale multiplies it.",
            when=in_cases_of(TOO_LARGE),
            every=True,
            first=True,
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "scales_loaded_for_every_channel",
            "The numbers are right, but the values' scale and middle were loaded once for each channel. 64 channels of "
            "a token share them: load a tile [64, HEAD_DIM // 64] and repeat it in registers.",
            when=lambda case, seen, got: _costly("value_scale", 1.5 * _loaded(seen, "codes"))(case, seen, got),
            cost=True,
        ),
        Mistake(
            "codes_loaded_twice",
            "The numbers are right, but codes were loaded more than once, for example for each nibble or each query "
            "head. Load the bytes once, and take both nibbles from them.",
            when=_costly("codes", 1.2),
            cost=True,
        ),
    ),
)
