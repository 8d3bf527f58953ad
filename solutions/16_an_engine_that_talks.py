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

# %% [markdown]
# **Prefixes in a tree · deeper.** Each node of the tree is a cached page with the tokens in it. The way from the root
# to a node reads the beginning of a text, and its pages hold the keys and values of that beginning. While a request
# reads pages, they are *locked*, from the first to the last. When memory is needed, pages go from the ends of the tree,
# and those that were used longest ago go first.
#
# Two requests may compute the same page at the same time. The tree keeps the page that came first. The other one is a
# *duplicate*: it goes back to the caller, whose table names the cached page before the duplicate is free.
#
# Production trees keep a run of pages in one node, a *radix tree*. Where a text ends or turns off inside a run, the
# node is split, and both parts keep its locks and its last use. You may do it either way.

# %%
# Exercise 16.7 · Prefixes in a tree
class Node:
    """One cached page, for the tree below. You need not take it: how you keep pages is your choice."""

    def __init__(self, page=None):
        self.page, self.behind = page, {}  # behind: the tokens of the next page -> its node
        self.locks, self.used = 0, 0


class PrefixCache:
    """Finds the pages that hold the keys and values of a text's beginning.

    Texts are lists of tokens, whole numbers, and may be empty. Pages are whole numbers. Only whole pages are cached: of
    page_size tokens, at least 1, from a multiple of page_size on. A page belongs to those texts alone that are the same
    from their first token to the page's end. The caller may change all lists that it gave and got.
    """

    def __init__(self, page_size):
        # BEGIN SOLUTION
        self.page_size, self.clock, self.root = page_size, 0, Node()
        # END SOLUTION

    def path(self, tokens):
        """The nodes of the longest cached beginning. (For your own methods; the check does not call it.)"""
        # BEGIN SOLUTION
        nodes, node = [], self.root
        for begin in range(0, len(tokens) - self.page_size + 1, self.page_size):
            node = node.behind.get(tuple(tokens[begin : begin + self.page_size]))
            if node is None:
                break
            nodes.append(node)
        return nodes
        # END SOLUTION

    def match(self, tokens):
        """The pages of the longest beginning of these tokens that is cached, as a list in order; they are used now."""
        # BEGIN SOLUTION
        self.clock += 1
        nodes = self.path(tokens)
        for node in nodes:
            node.used = self.clock
        return [node.page for node in nodes]
        # END SOLUTION

    def insert(self, tokens, pages):
        """Cache the pages of these tokens, len(tokens) // page_size of them. All of this beginning is used now.

        Where a page is cached already, that one stays. Returns the duplicates in order: those of `pages` in whose place
        another page was cached. One of `pages` may be the cached page itself, which `match` gave: it is no duplicate.
        """
        # BEGIN SOLUTION
        self.match(tokens)
        nodes, node = self.path(tokens), self.root
        for number, page in enumerate(pages):
            part = tuple(tokens[number * self.page_size : (number + 1) * self.page_size])
            node = node.behind.setdefault(part, Node(page))
            node.used = self.clock
        return [page for page, node in zip(pages, nodes) if page != node.page]
        # END SOLUTION

    def lock(self, tokens):
        """Lock each page of these tokens' whole pages once more. All of them are cached. This does not count as use."""
        # BEGIN SOLUTION
        for node in self.path(tokens):
            node.locks += 1
        # END SOLUTION

    def unlock(self, tokens):
        """Take back one lock that `lock` made for the same tokens."""
        # BEGIN SOLUTION
        for node in self.path(tokens):
            node.locks -= 1
        # END SOLUTION

    def evictable(self):
        """How many pages are cached and not locked."""
        # BEGIN SOLUTION
        waiting, number = [self.root], 0
        while waiting:
            node = waiting.pop()
            number += node.page is not None and node.locks == 0
            waiting += node.behind.values()
        return number
        # END SOLUTION

    def evict(self, count):
        """Give up `count` pages, at least 1; or all that are not locked, where these are fewer. Returns a list of them.

        They go one after the other: each time it is the page that was used longest ago, of those that are not locked
        and behind which no page is cached.
        """
        # BEGIN SOLUTION
        gone = []
        while len(gone) < count:
            waiting, ends = [self.root], []
            while waiting:
                parent = waiting.pop()
                for part, node in parent.behind.items():
                    waiting.append(node)
                    if not node.behind and node.locks == 0:
                        ends.append((node.used, node.page, parent, part))
            if not ends:
                break
            _, page, parent, part = min(ends, key=lambda end: end[0])
            del parent.behind[part]
            gone.append(page)
        return gone
        # END SOLUTION


# %%
BestPrefixCache = check("16.7", PrefixCache).best
