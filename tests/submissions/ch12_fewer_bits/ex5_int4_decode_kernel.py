"""Wrong answers to exercise 12.5, and unusual right ones."""

from tests.submissions.edits import changed

LOW = "low = ((codes & 15) ^ 8) - 8"
HIGH = "high = ((codes >> 4) ^ 8) - 8"
VALUE_LOW, VALUE_HIGH = "(((codes & 15) ^ 8) - 8) * scale", "(((codes >> 4) ^ 8) - 8) * scale"
KEY_BYTES = """tl.load(
            key_codes_pointer + places[:, None] * HALF + columns[None, :], mask=present[:, None], other=0
        ).to(tl.int32)"""
MASKED = 'tl.where(present[None, :], scores * scale_log2, float("-inf"))'
SHARED = "shared = places[:, None] * PARTS + parts[None, :]"
REPEATED = (
    "        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (64, PARTS, 32)), (64, HALF))\n"
    "        middle = tl.reshape(tl.broadcast_to(middle[:, :, None], (64, PARTS, 32)), (64, HALF))\n"
)
RESCALED = "output_even * rescale[:, None]"
LAUNCH = "int4_decode_kernel[(key_heads, batch)]("

ONE_HEAD = """# Exercise 12.5 · A decode kernel that reads INT4
@triton.jit
def one_head(q, kc, ks, km, vc, vs, vm, o, lengths, heads, capacity, scale, G: tl.constexpr, D: tl.constexpr):
    h, s = tl.program_id(0), tl.program_id(1)
    c = (s * (heads // G) + h // G).to(tl.int64)
    H: tl.constexpr = D // 2
    P: tl.constexpr = D // 64
    d, p = tl.arange(0, H), tl.arange(0, P)
    qe = tl.load(q + (s * heads + h) * D + 2 * d).to(tl.float32)
    qo = tl.load(q + (s * heads + h) * D + 2 * d + 1).to(tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    oe = tl.zeros([H], tl.float32)
    oo = tl.zeros([H], tl.float32)
    length = tl.load(lengths + s)
    for first in range(0, length, 64):
        n = first + tl.arange(0, 64)
        there = n < length
        row = c * capacity + n
        b = tl.load(kc + row[:, None] * H + d[None, :], mask=there[:, None], other=0).to(tl.int32)
        g = (c * (capacity // 64) + first // 64) * D + 2 * d
        low = (((b & 15) ^ 8) - 8) * tl.load(ks + g).to(tl.float32) + tl.load(km + g).to(tl.float32)
        high = (((b >> 4) ^ 8) - 8) * tl.load(ks + g + 1).to(tl.float32) + tl.load(km + g + 1).to(tl.float32)
        x = tl.where(there, (tl.sum(low * qe, 1) + tl.sum(high * qo, 1)) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(x, 0))
        w, shrink = tl.exp2(x - new), tl.exp2(top - new)
        b = tl.load(vc + row[:, None] * H + d[None, :], mask=there[:, None], other=0).to(tl.int32)
        a = tl.load(vs + row[:, None] * P + p, mask=there[:, None], other=0.0).to(tl.float32)
        m = tl.load(vm + row[:, None] * P + p, mask=there[:, None], other=0.0).to(tl.float32)
        a = tl.reshape(tl.broadcast_to(a[:, :, None], (64, P, 32)), (64, H))
        m = tl.reshape(tl.broadcast_to(m[:, :, None], (64, P, 32)), (64, H))
        oe = oe * shrink + tl.sum(w[:, None] * ((((b & 15) ^ 8) - 8) * a + m), 0)
        oo = oo * shrink + tl.sum(w[:, None] * ((((b >> 4) ^ 8) - 8) * a + m), 0)
        total = total * shrink + tl.sum(w, 0)
        top = new
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(o + (s * heads + h) * D + 2 * d, (oe / total).to(o.dtype.element_ty))
    tl.store(o + (s * heads + h) * D + 2 * d + 1, (oo / total).to(o.dtype.element_ty))

def int4_decode(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, lengths):
    batch, heads, D = query.shape
    output = torch.empty_like(query)
    one_head[(heads, batch)](query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, output,
                             lengths, heads, key_codes.shape[2], 1.4426950408889634 / D**0.5,
                             G=heads // key_codes.shape[1], D=D)
    return output
"""

