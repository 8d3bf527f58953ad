"""Exercise 13.3: rotary positions on the queries and keys of a packed QKV, in place; the values are not touched."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, InOut, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import CONTIGUOUS, beyond_32_bits, gaps
from exercises.topics.evidence import FAR_END, FIXED_SIZE, in_cases_of
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.pointers import load, put


def rope_oracle(qkv, cosine, sine, positions, query_heads, key_heads, exact=False):
    accurate = torch.promote_types(qkv.dtype, torch.float32)
    heads = qkv.unflatten(1, (query_heads + 2 * key_heads, -1))[:, : query_heads + key_heads]
    first, second = heads.to(accurate).chunk(2, dim=-1)  # [tokens, heads, head_dim / 2]
    cosine, sine = cosine[positions][:, None].to(accurate), sine[positions][:, None].to(accurate)
    heads.copy_(torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1))
    return heads.half().long() if exact else None


NO_STEP_ROUNDS = "float16, multiples of 16: no step rounds in float32"


# The driver is sent to the worker by its source alone, so it stands by itself.


def whole_numbers(functions, qkv, cosine, sine, positions, query_heads, key_heads, exact):
    """Queries and keys as whole numbers, which allow no error."""
    function = functions["rope_in_place"]
    getattr(function, "__wrapped__", function)(qkv, cosine, sine, positions, query_heads, key_heads)
    heads = qkv.unflatten(1, (query_heads + 2 * key_heads, -1))[:, : query_heads + key_heads]
    return heads.long()


def exact_in_float32(draw):
    """Multiples of 16, and angles in units of 2⁻¹²: in float32 no step rounds, so all who round once get the same."""
    qkv = draw.integers(24, 3 * 64, low=-1000, high=1000).half() * 16
    angles = draw.uniform(24, 32, high=6.3)
    tables = ((table * 2**12).round() / 2**12 for table in (angles.cos(), angles.sin()))
    return InOut(qkv), *tables, torch.arange(24), 1, 1, True


from_0, behind_others, anywhere = (0, 1), (5, 40), None  # where the first token may stand, the others following it


def drawn(draw, *, tokens, key_heads, group, head_dim, dtype=torch.float32, positions=behind_others, layout=None):
    query_heads = key_heads * group
    qkv = draw.normal(tokens, (query_heads + 2 * key_heads) * head_dim, dtype=dtype)
    any_places = draw.integers(tokens, low=0, high=60)
    places = torch.arange(tokens) + draw.integer(*positions) if positions else any_places
    capacity = int(places.max()) + 1  # the last position ends the tables
    angles = torch.arange(capacity)[:, None] * torch.logspace(0, -2, head_dim // 2, base=10.0) + draw.uniform(1)
    return InOut(layout(draw, qkv) if layout else qkv), angles.cos(), angles.sin(), places, query_heads, key_heads


def rope_cases(draw):
    half = torch.float16
    qkv, *rest = drawn(draw, tokens=3, key_heads=1, group=2, head_dim=16)
    return [
        Case("3 tokens, one head each, from position 0",
             drawn(draw, tokens=3, key_heads=1, group=1, head_dim=16, positions=from_0), metered=True),
        Case("8 query heads on 2 KV heads of 64",
             drawn(draw, tokens=4, key_heads=2, group=4, head_dim=64), metered=True),
        Case("a decode step: 5 sequences, each at a position of its own",
             drawn(draw, tokens=5, key_heads=2, group=2, head_dim=32, positions=anywhere)),
        Case("heads of 80: half of them is no power of two",
             drawn(draw, tokens=3, key_heads=2, group=3, head_dim=80), metered=True),
        Case("a slice of a wider tensor", drawn(draw, tokens=4, key_heads=1, group=2, head_dim=16, layout=gaps)),
        Case("float16", drawn(draw, tokens=6, key_heads=2, group=2, head_dim=64, dtype=half), metered=True),
        Case(f"300 tokens, {FAR_END}", drawn(draw, tokens=300, key_heads=1, group=1, head_dim=2)),
        Case(f"132 query heads, {FAR_END}", drawn(draw, tokens=2, key_heads=4, group=33, head_dim=4)),
        Case(f"300 KV heads, {FAR_END}", drawn(draw, tokens=2, key_heads=300, group=1, head_dim=2)),
        Case(NO_STEP_ROUNDS, exact_in_float32(draw), driver=whole_numbers),
        *beyond_32_bits(draw, "tokens", [qkv], *rest),
    ]  # fmt: skip


CONTRACT = Contract(
    drawn,
    choices={
        "tokens": (1, 2, 19),
        "key_heads": (1, 2, 3),
        "group": (1, 3, 4),
        "head_dim": (2, 6, 64, 130),
        "dtype": (torch.float32, torch.float16),
        "positions": (
            Level(from_0, "from position 0"),
            Level(behind_others, "behind other tokens"),
            Level(anywhere, "positions in any order"),
        ),
        "layout": (CONTIGUOUS, Level(gaps, "a gap after each row")),
    },
    says={
        "head_dim": "head_dim is any even number from 2 to 256",
        "group": "a multiple of key_heads",
        "positions": "in any order, some perhaps twice",
        "dtype": "float32 or float16",
        "layout": "any stride from row to row",
    },
    most=10,
)


def turned_in_place(qkv, cosine, sine, positions, query_heads, key_heads, exact=False):
    tokens, width = qkv.shape
    half = width // (query_heads + 2 * key_heads) // 2
    memory = qkv.as_strided((1 + (tokens - 1) * qkv.stride(0) + width - 1,), (1,))
    head = torch.arange(query_heads + key_heads)[:, None]
    column = torch.arange(half)
    for token in torch.arange(tokens):  # program by program
        place = load(positions, token)
        angle = place * half + column  # [half]
        cos, sin = load(cosine, angle), load(sine, angle)
        begins = token * qkv.stride(0) + head * (2 * half)
        first_at, second_at = begins + column, begins + half + column
        x, y = load(memory, first_at).float(), load(memory, second_at).float()
        first = x * cos - y * sin
        second = y * cos + x * sin
        put(memory, first_at, first)
        put(memory, second_at, second)
    return qkv.unflatten(1, (-1, 2 * half))[:, : query_heads + key_heads].long() if exact else None


HEADS = "torch.arange(query_heads + key_heads)"
PLACE = "load(positions, token)"
FIRST, SECOND = "x * cos - y * sin", "y * cos + x * sin"
CHANGES = (
    *edits("Neighbours were paired: numbers 2i and 2i + 1 of a head. Here number i goes with number i + head_dim / 2.",
        neighbours_paired=("begins + column, begins + half + column",
        "begins + 2 * column, begins + 2 * column + 1")),
    *edits("The pairs were turned backwards: the signs of the sine are exchanged. The first half becomes x · cos - "
        "y · sin, the second y · cos + x · sin.",
        turned_backwards=("x * cos - y * sin", "x * cos + y * sin", "y * cos + x * sin", "y * cos - x * sin")),
    *edits("A sign is wrong: x · cos - y · sin for the first half, y · cos + x · sin for the second.",
        sign_wrong=("x * cos - y * sin", "x * cos + y * sin"),
        sign_wrong__second=("y * cos + x * sin", "y * cos - x * sin")),
    *edits("A term is missing: the first half becomes x · cos - y · sin, the second y · cos + x · sin.",
        term_missing=(FIRST, "x * cos"), term_missing__second=(SECOND, "y * cos"),
        term_missing__both=(FIRST, "x * cos", SECOND, "y * cos")),
    *edits("A number was turned with itself: the first half becomes x · cos - y · sin, the second y · cos + x · sin.",
        turned_with_itself=(FIRST, "x * cos - x * sin"), turned_with_itself__second=(SECOND, "y * cos + y * sin")),
    *edits("The two results are exchanged: x · cos - y · sin belongs to the first half, y · cos + x · sin to the "
        "second.",
        halves_exchanged=("first_at, first)", "first_at, second)", "second_at, second)", "second_at, first)")),
    *edits("Both factors come from one table: load one row of cosines, and one of sines.",
        one_table=("load(sine, angle)", "load(cosine, angle)"),
        one_table__of_sines=("load(cosine, angle)", "load(sine, angle)")),
    *edits("Cosine and sine are exchanged.",
        tables_exchanged=("load(cosine, angle), load(sine, angle)", "load(sine, angle), load(cosine, angle)")),
    *edits("The second half was computed from the first half as it is after its turn. Load both halves before you "
        "store one of them.",
        first_half_already_turned=(SECOND, "y * cos + first.to(qkv.dtype) * sin"),
        first_half_already_turned__in_float32=(SECOND, "y * cos + first * sin")),
    *edits("The first half was computed from the second half as it is after its turn. Load both halves before you "
        "store one of them.",
        second_half_already_turned=(FIRST, "x * cos - (y * cos + x * sin).to(qkv.dtype) * sin"),
        second_half_already_turned__in_float32=(FIRST, "x * cos - (y * cos + x * sin) * sin")),
    *edits("A position is one off: the row of the tables is the position itself, from 0 on.",
        position_off_by_one=(PLACE, f"({PLACE} + 1)"), position_off_by_one__less=(PLACE, f"({PLACE} - 1)")),
    *edits("Tokens were turned by their row in the tensor, as if they stood at the start. Load each one's position.",
        rows_for_positions=(PLACE, "token")),
    *edits("Only the first token's position was read, and the others counted on from it. Each token has its own.",
        counted_from_the_first=(PLACE, "load(positions, 0 * token) + token"),
        counted_from_the_first__all_alike=(PLACE, "load(positions, 0 * token)")),
    *edits("The keys were not turned. They follow the query heads: turn query_heads + key_heads heads.",
        keys_not_turned=(HEADS, "torch.arange(query_heads)")),
    *edits("The last key head was not turned. There are query_heads + key_heads heads to turn.",
        last_head_left=(HEADS, "torch.arange(query_heads + key_heads - 1)")),
    *edits("Only the first head was turned. There are query_heads + key_heads heads to turn.",
        first_head_only=(HEADS, "torch.arange(1)")),
    *edits("A head begins head_dim numbers behind the one before, and not head_dim / 2.",
        heads_half_as_far=("head * (2 * half)", "head * half")),
    *edits("The values were turned too. Turn the first query_heads + key_heads heads, and leave the rest.",
        values_turned=(HEADS, "torch.arange(query_heads + 2 * key_heads)")),
    *edits("As many key heads were turned as there are query heads. There are key_heads of them, behind the queries.",
        keys_as_queries=(HEADS, "torch.arange(2 * query_heads)")),
    *edits("The queries were not turned, only the keys.",
        queries_not_turned=(HEADS, "torch.arange(query_heads, query_heads + key_heads)")),
    *edits("Rows of the packed tensor are read as if they had no gap. Use its row stride.",
        row_stride_ignored=("token * qkv.stride(0)", "token * width")),
    *edits("A row of the tables has head_dim / 2 numbers, one for each pair.",
        table_rows_too_long=("place * half + column", "place * (2 * half) + column"),
        table_rows_too_long__by_column=("place * half + column", "place + column")),
    *edits("Only one half of each head was stored.",
        half_stored=("put(memory, second_at, second)", "pass"),
        half_stored__second=("put(memory, first_at, first)", "pass")),
    *edits("The second half of a head begins head_dim / 2 numbers behind the first.",
        halves_of_the_row=("begins + half + column", "begins + 2 * half + column")),
    *edits("All pairs were turned by the first pair's angle. Each pair has an angle of its own.",
        first_angle_for_all=("place * half + column", "place * half + 0 * column")),
)  # fmt: skip


def largest_tensor(qkv, cosine, sine, positions, query_heads, key_heads, exact=False) -> int:
    """Nothing is made; the driver makes whole numbers of Q and K."""
    return qkv.tensor.numel() if exact else 1


def least_bytes(qkv, cosine, sine, positions, query_heads, key_heads) -> int:
    """Q and K in and out, a row of both tables for each token, and its position."""
    tokens, width = qkv.tensor.shape
    head_dim = width // (query_heads + 2 * key_heads)
    turned = 2 * tokens * (query_heads + key_heads) * head_dim * qkv.tensor.element_size()
    return turned + tokens * (head_dim * cosine.element_size() + positions.element_size())


def _half_is_no_power_of_two(case, seen, got) -> bool:
    qkv, _, _, _, query_heads, key_heads, *_ = case.args
    half = qkv.tensor.shape[1] // (query_heads + 2 * key_heads) // 2
    return half & (half - 1) != 0


def _angles_again(case, seen, got) -> bool:
    return case.metered and any(
        counts["stored"] == 0 and counts["loaded"] >= 2 * counts["distinct_loaded"] > 0
        for counts in seen.traffic.values()
    )


EXERCISE = Exercise(
    id="13.3",
    title="RoPE inside the packed tensor",
    entries=("rope_in_place",),
    cases=rope_cases,
    oracle=rope_oracle,
    contracts=(CONTRACT,),
    models=(model_of(turned_in_place, CHANGES),),
    needs=TRITON,
    requirements=in_one_kernel(
        *("cat", "index_put", "index_select", "index", "clone"), elements=largest_tensor, least_bytes=least_bytes
    ),
    hints=(
        "Draw a row: query_heads heads, then key_heads heads of K, then key_heads of V. Q and K lie side by side, so "
        "one tile of query_heads + key_heads heads covers both, and the rest of the row is V.",
        "Load the token's position, and with it a row of each table, [HALF]. It serves all heads of the token: "
        "cosine[None, :] against a tile [HEADS, HALF].",
        "first = qkv_pointer + token * qkv_stride + head * (2 * half) + column, with head [HEADS, 1] and column "
        "[1, HALF]. The second half lies `half` behind. Mask with (head < heads) & (column < half).",
        "Load x and y first, both in float32. Then store x * cosine - y * sine, and y * cosine + x * sine.",
    ),
    mistakes=(
        FIXED_SIZE,
        Mistake(
            "rounded_on_the_way",
            "The results are near, but not those of float32 rounded once. Something is rounded to float16 before the "
            "end: the cosine and sine, a product, or x and y were never cast. Convert what you load to float32, and "
            "only the sum back to the dtype of qkv.",
            when=in_cases_of(NO_STEP_ROUNDS),
            every=True,
            first=True,
        ),
        Mistake(
            "columns_unmasked",
            "Only heads are wrong whose half is no power of two: lanes of the tile behind it were loaded or stored, "
            "and they lie in the other half, or in the next head. Every load and store needs column < half "
            "in its mask.",
            when=_half_is_no_power_of_two,
            every=True,
        ),
        Mistake(
            "angles_for_each_head",
            "The numbers are right, but the cosines and sines of a token were loaded for each of its heads. In 16 bits "
            "they are as many bytes as the head. Let one program turn all heads of a token, and load the angles once.",
            when=_angles_again,
            cost=True,
        ),
    ),
)
