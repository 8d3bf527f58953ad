"""Decode attention as a kernel computes it, step by step, with what can go wrong at each step.

A program takes one query head, or a group that shares a KV head, of one sequence; it walks over the sequence's keys, or
over one split of them, a tile at a time, with a running maximum, a running sum and an accumulator. The keys lie in a
cache or in pages. All programs are computed at once, in float32, so that a model overflows where a kernel does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.decode_merge import MERGED
from exercises.topics.memory import load

LN_2 = math.log(2)
ALL_HEADS = ("group_of_all_heads", "group_of_all_heads__in_its_tile")  # slips that take them for one group
ROWS = 16  # query heads in the smallest tile of a matrix product


@dataclass(frozen=True)
class Shape:
    """How the right answer is cut up: what an exercise prescribes.

    Attributes:
        paged: whether keys lie in pages, and a table comes before the lengths; a cache otherwise.
        split: whether the last argument is a number of splits.
        merged: whether the splits are merged at the end.
        key_rows: keys of a tile; 0 for those of a page.
        by_dot: whether weights are cast to the values' dtype, for a matrix product.
        table_masked: whether entries of the table past the last key are masked; 6.5 never reaches them.
    """

    paged: bool = False
    split: bool = False
    merged: bool = False
    key_rows: int = 64
    by_dot: bool = True
    table_masked: bool = True


def decode_model(shape: Shape, slips: tuple[Slip, ...], styles: tuple[tuple[str, ...], ...] = ((),)) -> Model:
    """The model of a kernel of this shape.

    It is called with query [batch, query_heads, head_dim], keys, values [batch or pages, key_heads, slots, head_dim],
    tables [batch, max_blocks] where they are paged, lengths [batch], and a number of splits where there are such.

    Styles: "guarded" measures a row that has seen no key from 0; "divided_where_tokens" looks at the length, and not at
    the sum, before it divides; "tile_16" and the like; "splits_of_pages".
    """

    def compute(slips: Slips, query, keys, values, *rest):
        tables = rest[0] if shape.paged else None
        lengths = rest[1] if shape.paged else rest[0]
        splits = rest[-1] if shape.split else 1
        return _Decode(slips, shape, query, keys, values, tables, lengths, splits).result()

    return Model(compute, slips, styles)


class _Decode:
    """One call. Tiles are [splits, batch, key_heads, group, ...]."""

    def __init__(self, slips: Slips, shape: Shape, query, keys, values, tables, lengths, splits: int):
        self.slips, self.shape, self.splits = slips, shape, splits
        self.query, self.keys, self.values = query, keys, values
        self.tables, self.lengths = tables, lengths
        self.batch, self.query_heads, self.head_dim = query.shape
        self.key_heads, self.slots = keys.shape[1:3]
        self.group = self.query_heads // self.key_heads
        self.capacity = (tables.shape[1] if tables is not None else 1) * self.slots
        self.key_rows = shape.key_rows or self.slots
        self.page_size = 1 << (self.slots - 1).bit_length() if slips("page_size_rounded_up") else self.slots
        for rows in (16, 32, 128):
            if slips(f"tile_{rows}"):
                self.key_rows = rows
        if slips("tile_of_a_page"):
            self.key_rows = self.slots

    def result(self):
        s = self.slips
        counted = self._counted()  # [batch]: the tokens that the loop goes over
        first, last = self._bounds(counted)  # [splits, batch]
        steps = max(1, -(-int((last - first).max()) // self.key_rows))
        if steps * self.key_rows > 8192:
            return None
        positions = first[..., None] + torch.arange(steps * self.key_rows)  # [splits, batch, keys]
        end = self._end_of_mask(counted, last)[..., None]
        present = positions < end
        pages = self._pages(positions, present, last) if self.shape.paged else None
        query, heads = self._queries()  # [batch, key_heads, group, head_dim], or a KV head for each query head
        keys = self._loaded("key", positions, pages, self._load_mask("key", positions, present), heads)
        values = self._loaded("value", positions, pages, self._load_mask("value", positions, present), heads)
        if s("keys_used_as_values"):
            values = keys
        if s("values_used_as_keys"):
            keys = values
        visible = present[:, :, None, None]
        begin = 0.0 if s("maximum_starts_at_zero") else -1e4 if s("maximum_starts_finite") else -math.inf
        maximum = torch.full((*first.shape, *query.shape[1:3]), begin)
        total, accumulator = torch.zeros_like(maximum), torch.zeros(*maximum.shape, self.head_dim)
        scores = query @ keys.transpose(-1, -2) * self._scale()  # [splits, batch, key_heads, group, keys]
        if s("scores_in_float16"):
            scores = (scores / LN_2).half().float() * LN_2
        if s("scores_in_float16__natural"):
            scores = scores.half().float()
        if s("hidden_scored_minus_1e9"):
            scores = torch.where(visible, scores, -1e9)
        elif s("hidden_scored_minus_1e9__1e3", "hidden_scored_minus_1e9__1e4"):
            scores = torch.where(visible, scores, -1e3 if s("hidden_scored_minus_1e9__1e3") else -1e4)
        elif not s("tail_keys_scored"):
            scores = torch.where(visible, scores, -math.inf)
        for step in range(steps):
            active = (first + step * self.key_rows < last)[..., None, None]  # [splits, batch, 1, 1]
            if s("only_first_tile") and step or s("only_first_tile__of_128") and step * self.key_rows >= 128:
                break
            here = slice(step * self.key_rows, (step + 1) * self.key_rows)
            after = self._step(scores[..., here], values[..., here, :], maximum, total, accumulator)
            maximum, total = torch.where(active, after[0], maximum), torch.where(active, after[1], total)
            accumulator = torch.where(active[..., None], after[2], accumulator)
        if s("empty_sequence_nan__in_the_loop"):  # every program goes as far as the longest sequence
            spoilt = ((counted <= 0) & (counted.max() > 0))[None, :, None, None]
            maximum, total = (part.masked_fill(spoilt, math.nan) for part in (maximum, total))
            accumulator = accumulator.masked_fill(spoilt[..., None], math.nan)
        if s("empty_split_nan__in_the_loop", "empty_split_nan__in_one_step_at_least"):
            begun = first // self.key_rows * self.key_rows < last if s("empty_split_nan__in_the_loop") else last == last
            spoilt = (begun & (last <= first))[..., None, None]
            maximum, total = (part.masked_fill(spoilt, math.nan) for part in (maximum, total))
            accumulator = accumulator.masked_fill(spoilt[..., None], math.nan)
        return self._finished(maximum, total, accumulator, counted, last > first)

    # -------------------------------------------------------------------------------------------- which keys are read

    def _counted(self):
        s, lengths = self.slips, self.lengths.long()
        if s("length_ignored"):
            lengths = torch.full_like(lengths, self.capacity)
        if s("first_length_for_all"):
            lengths = lengths[:1].expand_as(lengths)
        if s("longest_length_for_all"):
            lengths = lengths.max().expand_as(lengths)
        if s("one_token_too_few"):
            lengths = (lengths - 1).clamp(min=0)
        if s("one_token_too_many", "one_token_too_many__in_the_cache"):
            lengths = lengths + 1
        if s("one_token_too_many__in_the_cache"):
            lengths = lengths.clamp(max=self.capacity)
        if s("last_page_read_whole"):
            lengths = -(-lengths // self.slots) * self.slots
        if s("last_page_left_out"):
            lengths = lengths // self.slots * self.slots
        return self._one_page_short(lengths)

    def _one_page_short(self, lengths):
        """The tokens without those of the last page, where a slip leaves it out."""
        s, in_last = self.slips, (lengths - 1) % self.slots + 1
        short = torch.zeros_like(lengths, dtype=torch.bool)
        if s("last_page_left_out__always"):
            short = lengths > 0
        if s("last_page_left_out__where_full"):
            short = (lengths > 0) & (in_last == self.slots)
        if s("last_page_left_out__of_one_token"):
            short = (lengths > 0) & (in_last == 1)
        return torch.where(short, lengths - in_last, lengths)

    def _bounds(self, counted):
        """First key and end of each split, [splits, batch]; where a split has no key the end is not larger."""
        s, split = self.slips, torch.arange(self.splits)[:, None]
        whole = counted
        if s("split_of_the_longest"):
            whole = counted.max().expand_as(counted)
        if s("split_of_the_capacity"):
            whole = torch.full_like(counted, self.capacity)
        unit = self.slots if s("splits_of_pages") else 1
        blocks = -(-whole // unit)
        size = unit * (-(-blocks // self.splits))
        if s("last_keys_lost", "split_rounded_down"):
            size = unit * (blocks // self.splits)
        if s("split_of_whole_tiles"):
            size = -(-size // self.key_rows) * self.key_rows
        first = split * size
        last = first + size
        if s("split_rounded_down"):
            last = torch.where(split == self.splits - 1, counted, last)
        if s("splits_of_equal_shares"):
            first, last = split * whole // self.splits, (split + 1) * whole // self.splits
        if s("split_ends_at_its_length"):
            last = size.expand_as(last)
        if s("empty_split_reads_the_last_key"):
            first = torch.minimum(first, (whole - 1).clamp(min=0))
            last = torch.minimum(first + size, counted)
        if s("split_begins_at_a_tile"):
            first = first // self.key_rows * self.key_rows
        if not s("past_the_sequences_end"):
            last = torch.minimum(last, counted)
        if s("first_tile_skipped"):
            first = first + self.key_rows
        if s("last_tile_dropped"):
            last = first + (last - first).clamp(min=0) // self.key_rows * self.key_rows
        if s("last_tile_skipped"):
            last = torch.maximum(last - self.key_rows, first)
        if s("table_read_past_its_end"):
            last = first + ((last - first) // self.key_rows + 1) * self.key_rows
        return first, last

    def _end_of_mask(self, counted, last):
        """The position where the mask of loads and scores ends, [splits, batch]."""
        s = self.slips
        if s("reaches_into_the_next_split"):
            return counted.expand_as(last)
        if s("table_read_past_its_end"):
            return self.lengths.long().expand_as(last)
        if s("last_page_read_whole__mask"):
            return last // self.key_rows * self.key_rows + self.key_rows
        if s("last_page_read_whole__offset_compared"):
            whole = torch.full_like(last, self.capacity)
            return torch.where(counted < self.slots, last, whole)
        shift = -1 if s("one_token_too_few__mask") else 0
        return last + (1 if s("one_token_too_many__mask") else shift)

    def _load_mask(self, name, positions, present):
        s = self.slips
        if s("tail_read_out_of_bounds", f"tail_read_out_of_bounds__{name}"):
            return torch.ones_like(present)
        if s("unused_slots_count", f"unused_slots_count__{name}"):
            return positions < self.capacity
        if s("newest_loaded_as_zeros"):
            return present & torch.cat([present[..., 1:], torch.zeros_like(present[..., :1])], dim=-1)
        return present

    # ------------------------------------------------------------------------------------------------ where they lie

    def _pages(self, positions, present, last):
        """The page of each position, [splits, batch, keys]."""
        s = self.slips
        blocks = positions // self.page_size
        if s("page_of_the_first_key"):
            tiles = blocks.unflatten(-1, (-1, self.key_rows))
            blocks = tiles[..., :1].expand_as(tiles).flatten(-2)
        ahead = torch.arange(positions.shape[-1]) >= self.key_rows  # entries that are loaded one step before
        if s("pages_of_the_tile_before"):
            blocks = torch.where(ahead, (positions - self.key_rows) // self.page_size, blocks)
        if s("table_ignored"):
            return blocks
        looked_up = positions
        if s("table_from_the_end"):
            blocks = -(-self.lengths.long()[:, None] // self.slots) - 1 - blocks
        if s("blocks_counted_from_the_split"):
            blocks = (positions - positions[..., :1]) // self.page_size
        if s("pages_of_the_first_tile"):
            looked_up = positions[..., : self.key_rows].repeat(1, 1, positions.shape[-1] // self.key_rows)
            blocks = looked_up // self.page_size
        if s("first_pages_of_the_sequence") and self.key_rows == self.shape.key_rows:
            looked_up = torch.where(ahead, positions, positions - positions[..., :1])
            blocks = looked_up // self.page_size
        row = torch.arange(self.batch)[None, :, None]
        stride = self.tables.shape[1] if s("strides_ignored__table") else self.tables.stride(0)
        if s("table_stride_from_lengths"):
            stride = -(-int(self.lengths.max()) // self.slots)
        if s("first_table_for_all", "first_table_for_all__no_page_is_0"):
            row = torch.zeros_like(row)
        chosen = torch.zeros_like(blocks) if s("pages_consecutive") else blocks
        if self.shape.table_masked:
            mask = torch.ones_like(present) if s("read_out_of_bounds") else present
            if looked_up is not positions:
                mask = looked_up < last[..., None]
        else:  # a page is looked up in every step of the loop
            mask = blocks * self.slots < last[..., None]
        if s("pages_ahead_cut_short"):
            mask = mask & (~ahead | (positions < last[..., None] - self.key_rows))
        pages = load(s, self.tables, row * stride + chosen * self.tables.stride(1), mask).long()
        if s("first_table_for_all__no_page_is_0"):
            pages = pages.clamp(min=0)
        return pages + blocks if s("pages_consecutive") else pages

    def _strides(self, name):
        s, tensor = self.slips, getattr(self, f"{name}s")
        strides = list(tensor.stride())
        other = self.values if name == "key" else self.keys
        theirs = "value" if name == "key" else "key"
        heads, slots, columns = tensor.shape[1:]
        plain = (heads * slots * columns, slots * columns, columns)
        for place, where in enumerate(("outer", "head", "row")):
            if s(f"strides_ignored__{name}_{where}_by_{theirs}", f"strides_ignored__{name}_by_{theirs}"):
                strides[place] = other.stride(place)
            ways = (f"{name}_{where}", name, f"both_{where}")
            if s("strides_ignored", *(f"strides_ignored__{way}" for way in ways)):
                strides[place] = plain[place]
        if s("first_head_for_all", f"first_head_for_all__{name}"):
            strides[1] = 0
        if s(f"first_sequence_for_all__{name}", "first_sequence_for_all") and not self.shape.paged:
            strides[0] = 0
        return strides

    def _loaded(self, name, positions, pages, mask, heads):
        """[splits, batch, heads, keys, head_dim] of key or value, as the kernel's pointers reach them."""
        s, tensor = self.slips, getattr(self, f"{name}s")
        outer, of_head, of_row, of_column = self._strides(name)
        head = heads[:, None]
        if self.shape.paged:
            slot = positions % self.page_size
            if s("slot_counted_from_the_split"):
                slot = (positions - positions[..., :1]) % self.page_size
            if s("slot_by_bit_mask"):
                slot = positions & (self.slots - 1)
            if s("offset_left_out"):
                slot = torch.zeros_like(slot)
            if s("page_not_multiplied"):
                outer = of_row
            if s("heads_of_a_page_forgotten"):
                outer = of_head
            if s("heads_of_a_page_forgotten__by_sizes"):
                outer = self.slots * self.head_dim
            rows = (pages * outer + slot * of_row)[:, :, None] + head * of_head  # [splits, batch, heads, keys]
        else:
            sequence = torch.arange(self.batch)[None, :, None, None]
            rows = sequence * outer + head * of_head + (positions * of_row)[:, :, None]
        offsets = rows[..., None] + torch.arange(self.head_dim) * of_column
        return load(s, tensor, offsets, mask[:, :, None, :, None]).float()

    def _queries(self):
        """Queries [batch, key_heads, group, head_dim], and the KV head of each place on the second dimension."""
        s, query = self.slips, self.query
        of_sequence, of_head, of_column = query.stride()
        if s("strides_ignored__query", "strides_ignored__query_sequence", "strides_ignored"):
            of_sequence = self.query_heads * self.head_dim
        if s("strides_ignored__query", "strides_ignored__query_head", "strides_ignored"):
            of_head = self.head_dim
        if s("first_sequence_for_all", "first_sequence_for_all__query"):
            of_sequence = 0
        head = torch.arange(self.query_heads)
        if s("group_offset_missing", "group_offset_missing__in_the_load"):
            head = head % self.group
        if s("rows_of_no_head_read"):
            head = self._rows_of_the_tile()
        if s(*ALL_HEADS):
            head = self._heads_of_all().flatten()
        offsets = (torch.arange(self.batch)[:, None] * of_sequence + head * of_head)[..., None]
        rows = load(s, query, offsets + torch.arange(self.head_dim) * of_column).float()
        if s(*ALL_HEADS):
            return rows.unflatten(1, (self.key_heads, -1)), torch.arange(self.key_heads)
        if s("by_modulo"):
            return rows[:, :, None], torch.arange(self.query_heads) % self.key_heads
        if s("by_count"):
            return rows[:, :, None], (torch.arange(self.query_heads) // self.key_heads).clamp(max=self.key_heads - 1)
        if s("by_count__unclamped"):
            return rows[:, :, None], torch.arange(self.query_heads) // self.key_heads
        return rows.unflatten(1, (self.key_heads, self.group)), torch.arange(self.key_heads)

    def _heads_of_all(self):
        """The query heads that a program takes where all of them are taken for a group, [key_heads, rows]."""
        tile = max(ROWS, 1 << (self.group - 1).bit_length())
        rows = min(self.query_heads, tile) if self.slips("group_of_all_heads__in_its_tile") else self.query_heads
        return torch.arange(self.key_heads)[:, None] * self.query_heads + torch.arange(rows)

    def _rows_of_the_tile(self):
        """Where a head comes to lie when every KV head has a whole tile of rows, [query_heads]."""
        head = torch.arange(self.query_heads)
        return head // self.group * max(ROWS, 1 << (self.group - 1).bit_length()) + head % self.group

    # -------------------------------------------------------------------------------------------------------- a tile

    def _scale(self) -> float:
        s, scale = self.slips, self.head_dim**-0.5
        if s("scale_missing"):
            scale = 1.0
        if s("scale_missing__in_base_two"):
            scale = LN_2
        if s("scale_twice"):
            scale *= self.head_dim**-0.5
        if s("scale_twice__in_base_two"):
            scale *= self.head_dim**-0.5 / LN_2
        if s("scale_inverted"):
            scale = self.head_dim**0.5
        for size in (64, 128):
            if s(f"scale_of_one_size__{size}"):
                scale = size**-0.5
        if s("log2e_missing"):
            scale *= LN_2
        if s("natural_exp", "natural_exp__and_log"):
            scale /= LN_2
        return scale

    def _step(self, scores, values, maximum, total, accumulator):
        s = self.slips
        if s("softmax_over_the_group"):
            top = scores.amax(3, keepdim=True)
        elif s("maximum_of_the_group"):
            top = scores.amax((3, 4), keepdim=True)[..., 0].expand_as(maximum)
            top = top.clamp(min=0.0) if self.group < ROWS else top  # rows of padding score 0
        else:
            top = scores.amax(4)
        if s("softmax_over_the_group"):
            weights = torch.exp(scores - top)
            weights = weights / weights.sum(3, keepdim=True)
            return maximum, torch.ones_like(total), accumulator + weights @ values
        new = top if s("maximum_forgets_the_old") else torch.maximum(maximum, top)
        if s("no_running_max", "no_running_max__empty_ones_right"):
            new = torch.zeros_like(new)
        reference = torch.where(new == -math.inf, 0.0, new) if s("guarded") else new
        weights = torch.exp(scores - (maximum if s("old_maximum_in_weights") else reference)[..., None])
        rescale = torch.exp(reference - maximum if s("rescale_turned_round") else maximum - reference)
        if s("no_running_max", "no_running_max__empty_ones_right"):
            rescale = torch.ones_like(rescale)
        added = weights.sum(4)
        if self.shape.by_dot and self.values.dtype != torch.float32 and not s("weights_in_float32"):
            weights = weights.to(self.values.dtype).float()
        product = weights @ values
        own_factor = torch.ones_like(rescale) if s("accumulator_not_rescaled", "nothing_rescaled") else rescale
        total = total * (torch.ones_like(rescale) if s("sum_not_rescaled", "nothing_rescaled") else rescale) + added
        if s("sum_rescaled_after_adding"):
            total = (total - added) + added * rescale
        if s("sum_not_kept"):
            total = added
        if s("accumulator_rescaled_after_adding"):
            accumulator = (accumulator + product) * own_factor[..., None]
        elif s("accumulator_overwritten"):
            accumulator = product
        else:
            accumulator = accumulator * own_factor[..., None] + product
        if s("accumulator_in_float16") and self.values.dtype == torch.float16:
            accumulator = accumulator.half().float()
        if s("divided_at_every_tile"):
            accumulator = accumulator / total[..., None]
        return maximum if s("maximum_not_updated") else new, total, accumulator

    # ------------------------------------------------------------------------------------------------ what is stored

    def _finished(self, maximum, total, accumulator, counted, has_keys):
        s = self.slips
        guarded = torch.where(total == 0, 1.0, total)
        divisor = guarded
        if s("divided_where_tokens"):
            divisor = torch.where((self.lengths > 0)[None, :, None, None], total, guarded)
        if s("empty_split_nan" if self.shape.split else "empty_sequence_nan"):
            divisor = total
        output = accumulator if s("not_divided") else accumulator / divisor[..., None]
        if s("divided_by_the_maximum"):
            output = accumulator / maximum[..., None]
        if s("weighed_already"):
            output = accumulator * torch.exp(maximum)[..., None]
        lse = self._log_sum_exp(maximum, total, guarded)
        written = torch.ones_like(total, dtype=torch.bool)
        if s("group_larger_than_the_tile"):
            written[:, :, :, ROWS:] = False
        if s("empty_split_nan__not_written"):
            written &= has_keys[..., None, None]
        if s("group_offset_missing"):
            written[:, :, 1:] = False
            output, lse = output[:, :, -1:].expand_as(output), lse[:, :, -1:].expand_as(lse)
        output, lse = output.masked_fill(~written[..., None], math.nan), lse.masked_fill(~written, math.nan)
        if s("rows_of_no_head_read", "rows_of_no_head_stored", "rows_a_group_apart", *ALL_HEADS):
            output, lse = self._stored_in_rows(output), self._stored_in_rows(lse)
        else:
            output, lse = output.flatten(2, 3), lse.flatten(2, 3)
        if self.shape.merged:
            both = MERGED.compute(s, output, lse)
            if both is NotImplemented:  # two slips of one step
                return both
            output, lse = both
            return self._in_the_result(output.to(self.query.dtype)), lse
        if self.shape.split:
            if s("splits_and_sequences_exchanged"):
                return tuple(part.transpose(0, 1).reshape(part.shape) for part in (output, lse))
            return output, lse
        output = self._in_the_result(output[0].to(self.query.dtype))
        theirs = s("output_by_other_strides", "output_by_other_strides__sequence", "output_by_other_strides__head")
        return self._stored_elsewhere(output) if theirs else output

    def _in_the_result(self, output):
        """What is read of rows that were stored side by side."""
        if not self.slips("output_laid_out_like_query"):
            return output
        return output.contiguous().as_strided(output.shape, torch.empty_like(self.query).stride())

    def _stored_in_rows(self, part):
        """[splits, batch, query_heads, ...] of what each program stores, [splits, batch, key_heads, rows, ...].

        Programs run in ascending order of the grid: of two that store into one row the later stays.
        """
        s = self.slips
        heads = torch.arange(self.query_heads).view(self.key_heads, -1)
        if s("rows_of_no_head_read", "rows_of_no_head_stored"):
            heads = self._rows_of_the_tile().view(self.key_heads, -1)
        if s(*ALL_HEADS):
            heads = self._heads_of_all()
        part = part.flatten(2, 3).unflatten(2, heads.shape)
        place = torch.arange(self.splits * self.batch).view(self.splits, self.batch, 1, 1)
        apart = self.query_heads * (self.key_heads if s(*ALL_HEADS) and self.shape.split else 1)  # key_heads · GROUP
        rows = place * (self.group if s("rows_a_group_apart") else apart) + heads
        if self.shape.split:  # the grid is (splits, KV heads, sequences)
            rows, part = rows.transpose(1, 2), part.transpose(1, 2)
        count = self.splits * self.batch * self.query_heads
        inside = rows < count
        self.slips.outside |= not bool(inside.all())
        rows, stored = rows[inside], part[inside]
        last = torch.full((count,), -1).scatter_reduce(0, rows, torch.arange(len(rows)), "amax")
        memory = torch.full((count, *part.shape[4:]), math.nan)
        memory[last >= 0] = stored[last[last >= 0]]
        return memory.view(self.splits, self.batch, self.query_heads, *part.shape[4:])

    def _stored_elsewhere(self, output):
        """Stored by the query's strides, or one of them, in memory that is contiguous."""
        of_sequence, of_head, of_column = self.query.stride()
        if self.slips("output_by_other_strides__head"):
            of_sequence = self.query_heads * self.head_dim
        if self.slips("output_by_other_strides__sequence"):
            of_head = self.head_dim
        sequence, head = torch.arange(self.batch)[:, None, None], torch.arange(self.query_heads)[:, None]
        offsets = sequence * of_sequence + head * of_head + torch.arange(self.head_dim) * of_column
        memory = torch.full((output.numel(),), math.nan, dtype=output.dtype)
        inside = offsets < output.numel()
        self.slips.outside |= not bool(inside.all())
        memory[offsets[inside]] = output[inside]
        return memory.view(output.shape)

    def _log_sum_exp(self, maximum, total, guarded):
        s = self.slips
        lse = maximum + torch.log(guarded)
        if s("no_running_max"):
            lse = torch.log(guarded)
        if s("no_running_max__empty_ones_right"):
            lse = torch.log(total)
        if s("log_of_sum_only"):
            lse = torch.log(guarded)
        if s("log_of_sum_only__empty_ones_right"):
            lse = torch.log(total)
        if s("lse_is_the_maximum"):
            lse = maximum
        if s("lse_is_the_sum"):
            lse = total
        if s("lse_in_base_2"):
            lse = lse / LN_2
        if s("lse_base_changed_the_wrong_way"):
            lse = lse / LN_2**2
        for digits in (0.69, 0.693, 0.7):
            if s(f"ln_2_of_few_digits__{digits}"):
                lse = lse * (digits / LN_2)
        if s("lse_rounded_to_16_bits"):
            lse = lse.to(self.query.dtype).float()
        if s("mixed_bases"):
            lse = maximum / LN_2 + torch.log(guarded)
        if s("mixed_bases__sum"):
            lse = maximum + torch.log2(guarded)
        if s("natural_exp"):  # the scores hold log2(e), and the log-sum-exp is taken for one in base 2
            lse = (maximum + torch.log2(guarded)) * LN_2
        if s("empty_split_counts"):
            lse = lse.masked_fill(total == 0, 0.0)
        return lse
