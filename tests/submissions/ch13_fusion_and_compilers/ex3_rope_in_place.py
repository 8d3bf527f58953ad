"""Wrong answers to exercise 13.3, and unusual right ones."""

from tests.submissions.edits import changed

FIRST = "first = qkv_pointer + token * qkv_stride + head * (2 * half) + column"
POSITION = "tl.load(positions_pointer + token)"
STORE_FIRST = "tl.store(first, (x * cosine - y * sine).to(dtype), mask=inside)"
LOAD_Y = "y = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)"
HEADS = "heads = query_heads + key_heads"

A_HEAD_A_PROGRAM = """# Exercise 13.3 · RoPE inside the packed tensor
@triton.jit
def one_head(qkv, cosine, sine, positions, stride, half, HALF: tl.constexpr):
    token, head, c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HALF)
    m = c < half
    angle = tl.load(positions + token) * half + c
    cos, sin = tl.load(cosine + angle, mask=m, other=0.0), tl.load(sine + angle, mask=m, other=0.0)
    p = qkv + token * stride + head * 2 * half + c
    x, y = tl.load(p, mask=m, other=0.0).to(tl.float32), tl.load(p + half, mask=m, other=0.0).to(tl.float32)
    tl.store(p, (x * cos - y * sin).to(qkv.dtype.element_ty), mask=m)
    tl.store(p + half, (y * cos + x * sin).to(qkv.dtype.element_ty), mask=m)

def rope_in_place(qkv, cosine, sine, positions, query_heads, key_heads):
    half = qkv.shape[1] // (query_heads + 2 * key_heads) // 2
    one_head[(qkv.shape[0], query_heads + key_heads)](qkv, cosine, sine, positions, qkv.stride(0), half,
                                                      HALF=triton.next_power_of_2(half))
"""

LOOP_OVER_HEADS = """# Exercise 13.3 · RoPE inside the packed tensor
@triton.jit
def looped(qkv, cosine, sine, positions, stride, heads, half, HALF: tl.constexpr):
    token, c = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    m = c < half
    angle = tl.load(positions + token) * half + c
    cos, sin = tl.load(cosine + angle, mask=m, other=0.0), tl.load(sine + angle, mask=m, other=0.0)
    for head in range(heads):
        p = qkv + token * stride + head * 2 * half + c
        x, y = tl.load(p, mask=m, other=0.0).to(tl.float32), tl.load(p + half, mask=m, other=0.0).to(tl.float32)
        tl.store(p, (x * cos - y * sin).to(qkv.dtype.element_ty), mask=m)
        tl.store(p + half, (y * cos + x * sin).to(qkv.dtype.element_ty), mask=m)

def rope_in_place(qkv, cosine, sine, positions, query_heads, key_heads):
    half = qkv.shape[1] // (query_heads + 2 * key_heads) // 2
    looped[(qkv.shape[0],)](qkv, cosine, sine, positions, qkv.stride(0), query_heads + key_heads, half,
                            HALF=triton.next_power_of_2(half))
"""

