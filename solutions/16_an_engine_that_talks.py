# %% [markdown]
# # 16 · An engine that talks

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, profile, progress, solution

import dataclasses
import math

import torch

device = default_device()

# %% [markdown]
# **Which rows belong together?** A weight matrix makes one element of a query from each of its rows. Rotary positions
# then turn these elements in pairs. Hugging Face and this course pair element $i$ of a head with element $i + d/2$.
# GGUF files of Llama models pair neighbours, $2i$ and $2i + 1$, and the rows of queries and keys were moved to suit
# when the file was written. A head of six elements lies there as
#
#     place in the file    0   1   2   3   4   5
#     row of our model     0   3   1   4   2   5
#
# You put them back, head by head. There are fewer heads of keys than of queries. A bias is one element for each row, so
# it is moved too. Values and outputs are not turned, and lie as they are.
#
# Many small models are *tied*: the file has no output matrix, and the embedding serves in its place.

# %%
# Exercise 16.1 · Rows in the right pairs
PARTS = {
    "token_embd": "embedding", "output_norm": "norm", "output": "logits",
    "attn_norm": "attention_norm", "attn_q": "attention.query", "attn_k": "attention.key", "attn_v": "attention.value",
    "attn_output": "attention.output", "ffn_norm": "feed_forward_norm", "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up", "ffn_down": "feed_forward.down",
}  # fmt: skip


def our_name(name):
    """Our name of a file's tensor: "blk.3.attn_q.weight" is "blocks.3.attention.query.weight"."""
    *layer, part, kind = name.split(".")
    return ".".join((*(("blocks", layer[1]) if layer else ()), PARTS[part], kind))


def load_weights(found, heads, key_heads):
    """The weights of a Llama model under our names, from those of a GGUF file.

    found: a dict from names to tensors, in any order, some in float32 and others in float16 or bfloat16. It has
        token_embd.weight [vocabulary, width], output_norm.weight, perhaps output.weight [vocabulary, width], and for
        each layer L from 0 on the other parts of the table: blk.L.attn_q.weight [heads · head_dim, width],
        blk.L.attn_k.weight and blk.L.attn_v.weight [key_heads · head_dim, width], blk.L.attn_output.weight
        [width, heads · head_dim] and so on. Q, K and V may have a bias too, as in blk.L.attn_q.bias
        [heads · head_dim].
    heads, key_heads: of queries, and of keys and values. heads is a multiple of key_heads; head_dim is any even number,
        and heads · head_dim need not be width.
    Returns: a dict from our_name(name) to the tensor, with the file's shape and dtype. In each head of Q and of K, row
    2i becomes row i, and row 2i + 1 becomes row i + head_dim / 2; so with the elements of their biases. All others are
    as in the file. Where the file has no output.weight, logits.weight is the embedding.
    """
    # BEGIN SOLUTION
    loaded = {}
    for name, tensor in found.items():
        count = heads if ".attn_q." in name else key_heads if ".attn_k." in name else None
        if count is not None:
            tensor = tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        loaded[our_name(name)] = tensor
    loaded.setdefault("logits.weight", loaded["embedding.weight"])
    return loaded
    # END SOLUTION


# %%
best_load_weights = check("16.1", load_weights).best

# %% [markdown]
# Now the small model of chapter 05, as a GGUF file would hold it. *Perplexity* is $e$ to the mean loss a token. With a
# perplexity of 10, the model is as unsure as if it chose among 10 tokens that are equally likely. You measure it on
# text that the model has read, once with your loader, and once with queries and keys left in the file's order.

# %%
from course_lib.models.decoder import Decoder
from course_lib.models.kinds import loss_on
from course_lib.models.loading.gguf_file import name_of
from course_lib.models.tiny import TINY, tiny_text
from course_lib.models.trained import trained_model


def in_file_order(rows, heads):
    """The rows of queries or keys as a GGUF file holds them: pairs side by side."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


rows_of = {"query": TINY.query_heads, "key": TINY.key_heads}
as_in_file = {}
for name, tensor in trained_model("tiny", device=device).state_dict().items():
    part = name.split(".")[-2]
    as_in_file[name_of(name)] = in_file_order(tensor, rows_of[part]) if part in rows_of else tensor

loaded = best_load_weights(as_in_file, TINY.query_heads, TINY.key_heads)
left = {name: as_in_file[name_of(name)] if name.split(".")[-2] in rows_of else loaded[name] for name in loaded}
text = tiny_text()[:4000]  # the model's tokens are bytes
decoder = Decoder(dataclasses.replace(TINY, tied=False)).to(device).eval()  # its output matrix is given, too
for words, weights in (("put back by your loader", loaded), ("left as in the file", left)):
    decoder.load_state_dict(weights)
    print(f"rows of queries and keys {words}: perplexity {math.exp(loss_on(decoder, text)):.2f}")
