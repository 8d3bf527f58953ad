"""Wrong answers to exercise 16.1, and unusual right ones."""

from tests.submissions.edits import changed

COUNT = 'count = heads if ".attn_q." in name else key_heads if ".attn_k." in name else None'
MOVED = "tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)"
TIED = '    loaded.setdefault("logits.weight", loaded["embedding.weight"])\n'
STORED = "loaded[our_name(name)] = tensor"
OTHER = "tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)"

WRONG = {
    "left_in_pairs": changed("16.1", (COUNT, "count = None")),
    "left_in_pairs__queries": changed("16.1", (COUNT, 'count = key_heads if ".attn_k." in name else None')),
    "left_in_pairs__keys": changed("16.1", (COUNT, 'count = heads if ".attn_q." in name else None')),
    "other_direction": changed("16.1", (MOVED, OTHER)),
    "other_direction__queries": changed("16.1", (MOVED, f'{MOVED} if "_k." in name else {OTHER}')),
    "other_direction__keys": changed("16.1", (MOVED, f'{MOVED} if "_q." in name else {OTHER}')),
    "keys_cut_by_query_heads": changed("16.1", ("else key_heads if", "else heads if")),
    "keys_cut_by_query_heads__where_it_fits": changed(
        "16.1", ("else key_heads if", "else (key_heads if len(tensor) % (2 * heads) else heads) if")
    ),
    "queries_cut_by_key_heads": changed("16.1", ("count = heads if", "count = key_heads if")),
    "across_heads": changed("16.1", (MOVED, "torch.cat((tensor[::2], tensor[1::2]))")),
    "across_heads__keys": changed("16.1", ("else key_heads if", "else 1 if")),
    "across_heads__other_way": changed("16.1", (MOVED, "torch.stack(tensor.chunk(2), dim=1).flatten(0, 1)")),
    "heads_taken_apart": changed(
        "16.1", (MOVED, "tensor.unflatten(0, (count, -1, 2)).transpose(0, 2).transpose(0, 1).flatten(0, 2)")
    ),
    "halves_exchanged": changed("16.1", (".transpose(1, 2)", ".flip(2).transpose(1, 2)")),
    "columns_moved": changed("16.1", (MOVED, "tensor.unflatten(1, (count, -1, 2)).transpose(2, 3).flatten(1)")),
    "head_dim_from_width": changed(
        "16.1", (MOVED, 'tensor.unflatten(0, (-1, len(found["output_norm.weight"]) // heads // 2, 2)).transpose(1, 2)'
                        '.flatten(0, 2)')
    ),
    "head_dim_from_width__reshaped": changed(
        "16.1",
        (MOVED, 'tensor.reshape(count, len(found["output_norm.weight"]) // heads // 2, 2, *tensor.shape[1:])'
                '.transpose(1, 2).reshape(tensor.shape)'),
    ),
    "head_dim_fixed": changed(
        "16.1", (MOVED, "tensor.reshape(-1, 32, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)")
    ),
    "values_moved": changed("16.1", ('".attn_k." in name', '(".attn_k." in name or ".attn_v." in name)')),
    "outputs_moved": changed(
        "16.1",
        ("        if count is not None", '        if "attn_output" in name:\n            tensor = tensor.unflatten(1, '
         "(heads, -1, 2)).transpose(2, 3).flatten(1)\n        if count is not None"),
    ),
    "bias_has_one_dimension": changed(
        "16.1", (MOVED, "tensor.view(count, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)")
    ),
    "biases_left": changed("16.1", ("is not None:", 'is not None and name.endswith("weight"):')),
    "biases_left__keys": changed("16.1", ("is not None:", 'is not None and not name.endswith("attn_k.bias"):')),
    "first_layer_alone": changed("16.1", ("is not None:", 'is not None and "blk.0." in name:')),
    "tied_head_missing": changed("16.1", (TIED, "")),
    "tied_always": changed("16.1", (TIED, '    loaded["logits.weight"] = loaded["embedding.weight"]\n')),
    "keys_cut_by_query_heads__bias": changed("16.1", (COUNT, f"{COUNT}\n        if name.endswith('attn_k.bias'):\n"
        "            count = heads if len(tensor) % (2 * heads) == 0 else None")),
    "values_moved__bias": changed("16.1", ('".attn_k." in name', '(".attn_k." in name or "attn_v.bias" in name)')),
    "values_moved__bias_and_tied_always": changed("16.1",
        ('".attn_k." in name', '(".attn_k." in name or "attn_v.bias" in name)'),
        (TIED, '    loaded["logits.weight"] = loaded["embedding.weight"]\n')),
    "from_layer_10": changed("16.1", ("is not None:", 'is not None and name[5] == ".":')),
    "norms_changed": changed("16.1", (STORED, "loaded[our_name(name)] = tensor + 1 if 'norm' in name else tensor")),
    "norms_changed__minus": changed(
        "16.1", (STORED, "loaded[our_name(name)] = tensor - 1 if 'norm' in name else tensor")
    ),
    "tied_in_the_loop": changed("16.1", (STORED, f"{STORED}\n        if name == 'token_embd.weight':\n"
        "            loaded['logits.weight'] = tensor"), (TIED, "")),
    "head_transposed": changed("16.1", (TIED, f"{TIED}    loaded['logits.weight'] = loaded['logits.weight'].T\n")),
    "head_transposed__tied": changed("16.1", (TIED, TIED.replace('"])', '"].T)'))),
    "head_transposed__own": changed("16.1", (STORED, f"{STORED}.T if name == 'output.weight' else tensor")),
    "dtype_changed": changed("16.1", (STORED, f"{STORED}.float()")),
    "dtype_changed__of_the_head": changed("16.1", (TIED, TIED.replace('"])', '"].float())'))),
    "dtype_changed__of_what_moves": changed("16.1", (".flatten(0, 2)", ".flatten(0, 2).float()")),
    "modified_input": changed(
        "16.1", ("            tensor = tensor.unf", "            tensor[:] = tensor.clone().unf")
    ),
}  # fmt: skip
UNUSUAL = {
    "an index of rows, and a name built by hand": """# Exercise 16.1 · Rows in the right pairs
OURS = {"attn_norm": "attention_norm", "attn_q": "attention.query", "attn_k": "attention.key",
        "attn_v": "attention.value", "attn_output": "attention.output", "ffn_norm": "feed_forward_norm",
        "ffn_gate": "feed_forward.gate", "ffn_up": "feed_forward.up", "ffn_down": "feed_forward.down"}


def load_weights(found, heads, key_heads):
    def rows(length, count):
        head_dim = length // count
        inside = torch.cat((torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)))
        return (torch.arange(count)[:, None] * head_dim + inside).flatten()

    loaded = {"embedding.weight": found["token_embd.weight"], "norm.weight": found["output_norm.weight"]}
    loaded["logits.weight"] = found.get("output.weight", found["token_embd.weight"])
    for name in found:
        if name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            tensor = found[name]
            if part in ("attn_q", "attn_k"):
                tensor = tensor[rows(len(tensor), heads if part == "attn_q" else key_heads)]
            loaded[f"blocks.{layer}.{OURS[part]}.{kind}"] = tensor
    return loaded
""",
    "head by head, in slices of two": changed(
        "16.1",
        (MOVED, "torch.cat([torch.cat((head[::2], head[1::2])) for head in tensor.chunk(count)])"),
    ),
    "written into new memory": changed(
        "16.1",
        ("            tensor = tensor.unf", """            moved, size = torch.empty_like(tensor), len(tensor) // count
            for row in range(len(tensor)):
                head, place = divmod(row, size)
                moved[head * size + place // 2 + place % 2 * (size // 2)] = tensor[row]
            tensor = moved
            assert torch.equal(tensor, found[name].unf"""),
        (".flatten(0, 2)", ".flatten(0, 2))"),
    ),
    "einops-like, and copies of everything": changed(
        "16.1",
        (MOVED, "tensor.reshape(count, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)"),
        ("loaded[our_name(name)] = tensor", "loaded[our_name(name)] = tensor.clone()"),
        (TIED, '    if "output.weight" not in found:\n        loaded["logits.weight"] = '
         'found["token_embd.weight"].clone()\n'),
    ),
}  # fmt: skip
