"""Exercise 5.4: which slots of a cache each new token sees.

`past` counts the tokens that a sequence has in its cache before the step, int32 [batch]; the new tokens are not among
them.
"""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level


def visible(past, new_tokens, capacity):
    """Whether new token i of a sequence sees a slot, bool [batch, new_tokens, capacity]."""
    slots, queries = torch.arange(capacity), torch.arange(new_tokens)[:, None]
    past = past.long()[:, None, None]
    position = past + queries
    seen = slots <= position
    return seen


def mask_cases(draw):
    def lengths(*values):
        return torch.tensor(values, dtype=torch.int32)

    a, b, new = draw.integer(1, 9), draw.integer(10, 40), draw.integer(2, 7)
    return [
        Case("3 new tokens behind 2, 8 slots", (lengths(2), 3, 8)),
        Case("a prompt of 4 into an empty cache of 4", (lengths(0), 4, 4)),
        Case("one new token each, behind 3, 0 and 6, 7 slots", (lengths(3, 0, 6), 1, 7)),
        Case(f"{new} new tokens behind {a} and {b}, 50 slots", (lengths(a, b), new, 50)),
        Case(f"the same sizes, behind {b} and {a}", (lengths(b, a), new, 50)),
        Case("a single slot", (lengths(0), 1, 1)),
        Case("2 new tokens behind more than 2,048", (lengths(2048 + a), 2, 2100)),
        Case("5 new tokens up to the end: behind 11 and 2, 16 slots", (lengths(11, 2), 5, 16)),
    ]


def drawn(draw, *, batch, new_tokens, past):
    """What the contract's choices make: arguments of `visible_slots`."""
    before, capacity = past(draw, batch, new_tokens)
    return torch.tensor(before, dtype=torch.int32), new_tokens, capacity


def _somewhere(draw, batch, new_tokens):
    return [draw.integer(0, 12) for _ in range(batch)], 12 + new_tokens + draw.integer(0, 5)


def _empty(draw, batch, new_tokens):
    return [0] * batch, new_tokens + draw.integer(1, 5)


def _to_the_end(draw, batch, new_tokens):
    before = [draw.integer(0, 12) for _ in range(batch)]
    return before, max(before) + new_tokens


CONTRACT = Contract(
    drawn,
    choices={
        "batch": (1, 2, 5),
        "new_tokens": (1, 2, 7, 17),
        "past": (
            Level(_somewhere, "behind some tokens"),
            Level(_empty, "empty caches"),
            Level(_to_the_end, "up to the last slot"),
        ),
    },
    says={"new_tokens": "new_tokens for every sequence, at least one; all of them fit"},
)

PAST, QUERY = "past.long()[:, None, None]", "torch.arange(new_tokens)"
POSITION, SEEN = "past + queries", "slots <= position"
CHANGES = (
    *edits("Every new token of a sequence sees as much as the first one. Token i stands i positions after it.",
        all_as_the_first=(QUERY, "0 * torch.arange(new_tokens)")),
    *edits("The mask leaves out `past`: new token i sees the first i + 1 slots. It stands at position past + i.",
        no_offset=(PAST, "0 * past.long()[:, None, None]")),
    *edits("A new token does not see its own slot. Its key is in the cache before its query is compared with the "
        "keys: take <=, not <.", own_slot_hidden=(POSITION, "past + queries - 1")),
    *edits("Every new token sees one slot too many, which belongs to the next token or to none. Token i stands at "
        "position past + i, as counting begins at 0.", one_too_many=(POSITION, "past + queries + 1")),
    *edits("The mask is aligned to the end of the buffer, so the last new token sees all of it. The tokens end at "
        "past + new_tokens - 1, and the slots after that are empty.",
        aligned_to_capacity=(POSITION, "0 * past + capacity - new_tokens + queries")),
    *edits("Every sequence was given the past of the longest one. Each has its own: past[:, None].",
        past_of_longest_sequence=(PAST, "past.long()[:, None, None].amax(0).expand(len(past), 1, 1)")),
    *edits("Every sequence was given the past of the first. Each has its own: past[:, None].",
        past_of_first_sequence=(PAST, "past.long()[:, None, None][:1].expand(len(past), 1, 1)")),
    *(edit for name, diagonal in (("longest", "past.amax(0)"), ("first", "past[0]"), ("shortest", "past.amin(0)"))
        for edit in edits(f"The diagonal of every sequence stands where that of the {name} one does, and is cut at the "
        "sequence's last token. Each has a past of its own: token i of a sequence sees the slots up to past[:, None] "
        "+ i.", **{f"diagonal_of_another_sequence__{name}":
            (SEEN, f"(slots <= {diagonal} + queries) & (slots < past + new_tokens)")})),
    *edits("The earlier tokens are hidden: a new token sees only the new ones. It must see all slots up to its own "
        "position.", past_hidden=(SEEN, "(slots <= position) & (slots >= past)")),
    *edits("Every new token sees all slots in use, so an earlier one sees later ones. Token i sees the slots up to "
        "past + i.", not_causal=(QUERY, "torch.full((new_tokens,), new_tokens - 1)")),
    *edits("A new token sees its own slot alone. It must see all slots up to it: <=, not ==.",
        own_slot_alone=(SEEN, "slots == position")),
    *edits("The new tokens are counted from the last to the first: the first one sees as much as the last should. "
        "Token i stands at position past + i.", newest_first=(QUERY, "torch.arange(new_tokens).flip(0)")),
    *edits("A single new token sees the whole buffer. It sees every token that is there, and the slots behind past "
        "hold none: one comparison does for any number of new tokens.",
        one_token_sees_all=(SEEN, "(slots <= position) | (new_tokens == 1)")),
    *edits("A new token sees the slots from before and its own, and none of the new tokens before it. Those stand in "
        "slots past to past + i - 1: it sees them as well.",
        new_tokens_apart=(SEEN, "(slots < past) | (slots == position)")),
    *edits("The mask shows the slots from before and none of the new tokens. They are in the cache too: token i sees "
        "the slots up to past + i.", only_unused_hidden=(SEEN, "(slots < past).expand(-1, new_tokens, -1)")),
    *(edit for name in ("int8", "float16")
        for edit in edits(f"Positions are kept as {name}, which does not hold every slot of a long cache. past is "
        "int32: leave it so wide, or wider.", alone=True,
        **{f"positions_in_few_bits__{name}": (POSITION, f"(past + queries).to(torch.{name})")})),
    *edits("The mask is the wrong way round: True stands where a slot may be seen.",
        turned_round=("return seen", "return ~seen")),
)  # fmt: skip


EXERCISE = Exercise(
    id="5.4",
    title="The causal mask over a cache",
    entries=("visible_slots",),
    cases=mask_cases,
    oracle=visible,
    contracts=(CONTRACT,),
    models=(model_of(visible, CHANGES),),
    hints=(
        "At which position does the i-th new token of a sequence stand, if `past` tokens came before?",
        "At position past + i. Slot j holds the token at position j. So which slots may it see?",
        "All with j <= past + i. Empty slots lie after the newest position, so the same comparison hides them.",
        "`torch.arange(capacity)` is [capacity]; `past[:, None] + torch.arange(new_tokens)` is [batch, new_tokens]. "
        "Compare them as [1, 1, capacity] and [batch, new_tokens, 1].",
    ),
)
