"""Wrong answers to exercise 14.2, and unusual right ones. Those of public engines name their report."""

from tests.submissions.edits import changed

KEY, VALUE = "key_cache[rows, :, positions] = key", "value_cache[rows, :, positions] = value"
SEEN = "seen = torch.arange(capacity, device=query.device) <= positions[:, None]"
COPIED = "output.copy_((weights[:, :, None] @ value_cache)[:, :, 0])"
ROWS = "rows = torch.arange(batch, device=query.device)"
WEIGHTS = "weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1)"
KEY_EVERYWHERE = (KEY, "key_cache[:, :, positions] = key[:, :, None]")
VALUE_EVERYWHERE = (VALUE, "value_cache[:, :, positions] = value[:, :, None]")
KEY_BEFORE, VALUE_BEFORE = ((line, line.replace("positions", "positions - 1")) for line in (KEY, VALUE))
KEPT = ("def decode_step(", "_kept = {}\n\n\ndef decode_step(")


def kept(name, copy=""):
    """The tensor of the call that warms up, copied and used from then on."""
    key = f"({name!r}, tuple(query.shape), capacity)"
    return ROWS, f"{ROWS}\n    {copy or name} = _kept.setdefault({key}, {name}.clone())"


WRONG = {
    # A position that became a number of Python's: RWKV-Vibe/rwkv_lightning and others; here the recorder refuses it.
    "host_waits": changed("14.2", (SEEN, "seen = torch.arange(capacity) <= torch.tensor(positions.tolist())[:, None]")),
    "host_waits__item": changed(
        "14.2", (KEY, "for b in range(batch):\n        key_cache[b, :, positions[b].item()] = key[b]")
    ),
    "host_waits__int": changed("14.2", (SEEN, f"longest = int(positions.max()) + 1\n    {SEEN}")),
    "host_waits__branch": changed(
        "14.2", (SEEN, f"{SEEN}\n    if (positions == 0).all():\n        output.copy_(value)\n        return")
    ),
    "host_waits__boolean_index": changed(
        "14.2", (KEY, "here = torch.arange(capacity) == positions[:, None]\n"
                      "    key_cache.transpose(1, 2)[here] = key")
    ),
    # Without gradients `.item()` is another operation, which the recorder once let through.
    "host_waits__without_gradients": changed(
        "14.2",
        (SEEN, f"longest = positions.max().item()\n    {SEEN}"),
        ("def decode_step(", "@torch.inference_mode()\ndef decode_step("),
    ),
    # Worked out in the call that warms up, and kept: kekzl/imp#950 fixed its number of splits like that.
    "position_baked": changed(
        "14.2",
        (ROWS, f"{ROWS}\n    kept = _kept.setdefault(tuple(query.shape) + (capacity,), positions.clone())"),
        ("[rows, :, positions]", "[rows, :, kept]"),
        ("<= positions[:, None]", "<= kept[:, None]"),
        ("def decode_step(", "_kept = {}\n\n\ndef decode_step("),
    ),
    "mask_baked": changed(
        "14.2",
        (SEEN, "seen = _kept.setdefault(tuple(query.shape) + (capacity,), "
               "torch.arange(capacity) <= positions[:, None])"),
        ("def decode_step(", "_kept = {}\n\n\ndef decode_step("),
    ),
    # A pointer to what stood there before: ik_llama.cpp#2136.
    "stale_source": changed("14.2", kept("query"), KEPT),
    "stale_source__the_key": changed("14.2", kept("key"), KEPT),
    "stale_source__the_value": changed("14.2", kept("value"), KEPT),
    "place_baked": changed("14.2", kept("positions", "place"), KEPT, ("[rows, :, positions]", "[rows, :, place]")),
    "place_baked__the_key": changed("14.2", kept("positions", "place"), KEPT, (KEY, KEY.replace("positions", "place"))),
    "all_seen": changed("14.2", (".masked_fill(~seen[:, None], -math.inf)", "")),
    "itself_unseen": changed("14.2", ("<= positions[:, None]", "< positions[:, None].clamp(min=1)")),
    "one_too_many_seen": changed("14.2", ("<= positions[:, None]", "<= positions[:, None] + 1")),
    "position_of_the_first": changed(
        "14.2", (ROWS, f"{ROWS}\n    positions = positions[:1].expand(batch)")
    ),
    "stored_behind": changed("14.2", (KEY, "key_cache[rows, :, (positions + 1).clamp(max=capacity - 1)] = key")),
    "scale_missing": changed("14.2", (" / math.sqrt(head_dim)", "")),
    "not_stored": changed(
        "14.2", (ROWS, f"{ROWS}\n    key_cache, value_cache = torch.clone(key_cache), torch.clone(value_cache)")
    ),
    "returns_a_tensor": changed("14.2", (COPIED, "return (weights[:, :, None] @ value_cache)[:, :, 0]")),
    "output_untouched": changed("14.2", (COPIED, "output = (weights[:, :, None] @ value_cache)[:, :, 0]")),
    "stored_with_the_first": changed("14.2", *(
        (f"{name}_cache[rows, :, positions] = {name}", f"{name}_cache[rows, :, positions[:1]] = {name}")
        for name in ("key", "value"))),
    "itself_unseen__nor_anything": changed("14.2", ("<= positions[:, None]", "< positions[:, None]")),
    "itself_unseen__finite": changed("14.2", ("<= positions[:, None]", "< positions[:, None]"), ("-math.inf", "-1e9")),
    "host_waits__end_of_a_slice": changed("14.2", (SEEN, f"keys = key_cache[:, :, : positions.max() + 1]\n    {SEEN}")),
    # Keys and values, each alone and both.
    "stored_everywhere": changed("14.2", KEY_EVERYWHERE, VALUE_EVERYWHERE),
    "stored_everywhere__the_key": changed("14.2", KEY_EVERYWHERE),
    "stored_everywhere__the_value": changed("14.2", VALUE_EVERYWHERE),
    "stored_before": changed("14.2", KEY_BEFORE, VALUE_BEFORE),
    "stored_before__the_key": changed("14.2", KEY_BEFORE),
    "stored_before__the_value": changed("14.2", VALUE_BEFORE),
    "stored_before__and_masked_so": changed("14.2", (ROWS, f"{ROWS}\n    positions = positions - 1")),
    "stored_behind__the_value": changed(
        "14.2", (VALUE, "value_cache[rows, :, (positions + 1).clamp(max=capacity - 1)] = value")
    ),
    "stored_exchanged": changed(
        "14.2", (f"{KEY}\n    {VALUE}", f"{KEY[:-3]}value\n    {VALUE[:-5]}key")
    ),
    "not_stored__no_line_for_it": changed("14.2", (f"    {KEY}\n    {VALUE}\n", "")),
    "key_not_stored": changed("14.2", (f"    {KEY}\n", "")),
    "key_not_stored__in_a_copy": changed("14.2", (KEY, f"key_cache = key_cache.clone()\n    {KEY}")),
    "value_not_stored": changed("14.2", (f"    {VALUE}\n", "")),
    "value_not_stored__in_a_copy": changed("14.2", (VALUE, f"value_cache = value_cache.clone()\n    {VALUE}")),
    "stored_late": changed("14.2", (f"    {KEY}\n    {VALUE}\n", ""), (COPIED, f"{COPIED}\n    {KEY}\n    {VALUE}")),
    "stored_late__the_value": changed("14.2", (f"    {VALUE}\n", ""), (COPIED, f"{COPIED}\n    {VALUE}")),
    "stored_late__the_key": changed("14.2", (f"    {KEY}\n", ""), (COPIED, f"{COPIED}\n    {KEY}")),
    "scale_of_another_size": changed("14.2", ("math.sqrt(head_dim)", "math.sqrt(key.shape[1])")),
    "scale_of_another_size__no_root": changed("14.2", ("math.sqrt(head_dim)", "head_dim")),
    "softmax_over_heads": changed("14.2", ("softmax(dim=-1)", "softmax(dim=1)")),
    "one_cache_alone": changed("14.2", ("@ value_cache", "@ key_cache")),
    "one_cache_alone__of_values": changed("14.2", ("(key_cache @", "(value_cache @")),
    "masked_with_0": changed("14.2", ("-math.inf", "0.0")),
    "masked_late": changed("14.2", (WEIGHTS, "weights = scores.softmax(dim=-1) * seen[:, None]")),
}

