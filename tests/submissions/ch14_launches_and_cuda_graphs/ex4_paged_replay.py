"""Wrong answers to exercise 14.4, and unusual right ones. Those of public engines name their report."""

from tests.submissions.edits import changed

KEY = "key_pages[slots // page_size, :, slots % page_size] = key"
VALUE = "value_pages[slots // page_size, :, slots % page_size] = value"
SEEN = "seen = torch.arange(keys.shape[2], device=query.device) < lengths[:, None]"
COPIED = "output.copy_((weights[:, :, None] @ values)[:, :, 0])"
SIZES = "page_size, head_dim = key_pages.shape[2:]"
OF_TABLE = "tables[torch.arange(len(tables)), (lengths - 1).clamp(min=0) // page_size]"
SLOTS, LENGTHS = "slots[count:] = unused_slot", "    lengths[count:] = 0\n"
FILLED = "for buffer, tensor in zip((*vectors, slots, lengths), (*new_vectors, new_slots, new_lengths)):"
KEPT = ("def paged_step(", "_kept = {}\n\n\ndef paged_step(")


def kept(name):
    """The tensor of the call that warms up, copied and used from then on."""
    key = f"({name!r}, tuple({name}.shape), key_pages.data_ptr())"
    return SIZES, f"{SIZES}\n    {name} = _kept.setdefault({key}, {name}.clone())"