WRONG = {
    "modified_input": changed(
        "13.3", ("    heads = query_heads + key_heads\n    rope", "    heads = query_heads + key_heads\n"
                 "    positions.resize_(triton.next_power_of_2(len(positions)))\n    rope")
    ),
    "rounded_on_the_way": changed(
        "13.3", ("(x * cosine - y * sine)", "((x * cosine).to(dtype) - (y * sine).to(dtype))")
    ),
    "rounded_on_the_way__the_angles": changed(
        "13.3",
        ("    inside = (head < heads)", "    cosine = cosine.to(qkv_pointer.dtype.element_ty).to(tl.float32)\n"
                                        "    inside = (head < heads)"),
    ),
    "rounded_on_the_way__all_of_it": changed(
        "13.3",
        (LOAD_Y, LOAD_Y.replace(".to(tl.float32)", "")),
        ("x = tl.load(first, mask=inside, other=0.0).to(tl.float32)", "x = tl.load(first, mask=inside, other=0.0)"),
        ("    inside = (head < heads)", "    narrow = qkv_pointer.dtype.element_ty\n    cosine = cosine.to(narrow)\n"
                                        "    sine = sine.to(narrow)\n    inside = (head < heads)"),
    ),
    "fixed_size": changed("13.3", ("kernel[(qkv.shape[0],)](", "kernel[(min(qkv.shape[0], 132),)](")),
    "fixed_size__tile_of_heads": changed("13.3", ("HEADS=triton.next_power_of_2(heads)", "HEADS=64")),
    # onnxruntime#26758: a kernel always took halves where the model's pairs were neighbours. Here it is the reverse.
    "neighbours_paired": changed(
        "13.3", (FIRST, FIRST.replace("+ column", "+ 2 * column")), ("first + half", "first + 1")
    ),
    "turned_backwards": changed(
        "13.3", ("x * cosine - y * sine", "x * cosine + y * sine"), ("y * cosine + x * sine", "y * cosine - x * sine")
    ),
    "sign_wrong": changed("13.3", ("x * cosine - y * sine", "x * cosine + y * sine")),
    "term_missing": changed("13.3", ("y * cosine + x * sine", "y * cosine")),
    "turned_with_itself": changed("13.3", ("y * cosine + x * sine", "y * cosine + y * sine")),
    "halves_exchanged": changed(
        "13.3", ("(x * cosine - y * sine)", "(TMP)"), ("(y * cosine + x * sine)", "(x * cosine - y * sine)"),
        ("(TMP)", "(y * cosine + x * sine)"),
    ),
    "one_table": changed("13.3", ("tl.load(sine_pointer", "tl.load(cosine_pointer")),
    "first_half_already_turned__in_float32": changed(
        "13.3", (STORE_FIRST, "x = x * cosine - y * sine\n    tl.store(first, x.to(dtype), mask=inside)")
    ),
    "second_half_already_turned": changed(
        "13.3", (f"    {STORE_FIRST}\n", ""),
        ("(y * cosine + x * sine).to(dtype), mask=inside)", "(y * cosine + x * sine).to(dtype), mask=inside)\n"
         f"    {LOAD_Y}\n    {STORE_FIRST}"),
    ),
    "position_off_by_one": changed("13.3", (POSITION, f"{POSITION} + 1")),
    "last_head_left": changed("13.3", (HEADS, f"{HEADS} - 1")),
    "first_head_only": changed("13.3", (HEADS, "heads = 1")),
    "heads_half_as_far": changed("13.3", ("head * (2 * half)", "head * half")),
    "columns_unmasked": changed("13.3", ("inside = (head < heads) & (column < half)", "inside = head < heads")),
    "tables_exchanged": changed(
        "13.3",
        ("sine = tl.load(sine_pointer", "sine = tl.load(TMP"),
        ("tl.load(cosine_pointer", "tl.load(sine_pointer"),
        ("tl.load(TMP", "tl.load(cosine_pointer"),
    ),
    "first_half_already_turned": changed(
        "13.3",
        ("(y * cosine + x * sine)", "(y * cosine + tl.load(first, mask=inside, other=0.0).to(tl.float32) * sine)"),
    ),
    "rows_for_positions": changed("13.3", (POSITION, "token")),
    "counted_from_the_first": changed("13.3", (POSITION, "tl.load(positions_pointer) + token")),
    "counted_from_the_first__all_alike": changed("13.3", (POSITION, "tl.load(positions_pointer)")),
    "keys_not_turned": changed("13.3", (HEADS, "heads = query_heads")),
    # LMCache#4144: K and V of a head lie side by side there, and only K may be turned.
    "values_turned": changed("13.3", (HEADS, "heads = query_heads + 2 * key_heads")),
    "keys_as_queries": changed("13.3", (HEADS, "heads = 2 * query_heads")),
    "queries_not_turned": changed(
        "13.3",
        (HEADS, "heads = key_heads"),
        (
            "qkv, cosine, sine, positions, qkv.stride(0),",
            "qkv[:, query_heads * 2 * half :], cosine, sine, positions, qkv.stride(0),",
        ),
    ),
    "row_stride_ignored": changed("13.3", ("positions, qkv.stride(0),", "positions, qkv.shape[1],")),
    "offset_in_32_bits": changed("13.3", (".to(tl.int64)", "")),
    "half_stored": changed("13.3", (STORE_FIRST, "pass")),
    "first_angle_for_all": changed("13.3", ("position * half + column", "position * half + 0 * column")),
    "angles_for_each_head": A_HEAD_A_PROGRAM,
    "too_many_bytes": changed(
        "13.3",
        (HEADS, "heads = query_heads + 2 * key_heads"),
        ("(x * cosine - y * sine)", "tl.where(head < turned, x * cosine - y * sine, x)"),
        ("(y * cosine + x * sine)", "tl.where(head < turned, y * cosine + x * sine, y)"),
        ("qkv_stride, heads, half,", "qkv_stride, heads, half, turned,"),
        ("qkv.stride(0), heads, half,", "qkv.stride(0), heads, half, query_heads + key_heads,"),
    ),
    "no_kernel_launched": """# Exercise 13.3 · RoPE inside the packed tensor
def rope_in_place(qkv, cosine, sine, positions, query_heads, key_heads):
    heads = qkv.unflatten(1, (query_heads + 2 * key_heads, -1))[:, : query_heads + key_heads]
    x, y = heads.float().chunk(2, -1)
    c, s = cosine[positions][:, None], sine[positions][:, None]
    heads.copy_(torch.cat((x * c - y * s, y * c + x * s), -1))
""",
    "sign_wrong__and_keys_not_turned": changed(
        "13.3", (HEADS, "heads = query_heads"), ("x * cosine - y * sine", "x * cosine + y * sine")
    ),
}

UNUSUAL = {
    "a loop over the heads": LOOP_OVER_HEADS,
    "a row's own pointer in int64": changed(
        "13.3",
        ("token = tl.program_id(0).to(tl.int64)", "token = tl.program_id(0)"),
        ("qkv_pointer + token * qkv_stride", "(qkv_pointer + token.to(tl.int64) * qkv_stride)"),
    ),
    "a tile twice as wide": changed(
        "13.3", ("HALF=triton.next_power_of_2(half)", "HALF=2 * triton.next_power_of_2(half)")
    ),
    "loaded after the angles, stored in the other order": changed(
        "13.3",
        (f"    {STORE_FIRST}\n", ""),
        (
            "(y * cosine + x * sine).to(dtype), mask=inside)",
            f"(y * cosine + x * sine).to(dtype), mask=inside)\n    {STORE_FIRST}",
        ),
    ),
}