IN_HALF = (
    ("channels).to(tl.float32)", "channels)"),
    ("channels + 1).to(tl.float32)", "channels + 1)"),
    (
        "keys_even = low * scale_even[None, :] + middle_even[None, :]",
        "keys_even = (low * scale_even[None, :] + middle_even[None, :]).to(tl.float32)",
    ),
    (
        "keys_odd = high * scale_odd[None, :] + middle_odd[None, :]",
        "keys_odd = (high * scale_odd[None, :] + middle_odd[None, :]).to(tl.float32)",
    ),
    ("shared, mask=present[:, None], other=0.0).to(tl.float32)", "shared, mask=present[:, None], other=0.0)"),
    (f"{VALUE_LOW} + middle", f"({VALUE_LOW} + middle).to(tl.float32)"),
    (f"{VALUE_HIGH} + middle", f"({VALUE_HIGH} + middle).to(tl.float32)"),
)

WRONG = {
    # q · (code · s + m) = (q · s) · code + q · m, and q · s leaves float16.
    "scaled_in_half": changed(
        "12.5",
        *((f"query_{part} = tl.load(query_pointer + rows{at}, mask=exist, other=0.0).to(tl.float32)",
           f"query_{part} = tl.load(query_pointer + rows{at}, mask=exist, other=0.0)")
          for part, at in (("even", ""), ("odd", " + 1"))),
        ("keys_even = low * scale_even[None, :] + middle_even[None, :]",
         "narrow = query_pointer.dtype.element_ty\n        keys_even = low.to(narrow)"),
        ("keys_odd = high * scale_odd[None, :] + middle_odd[None, :]", "keys_odd = high.to(narrow)"),
        ("tl.dot(query_even, tl", "tl.dot(query_even * scale_even[None, :].to(narrow), tl"),
        ("scores += tl.dot(query_odd, tl",
         "scores += tl.sum(query_even.to(tl.float32) * middle_even[None, :], 1)[:, None]\n"
         "        scores += tl.sum(query_odd.to(tl.float32) * middle_odd[None, :], 1)[:, None]\n"
         "        scores += tl.dot(query_odd * scale_odd[None, :].to(narrow), tl"),
    ),
    "too_many_bytes__even_scales_twice": changed(
        "12.5",
        ("        middle_odd = tl.load(",
         "        scale_even = tl.load(key_scale_pointer + channels).to(tl.float32)\n        middle_odd = tl.load("),
    ),
    "fixed_size": changed("12.5", ("kernel[(key_heads, batch)]", "kernel[(key_heads, min(batch, 132))]")),
    "fixed_size__heads": changed("12.5", ("kernel[(key_heads, batch)]", "kernel[(min(key_heads, 8), batch)]")),
    # In the dtype of the scales: right where they are float32.
    "dequantised_in_half": changed("12.5", *IN_HALF),
    # The softmax cancels what all keys have in common.
    "key_middle_missing__of_the_first_group": changed(
        "12.5",
        (
            "        middle_even =",
            "        channels = cache * (capacity // 64) * HEAD_DIM + 2 * columns\n        middle_even =",
        ),
    ),
    "a_group_too_many": changed("12.5", ("cache * (capacity // 64)", "cache * (capacity // 64 + 1)")),
    # Right wherever all heads but the first have as many groups as the cache has room for.
    "groups_of_the_length": changed("12.5", ("cache * (capacity // 64)", "cache * tl.cdiv(length, 64)")),
    "groups_of_the_length__rounded_down": changed("12.5", ("cache * (capacity // 64)", "cache * (length // 64)")),
    "tokens_of_the_length": changed("12.5", ("cache * capacity + tokens", "cache * length + tokens")),
    "one_accumulator_rescaled": changed("12.5", ("output_odd * rescale[:, None]", "output_odd")),
    "sign_not_extended": changed(
        "12.5",
        (LOW, "low = codes & 15"),
        (HIGH, "high = codes >> 4"),
        (VALUE_LOW, "(codes & 15) * scale"),
        (VALUE_HIGH, "(codes >> 4) * scale"),
    ),
    "read_with_an_offset": changed("12.5", (" ^ 8) - 8", ") - 8")),
    "nibbles_exchanged": changed(
        "12.5", ("codes & 15", "codes TMP"), ("codes >> 4", "codes & 15"), ("codes TMP", "codes >> 4")
    ),
    "halves_for_neighbours": changed(
        "12.5",
        ("2 * columns", "columns"),
        ("channels + 1", "channels + HALF"),
        ("rows + 1", "rows + HALF"),
        ("(64, PARTS, 32)), (64, HALF))", "(64, PARTS, 32)), (64, HALF))"),
    ),
    "sign_not_extended__keys": changed("12.5", (LOW, "low = codes & 15"), (HIGH, "high = codes >> 4")),
    "sign_not_extended__values": changed(
        "12.5", (VALUE_LOW, "(codes & 15) * scale"), (VALUE_HIGH, "(codes >> 4) * scale")
    ),
    "nibbles_exchanged__keys": changed(
        "12.5", (LOW, HIGH.replace("high", "low")),
        (HIGH + "\n        keys", LOW.replace("low", "high") + "\n        keys")
    ),
    "halves_for_neighbours__values": changed(
        "12.5",
        ("output_pointer + rows + 1,", "output_pointer + rows - columns[None, :] + HALF,"),
        ("output_pointer + rows,", "output_pointer + rows - columns[None, :],"),
    ),
    "middle_as_zero_point": changed(
        "12.5",
        ("low * scale_even[None, :] + middle_even[None, :]", "(low - middle_even[None, :]) * scale_even[None, :]"),
        ("high * scale_odd[None, :] + middle_odd[None, :]", "(high - middle_odd[None, :]) * scale_odd[None, :]"),
    ),
    "middle_scaled": changed(
        "12.5",
        ("low * scale_even[None, :] + middle_even[None, :]", "(low + middle_even[None, :]) * scale_even[None, :]"),
        ("high * scale_odd[None, :] + middle_odd[None, :]", "(high + middle_odd[None, :]) * scale_odd[None, :]"),
    ),
    "middle_scaled__of_the_values": changed("12.5", ("- 8) * scale + middle", "- 8 + middle) * scale")),
    "even_for_odd": changed(
        "12.5", ("high * scale_odd[None, :] + middle_odd", "high * scale_odd[None, :] + middle_even")
    ),
    "even_for_odd__offset_missing": changed("12.5", ("channels + 1)", "channels)")),
    "slots_count": changed("12.5", ("shared, mask=present[:, None], other=0.0)", "shared)")),
    "heads_by_modulo": changed(
        "12.5",
        ("rows = (cache * GROUP + members)[:, None]",
         "heads = tl.num_programs(0)\n"
         "    rows = (sequence * heads * GROUP + tl.program_id(0) + heads * members)[:, None]"),
    ),
    "first_codes_for_all__of_the_values": changed(
        "12.5", ("value_codes_pointer + places", "value_codes_pointer + tokens")
    ),
    "sign_not_extended__keys_and_key_middle_missing": changed(
        "12.5",
        (LOW, "low = codes & 15"), (HIGH, "high = codes >> 4"),
        (" + middle_even[None, :]", ""), (" + middle_odd[None, :]", ""),
    ),
    "nibbles_exchanged__and_value_scale_missing": changed(
        "12.5", ("codes & 15", "codes TMP"), ("codes >> 4", "codes & 15"), ("codes TMP", "codes >> 4"),
        ("- 8) * scale + middle", "- 8) + middle"),
    ),
    "scale_missing__and_not_divided": changed(
        "12.5", (" / math.sqrt(head_dim),", ","), ("output_even / total", "output_even"),
        ("output_odd / total", "output_odd"),
    ),
    "value_middle_missing__and_tail_not_masked": changed(
        "12.5", ("* scale + middle", "* scale"), (MASKED, "scores * scale_log2")
    ),
    "key_middle_missing": changed("12.5", (" + middle_even[None, :]", ""), (" + middle_odd[None, :]", "")),
    "value_middle_missing": changed("12.5", ("* scale + middle", "* scale")),
    "key_scale_missing": changed("12.5", ("low * scale_even[None, :]", "low"), ("high * scale_odd[None, :]", "high")),
    "value_scale_missing": changed("12.5", ("- 8) * scale + middle", "- 8) + middle")),
    "first_scales_for_all": changed("12.5", ("(capacity // 64) + first // 64)", "(capacity // 64))")),
    "first_head_scales": changed("12.5", ("(cache * (capacity // 64) + first // 64)", "(first // 64)")),
    "first_part_for_all": changed("12.5", (SHARED, "shared = places[:, None] * PARTS + 0 * parts[None, :]")),
    "parts_by_turns": changed(
        "12.5",
        (
            "tl.broadcast_to(scale[:, :, None], (64, PARTS, 32))",
            "tl.broadcast_to(scale[:, None, :], (64, HALF // PARTS, PARTS))",
        ),
        (
            "tl.broadcast_to(middle[:, :, None], (64, PARTS, 32))",
            "tl.broadcast_to(middle[:, None, :], (64, HALF // PARTS, PARTS))",
        ),
    ),
    "first_codes_for_all": changed("12.5", ("places = cache * capacity + tokens", "places = tokens")),
    "keys_as_values": changed("12.5", ("value_codes_pointer + places", "key_codes_pointer + places")),
    "scale_missing": changed("12.5", (" / math.sqrt(head_dim),", ",")),
    "natural_exp": changed("12.5", ("tl.exp2(", "tl.exp(")),
    "tail_not_masked": changed("12.5", (MASKED, "scores * scale_log2")),
    "newest_left_out": changed("12.5", ("tokens < length", "tokens < length - 1")),
    "partial_group_skipped": changed("12.5", ("range(0, length, 64)", "range(0, length - 63, 64)")),
    "nothing_rescaled": changed("12.5", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - new_max)")),
    "accumulator_not_rescaled": changed(
        "12.5", (RESCALED, "output_even"), ("output_odd * rescale[:, None]", "output_odd")
    ),
    "sum_not_rescaled": changed("12.5", ("running_sum * rescale", "running_sum")),
    "not_divided": changed("12.5", ("output_even / total", "output_even"), ("output_odd / total", "output_odd")),
    "nan_from_the_start": changed("12.5", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - running_max)")),
    "empty_sequence_nan": changed("12.5", ("tl.where(running_sum == 0.0, 1.0, running_sum)[", "running_sum[")),
    "codes_loaded_twice": changed("12.5", (LOW, f"low = (({KEY_BYTES} & 15) ^ 8) - 8")),
    "too_many_bytes": ONE_HEAD,
    "too_many_bytes__of_all_groups": changed(
        "12.5",
        ("for first in range(0, length, 64)", "for first in range(0, capacity, 64)"),
        (
            "weights = tl.exp2(scores - new_max[:, None])",
            "weights = tl.where(present[None, :], tl.exp2(scores - new_max[:, None]), 0.0)",
        ),
        (
            "rescale = tl.exp2(running_max - new_max)",
            'rescale = tl.where(running_max == float("-inf"), 0.0, tl.exp2(running_max - new_max))',
        ),
    ),
    "scales_loaded_for_every_channel": changed(
        "12.5", (SHARED, "shared = places[:, None] * PARTS + columns[None, :] // 32"), (REPEATED, "")
    ),
    # sglang#23134: the whole cache is dequantised in each call.
    "no_kernel_launched": """# Exercise 12.5 · A decode kernel that reads INT4
def int4_decode(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, lengths):
    def signed(b):
        both = torch.stack(((b & 15).int(), (b >> 4).int()), -1).flatten(-2)
        return torch.where(both > 7, both - 16, both)
    k = signed(key_codes) * key_scale.float().repeat_interleave(64, 2) + key_middle.float().repeat_interleave(64, 2)
    v = signed(value_codes) * value_scale.float().repeat_interleave(64, 3)
    v = v + value_middle.float().repeat_interleave(64, 3)
    g = query.shape[1] // k.shape[1]
    k, v = k.nan_to_num().repeat_interleave(g, 1), v.nan_to_num().repeat_interleave(g, 1)
    s = torch.einsum("bhd,bhnd->bhn", query.float(), k) / query.shape[2] ** 0.5
    there = torch.arange(k.shape[2], device=query.device) < lengths[:, None, None]
    s = s.masked_fill(~there, -1e30)
    w = (s - s.amax(-1, keepdim=True)).exp() * there
    return torch.einsum("bhn,bhnd->bhd", w / w.sum(-1, keepdim=True).clamp(min=1e-30), v).to(query.dtype)
""",
    "sign_not_extended__and_sum_not_rescaled": changed(
        "12.5",
        (LOW, "low = codes & 15"),
        (HIGH, "high = codes >> 4"),
        (VALUE_LOW, "(codes & 15) * scale"),
        (VALUE_HIGH, "(codes >> 4) * scale"),
        ("running_sum * rescale", "running_sum"),
    ),
}

