"""Exercise 12.4: the residual window of a quantised cache as a state machine, judged on scripts of appends."""

from __future__ import annotations

from functools import partial

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level

# The driver is sent to the worker by its source alone, so it stands by itself.


def replay(functions, group, window, script, twice=False):
    """Append keys that are numbered, as many at a time as the script says, and tell what every right window has.

    The keys' memory is used again after each call. With `twice` a second window, made anew, gets the same script.
    """
    import torch

    given, labels, returned, story, total, before = [], [], [], {}, 0, []
    buffer = torch.empty(max(script) + 1, 3)

    def numbers(keys):
        if not isinstance(keys, torch.Tensor) or keys.dim() != 2 or keys.shape[1] != 3:
            return f"{type(keys).__name__} {list(getattr(keys, 'shape', ()))} for [count, 3]"
        runs = []
        for number in keys[:, 0].tolist():
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        words = (f"{first:.0f} to {last:.0f}" if last > first else f"{first:.0f}" for first, last in runs[:4])
        return f"key{'s' * (len(keys) > 1)} " + " and ".join(words) if runs else "no keys"

    def quantise(keys):
        given.append((keys, keys.clone()))
        labels.append(object())
        return labels[-1]

    book = functions["KeyWindow"](group, window, quantise)
    for turn, count in enumerate(script, 1):
        buffer[:count] = torch.arange(total, total + count, dtype=torch.float32)[:, None]
        book.append(buffer[:count])
        total += count
        buffer.fill_(-7.0)
        recent = book.recent()
        groups = [labels.index(part) if part in labels else -1 for part in book.groups()]
        new = [numbers(given[place][1]) if place >= 0 else "by another window" for place in groups[len(before) :]]
        told = {  # in short pieces, because a verdict shows the beginning of each alone
            "recent()": numbers(recent),
            "quantised": (", ".join(new[:4]) or "no keys") + f" ({len(new)} in all)" * (len(new) > 4),
            "quantised after these": ", ".join(new[4:]) or "no keys",
            "groups()": "as quantised",
            "what changed": "nothing",
        }
        if groups[: len(before)] != before or len(given) != len(groups):
            told["groups()"] = f"{len(groups)} of {len(given)} in the order {groups[:6]}"
        if not all(torch.equal(now, then) for now, then in given):
            told["what changed"] = "what quantise was given"
        elif not all(torch.equal(now, then) for now, then in returned):
            told["what changed"] = "what recent() returned earlier"
        if isinstance(recent, torch.Tensor):
            returned.append((recent, recent.clone()))
        before = groups
        story |= {f"{what} after append {turn}, {total} keys in all": words for what, words in told.items()}
    if twice:
        again = replay(functions, group, window, script)
        story |= {f"a second window's {what}": words for what, words in again.items()}
    return story


def appended(whole, kept, keys, group, window, quantise):
    """The keys that are whole after an append; `kept` gets what quantise returned."""
    whole = keys.clone() if whole is None else torch.cat((whole, keys))
    for _ in range(len(whole)):
        if len(whole) < window + group:
            break
        oldest = whole[:group]
        kept.append(quantise(oldest.clone()))
        whole = whole[group:]
    return whole


class _Window:
    def __init__(self, step, group, window, quantise):
        self.step, self.sizes = step, (group, window, quantise)
        self.kept, self.whole = [], None

    def append(self, keys):
        self.whole = self.step(self.whole, self.kept, keys, *self.sizes)

    def groups(self):
        return list(self.kept)

    def recent(self):
        return self.whole


def window_story(group, window, script, twice=False):
    return replay({"KeyWindow": partial(_Window, appended)}, group, window, script, twice)


def window_cases(draw):
    def case(name, *args):
        return Case(name, args, driver=replay)

    return [
        case("groups of 4, no window, one key at a time", 4, 0, [1] * 9),
        case("groups of 4, a window of 6, one key at a time", 4, 6, [1] * 15),
        case("63 keys, then one, then one", 64, 0, [63, 1, 1]),
        case("64 keys at once", 64, 0, [64]),
        case("65 keys at once", 64, 0, [65]),
        case("a window of 128: 191 keys, then one, then one", 64, 128, [191, 1, 1]),
        case("a prompt of 300 keys, then 22 one by one", 64, 0, [300] + [1] * 22),
        case("a prompt of 300 keys, a window of 100", 64, 100, [300, 30, 30]),
        case("a prompt of 12 keys, twice as large as all that stays", 4, 2, [12, 0, 12]),
        case("nothing at first", 4, 0, [0, 3, 0, 1, 0]),
        case("groups of one key", 1, 2, [1, 2, 3, 1]),
        case("two windows, one after the other", 4, 1, [3, 5, 1], True),
        case("many at a time, of any number", 32, 50, [draw.integer(0, 90) for _ in range(12)]),
    ]


