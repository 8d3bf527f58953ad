"""Exercise 8.1: how much of a chip a decode kernel fills."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, Slip


def occupancy_oracle(batch, key_heads, splits, slots):
    programs = batch * key_heads * splits
    waves = -(-programs // slots)
    return programs, waves, programs / (waves * slots)


def splits_for_one_wave_oracle(batch, key_heads, slots):
    return max(1, slots // (batch * key_heads))


def occupancy_cases(draw):
    batch, heads, slots = draw.integer(2, 9), draw.choice((2, 4, 8)), draw.choice((40, 84, 108, 142, 148))
    splits = draw.integer(3, 60)
    return [
        Case("1 sequence, 8 KV heads, no split, 132 slots", (1, 8, 1, 132), "occupancy"),
        Case("16 splits: nearly one wave", (1, 8, 16, 132), "occupancy"),
        Case("17 splits: 4 programs too many for one wave", (1, 8, 17, 132), "occupancy"),
        Case("33 splits: two whole waves", (1, 8, 33, 132), "occupancy"),
        Case("a whole wave of an A100", (27, 4, 1, 108), "occupancy"),
        Case("64 sequences, 8 KV heads, 264 slots", (64, 8, 1, 264), "occupancy"),
        Case(
            f"{batch} sequences, {heads} KV heads, {splits} splits, {slots} slots",
            (batch, heads, splits, slots),
            "occupancy",
        ),
        Case("1 sequence, 8 KV heads, 132 slots", (1, 8, 132), "splits_for_one_wave"),
        Case("1 sequence, 1 KV head", (1, 1, 132), "splits_for_one_wave"),
        Case("4 sequences, 8 KV heads, 264 slots", (4, 8, 264), "splits_for_one_wave"),
        Case("6 sequences, 8 KV heads, 132 slots: 2.75", (6, 8, 132), "splits_for_one_wave"),
        Case("11 sequences, 4 KV heads, 132 slots: even", (11, 4, 132), "splits_for_one_wave"),
        Case("16 sequences, 8 KV heads, 132 slots: hardly room for one", (16, 8, 132), "splits_for_one_wave"),
        Case("64 sequences, 8 KV heads, 132 slots: too many already", (64, 8, 132), "splits_for_one_wave"),
        Case(f"{batch} sequences, {heads} KV heads, {slots} slots", (batch, heads, slots), "splits_for_one_wave"),
    ]


def _for_arguments(count, function):
    """A slip's formula for one of two functions, told apart by how many arguments they take."""
    return lambda *args: function(*args) if len(args) == count else None


def _one_wave_too_many(batch, heads, splits, slots):
    programs = batch * heads * splits
    waves = programs // slots + 1
    return programs, waves, programs / (waves * slots)


def _busiest(batch, heads, slots):
    """The number of splits whose programs fill the largest share of their waves, however many these are."""
    return max(range(1, slots + 1), key=lambda splits: occupancy_oracle(batch, heads, splits, slots)[2])


def _busy_of_few_digits(digits):
    def formula(*args):
        programs, waves, busy = occupancy_oracle(*args)
        return programs, waves, round(busy, digits)

    return _for_arguments(4, formula)


def _occupancy_of(got):
    """The three numbers of an answer; None when it is something else."""
    numbers = isinstance(got, (tuple, list)) and len(got) == 3 and all(isinstance(x, (int, float)) for x in got)
    return tuple(got) if numbers else None


def _busy_is(share):
    """A `when`: programs and waves are right, and the busy share is `share(programs, waves, slots)` instead."""

    def when(case, seen, got):
        numbers = _occupancy_of(got) if len(case.args) == 4 else None
        if numbers is None:
            return False
        programs, waves, busy = occupancy_oracle(*case.args)
        told = share(programs, waves, case.args[3])
        return numbers[:2] == (programs, waves) and abs(numbers[2] - told) < 1e-6 < abs(busy - told)

    return when


