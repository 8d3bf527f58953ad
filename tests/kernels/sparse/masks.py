"""Ten masks for the tests of block lists: each a function of (batch, head, query position, key position)."""

import torch

# Lengths with a ragged tile on each side; documents and chances are tables that positions look up.
QUERIES, KEYS, BLOCK = 100, 120, 32
DOCUMENT = torch.tensor([0] * 20 + [1] * 45 + [2] * 55)
CHANCES = torch.rand(4, KEYS, KEYS, generator=torch.Generator().manual_seed(1))
WINDOW, PREFIX, SINK = 40, 30, 4


def causal(batch, head, query, key):
    return key <= query


def window(batch, head, query, key):
    return (key <= query) & (key > query - WINDOW)


def prefix(batch, head, query, key):
    return (key <= query) | (key < PREFIX)


def document(batch, head, query, key):
    return (DOCUMENT[query] == DOCUMENT[key]) & (key <= query)


def dilated(batch, head, query, key):
    return (key <= query) & ((query - key) % 8 == 0)


def sink_and_window(batch, head, query, key):
    return (key <= query) & ((key < SINK) | (key > query - WINDOW))


def checkerboard(batch, head, query, key):
    return (query // BLOCK + key // BLOCK) % 2 == 0


def one_in_eight(batch, head, query, key):
    return CHANCES[head, query, key] < 0.125


def nothing_in_some_rows(batch, head, query, key):
    return (key <= query) & (query % 3 != 0) & (query // BLOCK != 1)


def all_of_a_ragged_length(batch, head, query, key):
    return (query >= 0) & (key >= 0)


MASKS = (causal, window, prefix, document, dilated, sink_and_window, checkerboard, one_in_eight, nothing_in_some_rows,
         all_of_a_ragged_length)  # fmt: skip


def dense(mask, heads):
    """The mask as bool [1, heads, QUERIES, KEYS]."""
    places = [torch.arange(size) for size in (1, heads, QUERIES, KEYS)]
    shapes = [(-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)]
    return mask(*(place.view(shape) for place, shape in zip(places, shapes))).expand(1, heads, QUERIES, KEYS)