LIMIT = "len(whole) < window + group"
OLDEST, REST = "oldest = whole[:group]", "whole = whole[group:]"
JOINED = "keys.clone() if whole is None else torch.cat((whole, keys))"
KEPT = "kept.append(quantise(oldest.clone()))"
CHANGES = (
    *edits("A full group is quantised one key too late. It is due as soon as window + group keys are whole: use >=, "
        "and compare after the new keys were added.", one_key_late=(LIMIT, "len(whole) <= window + group")),
    *edits("A group is quantised one key too early, so that fewer than `window` keys, or no full group, are whole.",
        one_key_early=(LIMIT, "len(whole) < window + group - 1")),
    *edits("An append quantises one group at most, but many keys at once can fill several. Repeat with `while`.",
        one_group_an_append=("range(len(whole))", "range(1)")),
    *edits("The window is ignored: every full group is quantised, and the newest keys with it. `window` keys must stay "
        "whole: wait for window + group.", window_ignored=(LIMIT, "len(whole) < group")),
    *edits("As soon as one group was due, all full groups were quantised, and the newest keys with them. Each waits "
        "until window + group keys are whole.",
        window_flushed=(LIMIT, "len(whole) < (group if _ else window + group)"),
        window_flushed__of_all=(LIMIT, "len(whole) < (group if _ else max(window, group))")),
    *edits("whole[-window:] keeps all keys where window is 0, because -0 is 0, and it loses keys where more of them "
        "stay. Keep whole[group:].",
        last_window_kept=("range(len(whole))", "range(1)", REST, "whole = whole[-window:]")),
    *edits("Keys are quantised as soon as more than `window` are whole, so groups are not full. Wait until there are "
        "window + group.", groups_not_full=(LIMIT, "len(whole) <= window")),
    *edits("`window` was taken for the number of all whole keys, so quantising begins too early and too few stay "
        "whole. Wait until window + group are whole.", window_of_all=(LIMIT, "len(whole) < max(window, group)")),
    *edits("The newest keys are quantised, and old ones stay whole. Take the group from the front.",
        newest_quantised=(OLDEST, "oldest = whole[-group:]", REST, "whole = whole[:-group]")),
    *edits("Keys that were quantised stay in the window, so they are there twice. Remove them: whole[group:].",
        still_in_the_window=("range(len(whole))", "range(1)", REST, "pass")),
    *edits("The window is emptied when a group is quantised, and keys that were in no group are lost. Keep "
        "whole[group:].", rest_lost=(REST, "whole = whole[:0]"),
        rest_lost__one_more=(REST, "whole = whole[group + 1 :]")),
    *edits("All whole keys were quantised as one group. A group has exactly `group` keys: repeat until fewer than "
        "window + group are whole.",
        all_in_one_group=(OLDEST, "oldest = whole", REST, "whole = whole[:0]"),
        all_in_one_group__but_the_window=(OLDEST, "oldest = whole[: len(whole) - window]", REST,
        "whole = whole[len(whole) - window :]")),
    *edits("The groups are not in the order of their tokens. Add each at the end of the list.",
        groups_reversed=(KEPT, "kept.insert(0, quantise(oldest.clone()))")),
    *edits("groups() has the last group alone. Keep what quantise returned for each group in a list.",
        last_group_alone=(KEPT, "kept[:] = [quantise(oldest.clone())]")),
    *edits("New keys stand before old ones. Add them at the end.",
        new_keys_first=(JOINED, "keys.clone() if whole is None else torch.cat((keys, whole))")),
    *edits("New keys replace those that are whole. Join them: torch.cat((whole, keys)).",
        old_keys_replaced=(JOINED, "keys.clone()")),
    *edits("A view of the caller's keys was kept. The caller uses that memory again, and the window changes with it. "
        "Keep a copy: keys.clone(). A slice is a view, too.",
        view_of_the_callers=(JOINED, "torch.cat((whole, keys)) if whole is not None and len(whole) else keys"),
        view_of_the_callers__first=(JOINED,
        "torch.cat((whole, keys)) if whole is not None else keys")),
)  # fmt: skip


SECOND = "a second window's "


def _said(words):
    return lambda case, seen, got: any(words in str(told) for told in (got or {}).values())


def _state_is_shared(case, seen, got):
    """Whether the second window does other things in the same script, or one has groups of another case."""
    if _said("by another window")(case, seen, got):
        return True
    of_second = {what: words for what, words in (got or {}).items() if what.startswith(SECOND)}
    return any(got[what.removeprefix(SECOND)] != words for what, words in of_second.items())


EXERCISE = Exercise(
    id="12.4",
    title="The residual window",
    entries=("KeyWindow",),
    cases=window_cases,
    oracle=window_story,
    contracts=(
        Contract(
            lambda draw, *, group, window, largest: (group, window, [draw.integer(0, largest) for _ in range(10)]),
            choices={
                "group": (1, 2, 7, 64),
                "window": (0, 1, 5, 128),
                "largest": (Level(3, "few keys at a time"), Level(200, "many keys at a time")),
            },
            says={"group": "at least 1", "window": "at least 0", "largest": "count at least 0"},
            driver=replay,
            most=6,
        ),
    ),
    models=(model_of(window_story, CHANGES, (appended,)),),
    hints=(
        "Keep two things: a list of what quantise returned, and one tensor of the keys that are whole.",
        "append: first join the new keys to the whole ones (torch.cat copies them). Then quantise the oldest `group` "
        "while at least window + group are whole.",
        "What you keep and hand out must be memory of its own. A slice of the caller's tensor, or of a buffer that you "
        "write again, changes later: clone() it.",
        "while len(whole) >= window + group: kept.append(quantise(whole[:group].clone())); whole = whole[group:]",
    ),
    mistakes=(
        Mistake(
            "state_shared",
            "Two windows are not independent: the second, made anew, has keys or groups of the first. Make the list "
            "and the tensor in `__init__`, as attributes of self.",
            when=_state_is_shared,
        ),
        Mistake(
            "group_changes_later",
            "A tensor that quantise was given has changed afterwards. It is a view of memory that you, or the caller, "
            "write again. Give it a copy: clone().",
            when=_said("what quantise was given"),
        ),
        Mistake(
            "recent_changes_later",
            "What recent() returned has changed with a later append. It is a view of memory that you write again. "
            "Return a copy: clone().",
            when=_said("what recent() returned earlier"),
        ),
    ),
)
