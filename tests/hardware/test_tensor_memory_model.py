"""The model of tensor memory: a right product warp passes in every order of events, and each missing wait is told."""

import random

import pytest

from course_lib.hardware.tensor_memory_model import play_tensor_memory

PLAN = {"S0": (0, 128), "P0": (64, 64), "O0": (256, 128), "S1": (128, 128), "P1": (192, 64), "O1": (384, 128)}
ALIKE = [[10, 10]], [[5, 15]], [5]


def right(blocks):
    yield "scores", 0, 0
    yield "scores", 1, 0
    for block in range(blocks):
        for tile in (0, 1):
            yield "wait", "weights", tile, block
            yield "wait", "corrected", tile, block
            yield "output", tile, block
            if block + 1 < blocks:
                yield "scores", tile, block + 1


def without(*steps):
    return lambda blocks: [step for step in right(blocks) if step not in steps]


def play(warp, blocks=3, ticks=ALIKE, plan=PLAN, **options):
    return play_tensor_memory({"product_warp": warp}, plan, blocks, *ticks, **options)


def endings_in_every_order(warp, blocks, plan=PLAN):
    """How a warp ends in all orders in which what is under way can end, and how many states it goes through."""
    seen, endings, open_orders = set(), set(), [[]]
    while open_orders:
        order = open_orders.pop()
        played = play(warp, blocks, plan=plan, order=order)
        if played["ending"] != "open":
            endings.add(played["ending"])
        elif played["state"] not in seen:
            seen.add(played["state"])
            open_orders += [[*order, number] for number in range(played["open"])]
    return endings, len(seen)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_right_product_warp_finishes_in_every_order_of_events(blocks):
    endings, states = endings_in_every_order(right, blocks)
    assert endings == {"finished"} and states > 8 * blocks


@pytest.mark.parametrize("step", [step for step in right(3) if step[0] == "wait" and step[1:] != ("corrected", 0, 0)
                                  and step[1:] != ("corrected", 1, 0)], ids=str)  # fmt: skip
def test_without_any_of_its_waits_some_order_of_events_ends_in_a_fault(step):
    endings, _ = endings_in_every_order(without(step), 3)
    assert any(" columns " in ending for ending in endings)


@pytest.mark.parametrize("seed", range(40))
def test_a_right_product_warp_finishes_whatever_each_part_takes(seed):
    dice = random.Random(seed)

    def some(pairs):
        lists = [[dice.choice((1, 7, 40, 600)) for _ in range(2)] for _ in range(dice.randint(1, 9))]
        return lists if pairs else [one for one, _ in lists]

    assert play(right, dice.randint(1, 9), (some(True), some(True), some(False)))["ending"] == "finished"


@pytest.mark.parametrize(
    "ticks, most",
    [(([[10, 10]], [[5, 15]], [5]), 40), (([[10, 10]], [[5, 45]], [5]), 70), (([[9, 9]], [[1, 2]], [1]), 36)],
)
def test_the_tensor_cores_are_as_busy_as_two_tiles_allow(ticks, most):
    events = []
    assert play(right, 30, ticks, most_ticks=31 * most, events=events)["time"] == "in time"
    assert 30 * most <= max(end for *_, end in events) <= 31 * most
    assert play(right, 30, ticks, most_ticks=30 * most - 1)["time"] == "too long"


@pytest.mark.parametrize(
    "warp, told",
    [
        (lambda blocks: [("wait", "weights", 0, 0), ("scores", 0, 0)],
         "deadlock at ('wait', 'weights', 0, 0)"),
        (lambda blocks: [("scores", 0, 0), ("output", 0, 0)],
         "output 0, block 0 finds S0 of block 0 in columns 64-127, not P0 of block 0"),
        (lambda blocks: [("scores", 0, 0), ("wait", "weights", 0, 0), ("scores", 0, 1), ("output", 0, 0)],
         "output 0, block 0 finds S0 of block 1 in columns 64-127, not P0 of block 0"),
        (lambda blocks: [("scores", 0, 0), ("scores", 0, 1)],
         "softmax 0, block 0 reads columns 0-127 while scores 0, block 1 writes"),
        (lambda blocks: [("scores", 1, 3)],
         "impossible: ('scores', 1, 3); blocks are 0 to 2"),
        (lambda blocks: (("wait", "corrected", 0, 0) for _ in iter(int, 1)), "endless"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_told_in_words(warp, told):
    assert play(warp)["ending"] == told


def test_a_product_that_meets_the_correction_is_told():
    steps = without(("wait", "corrected", 1, 2))
    told = play(steps, ticks=([[10, 10]], [[1, 1]], [400]))["ending"]
    assert told == "output 1, block 2 writes columns 384-511 while correction 1, block 2 writes"


def test_the_last_products_of_each_tile_are_told():
    played = play(without(("output", 1, 2)))
    assert played["products"] == {"tile 0": "S0 O0 S1 O1 S2 O2", "tile 1": "S0 O0 S1 O1 S2"}
    assert play(lambda blocks: [])["products"] == {"tile 0": "none", "tile 1": "none"}
    assert play(right, 9)["products"]["tile 1"] == "S5 O5 S6 O6 S7 O7 S8 O8"


def test_regions_of_a_plan_that_overlap_are_found():
    told = play(right, plan=PLAN | {"O0": (192, 128)}, ticks=([[10, 10]], [[5, 50]], [5]))["ending"]
    assert told == "output 0, block 0 writes columns 192-255 while softmax 1, block 0 writes"


def test_events_say_who_did_what_when():
    events = []
    play(right, 2, events=events)
    kinds = {(who, what) for who, what, *_ in events}
    assert kinds == {("tensor cores", "scores"), ("tensor cores", "output"), ("correction", "rescale"),
                     *((f"softmax {tile}", what) for tile in (0, 1) for what in ("read", "write"))}  # fmt: skip
    assert len(events) == 2 * (4 + 4) + 2 and all(begin < end for *_, begin, end in events)


@pytest.mark.parametrize(
    "given",
    [None, 7, ["x"], [("scores", 0)], [("wait", "scores", 0, 0)], [("output", "0", 0)], [("wait", 0, 0)]],
    ids=str,
)
def test_a_step_that_does_not_exist_is_refused_with_those_that_do(given):
    with pytest.raises(ValueError, match="does not exist|yields steps"):
        play(lambda blocks: given)