UNUSUAL = {
    "the keys' scale and middle folded into the query": changed(
        "12.5",
        ("keys_even = low * scale_even[None, :] + middle_even[None, :]", "keys_even = low.to(tl.float32)"),
        ("keys_odd = high * scale_odd[None, :] + middle_odd[None, :]", "keys_odd = high.to(tl.float32)"),
        ("tl.dot(query_even, tl", "tl.dot(query_even * scale_even[None, :], tl"),
        ("tl.dot(query_odd, tl", "tl.dot(query_odd * scale_odd[None, :], tl"),
        (
            f"scores = {MASKED}",
            "scores += tl.sum(query_even * middle_even[None, :] + query_odd * middle_odd[None, :], 1)[:, None]\n"
            f"        scores = {MASKED}",
        ),
    ),
    "nibbles joined, one accumulator": changed(
        "12.5",
        (
            "query_even = tl.load(query_pointer + rows, mask=exist, other=0.0).to(tl.float32)",
            "wide = (cache * GROUP + members)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]\n"
            "    query_all = tl.load(query_pointer + wide, mask=exist, other=0.0).to(tl.float32)",
        ),
        ("    query_odd = tl.load(query_pointer + rows + 1, mask=exist, other=0.0).to(tl.float32)\n", ""),
        (
            'scores = tl.dot(query_even, tl.trans(keys_even), input_precision="ieee")',
            "keys = tl.reshape(tl.join(keys_even, keys_odd), (64, HEAD_DIM))\n"
            '        scores = tl.dot(query_all, tl.trans(keys), input_precision="ieee")',
        ),
        ('        scores += tl.dot(query_odd, tl.trans(keys_odd), input_precision="ieee")\n', ""),
    ),
    "products of the queries' own dtype": changed(
        "12.5",
        ("mask=exist, other=0.0).to(tl.float32)", "mask=exist, other=0.0)"),
        ("tl.trans(keys_even)", "tl.trans(keys_even.to(query_even.dtype))"),
        ("tl.trans(keys_odd)", "tl.trans(keys_odd.to(query_even.dtype))"),
        ("tl.dot(weights, values_even", "tl.dot(weights.to(query_even.dtype), values_even.to(query_even.dtype)"),
        ("tl.dot(weights, values_odd", "tl.dot(weights.to(query_even.dtype), values_odd.to(query_even.dtype)"),
    ),
    "shifts in int8": changed(
        "12.5",
        (".to(tl.int32)", ".to(tl.int8, bitcast=True)"),
        ("((codes & 15) ^ 8) - 8", "(codes << 4).to(tl.int8) >> 4"),
        ("((codes >> 4) ^ 8) - 8", "codes >> 4"),
    ),
}
