"""One step of attention over a cache: the new token stored, then every slot in use asked; with what can go wrong."""

from __future__ import annotations

import math

import torch

from course_lib.checker import edits, model_of
from course_lib.checker.specification.model import reaches_outside
from exercises.topics.cache_model import is_copied
from exercises.topics.cache_slips import WRITTEN_INTO_A_COPY
from exercises.topics.decode import by_count, by_division, by_modulo, first_head


def cached_step(query, key, value, key_cache, value_cache, past):
    """The output; the caches are written."""
    past = past.long()
    keys, values = key_cache, value_cache
    store(key, value, keys, values, past)
    return attend(query, keys.float(), values.float(), past + 1).to(query.dtype)


def store(key, value, keys, values, free):
    sequences = torch.arange(len(free))
    slots = free
    write(keys, sequences, slots, key)
    write(values, sequences, slots, value)


def write(cache, sequences, slots, rows):
    """Rows in these slots; what falls behind the cache is lost, and slot -1 is the last, as in PyTorch."""
    there = slots < cache.shape[2]
    if not there.all():
        reaches_outside()
    cache[sequences[there], :, slots[there]] = rows[there]


def attend(query, keys, values, lengths):
    heads = by_division(query.shape[1], keys.shape[1])
    scale = 1 / math.sqrt(query.shape[2])
    scores = (query.float()[:, :, None] @ keys[:, heads].transpose(2, 3))[:, :, 0] * scale  # [batch, heads, slots]
    hidden = (torch.arange(keys.shape[2]) >= lengths[:, None])[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, dim=2)
    output = (weights[:, :, None] @ values[:, heads])[:, :, 0]
    return output


def divided(weights):
    """Weights that add up to 1, for edits."""
    return weights / weights.sum(2, keepdim=True)


def in_a_copy(copied):
    """Caches of which the edit takes a copy where this is true of one."""
    key, value = (f"{cache}.clone() if {copied.format(cache)} else {cache}" for cache in ("key_cache", "value_cache"))
    return f"keys, values = {key}, {value}"