def _waves_rounded_down(case, seen, got):
    numbers = _occupancy_of(got) if len(case.args) == 4 else None
    if numbers is None:
        return False
    programs, waves, _ = occupancy_oracle(*case.args)
    return numbers[0] == programs and numbers[1] != waves and numbers[1] in (programs // case.args[3], waves - 1)


EXERCISE = Exercise(
    id="8.1",
    title="How much of the chip works",
    entries=("occupancy", "splits_for_one_wave"),
    cases=occupancy_cases,
    oracle={"occupancy": occupancy_oracle, "splits_for_one_wave": splits_for_one_wave_oracle},
    hints=(
        "There is one program for each sequence, KV head and split. How often must you fill the chip until all of them "
        "have run? The last wave may leave slots empty.",
        "Round the waves up: -(-programs // slots), or triton.cdiv(programs, slots). All waves together have waves · "
        "slots slots. Which share of them holds a program?",
        "For one wave, batch · key_heads · splits may be at most slots. So divide slots by batch · key_heads, round "
        "down, and return at least 1.",
    ),
    slips=(
        Slip(
            "busy_in_percent",
            "The busy share is given in percent; a share between 0 and 1 is asked for.",
            formula=_for_arguments(4, lambda *args: (*occupancy_oracle(*args)[:2], 100 * occupancy_oracle(*args)[2])),
        ),
        Slip(
            "splits_forgotten",
            "The splits are missing from the number of programs. Each KV head of each sequence has one program for "
            "every split.",
            formula=_for_arguments(4, lambda batch, heads, splits, slots: occupancy_oracle(batch, heads, 1, slots)),
        ),
        Slip(
            "batch_forgotten",
            "The sequences of the batch are missing from the number of programs: each has its own keys and its own "
            "programs.",
            formula=_for_arguments(4, lambda batch, heads, splits, slots: occupancy_oracle(1, heads, splits, slots)),
        ),
        Slip(
            "one_wave_too_many",
            "The waves are rounded down and 1 added, which is one too many where the programs fill whole waves. Round "
            "up: -(-programs // slots).",
            formula=_for_arguments(4, _one_wave_too_many),
        ),
        Slip(
            "busy_rounded",
            "The busy share is rounded to a few digits. Return the quotient as it is: whoever prints it rounds it.",
            formula=tuple(_busy_of_few_digits(digits) for digits in (1, 2, 3, 4)),
        ),
        Slip(
            "busiest_chosen",
            "splits_for_one_wave looks for the largest busy share, which may take several waves. The largest number of "
            "splits whose programs fit in one wave is asked for.",
            formula=_for_arguments(3, _busiest),
        ),
        Slip(
            "full_wave_refused",
            "splits_for_one_wave wants fewer programs than slots. As many as slots fit in one wave too: at most slots.",
            formula=(
                _for_arguments(3, lambda batch, heads, slots: max(1, (slots - 1) // (batch * heads))),
                _for_arguments(3, lambda batch, heads, slots: max(1, -(-slots // (batch * heads)) - 1)),
            ),
        ),
        Slip(
            "divided_twice_with_rounding",
            "splits_for_one_wave divides twice and rounds in between, or up at the end. Divide the slots by batch · "
            "key_heads, once, and round down.",
            formula=tuple(
                _for_arguments(3, function)
                for function in (
                    lambda batch, heads, slots: max(1, -(-(slots // heads) // batch)),
                    lambda batch, heads, slots: max(1, -(-(slots // batch) // heads)),
                    lambda batch, heads, slots: max(1, -(-slots // heads) // batch),
                    lambda batch, heads, slots: max(1, -(-slots // batch) // heads),
                )
            ),
        ),
        Slip(
            "splits_capped",
            "splits_for_one_wave has a largest number of splits, which nobody asked for.",
            formula=tuple(
                _for_arguments(3, lambda batch, heads, slots, most=most: max(1, min(most, slots // (batch * heads))))
                for most in (16, 32, 64, 128)
            ),
        ),
        Slip(
            "one_split_too_many",
            "splits_for_one_wave rounds up, and the programs no longer fit in one wave. Round down.",
            formula=_for_arguments(3, lambda batch, heads, slots: -(-slots // (batch * heads))),
        ),
        Slip(
            "split_to_the_nearest",
            "splits_for_one_wave rounds to the nearest whole number. Half of the time that is too many. Round down.",
            formula=_for_arguments(3, lambda batch, heads, slots: max(1, round(slots / (batch * heads)))),
        ),
        Slip(
            "no_split_at_all",
            "With more sequences and heads than slots the division in splits_for_one_wave gives 0, and nothing would "
            "be launched. There is always at least 1.",
            formula=_for_arguments(3, lambda batch, heads, slots: slots // (batch * heads)),
        ),
        Slip(
            "batch_forgotten_in_splits",
            "splits_for_one_wave divides the slots by the KV heads only. The batch's sequences share them too.",
            formula=_for_arguments(3, lambda batch, heads, slots: max(1, slots // heads)),
        ),
    ),
    mistakes=(
        Mistake(
            "waves_rounded_down",
            "The number of waves was rounded down. Programs that are left over after the last whole wave run too, in a "
            "wave of their own: round up.",
            when=_waves_rounded_down,
        ),
        Mistake(
            "busy_above_one",
            "The busy share is programs / slots, which is more than 1 as soon as there is more than one wave. Divide "
            "by the slots of all waves: waves · slots.",
            when=_busy_is(lambda programs, waves, slots: programs / slots),
        ),
        Mistake(
            "busy_capped",
            "The busy share is cut off at 1. But 136 programs on 132 slots take two waves, and the second is nearly "
            "empty. Divide the programs by waves · slots.",
            when=_busy_is(lambda programs, waves, slots: min(1.0, programs / slots)),
        ),
        Mistake(
            "busy_of_the_last_wave",
            "That is the busy share of the last wave only. Take all waves together: programs / (waves · slots).",
            when=_busy_is(lambda programs, waves, slots: (programs - (waves - 1) * slots) / slots),
        ),
    ),
)
