"""How 14.4 judges `fill_buffers` by itself: what it must leave in the buffers, and what people leave there."""

from __future__ import annotations

from course_lib.checker import edits

# The driver is sent to the worker by its source alone, so it stands by itself.


def filled_in_turn(functions, buffers, batches, unused_slot, pages):
    """What the buffers hold after each batch, where that is promised. pages: the numbers from 0 that are pages."""
    function = functions["fill_buffers"]
    function = getattr(function, "__wrapped__", function)  # what watches it would take copies for arguments
    buffers = [buffer.clone() for buffer in buffers]
    story = {}
    for number, batch in enumerate(batches, 1):
        function(tuple(buffers), tuple(tensor.clone() for tensor in batch), unused_slot)
        query, key, value, slots, tables, lengths = buffers
        count, columns = batch[4].shape
        story |= {
            f"slots after batch {number}": slots.clone(),
            f"lengths after batch {number}": lengths.clone(),
            f"tables of batch {number}": tables[:count, :columns].clone(),
            f"entries of `tables` that are no pages, after batch {number}": int(
                ((tables < 0) | (tables >= pages)).sum()
            ),
        }
        for name, buffer in (("query", query), ("key", key), ("value", value)):
            story[f"{name} of batch {number}"] = buffer[:count].clone()
    return story


def filled(buffers, batch, unused_slot):
    query, key, value, slots, tables, lengths = (buffer.clone() for buffer in buffers)
    count, blocks = batch[4].shape
    query[:count], key[:count], value[:count] = batch[0], batch[1], batch[2]
    slots[:count] = batch[3]
    lengths[:count] = batch[5]
    tables[:count, :blocks] = batch[4]
    slots[count:] = unused_slot
    lengths[count:] = 0
    return query, key, value, slots, tables, lengths


def filling(buffers, batches, unused_slot, pages):
    story = {}
    for number, batch in enumerate(batches, 1):
        buffers = filled(buffers, batch, unused_slot)
        query, key, value, slots, tables, lengths = buffers
        count, blocks = batch[4].shape
        story |= {
            f"slots after batch {number}": slots,
            f"lengths after batch {number}": lengths,
            f"tables of batch {number}": tables[:count, :blocks],
            f"entries of `tables` that are no pages, after batch {number}": int(
                ((tables < 0) | (tables >= pages)).sum()
            ),
        }
        for name, buffer in (("query", query), ("key", key), ("value", value)):
            story[f"{name} of batch {number}"] = buffer[:count]
    return story


NAMES = ("query", "key", "value", "slots", "tables", "lengths")
HELD_BEFORE = (
    "what stood there before. Write into a buffer's own memory, with buffer[:count] = tensor or copy_. Giving the name "
    "to another tensor changes nothing, because a replay reads the memory that was recorded."
)
RETURNED, VECTORS = "return query, key, value, slots, tables, lengths", "query[:count], key[:count], value[:count] ="
SLOTS, LENGTHS, TABLES = "slots[:count] = batch[3]", "lengths[:count] = batch[5]", "tables[:count, :blocks] = batch[4]"
PADDED_SLOTS, PADDED_LENGTHS = "slots[count:] = unused_slot", "lengths[count:] = 0"
FILLING = (
    *edits(f"The buffers still hold {HELD_BEFORE}",
        buffers_not_filled=(RETURNED, "return buffers"),
        buffers_not_filled__numbers=(RETURNED, "return query, key, value, *buffers[3:]"),
        buffers_not_filled__vectors=(RETURNED, "return *buffers[:3], slots, tables, lengths")),
    *(edit for number, name in enumerate(NAMES) for edit in edits(f"`{name}` still holds {HELD_BEFORE}",
        **{f"buffers_not_filled__{name}": (RETURNED, RETURNED.replace(name, f"buffers[{number}]"))})),
    *edits("The batch's slots are not in their buffer: only the rows behind the batch were filled there.",
        batch_without_slots=(SLOTS, "pass")),
    *edits("The batch's lengths are not in their buffer: only the rows behind the batch were filled there.",
        batch_without_lengths=(LENGTHS, "pass")),
    *edits("Rows behind the batch kept the slots of an earlier batch. In a replay they store their token over another "
        "sequence's. Give every row behind the batch the unused slot.",
        padded_rows_stored=(PADDED_SLOTS, "pass")),
    *edits("Rows behind the batch have slot 0. That is no harmless number: it is the first place of page 0, which may "
        "belong to a sequence, and a replay stores their token there. Give them the unused slot.",
        padded_to_slot_0=(PADDED_SLOTS, "slots[count:] = 0")),
    *edits("Rows behind the batch have slot -1. PyTorch takes this index for the last one, so their token goes into "
        "the last page. Give them the unused slot.", padded_to_the_last=(PADDED_SLOTS, "slots[count:] = -1")),
    *edits("Rows behind the batch kept the lengths of an earlier batch, so the step reads pages for them that are not "
        "theirs. Set their lengths to 0.", padded_lengths_kept=(PADDED_LENGTHS, "pass")),
    *edits("Rows behind the batch have a length other than 0. Set it to 0.",
        padded_lengths=(PADDED_LENGTHS, "lengths[count:] = 1")),
    *edits("The unused slot and the length 0 were given to the wrong buffers: rows behind the batch have the slot 0, "
        "and the unused slot as their length.",
        slot_and_length_exchanged=(PADDED_SLOTS, "slots[count:] = 0", PADDED_LENGTHS, "lengths[count:] = unused_slot")),
    *edits("The batch went into the last rows of the buffers. It belongs into the first ones: the graph's outputs are "
        "read from there, and the rows behind them are made harmless.",
        batch_in_the_last_rows=(VECTORS, "query[len(query) - count:], key[len(key) - count:], "
        "value[len(value) - count:] =", SLOTS, "slots[len(slots) - count:] = batch[3]",
        LENGTHS, "lengths[len(lengths) - count:] = batch[5]",
        TABLES, "tables[len(tables) - count:, :blocks] = batch[4]",
        PADDED_SLOTS, "slots[:len(slots) - count] = unused_slot",
        PADDED_LENGTHS, "lengths[:len(lengths) - count] = 0")),
    *edits("The batch's tables went into the last columns. A sequence's first page belongs into the first column: "
        "tables[:count, :columns] = batch[4].",
        tables_in_the_last_columns=(TABLES, "tables[:count, tables.shape[1] - blocks:] = batch[4]")),
    *edits("Entries of `tables` that the batch does not fill were set to -1, which is no page. PyTorch takes it for "
        "the last one, and a kernel reads outside of the cache. Leave what is there, or set 0.",
        tables_without_a_page=(TABLES, "tables[:] = -1; tables[:count, :blocks] = batch[4]"),
        tables_without_a_page__columns=(TABLES, "tables[:count] = -1; tables[:count, :blocks] = batch[4]"),
        tables_without_a_page__rows=(TABLES, "tables[:count, :blocks] = batch[4]; tables[count:] = -1"),
        tables_without_a_page__right_of_it=(TABLES, "tables[:, blocks:] = -1; tables[:count, :blocks] = batch[4]")),
)  # fmt: skip
