"""Exercise 14.4: the step on a paged cache, replayed with growing lengths and batches smaller than the graph's."""

from __future__ import annotations

import math
from functools import partial

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.hardware.captured_step import captured_and_replayed
from exercises.ch14_launches_and_cuda_graphs.filling import FILLING, filled, filled_in_turn, filling
from exercises.ch14_launches_and_cuda_graphs.not_captured import NOT_CAPTURED


def stepped(query, key, value, slots, tables, lengths, key_pages, value_pages, then):
    """The output and the pages afterwards. `then`: the buffers when the step was recorded."""
    _, heads, page_size, head_dim = key_pages.shape
    stored_keys, stored_values = key_pages.clone(), value_pages.clone()
    stored = slots
    stored_keys[stored // page_size, :, stored % page_size] = key.to(key_pages.dtype)
    stored_values[stored // page_size, :, stored % page_size] = value.to(value_pages.dtype)
    pages = tables
    keys = stored_keys[pages].transpose(1, 2).flatten(2, 3)
    values = stored_values[pages].transpose(1, 2).flatten(2, 3)
    scores = (keys @ query[..., None])[..., 0] * head_dim**-0.5
    places = torch.arange(keys.shape[2])
    seen = places < lengths[:, None]
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return (weights[..., None] * values).sum(-2), stored_keys, stored_values


def told(key_pages, value_pages, steps, warm, unused_slot):
    story = {}
    key_pages, value_pages = key_pages.clone(), value_pages.clone()
    for number, contents in enumerate(steps, 1):
        output, keys, values = stepped(*contents, key_pages, value_pages, warm)
        key_pages, value_pages = keys, values
        story[f"output of replay {number}"] = output[: (contents[5] > 0).sum()]
        key_pages[unused_slot // key_pages.shape[2]] = 0.0
        value_pages[unused_slot // value_pages.shape[2]] = 0.0
    story["keys afterwards"], story["values afterwards"] = key_pages, value_pages
    return story


def _batch(draw, lengths, sizes, pages, columns):
    """A step's six tensors: tables of pages from the list, each once, and of any where no token is."""
    heads, head_dim, page_size = sizes
    rows, free = len(lengths), [pages[place] for place in draw.permutation(len(pages)).tolist()]
    tables = torch.tensor([[draw.choice(pages) for _ in range(columns)] for _ in lengths])
    for table, length in zip(tables, lengths):
        for block in range(-(-length // page_size)):
            table[block] = free.pop()
    lengths = torch.tensor(lengths)
    last = lengths - 1
    slots = tables[torch.arange(rows), last // page_size] * page_size + last % page_size
    return *(draw.normal(rows, heads, head_dim) for _ in "qkv"), slots, tables, lengths


def _in_buffers(draw, batch, rows, columns, pages, unused_slot):
    """A batch as the step finds it: with rows behind it that nobody needs, and entries of tables that are any pages."""
    query, key, value, slots, tables, lengths = batch
    count, more = len(lengths), rows - len(lengths)
    vectors = [torch.cat([tensor, draw.normal(more, *tensor.shape[1:])]) for tensor in (query, key, value)]
    filled = torch.tensor([[draw.choice(pages) for _ in range(columns)] for _ in range(rows)])
    filled[:count, : tables.shape[1]] = tables
    slots = torch.cat([slots, torch.full((more,), unused_slot)])
    return *vectors, slots, filled, torch.cat([lengths, torch.zeros(more, dtype=torch.int64)])


def _inputs(draw, *, lengths, heads, head_dim, page_size, filling=False):
    """For `paged_step` pages, what the buffers hold in each replay and while it is recorded, and the unused slot; for
    `fill_buffers` the latter, the batches, the unused slot and the number of pages.

    lengths: of each replay's sequences; the graph has as many rows as the largest batch and one more, and is recorded
        with lengths of 1 to 3.
    """
    rows = max(map(len, lengths)) + 1
    columns = max(-(-length // page_size) for batch in lengths for length in batch)
    needed = max([3 * rows, *(sum(-(-length // page_size) for length in batch) for batch in lengths)])
    unused = draw.integer(1, needed + 1)  # neither the first page nor the last
    unused_slot = unused * page_size + draw.integer(0, page_size)
    pages = [page for page in range(needed + 2) if page != unused]
    sizes = heads, head_dim, page_size
    warm = _batch(draw, [1 + row % min(3, columns * page_size) for row in range(rows)], sizes, pages, columns)
    batches = [_batch(draw, batch, sizes, pages, max(-(-length // page_size) for length in batch)) for batch in lengths]
    if filling:
        return warm, batches, unused_slot, needed + 2
    caches = [draw.normal(needed + 2, heads, page_size, head_dim) for _ in "kv"]
    steps = [_in_buffers(draw, batch, rows, columns, [*pages, unused], unused_slot) for batch in batches]
    return *caches, steps, warm, unused_slot


def _drawn(draw, *, batch, heads, head_dim, page_size, longest, filling=False):
    """Three replays: the batch, one that is not larger, and one of one sequence; lengths up to the longest."""
    counts = (batch, draw.integer(1, batch + 1), 1)
    lengths = [[draw.integer(1, longest + 1) for _ in range(count)] for count in counts]
    lengths[1][0] = longest
    sizes = {"heads": heads, "head_dim": head_dim, "page_size": page_size}
    return _inputs(draw, lengths=lengths, **sizes, filling=filling)


def paged_cases(draw):
    def step(name, lengths, heads=2, head_dim=8, page_size=4):
        sizes = {"heads": heads, "head_dim": head_dim, "page_size": page_size}
        return Case(name, _inputs(draw, lengths=lengths, **sizes), "paged_step", captured_and_replayed)

    def fill(name, lengths, heads=2, head_dim=4, page_size=4):
        sizes = {"heads": heads, "head_dim": head_dim, "page_size": page_size}
        return Case(name, _inputs(draw, lengths=lengths, **sizes, filling=True), "fill_buffers", filled_in_turn)

    return [
        step("one sequence, one page", [[2], [3], [4]], heads=1, head_dim=4),
        fill("buffers of 2 rows, batches of 1", [[2], [3], [4]], heads=1),
        step("lengths that grow over several pages", [[5, 3], [9, 7], [16, 12]]),
        step("batches of 4, 2 and 3", [[3, 5, 2, 7], [6, 4], [8, 1, 9]], heads=1),
        fill("batches of 4, 2 and 3, tables of several widths", [[3, 5, 2, 7], [13, 4], [8, 1, 9]]),
        step("a batch of 1 after one of 5", [[4] * 5, [11]], head_dim=16),
        fill("buffers: a batch of 1 after one of 5", [[4] * 5, [11]]),
        step("a length of 40 in a graph that was recorded at 3", [[7, 8], [40, 9]], page_size=16),
        step("pages of one token", [[3, 2], [5, 4]], heads=3, page_size=1),
    ]


CONTRACTS = (
    Contract(
        _drawn,
        choices={"batch": (1, 3), "heads": (1, 3), "head_dim": (4, 15), "page_size": (1, 3, 8), "longest": (1, 13)},
        entry="paged_step",
        driver=captured_and_replayed,
        most=4,
    ),
    Contract(
        partial(_drawn, heads=1, head_dim=3, filling=True),
        choices={"batch": (1, 2, 5), "page_size": (1, 4), "longest": (1, 9)},
        entry="fill_buffers",
        driver=filled_in_turn,
        most=3,
    ),
)

STORED, PAGES, SEEN = "stored = slots", "pages = tables", "places < lengths[:, None]"
PLACE = "[stored // page_size, :, stored % page_size] = "
KEY = f"stored_keys{PLACE}key.to(key_pages.dtype)"
VALUE = f"stored_values{PLACE}value.to(value_pages.dtype)"
OF_TABLE = "tables[torch.arange(len(tables)), (lengths - 1).clamp(min=0) // page_size]"
AFTERWARDS = "key_pages, value_pages = keys, values"
ONE_AXIS = ".transpose(1, 2).flatten(2, 3)"
CHANGES = (
    *edits("The number `longest` decided how far each replay looks. It comes from the recording, and the sequences "
        "have grown since. Look at all columns of the table, and use `lengths` to mask what is not there.",
        longest_baked=(SEEN, f"({SEEN}) & (places < then[5].max())"),
        longest_baked__whole_pages=(SEEN, f"({SEEN}) & (places < -(-then[5].max() // page_size) * page_size)")),
    *edits("Every replay used the slots from the recording. They were copied before it, or turned into numbers. Read "
        "the tensor `slots` in the step.", slots_baked=(STORED, "stored = then[3]")),
    *edits("Every replay used the tables from the recording. They were copied before it. Read the tensor `tables` in "
        "the step.", tables_baked=(PAGES, "pages = then[4]")),
    *edits("Every replay used the lengths from the recording. Read the tensor `lengths` in the step.",
        lengths_baked=(SEEN, "places < then[5][:, None]")),
    *edits("Every replay used the query, key or value from the recording, because a copy was made before it. Only the "
        "tensors that the step is given get new contents, so read these themselves.",
        stale_source=("@ query[", "@ then[0]["), stale_source__of_the_key=("= key.to", "= then[1].to"),
        stale_source__of_the_value=("= value.to", "= then[2].to"),
        stale_source__of_all=("@ query[", "@ then[0][", "= key.to", "= then[1].to", "= value.to", "= then[2].to")),
    *edits("The query attended to everything in the pages, even behind a sequence's end. Mask that with `lengths`.",
        all_seen=(SEEN, "places >= 0 * lengths[:, None]")),
    *edits("The new token does not attend to itself. `lengths` already counts it.",
        itself_unseen=(SEEN, "places < (lengths[:, None] - 1).clamp(min=1)"),
        itself_unseen__at_all=(SEEN, "places < lengths[:, None] - 1")),
    *edits("The query attends to one token too many. `lengths` already counts the new token.",
        one_too_many_seen=(SEEN, "places <= lengths[:, None]")),
    *edits("The new token was stored at its place in the sequence, as if the sequence began at slot 0. Use `slots`.",
        place_for_slot=(STORED, "stored = lengths - 1")),
    *edits("The page's number was taken for a slot. A page has page_size slots: token n of a sequence is in slot "
        "tables[n // page_size] * page_size + n % page_size, which `slots` holds.",
        page_for_slot=(STORED, "stored = slots // page_size"),
        page_for_slot__times_its_size=(STORED, "stored = slots // page_size * page_size"),
        page_for_slot__from_the_table=(STORED, f"stored = {OF_TABLE}"),
        page_for_slot__from_the_table_times_its_size=(STORED, f"stored = {OF_TABLE} * page_size")),
    *edits("A slot was split in the wrong way. Its page is slot // page_size, and its place there slot % page_size.",
        slot_taken_apart=("stored // page_size, :, stored % page_size",
        "stored % key_pages.shape[0], :, stored // key_pages.shape[0] % page_size")),
    *edits("The scores were not multiplied by 1/√head_dim.", scale_missing=(" * head_dim**-0.5", "")),
    *edits("The scale is 1/√head_dim, with the numbers of one head. Yours counts those of all heads.",
        scale_of_all_heads=("head_dim**-0.5", "(heads * head_dim)**-0.5")),
    *edits("Scores behind a sequence's end were set to 0. In the softmax a score of 0 has the weight e⁰ = 1. Set them "
        "to -math.inf, whose weight is 0.", masked_with_0=("~seen[:, None], -math.inf", "~seen[:, None], 0.0")),
    *edits("The softmax runs over the heads. Each head weighs the places of its sequence, so it runs over the last "
        "dimension.", softmax_over_heads=("softmax(-1)", "softmax(1)")),
    *edits("The weights behind a sequence's end were set to 0 after the softmax. Their share is then missing from the "
        "sum of weights. Mask the scores, before the softmax.",
        masked_late=("scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)",
        "scores.softmax(-1) * seen[:, None]")),
    *edits("Heads and places got mixed. key_pages[tables] is [rows, columns, heads, page_size, head_dim], so columns "
        "and places are no neighbours: a reshape alone cannot make one axis of them. Move the heads to the front "
        "first, with transpose(1, 2).",
        heads_mixed=(ONE_AXIS, ".reshape(len(pages), -1, heads, head_dim).transpose(1, 2)"),
        heads_mixed__in_front=(ONE_AXIS, ".reshape(len(pages), heads, -1, head_dim)")),
    *edits("The query attended to pages as they were before the new token. Store the new key and the new value first, "
        "and read the pages then.",
        stored_late=("stored_keys[pages]", "key_pages[pages]", "stored_values[pages]", "value_pages[pages]"),
        stored_late__of_the_key=("stored_keys[pages]", "key_pages[pages]"),
        stored_late__of_the_value=("stored_values[pages]", "value_pages[pages]")),
    *edits("The new key and value are not in the pages afterwards, or not in those that were given: write into them in "
        "place. An index makes a copy (key_pages[pages][...] = key writes into that).",
        not_stored=(AFTERWARDS, "pass"),
        not_stored__nor_seen=("(-2), stored_keys, stored_values", "(-2), key_pages.clone(), value_pages.clone()",
        "stored_keys[pages]", "key_pages[pages]", "stored_values[pages]", "value_pages[pages]")),
    *edits("The new key is not in `key_pages` afterwards, or not in those that were given. Store it in place, as the "
        "value.", key_not_stored=(AFTERWARDS, "value_pages = values"), key_not_stored__nor_seen=(KEY, "pass")),
    *edits("The new value is not in `value_pages` afterwards, or not in those that were given. Store it in place, as "
        "the key.", value_not_stored=(AFTERWARDS, "key_pages = keys"), value_not_stored__nor_seen=(VALUE, "pass")),
    *edits("The new key is in `value_pages`, and the new value in `key_pages`: they are exchanged.",
        stored_exchanged=("= key.to", "= value.to", "= value.to", "= key.to")),
    *edits("The same pages were taken for keys and values. Scores come from `key_pages`, and what is averaged comes "
        "from `value_pages`.",
        one_kind_of_pages=("stored_values[pages]", "stored_keys[pages]"),
        one_kind_of_pages__of_values=("stored_keys[pages]", "stored_values[pages]")),
)  # fmt: skip

EXERCISE = Exercise(
    id="14.4",
    title="The paged step, replayed",
    entries=("paged_step", "fill_buffers"),
    cases=paged_cases,
    oracle={"paged_step": told, "fill_buffers": filling},
    contracts=CONTRACTS,
    models=(
        model_of(told, CHANGES, (stepped,), entry="paged_step"),
        model_of(filling, FILLING, (filled,), entry="fill_buffers"),
    ),
    hints=(
        "fill_buffers: count, blocks = batch[4].shape. Copy each tensor into buffer[:count], and the tables into "
        "tables[:count, :blocks]. Then slots[count:] = unused_slot and lengths[count:] = 0.",
        "paged_step stores with tensors as indices: key_pages[slots // page_size, :, slots % page_size] = key.",
        "key_pages[tables] is [rows, columns, heads, page_size, head_dim]. transpose(1, 2).flatten(2, 3) makes one "
        "axis of keys out of columns and places.",
        "Look at all columns of the table in every replay, and do not use `longest`. Mask what is behind a sequence's "
        "end: only places with torch.arange(...) < lengths[:, None] count.",
    ),
    mistakes=NOT_CAPTURED,
)