WRONG = {
    # jd-opensource/xllm#1939: a batch of 100 in a graph of 112, with the metadata of 100.
    "padded_rows_stored": changed("14.4", (f"    {SLOTS}\n", "")),
    "padded_rows_stored__and_lengths": changed("14.4", (f"    {SLOTS}\n", ""), (LENGTHS, "")),
    "padded_to_slot_0": changed("14.4", (SLOTS, "slots[count:] = 0")),
    "padded_to_the_last": changed("14.4", (SLOTS, "slots[count:] = -1")),
    "padded_lengths_kept": changed("14.4", (LENGTHS, "")),
    "padded_lengths": changed("14.4", (LENGTHS, "    lengths[count:] = 1\n")),
    "buffers_not_filled__tables": changed("14.4", ("    tables[:count, :columns] = new_tables\n", "")),
    # kekzl/imp#950: the split count of a short prompt stayed in the graph.
    "longest_baked": changed("14.4", (SEEN, f"{SEEN}\n    seen = seen & (torch.arange(keys.shape[2]) < longest)")),
    "longest_baked__columns": changed(
        "14.4",
        (SIZES, f"{SIZES}\n    tables = tables[:, : -(-longest // page_size)]"),
    ),
    # ggml-org's and others' stale source pointers: a copy that nobody fills again.
    "slots_baked": changed("14.4", KEPT, kept("slots")),
    "tables_baked": changed("14.4", KEPT, kept("tables")),
    "lengths_baked": changed("14.4", KEPT, kept("lengths")),
    "stale_source": changed("14.4", KEPT, kept("query")),
    "stale_source__the_key": changed("14.4", KEPT, kept("key")),
    "stale_source__the_value": changed("14.4", KEPT, kept("value")),
    "all_seen": changed("14.4", (".masked_fill(~seen[:, None], -math.inf)", "")),
    "itself_unseen": changed("14.4", ("< lengths[:, None]", "< (lengths[:, None] - 1).clamp(min=1)")),
    "one_too_many_seen": changed("14.4", ("< lengths[:, None]", "<= lengths[:, None]")),
    "place_for_slot": changed("14.4", (SIZES, f"{SIZES}\n    slots = lengths - 1")),
    "scale_missing": changed("14.4", (" / math.sqrt(head_dim)", "")),
    "not_stored": changed(
        "14.4", (SIZES, f"{SIZES}\n    key_pages, value_pages = torch.clone(key_pages), torch.clone(value_pages)")
    ),
    "buffers_not_filled": changed(
        "14.4",
        ("    *vectors, slots", "    buffers = tuple(buffer.clone() for buffer in buffers)\n    *vectors, slots"),
    ),
    "host_waits": changed("14.4", (SIZES, f"{SIZES}\n    tables = tables[:, : -(-int(lengths.max()) // page_size)]")),
    # Stores only what has a slot, by a mask: how many that are, a graph cannot know.
    "host_waits__boolean_index": changed(
        "14.4", (KEY, "real = lengths > 0\n"
                     "    key_pages[slots[real] // page_size, :, slots[real] % page_size] = key[real]")
    ),
    "returns_a_tensor": changed("14.4", (COPIED, "return (weights[:, :, None] @ values)[:, :, 0]")),
    "output_untouched": changed("14.4", (COPIED, "output = (weights[:, :, None] @ values)[:, :, 0]")),
    "scale_missing__and_padded_rows_stored": changed(
        "14.4", (f"    {SLOTS}\n", ""), (" / math.sqrt(head_dim)", "")
    ),
    # The names of two buffers are given to other tensors.
    "buffers_not_filled__slots_and_lengths": changed(
        "14.4",
        (f"    {SLOTS}\n", "    slots = torch.cat([new_slots, torch.full((len(slots) - count,), unused_slot)])\n"),
        (LENGTHS, "    lengths = torch.cat([new_lengths, torch.zeros(len(lengths) - count, dtype=torch.int64)])\n"),
        ("zip((*vectors, slots, lengths), (*new_vectors, new_slots, new_lengths))", "zip(vectors, new_vectors)"),
    ),
    "buffers_not_filled__only_the_slots": changed(
        "14.4",
        (f"    {SLOTS}\n", "    slots = torch.cat([new_slots, torch.full((len(slots) - count,), unused_slot)])\n"),
        ("zip((*vectors, slots, lengths), (*new_vectors, new_slots, new_lengths))",
         "zip((*vectors, lengths), (*new_vectors, new_lengths))"),
    ),
    "buffers_not_filled__only_numbers": changed(
        "14.4",
        ("zip((*vectors, slots, lengths), (*new_vectors, new_slots, new_lengths))",
         "zip((slots, lengths), (new_slots, new_lengths))"),
    ),
    "padded_to_slot_0__all_cleared": changed(
        "14.4",
        ("    for buffer, tensor in zip(", "    for buffer in buffers:\n        buffer.zero_()\n"
         "    for buffer, tensor in zip("),
        (f"    {SLOTS}\n", ""),
        (LENGTHS, ""),
    ),
    "tables_without_a_page": changed(
        "14.4", ("    tables[:count,", "    tables.fill_(-1)\n    tables[:count,")
    ),
    "tables_without_a_page__behind_the_batch": changed(
        "14.4", (LENGTHS, f"{LENGTHS}    tables[count:] = -1\n")
    ),
    "tables_without_a_page__behind_each_sequence": changed(
        "14.4", (LENGTHS, f"{LENGTHS}    tables[:count, columns:] = -1\n")
    ),
    "tables_in_the_last_columns": changed("14.4", ("tables[:count, :columns]", "tables[:count, -columns:]")),
    "stored_late": changed(
        "14.4", (f"    {KEY}\n    {VALUE}\n", ""), (COPIED, f"{COPIED}\n    {KEY}\n    {VALUE}")
    ),
    "stored_late__the_value": changed(
        "14.4",
        (f"    {VALUE}\n", ""), ("    keys = key_pages[tables]", "    values = value_pages[tables]\n"
                                 f"    {VALUE}\n    keys = key_pages[tables]"),
        ("values = value_pages[tables].transpose", "values = values.transpose"),
    ),
    "stored_late__the_key": changed(
        "14.4",
        (f"    {KEY}\n", ""), ("flatten(2, 3)\n    scores", f"flatten(2, 3)\n    {KEY}\n    scores"),
    ),
    "page_for_slot": changed("14.4", (SIZES, f"{SIZES}\n    slots = slots // page_size")),
    "page_for_slot__from_the_table": changed("14.4", (SIZES, f"{SIZES}\n    slots = {OF_TABLE}")),
    "page_for_slot__its_first_place": changed("14.4", (SIZES, f"{SIZES}\n    slots = {OF_TABLE} * page_size")),
    "masked_with_0": changed("14.4", ("-math.inf", "0.0")),
    "masked_with_0__and_padded_rows_stored": changed("14.4", ("-math.inf", "0.0"), (f"    {SLOTS}\n", "")),
    "masked_late": changed(
        "14.4", ("scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1)",
                 "scores.softmax(dim=-1).masked_fill(~seen[:, None], 0)"),
    ),
    "heads_mixed": changed(
        "14.4", (".transpose(1, 2).flatten(2, 3)", ".reshape(len(tables), -1, *key.shape[1:]).transpose(1, 2)")
    ),
    "heads_mixed__heads_in_front": changed(
        "14.4", (".transpose(1, 2).flatten(2, 3)", ".reshape(len(tables), key.shape[1], -1, head_dim)")
    ),
    "scale_of_all_heads": changed("14.4", ("math.sqrt(head_dim)", "math.sqrt(query[0].numel())")),
    "not_stored__in_a_copy_of_the_page": changed(
        "14.4",
        (KEY, "key_pages[slots // page_size][torch.arange(len(slots)), :, slots % page_size] = key"),
        (VALUE, "value_pages[slots // page_size][torch.arange(len(slots)), :, slots % page_size] = value"),
    ),
    "longest_baked__and_one_too_many": changed(
        "14.4",
        (SEEN, f"{SEEN}\n    seen = seen & (torch.arange(keys.shape[2]) < longest)"),
        ("< lengths[:, None]", "<= lengths[:, None]"),
    ),
    # Keys and values, and each buffer, by themselves.
    "key_not_stored": changed("14.4", (f"    {KEY}\n", "")),
    "value_not_stored": changed("14.4", (f"    {VALUE}\n", "")),
    "value_not_stored__in_a_copy": changed("14.4", (VALUE, f"value_pages = value_pages.clone()\n    {VALUE}")),
    "stored_exchanged": changed("14.4", (f"{KEY}\n    {VALUE}", f"{KEY[:-3]}value\n    {VALUE[:-5]}key")),
    "softmax_over_heads": changed("14.4", ("softmax(dim=-1)", "softmax(dim=1)")),
    "one_kind_of_pages": changed("14.4", ("values = value_pages[tables]", "values = key_pages[tables]")),
    "one_kind_of_pages__of_values": changed("14.4", ("keys = key_pages[tables]", "keys = value_pages[tables]")),
    **{
        name: changed("14.4", (FILLED, f"{FILLED}\n        if buffer is {buffer}:\n            continue"))
        for name, buffer in {
            "buffers_not_filled__query": "vectors[0]",
            "buffers_not_filled__key": "vectors[1]",
            "buffers_not_filled__value": "vectors[2]",
            "buffers_not_filled__key_and_value": "vectors[1] or buffer is vectors[2]",
            "batch_without_slots": "slots",
            "batch_without_lengths": "lengths",
        }.items()
    },
    "slot_and_length_exchanged": changed(
        "14.4", (SLOTS, "slots[count:] = 0"), (LENGTHS, "    lengths[count:] = unused_slot\n")
    ),
    "batch_in_the_last_rows": changed(
        "14.4",
        ("buffer[:count] = tensor", "buffer[len(buffer) - count :] = tensor"),
        ("tables[:count, :columns]", "tables[len(tables) - count :, :columns]"),
        (SLOTS, "slots[: len(slots) - count] = unused_slot"),
        (LENGTHS, "    lengths[: len(lengths) - count] = 0\n"),
    ),
    "one_too_many_seen__of_cleared_tables": changed(
        "14.4", ("< lengths[:, None]", "<= lengths[:, None]"),
        ("    tables[:count,", "    tables.zero_()\n    tables[:count,")),
}

