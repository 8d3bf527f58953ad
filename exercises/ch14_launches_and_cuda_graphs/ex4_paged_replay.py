"""Exercise 14.4: the step on a paged cache, replayed with growing lengths and batches smaller than the graph's."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract
from exercises.ch14_launches_and_cuda_graphs.recorder import NOT_RECORDED, recorded_and_replayed


def filled(buffers, batch, unused_slot):
    query, key, value, slots, tables, lengths = (buffer.clone() for buffer in buffers)
    count, blocks = batch[4].shape
    query[:count], key[:count], value[:count] = batch[0], batch[1], batch[2]
    slots[:count], lengths[:count] = batch[3], batch[5]
    tables[:count, :blocks] = batch[4]
    slots[count:] = unused_slot
    lengths[count:] = 0
    return query, key, value, slots, tables, lengths


def stepped(query, key, value, slots, tables, lengths, key_pages, value_pages, then):
    """The output and the pages afterwards. `then`: the buffers when the step was recorded."""
    page_size, head_dim = key_pages.shape[2:]
    key_pages, value_pages = key_pages.clone(), value_pages.clone()
    stored = slots
    key_pages[stored // page_size, :, stored % page_size] = key.to(key_pages.dtype)
    value_pages[stored // page_size, :, stored % page_size] = value.to(value_pages.dtype)
    pages = tables
    keys = key_pages[pages].transpose(1, 2).flatten(2, 3)
    values = value_pages[pages].transpose(1, 2).flatten(2, 3)
    scores = (keys @ query[..., None])[..., 0] * head_dim**-0.5
    places = torch.arange(keys.shape[2])
    seen = places < lengths[:, None]
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return (weights[..., None] * values).sum(-2), key_pages, value_pages


def told(key_pages, value_pages, steps, warm, unused_slot):
    story = {}
    buffers = warm
    for number, batch in enumerate(steps, 1):
        buffers = filled(buffers, batch, unused_slot)
        output, keys, values = stepped(*buffers, key_pages, value_pages, warm)
        key_pages, value_pages = keys, values
        rows = len(batch[0])
        story[f"output of replay {number}"] = output[:rows]
        story[f"lengths behind the batch of replay {number}"] = buffers[5][rows:]
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


def _inputs(draw, *, lengths, heads, head_dim, page_size):
    """Pages, steps, what is recorded, and the unused slot. lengths: of each replay's sequences; the graph has as many
    rows as the largest batch and one more, and is recorded with lengths of 1 to 3."""
    rows = max(map(len, lengths)) + 1
    columns = max(-(-length // page_size) for batch in lengths for length in batch)
    needed = max([3 * rows, *(sum(-(-length // page_size) for length in batch) for batch in lengths)])
    unused = draw.integer(1, needed + 1)  # neither the first page nor the last
    pages = [page for page in range(needed + 2) if page != unused]
    caches = [draw.normal(needed + 2, heads, page_size, head_dim) for _ in "kv"]
    sizes = heads, head_dim, page_size
    warm = _batch(draw, [1 + row % min(3, columns * page_size) for row in range(rows)], sizes, pages, columns)
    steps = [_batch(draw, batch, sizes, pages, max(-(-length // page_size) for length in batch)) for batch in lengths]
    return *caches, steps, warm, unused * page_size + draw.integer(0, page_size)


def _drawn(draw, *, batch, heads, head_dim, page_size, longest):
    """Three replays: the batch, one that is not larger, and one of one sequence; lengths up to the longest."""
    counts = (batch, draw.integer(1, batch + 1), 1)
    lengths = [[draw.integer(1, longest + 1) for _ in range(count)] for count in counts]
    lengths[1][0] = longest
    return _inputs(draw, lengths=lengths, heads=heads, head_dim=head_dim, page_size=page_size)


def paged_cases(draw):
    def case(name, lengths, heads=2, head_dim=8, page_size=4, **options):
        sizes = {"heads": heads, "head_dim": head_dim, "page_size": page_size}
        return Case(name, _inputs(draw, lengths=lengths, **sizes, **options), driver=recorded_and_replayed)

    return [
        case("one sequence, one page", [[2], [3], [4]], heads=1, head_dim=4),
        case("lengths that grow over several pages", [[5, 3], [9, 7], [16, 12]]),
        case("batches of 4, 2 and 3", [[3, 5, 2, 7], [6, 4], [8, 1, 9]], heads=1),
        case("a batch of 1 after one of 5", [[4] * 5, [11]], head_dim=16),
        case("a length of 40 in a graph that was recorded at 3", [[7, 8], [40, 9]], page_size=16),
        case("pages of one token", [[3, 2], [5, 4]], heads=3, page_size=1),
    ]


CONTRACT = Contract(
    _drawn,
    choices={"batch": (1, 3), "heads": (1, 3), "head_dim": (4, 15), "page_size": (1, 3, 8), "longest": (1, 13)},
    driver=recorded_and_replayed,
    most=4,
)

PADDED_SLOTS, PADDED_LENGTHS = "slots[count:] = unused_slot", "lengths[count:] = 0"
STORED, PAGES, SEEN = "stored = slots", "pages = tables", "places < lengths[:, None]"
COPIES = "(buffer.clone() for buffer in buffers)"
CHANGES = (
    *edits("", tables_cleared=(COPIES, "(torch.zeros_like(b) if b is buffers[4] else b.clone() for b in buffers)")),
    *edits("The replays used what the buffers held when the step was recorded. Write into the buffers' own memory, "
        "with buffer[:count] = tensor or copy_. Giving the name to another tensor changes nothing.",
        buffers_not_filled=("return query, key, value, slots, tables, lengths", "return buffers")),
    *edits("Rows behind the batch stored a token over another sequence's. They kept the slots of an earlier batch. "
        "Give every row behind the batch the unused slot.",
        padded_rows_stored=(PADDED_SLOTS, "slots[count:] = slots[count:]")),
    *edits("Rows behind the batch stored their token in slot 0, which may belong to a sequence. Give them the "
        "unused slot.",
        padded_to_slot_0=(PADDED_SLOTS, "slots[count:] = 0")),
    *edits("Rows behind the batch have slot -1. PyTorch takes this index for the last one, so their token went into "
        "the last page. Give them the unused slot.", padded_to_the_last=(PADDED_SLOTS, "slots[count:] = -1")),
    *edits("Rows behind the batch kept the lengths of an earlier batch, so the step reads pages for them that are not "
        "theirs. Set their lengths to 0.", padded_lengths_kept=(PADDED_LENGTHS, "lengths[count:] = lengths[count:]")),
    *edits("Rows behind the batch have a length other than 0. Set it to 0.",
        padded_lengths=(PADDED_LENGTHS, "lengths[count:] = 1")),
    *edits("The number `longest` decided how far each replay looks. It comes from the recording, and the sequences "
        "have grown since. Look at all columns of the table, and use `lengths` to mask what is not there.",
        longest_baked=(SEEN, f"({SEEN}) & (places < then[5].max())"),
        longest_baked__whole_pages=(SEEN, f"({SEEN}) & (places < -(-then[5].max() // page_size) * page_size)")),
    *edits("Every replay used the slots from the recording. They were copied before it, or turned into numbers. Read "
        "the tensor `slots` in the step.", slots_baked=(STORED, "stored = then[3]")),
    *edits("Every replay used the tables from the recording. Either `fill_buffers` does not copy the new ones to "
        "the first columns, or the step reads a copy that was made before.", tables_baked=(PAGES, "pages = then[4]")),
    *edits("Every replay used the lengths from the recording. Read the tensor `lengths` in the step.",
        lengths_baked=(SEEN, "places < then[5][:, None]")),
    *edits("The query attended to everything in the pages, even behind a sequence's end. Mask that with `lengths`.",
        all_seen=(SEEN, "places >= 0 * lengths[:, None]")),
    *edits("The new token does not attend to itself. `lengths` already counts it.",
        itself_unseen=(SEEN, "places < (lengths[:, None] - 1).clamp(min=1)"),
        itself_unseen__at_all=(SEEN, "places < lengths[:, None] - 1")),
    *edits("The query attends to one token too many. `lengths` already counts the new token.",
        one_too_many_seen=(SEEN, "places <= lengths[:, None]")),
    *edits("The new token was stored at its place in the sequence, as if the sequence began at slot 0. Use `slots`.",
        place_for_slot=(STORED, "stored = lengths - 1")),
    *edits("A slot was split in the wrong way. Its page is slot // page_size, and its place there slot % page_size.",
        slot_taken_apart=("stored // page_size, :, stored % page_size",
        "stored % key_pages.shape[0], :, stored // key_pages.shape[0] % page_size")),
    *edits("The scores were not multiplied by 1/√head_dim.", scale_missing=(" * head_dim**-0.5", "")),
    *edits("The new key and value are not in the pages afterwards, or not in those that were given: write into them in "
        "place.", not_stored=("key_pages, value_pages = keys, values", "pass")),
)  # fmt: skip

EXERCISE = Exercise(
    id="14.4",
    title="The paged step, replayed",
    entries=("paged_step", "fill_buffers"),
    cases=paged_cases,
    oracle=told,
    contracts=(CONTRACT,),
    models=(model_of(told, CHANGES, (filled, stepped)),),
    hints=(
        "fill_buffers: count, blocks = batch[4].shape. Copy each tensor into buffer[:count], and the tables into "
        "tables[:count, :blocks]. Then slots[count:] = unused_slot and lengths[count:] = 0.",
        "paged_step stores with tensors as indices: key_pages[slots // page_size, :, slots % page_size] = key.",
        "key_pages[tables] is [rows, columns, heads, page_size, head_dim]. transpose(1, 2).flatten(2, 3) makes one "
        "axis of keys out of columns and places.",
        "Look at all columns of the table in every replay, and do not use `longest`. Mask what is behind a sequence's "
        "end: only places with torch.arange(...) < lengths[:, None] count.",
    ),
    mistakes=NOT_RECORDED,
)
