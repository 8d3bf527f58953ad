"""Exercise 16.1: a GGUF file's weights under our names, with the rows of queries and keys put back in our order."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import DoesNotRun


def by_name(functions, found, heads, key_heads, names):
    """What was loaded, by the names that are asked for; None stands for what is missing. Its source alone is sent."""
    loaded = functions["load_weights"](found, heads, key_heads)
    if not isinstance(loaded, dict):
        return loaded
    others = sorted(map(str, loaded.keys() - set(names)))
    return {name: loaded.get(name) for name in names} | {"other names": ", ".join(others[:3])}


def file_of(draw, *, layers, heads, head_dim, width, tied=True, biases=False, dtype=torch.float32):
    query_heads, key_heads = heads
    queries, keys = query_heads * head_dim, key_heads * head_dim
    found = {"token_embd.weight": draw.normal(5, width, dtype=dtype), "output_norm.weight": draw.normal(width)}
    if not tied:
        found["output.weight"] = draw.normal(5, width, dtype=dtype)
    for layer in range(layers):
        matrices = {
            "attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width),
            "attn_output": (width, queries), "ffn_gate": (3, width), "ffn_up": (3, width), "ffn_down": (width, 3),
        }  # fmt: skip
        found |= {f"blk.{layer}.{name}.weight": draw.normal(*shape, dtype=dtype) for name, shape in matrices.items()}
        found |= {f"blk.{layer}.{name}.weight": draw.normal(width) for name in ("attn_norm", "ffn_norm")}
        found |= {f"blk.{layer}.{name}.bias": draw.normal(matrices[name][0]) for name in list(matrices)[:3] if biases}
    order = list(found)
    found = {order[place]: found[order[place]] for place in draw.permutation(len(order))}
    return found, query_heads, key_heads, sorted({"logits.weight", *map(ours, order)})


def loader_cases(draw):
    def case(name, **choices):
        return Case(name, file_of(draw, **choices), driver=by_name)

    return [
        case("one head of 6, one layer", layers=1, heads=(1, 1), head_dim=6, width=6),
        case("2 heads of 8", layers=1, heads=(2, 2), head_dim=8, width=16),
        case("4 query heads on 2 of 8", layers=2, heads=(4, 2), head_dim=8, width=32),
        case("with an output matrix of its own", layers=1, heads=(3, 1), head_dim=10, width=30, tied=False),
        case("9 query heads on 3 of 64, as in SmolLM2", layers=1, heads=(9, 3), head_dim=64, width=4),
        case("heads · head_dim is twice the width", layers=1, heads=(4, 2), head_dim=16, width=32),
        case("with biases", layers=1, heads=(4, 2), head_dim=8, width=32, biases=True, tied=False),
        case("float16, norms in float32", layers=1, heads=(6, 2), head_dim=12, width=8, dtype=torch.float16),
        case("heads of 2: nothing moves", layers=1, heads=(4, 2), head_dim=2, width=8),
        case("12 layers", layers=12, heads=(2, 1), head_dim=6, width=2),
    ]


CONTRACT = Contract(
    file_of, driver=by_name, most=5,
    choices={"layers": (1, 3),
        "heads": tuple(Level(pair, "{} query heads on {}".format(*pair)) for pair in ((1, 1), (3, 1), (8, 4), (5, 5))),
        "head_dim": (2, 6, 10, 64, 128), "width": (1, 7, 16),
        "tied": (Level(True, "tied"), Level(False, "an output matrix of its own")),
        "biases": (Level(False, ""), Level(True, "biases")), "dtype": (torch.float32, torch.float16, torch.bfloat16)},
    says={"heads": "heads is a multiple of key_heads", "head_dim": "any even number", "width": "need not be width",
        "tied": "perhaps output.weight", "biases": "may have a bias too", "dtype": "others in float16 or bfloat16"},
)  # fmt: skip

PLACES = {
    "token_embd": "embedding", "output_norm": "norm", "output": "logits", "attn_norm": "attention_norm",
    "attn_q": "attention.query", "attn_k": "attention.key", "attn_v": "attention.value",
    "attn_output": "attention.output", "ffn_norm": "feed_forward_norm", "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up", "ffn_down": "feed_forward.down",
}  # fmt: skip


def ours(name):
    *layer, part, kind = name.split(".")
    return ".".join((*(("blocks", layer[1]) if layer else ()), PLACES[part], kind))


def loaded_weights(found, heads, key_heads, names):
    loaded = {}
    for name, tensor in found.items():
        part, kind = name.split(".")[-2:]
        if part == "attn_q":
            tensor = halves(tensor, heads)
        if part == "attn_k":
            tensor = halves(tensor, key_heads)
        loaded[ours(name)] = tensor
    head = loaded.get("logits.weight")
    loaded["logits.weight"] = loaded.get("embedding.weight") if head is None else head
    return {name: loaded.get(name) for name in names} | {"other names": ""}


def halves(rows, heads):
    """[heads · head_dim, ...] with each pair of rows half a head apart, from pairs side by side."""
    return cut(rows, heads, -1, 2).transpose(1, 2).flatten(0, 2)


def cut(rows, heads, *sizes):
    if len(rows) % (2 * heads):
        raise DoesNotRun
    return rows.unflatten(0, (heads, *sizes))


# What people write in the place of `halves`.


def pairs(rows, heads):
    return cut(rows, heads, 2, -1).transpose(1, 2).flatten(0, 2)


def exchanged(rows, heads):
    return cut(rows, heads, -1, 2).flip(2).transpose(1, 2).flatten(0, 2)


def by_pairs(rows, heads):
    """Pairs of all heads in turn: the heads are taken for the inner dimension."""
    return cut(rows, heads, -1, 2).permute(1, 2, 0, *range(3, rows.dim() + 2)).flatten(0, 2)


def columns(rows, heads):
    return halves(rows.T, heads).T if rows.dim() == 2 else rows


def heads_of(rows, found, heads):
    """Heads of width / heads rows."""
    size = found["token_embd.weight"].shape[1] // heads
    if size < 2 or len(rows) % size or size % 2:
        raise DoesNotRun
    return halves(rows, len(rows) // size)


Q, K = "halves(tensor, heads)", "halves(tensor, key_heads)"
QUERIES, KEYS = 'if part == "attn_q":', 'if part == "attn_k":'
TIED = 'loaded["logits.weight"] = loaded.get("embedding.weight") if head is None else head'
OF_WEIGHTS = 'if part == "attn_{}" and kind == "weight":'
STORED, HEAD = "loaded[ours(name)] = tensor", " if head is None else head"


def sided(name, sentence, wrong):
    """A slip of both matrices, of Q alone and of K alone. wrong: what stands for `halves`; {} is a number of heads."""
    query, key = (Q, wrong.format("heads")), (K, wrong.format("key_heads"))
    ways = ("", "queries and keys", query + key), ("__queries", "queries", query), ("__keys", "keys", key)
    return tuple(row for way, rows, put in ways for row in edits(sentence.format(rows), **{name + way: put}))


CHANGES = (
    *sided("left_in_pairs", "The rows of {} are left as in the file, with pairs side by side. The model still writes "
        "sentences, because a part of each score is right. Move row 2i of a head to i, and row 2i + 1 to "
        "i + head_dim / 2, both in Q and in K.", "tensor"),
    *sided("other_direction", "The rows of {} were moved in the other direction, from halves to pairs. The file has "
        "pairs, so split a head as [head_dim / 2, 2] and exchange these two dimensions.", "pairs(tensor, {})"),
    *edits("The rows or the bias of keys were cut into as many heads as queries have. There are key_heads of them.",
        keys_cut_by_query_heads=(K, "halves(tensor, heads)"),
        keys_cut_by_query_heads__bias=(K, 'halves(tensor, heads if kind == "bias" else key_heads)'),
        keys_cut_by_query_heads__bias_where_it_fits=(K, 'halves(tensor, heads if kind == "bias" else key_heads) if '
        'kind == "weight" or len(tensor) % (2 * heads) == 0 else tensor')),
    *edits("The rows of queries were cut into as many heads as keys have. There are `heads` of them.",
        queries_cut_by_key_heads=(Q, "halves(tensor, key_heads)")),
    *sided("across_heads", "The rows of {} were moved across the whole matrix, all even ones first. Each head is "
        "moved by itself: cut the rows into heads first.", "halves(tensor, 1)"),
    *sided("across_heads__other_way", "The rows of {} were moved across the whole matrix, from halves to pairs. Each "
        "head is moved by itself, and from pairs to halves.", "pairs(tensor, 1)"),
    *sided("heads_taken_apart", "The first rows of all heads of {} stand together, then the second ones. A head's "
        "rows stay together: exchange dimensions only inside a head.", "by_pairs(tensor, {})"),
    *sided("halves_exchanged", "The halves of the heads of {} are exchanged: row 2i goes to i, and row 2i + 1 to "
        "i + head_dim / 2.", "exchanged(tensor, {})"),
    *sided("columns_moved", "The columns of {} were moved. A row makes one element of a query or key, so move "
        "whole rows.", "columns(tensor, {})"),
    *sided("head_dim_from_width", "The rows of {} were cut into heads of width / heads. A model may have other heads: "
        "head_dim is the number of rows, divided by the matrix's own number of heads.",
        "heads_of(tensor, found, heads)"),
    *edits("The rows or the bias of values were moved too. Positions do not turn values, so they lie as they are.",
        values_moved=(KEYS, 'if part in ("attn_k", "attn_v"):'),
        values_moved__bias=(KEYS, 'if part == "attn_k" or name.endswith("attn_v.bias"):')),
    *edits("The output projection was changed too. Its input is made of the values, which are not turned.",
        outputs_moved=(KEYS, f'if part == "attn_output":\n    tensor = halves(tensor.T, heads).T\n{KEYS}')),
    *edits("A bias was left in pairs. Its elements are added to what the rows make, so they move with the rows, in Q "
        "and in K.", biases_left=(QUERIES, OF_WEIGHTS.format("q"), KEYS, OF_WEIGHTS.format("k")),
        biases_left__queries=(QUERIES, OF_WEIGHTS.format("q")), biases_left__keys=(KEYS, OF_WEIGHTS.format("k"))),
    *edits("Only the first layer's rows were moved. Each layer has queries and keys.",
        first_layer_alone=(QUERIES, 'if name.startswith("blk.0.attn_q."):', KEYS,
        'if name.startswith("blk.0.attn_k."):')),
    *edits("In layers from 10 on the rows were not moved. Their number has two digits: split the name at its dots.",
        from_layer_10=(QUERIES, f'{QUERIES[:-1]} and name[5] == ".":', KEYS, f'{KEYS[:-1]} and name[5] == ".":')),
    *edits("The weights of the norms were changed by 1. Some models store them so, and this file does not.",
        norms_changed=(STORED, f"{STORED} + part.endswith('norm')"),
        norms_changed__minus=(STORED, f"{STORED} - 1 * part.endswith('norm')")),
    *edits("logits.weight is missing where the file has no output.weight. The embedding is the output matrix there.",
        tied_head_missing=(TIED, "pass")),
    *edits("logits.weight is the embedding though the file has an output.weight. Take the embedding only where there "
        "is none.", tied_always=(HEAD, "")),
    *edits("logits.weight is the embedding where output.weight stands before token_embd.weight. The tensors come in "
        "any order, so look after the loop whether logits.weight is missing.", tied_in_the_loop=(STORED, f"{STORED}\n"
        'if part == "token_embd":\n    loaded["logits.weight"] = tensor')),
    *edits("logits.weight was transposed. It is [vocabulary, width], as in the file.",
        head_transposed=(f'loaded.get("embedding.weight"){HEAD}', f'(loaded.get("embedding.weight"){HEAD}).T'),
        head_transposed__tied=('loaded.get("embedding.weight")', 'loaded.get("embedding.weight").T'),
        head_transposed__own=(HEAD, f"{HEAD}.T")),
)  # fmt: skip


def refused_where(said):
    """A `when`: PyTorch refused, in a case of which this is said."""
    return lambda case, seen, got: seen.error is not None and _said_of(*case.args) == said


def _said_of(found, heads, *_):
    if any(name.endswith("bias") for name in found):
        return "biases"
    rows, width, keys = (len(found[f"{name}.weight"]) for name in ("blk.0.attn_q", "output_norm", "blk.0.attn_k"))
    return f"keys {'do not ' * (keys % (2 * heads) > 0)}fit, {'other ' * (rows != width)}width"


def other_dtype(case, seen, got):
    """Whether some tensor has another dtype than in the file, and all have their shapes."""
    want = loaded_weights(*case.args)
    both = [(got.get(name), want[name]) for name in case.args[-1]] if isinstance(got, dict) else []
    shapes = all(getattr(one, "shape", None) == other.shape for one, other in both)
    return shapes and any(one.dtype != other.dtype for one, other in both)


EXERCISE = Exercise(
    id="16.1", title="Rows in the right pairs", entries=("load_weights",), cases=loader_cases, oracle=loaded_weights,
    contracts=(CONTRACT,), models=(model_of(loaded_weights, CHANGES, (halves, cut), (pairs, exchanged, by_pairs,
        columns, heads_of), may_be_silent=True, most_pairs=100),),
    hints=(
        "Begin with a loop over found.items() that only renames. Then change the two kinds of tensors whose rows move.",
        "One head of six lies in the file as rows 0 3 1 4 2 5 of ours. Written as three rows of two numbers, the first "
        "column is 0 1 2, and the second is 3 4 5.",
        "tensor.unflatten(0, (count, -1, 2)) is [heads, head_dim / 2, 2, ...]. Exchange dimensions 1 and 2, and "
        "flatten the first three. `count` is heads for Q, and key_heads for K. A bias passes through the same line.",
        'At the end, loaded.setdefault("logits.weight", loaded["embedding.weight"]).',
    ),
    mistakes=(
        Mistake("head_dim_fixed", "Rows were cut by a number that fits only some models. head_dim is the number of "
            "rows, divided by the matrix's own number of heads.", when=refused_where("keys fit, width")),
        Mistake("keys_cut_by_query_heads", "The rows of keys cannot be cut into as many heads as queries have. "
            "There are key_heads of them.", when=refused_where("keys do not fit, width")),
        Mistake("head_dim_from_width", "Rows cannot be cut where heads · head_dim is not the width. head_dim is "
            "the rows, divided by the matrix's own heads.", when=refused_where("keys fit, other width")),
        Mistake("bias_has_one_dimension", "A bias has one dimension, and a matrix has two. Move the rows in a way that "
            "leaves the other dimensions as they are: unflatten dimension 0, exchange, flatten.",
            when=refused_where("biases")),
        Mistake("dtype_changed", "A tensor has another dtype than in the file. Move its rows, and convert nothing.",
            when=other_dtype),
    ),
)  # fmt: skip