UNUSUAL = {
    # It is masked_fill under another name: no list of places is made, and nothing waits.
    "a number stored where a mask says": changed(
        "14.2",
        ("weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1)",
         "scores[~seen[:, None].expand_as(scores)] = -math.inf\n    weights = scores.softmax(dim=-1)"),
    ),
    "in inference mode": changed("14.2", ("def decode_step(", "@torch.inference_mode()\ndef decode_step(")),
    "stored by torch.where": changed(
        "14.2",
        (KEY, "here = (torch.arange(capacity) == positions[:, None])[:, None, :, None]\n"
              "    key_cache.copy_(torch.where(here, key[:, :, None], key_cache))"),
        (VALUE, "value_cache.copy_(torch.where(here, value[:, :, None], value_cache))"),
    ),
    "stored by scatter": changed(
        "14.2",
        (KEY, "place = positions[:, None, None, None].expand(-1, key.shape[1], 1, head_dim)\n"
              "    key_cache.scatter_(2, place, key[:, :, None])"),
        (VALUE, "value_cache.scatter_(2, place, value[:, :, None])"),
    ),
    "einsum, written by out=": changed(
        "14.2", (COPIED, 'torch.add(torch.einsum("bhc,bhcd->bhd", weights, value_cache), 0.0, out=output)')
    ),
    "scaled_dot_product_attention with a mask": changed(
        "14.2",
        (COPIED, "output.copy_(torch.nn.functional.scaled_dot_product_attention(query[:, :, None], key_cache, "
                 "value_cache, attn_mask=seen[:, None, None])[:, :, 0])"),
    ),
}