TOO_FEW = (
    "The query did not see the new token itself: only the tokens from before. The length was read before the new "
    "token was appended; after it past + 1 slots are in use."
)
BY_MODULO = (
    "Query head h read KV head h % key_heads. Neighbours share a head: h // (query_heads // key_heads), which is what "
    "`repeat_interleave` does and `repeat` does not."
)
CACHES, CLONES = "keys, values = key_cache, value_cache", "keys, values = key_cache.clone(), value_cache.clone()"
STORE, SLOTS, SCALE = "store(key, value, keys, values, past)", "slots = free", "1 / math.sqrt(query.shape[2])"
MASKED, SOFTMAX = "scores.masked_fill(hidden, -math.inf)", "torch.softmax(scores, dim=2)"
CHANGES = (
    *edits("Every sequence was treated with the past of the first one. Each has its own.",
        past_of_first_sequence=("past.long()", "past.long()[:1].expand(len(past))")),
    *edits("The cache does not hold the new key and value: the next step would miss them. Write them into the tensors "
        "given, at slot past.", not_stored=(CACHES, CLONES)),
    *edits(WRITTEN_INTO_A_COPY, written_into_a_copy=(CACHES, in_a_copy("not {}.is_contiguous()")),
        written_into_a_copy__two_dimensions=(CACHES, in_a_copy("is_copied({}, 2)")),
        written_into_a_copy__three_dimensions=(CACHES, in_a_copy("is_copied({}, 3)"))),
    *edits(WRITTEN_INTO_A_COPY, alone=True,
        written_into_a_copy__key=("keys, values = key_cache", "keys, values = key_cache.contiguous()"),
        written_into_a_copy__value=("= key_cache, value_cache", "= key_cache, value_cache.contiguous()")),
    *edits("The new key and value were neither stored nor asked for: the query saw the tokens from before alone. "
        "Write them at slot past first; then past + 1 slots are in use.",
        nothing_stored=(STORE, "pass", "past + 1", "past")),
    *edits("The query asked before the new key and value were stored, and met what happened to lie in their slot. "
        "Store first.", asked_before_stored=(CACHES, CLONES, STORE, "store(key, value, key_cache, value_cache, past)")),
    *edits("The new token was put behind the whole buffer, and the query saw all of it. The buffer has room: write at "
        "slot past, and show slots 0 to past.",
        behind_the_buffer=(STORE,
            "keys, values = (torch.cat([old, new[:, :, None]], 2) for old, new in ((keys, key), (values, value)))",
            "past + 1", "torch.full_like(past, keys.shape[2])")),
    *edits("The new value was not written: its slot in the value cache still holds what was there.",
        value_not_stored=("write(values, sequences, slots, value)", "pass")),
    *edits("The new key was not written: its slot in the key cache still holds what was there.",
        key_not_stored=("write(keys, sequences, slots, key)", "pass")),
    *edits("The new key was written into both caches. value_cache gets the new value.",
        keys_stored_as_values=("slots, value)", "slots, key)")),
    *edits("The new value was written into both caches. key_cache gets the new key.",
        values_stored_as_keys=("slots, key)", "slots, value)")),
    *edits("The weights were multiplied with the keys. They belong to the values.",
        keys_read_as_values=("values.float()", "keys.float()")),
    *edits("Every sequence was given the first one's new key and value. Each has its own row.",
        new_of_first_sequence=(SLOTS, "key, value = key[:1].expand_as(key), value[:1].expand_as(value)\nslots = free")),
    *edits("The new token was written to slot 0, over the oldest one. The first free slot is past.",
        stored_in_slot_zero=(SLOTS, "slots = 0 * free")),
    *edits("Every sequence's new token was written at the slot of the first one. Each has a past of its own.",
        slot_of_first_sequence=(SLOTS, "slots = free[:1].expand_as(free)")),
    *edits("The new token was written to the last slot of the buffer. The first free slot is past, and the buffer may "
        "have room behind it.",
        stored_in_last_slot=(SLOTS, "slots = torch.full_like(free, keys.shape[2] - 1)", "scores = scores.masked_fill(",
            "hidden = hidden | (torch.arange(keys.shape[2]) == lengths[:, None] - 1)[:, None]\n"
            "hidden[..., -1] = False\nscores = scores.masked_fill(")),
    *edits("The new token was written over the newest one in the cache. With `past` tokens in slots 0 to past - 1 the "
        "first free slot is `past`.", slot_too_early=(SLOTS, "slots = free - 1")),
    *edits("The new token was written one slot too far and the slot before it left as it was. With `past` tokens in "
        "slots 0 to past - 1, the first free slot is `past`.", slot_too_late=(SLOTS, "slots = free + 1")),
    *edits("Each sequence's new token was also written at the slots of the other sequences. `cache[:, :, past]` takes "
        "every sequence with every past; `cache[torch.arange(batch), :, past]` pairs them.",
        every_past=("write(keys,",
            "sequences, slots = (index.flatten() for index in torch.meshgrid(sequences, slots, indexing='ij'))\n"
            "key, value = key[sequences], value[sequences]\nwrite(keys,")),
    *edits(BY_MODULO, heads_by_modulo=("by_division", "by_modulo")),
    *edits(BY_MODULO, alone=True,
        heads_by_modulo__keys_alone=("keys[:, heads]", "keys[:, by_modulo(query.shape[1], keys.shape[1])]")),
    *edits(BY_MODULO,
        heads_by_modulo__in_their_order=("by_division", "by_modulo", "return output",
            "return output[:, torch.arange(output.shape[1]).view(-1, keys.shape[1]).T.flatten()]")),
    *edits("Query head h read KV head h // key_heads. It is divided by the group's size: h // (query_heads // "
        "key_heads).", heads_by_count=("by_division", "by_count")),
    *edits("Every query head read KV head 0.", first_head_only=("by_division", "first_head")),
    *edits("The scores are not scaled. Multiply them by 1/√head_dim.", not_scaled=(SCALE, "1.0")),
    *edits("The scores are divided by head_dim, or twice by its square root. Divide once by √head_dim.",
        scaled_by_head_dim=(SCALE, "1 / query.shape[2]")),
    *edits("The scale is taken from the number of slots. It is 1/√head_dim, whatever the cache's capacity.",
        scale_by_the_keys=(SCALE, "1 / math.sqrt(keys.shape[2])")),
    *edits("The scale is taken from the number of query heads. It is 1/√head_dim.",
        scale_by_the_heads=(SCALE, "1 / math.sqrt(query.shape[1])")),
    *edits("The scores are multiplied by √head_dim. They are divided by it.",
        scale_inverted=(SCALE, "math.sqrt(query.shape[2])")),
    *edits("The largest score is not subtracted before exp, so that large scores become infinite and ∞ / ∞ is NaN. "
        "Subtract each row's maximum: it changes no weight.",
        maximum_not_subtracted=(SOFTMAX, "divided(torch.exp(scores) * ~hidden)"),
        maximum_not_subtracted__masked_behind=(MASKED, "scores", SOFTMAX, "divided(torch.exp(scores) * ~hidden)")),
    *edits("Only the last sequence has its output, the others have zeros. Is the tensor for the output made once, "
        "before the loop over the sequences?", only_last_sequence=("return output", "output[:-1] = 0\nreturn output")),
    *edits("The scores themselves weigh the values. Their softmax does.", no_softmax=(SOFTMAX, "scores")),
    *edits("The softmax runs over the heads. It runs over the slots, for each query head by itself.",
        softmax_over_heads=("dim=2", "dim=1")),
    *edits("The query saw one slot too many, which no token of the sequence was written to. After the new token past "
        "+ 1 slots are in use.", one_token_too_many=("past + 1", "past + 2")),
    *edits(TOO_FEW, one_token_too_few=("past + 1", "past"),
        one_token_too_few__but_one=("past + 1", "past.clamp(min=1)")),
    *edits("The query saw the whole buffer. Slots behind the new token hold what happened to lie there: hide them, "
        "before the softmax.", whole_buffer=("past + 1", "torch.full_like(past, keys.shape[2])")),
    *edits("The query saw the first slot alone. That is what `is_causal=True` does with one query: PyTorch aligns the "
        "mask to the first key. The newest token sees everything, so no mask is needed but the length's.",
        only_first_slot=("past + 1", "torch.ones_like(past)")),
    *edits("Every sequence was attended as if it had as many tokens as the first. Each has a past of its own: past[:, "
        "None].", first_length_for_all=("past + 1", "past[:1].expand_as(past) + 1")),
    *edits("Every sequence was attended as if it had as many tokens as the longest of the batch. Each has a past of "
        "its own.", longest_for_all=("past + 1", "past.max().expand_as(past) + 1")),
    *edits("The mask is the wrong way round: the query saw the slots behind the new token, and none of its tokens.",
        mask_turned_round=(">= lengths", "< lengths")),
    *edits("The hidden slots were set to 0 after the softmax. Their scores are in its sum, so the weights that are "
        "left add up to less than 1: set the scores to minus infinity before it.",
        masked_after_softmax=(MASKED, "scores", SOFTMAX, "torch.softmax(scores, dim=2).masked_fill(hidden, 0.0)")),
    *edits("The hidden slots were set to 0 after the softmax, and the weights divided by their new sum. Where a "
        "hidden score is much the largest, all other weights are 0 by then, and 0 / 0 is NaN: set the scores to minus "
        "infinity before it.",
        masked_after_softmax__and_divided=(MASKED, "scores", SOFTMAX,
            "divided(torch.softmax(scores, dim=2).masked_fill(hidden, 0.0))")),
    *edits("The hidden slots were given a finite score, -100 or -10,000 perhaps. Where all others are lower still, "
        "the hidden ones decide: a hidden score is minus infinity.", hidden_scores_not_low__100=("-math.inf", "-100.0"),
        hidden_scores_not_low__1000=("-math.inf", "-1000.0"), hidden_scores_not_low__10000=("-math.inf", "-10000.0")),
    *edits("The hidden slots were given a score of 0, and e⁰ = 1 is a weight. A hidden score is minus infinity.",
        hidden_scores_zero=("-math.inf", "0.0")),
    *edits("", empty_zero=("return output", "return torch.where(hidden.all(2, keepdim=True), 0.0, output)"),
        empty_mean=("-math.inf", "-1e30")),
)  # fmt: skip
STEP = model_of(cached_step, CHANGES, (store, attend), uses=(is_copied, by_count, by_modulo, first_head))