UNUSUAL = {
    "in inference mode": changed("14.4", ("def paged_step(", "@torch.inference_mode()\ndef paged_step(")),
    "one slot after another, in a flat pool": changed(
        "14.4",
        (KEY, "place = (slots // page_size)[:, None] * key_pages[0].numel() + torch.arange(key.shape[1]) * page_size "
              "* head_dim + (slots % page_size)[:, None] * head_dim\n"
              "    place = place[..., None] + torch.arange(head_dim)\n    key_pages.view(-1)[place] = key"),
    ),
    "stored by index_put_": changed(
        "14.4",
        (VALUE, "heads = torch.arange(value.shape[1])\n    value_pages.index_put_(((slots // page_size)[:, None], "
                "heads, (slots % page_size)[:, None]), value)"),
    ),
    "scaled_dot_product_attention with a mask": changed(
        "14.4",
        (COPIED, "output.copy_(torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, "
                 "attn_mask=seen[:, None, None])[:, :, 0])"),
    ),
    "the whole buffers first, then the batch": changed(
        "14.4",
        ("    for buffer, tensor in zip(", "    slots.fill_(unused_slot)\n    lengths.zero_()\n    tables.zero_()\n"
         "    for buffer, tensor in zip("),
        (f"    {SLOTS}\n", ""),
        (LENGTHS, ""),
    ),
    "all numbers behind the batch 0, but for the slots": changed(
        "14.4",
        ("    for buffer, tensor in zip(", "    for buffer in buffers:\n        buffer.zero_()\n"
         "    for buffer, tensor in zip("),
        (LENGTHS, ""),
    ),
    "entries behind the batch name a page of the batch": changed(
        "14.4",
        (LENGTHS, f"{LENGTHS}    tables[count:] = tables[0, 0]\n"),
    ),
    "one axis by a permutation, heads last": changed(
        "14.4",
        ("key_pages[tables].transpose(1, 2).flatten(2, 3)",
         "key_pages[tables].permute(0, 1, 3, 2, 4).flatten(1, 2).transpose(1, 2)"),
    ),
    "masked by a very small number": changed("14.4", ("-math.inf", "-1e30")),
    "one column of the table after another, by online softmax": changed(
        "14.4",
        ("    keys = key_pages[tables]", "    best = torch.full_like(query[..., :1], -1e30)\n"
         "    total, sums = torch.zeros_like(best), torch.zeros_like(query)\n"
         "    for column in range(tables.shape[1]):\n"
         "        keys, values = key_pages[tables[:, column]], value_pages[tables[:, column]]\n"
         "        scores = (keys @ query[..., None])[..., 0] / math.sqrt(head_dim)\n"
         "        here = column * page_size + torch.arange(page_size) < lengths[:, None]\n"
         "        scores = scores.masked_fill(~here[:, None], -1e30)\n"
         "        larger = torch.maximum(best, scores.amax(-1, keepdim=True))\n"
         "        weights = torch.exp(scores - larger) * here[:, None]\n"
         "        total = total * torch.exp(best - larger) + weights.sum(-1, keepdim=True)\n"
         "        sums = sums * torch.exp(best - larger) + (weights[:, :, None] @ values)[:, :, 0]\n"
         "        best = larger\n    output.copy_(sums / total.clamp(min=1e-30))\n    return\n"
         "    keys = key_pages[tables]"),
    ),
}
