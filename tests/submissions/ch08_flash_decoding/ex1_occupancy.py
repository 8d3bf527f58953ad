"""Wrong answers to exercise 8.1, and unusual right ones."""

from tests.submissions.edits import changed

WAVES = "waves = -(-programs // slots)"


BUSY = "programs / (waves * slots)"


ONE_WAVE = "max(1, slots // (batch * key_heads))"


WRONG = {
    "one_wave_too_many": changed("8.1", ("waves = -(-programs // slots)", "waves = programs // slots + 1")),
    "waves_rounded_down": changed("8.1", (WAVES, "waves = max(1, programs // slots)")),
    "waves_rounded_down__and_divided_by_none": changed(
        "8.1", (WAVES, "waves = programs // slots"), (BUSY, "programs / max(1, waves * slots)")
    ),
    "busy_above_one": changed("8.1", (BUSY, "programs / slots")),
    "busy_capped": changed("8.1", (BUSY, "min(1.0, programs / slots)")),
    "busy_of_the_last_wave": changed("8.1", (BUSY, "(programs - (waves - 1) * slots) / slots")),
    "busy_of_the_last_wave__by_remainder": changed("8.1", (BUSY, "((programs % slots) or slots) / slots")),
    "busy_in_percent": changed("8.1", (BUSY, "100 * programs / (waves * slots)")),
    "splits_forgotten": changed("8.1", ("batch * key_heads * splits", "batch * key_heads")),
    "batch_forgotten": changed("8.1", ("batch * key_heads * splits", "key_heads * splits")),
    "one_split_too_many": changed("8.1", (ONE_WAVE, "-(-slots // (batch * key_heads))")),
    "split_to_the_nearest": changed("8.1", (ONE_WAVE, "max(1, round(slots / (batch * key_heads)))")),
    "no_split_at_all": changed("8.1", (ONE_WAVE, "slots // (batch * key_heads)")),
    "batch_forgotten_in_splits": changed("8.1", (ONE_WAVE, "max(1, slots // key_heads)")),
    "busy_rounded": changed("8.1", (BUSY, "round(programs / (waves * slots), 2)")),
    "busiest_chosen": changed(
        "8.1",
        (ONE_WAVE, "max(range(1, slots + 1), key=lambda splits: occupancy(batch, key_heads, splits, slots)[2])"),
    ),
    "full_wave_refused": changed("8.1", (ONE_WAVE, "max(1, (slots - 1) // (batch * key_heads))")),
    "divided_twice_with_rounding": changed("8.1", (ONE_WAVE, "max(1, -(-(slots // key_heads) // batch))")),
    "splits_capped": changed("8.1", (ONE_WAVE, "max(1, min(128, slots // (batch * key_heads)))")),
}


SEARCHED = """# Exercise 8.1 · How much of the chip works
def occupancy(batch, key_heads, splits, slots):
    programs = left = batch * key_heads * splits
    waves = 0
    while left > 0:
        left -= slots
        waves += 1
    return [programs, waves, programs / slots / waves]

def splits_for_one_wave(batch, key_heads, slots):
    splits = 1
    while occupancy(batch, key_heads, splits + 1, slots)[1] == 1:
        splits += 1
    return splits
"""


UNUSUAL = {
    "counted and searched": SEARCHED,
    "ceil of a fraction": changed("8.1", (WAVES, "waves = math.ceil(programs / slots)")),
    "numpy": changed(
        "8.1",
        (WAVES, "waves = int(np.ceil(programs / slots))"),
        (BUSY, "float(np.float64(programs) / (waves * slots))"),
    ),
    "a bound in place of a maximum": changed("8.1", (ONE_WAVE, "slots // (batch * key_heads) or 1")),
}
