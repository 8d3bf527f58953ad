"""Exercise 5.4: which slots of a cache each new token sees.

`past` counts the tokens that a sequence has in its cache before the step, int32 [batch]; the new tokens are not among
them.
"""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake


def mask_oracle(past, new_tokens, capacity):
    slots, queries = torch.arange(capacity), torch.arange(new_tokens)
    return slots <= (past[:, None] + queries)[:, :, None]


def mask_cases(draw):
    def lengths(*values):
        return torch.tensor(values, dtype=torch.int32)

    a, b, new = draw.integer(1, 9), draw.integer(10, 40), draw.integer(2, 7)
    return [
        Case("3 new tokens behind 2, 8 slots", (lengths(2), 3, 8)),
        Case("a prompt of 4 into an empty cache of 4", (lengths(0), 4, 4)),
        Case("one new token each, behind 3, 0 and 6, 7 slots", (lengths(3, 0, 6), 1, 7)),
        Case(f"{new} new tokens behind {a} and {b}, 50 slots", (lengths(a, b), new, 50)),
        Case("a single slot", (lengths(0), 1, 1)),
        Case("5 new tokens up to the end: behind 11 and 2, 16 slots", (lengths(11, 2), 5, 16)),
    ]


def _mask(compare):
    """A slip: `compare(slots, past [batch, 1, 1], queries [new, 1], new_tokens, capacity)` broadcasts to the mask."""

    def result(past, new_tokens, capacity):
        slots, queries = torch.arange(capacity), torch.arange(new_tokens)[:, None]
        shape = (len(past), new_tokens, capacity)
        return compare(slots, past.long()[:, None, None], queries, new_tokens, capacity).expand(shape)

    return result


EXERCISE = Exercise(
    id="5.4",
    title="The causal mask over a cache",
    entries=("visible_slots",),
    cases=mask_cases,
    oracle=mask_oracle,
    hints=(
        "At which position does the i-th new token of a sequence stand, if `past` tokens came before?",
        "At position past + i. Slot j holds the token at position j. So which slots may it see?",
        "All with j <= past + i. Slots that hold no token yet lie behind the newest position, and the same comparison "
        "hides them.",
        "`torch.arange(capacity)` is [capacity]; `past[:, None] + torch.arange(new_tokens)` is [batch, new_tokens]. "
        "Compare them as [1, 1, capacity] and [batch, new_tokens, 1].",
    ),
    mistakes=(
        Mistake(
            "no_offset",
            "The mask knows nothing of the past: new token i sees the first i + 1 slots. It stands at position past + "
            "i.",
            result=_mask(lambda slots, past, queries, new, capacity: slots <= queries),
        ),
        Mistake(
            "own_slot_hidden",
            "A new token does not see its own slot. Its key is appended before it asks: take <=, not <.",
            result=_mask(lambda slots, past, queries, new, capacity: slots < past + queries),
        ),
        Mistake(
            "one_too_many",
            "Every new token sees one slot too many, which belongs to the next token or to none. Token i stands at "
            "position past + i, as counting begins at 0.",
            result=_mask(lambda slots, past, queries, new, capacity: slots <= past + queries + 1),
        ),
        Mistake(
            "aligned_to_capacity",
            "The mask is aligned to the end of the buffer, and the last new token sees all of it. It stands where the "
            "tokens end, at past + new_tokens - 1; behind it the buffer holds nothing.",
            result=_mask(lambda slots, past, queries, new, capacity: slots <= capacity - new + queries),
        ),
        Mistake(
            "past_of_first_sequence",
            "Every sequence was given the past of the first. Each has its own: past[:, None].",
            result=_mask(lambda slots, past, queries, new, capacity: slots <= past[:1] + queries),
        ),
        Mistake(
            "past_hidden",
            "The tokens from before are hidden: a new token sees only the new ones. What the cache is for is that it "
            "sees all up to its own position.",
            result=_mask(lambda slots, past, queries, new, capacity: (slots >= past) & (slots <= past + queries)),
        ),
        Mistake(
            "not_causal",
            "Every new token sees all slots in use, so an earlier one sees later ones. Token i sees the slots up to "
            "past + i.",
            result=_mask(lambda slots, past, queries, new, capacity: slots < past + new),
        ),
        Mistake(
            "new_tokens_apart",
            "A new token sees the slots from before and its own, and none of the new tokens before it. Those stand in "
            "slots past to past + i - 1: it sees them as well.",
            result=_mask(lambda slots, past, queries, new, capacity: (slots < past) | (slots == past + queries)),
        ),
        Mistake(
            "only_unused_hidden",
            "The mask shows the slots from before and none of the new tokens. They are in the cache too: token i sees "
            "the slots up to past + i.",
            result=_mask(lambda slots, past, queries, new, capacity: slots < past),
        ),
        Mistake(
            "turned_round",
            "The mask is the wrong way round: True stands where a slot may be seen.",
            result=_mask(lambda slots, past, queries, new, capacity: slots > past + queries),
        ),
    ),
)
