"""Exercise 18.3: stream-K's plan and repair, played on a model of programs, a workspace and flags."""

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.hardware.stream_model import play_stream_k
from exercises.ch18_products_and_experts.product_steps import ways


def first_step(of, programs, tiles, steps):
    total = tiles * steps
    each, more = total // programs, total % programs
    return of * each + min(of, more)


def program(number, programs, tiles, steps):
    begin = first_step(number, programs, tiles, steps)
    end = first_step(number + 1, programs, tiles, steps)
    own = range(begin // steps, -(-end // steps)) if begin < end else ()
    for tile in reversed(own):
        first = tile * steps
        start, stop = max(begin, first), min(end, first + steps)
        yield ("multiply", tile, start - first, stop - first)
        if stop == first + steps:
            other = number
            while start > first:
                other = other - 1
                yield ("wait", other)
                yield ("add", other)
                start = first_step(other, programs, tiles, steps)
            yield ("store", tile)
        else:
            yield ("leave",)
            yield ("barrier",)
            yield ("raise",)


def played(*arguments):
    """What the machine makes of the actions: called like the driver, but for the function."""
    return play_stream_k({"program": program}, *arguments)


QUICK, SLOW_WARP, SLOW_WARPS = [1, 1, 1, 1], [1, 2, 3, 5000], [700, 1, 300, 20]


def made(draw, programs, tiles, steps, room=None, step_ticks=(10,), store_ticks=(2, 3, 4, 6)):
    return programs, tiles, steps, room or programs, list(step_ticks), list(store_ticks)


def stream_cases(draw):
    prime, slow = draw.choice((17, 23, 31)), draw.integer(300, 900)
    given = {
        "1 program, 2 tiles of 3 steps: nothing is shared": (1, 2, 3),
        "2 programs, 2 tiles of 4 steps: a tile each": (2, 2, 4), "2 programs, 1 tile of 4 steps": (2, 1, 4),
        "2 programs, 3 tiles of 4 steps": (2, 3, 4), "4 programs, 9 tiles of 4 steps": (4, 9, 4),
        "5 programs, 1 tile of 5 steps: one step each": (5, 1, 5),
        "3 programs, 2 tiles of 5 steps: 4, 3 and 3 steps": (3, 2, 5),
        "4 programs, 2 tiles of 7 steps: a tile over 3 programs": (4, 2, 7),
        "6 programs, 1 tile of 4 steps: two have none": (6, 1, 4),
        "4 programs, 9 tiles of 4 steps, one program at a time": (4, 9, 4, 1),
        "7 programs, 3 tiles of 8 steps, two at a time": (7, 3, 8, 2),
        "4 programs, 9 tiles of 4 steps, a warp stores slowly": (4, 9, 4, None, (10,), SLOW_WARP),
        "4 programs, 3 tiles of 7 steps, two warps store slowly": (4, 3, 7, None, (10,), SLOW_WARPS),
        "4 programs, 3 tiles of 5 steps, program 0 is slow": (4, 3, 5, None, (slow, 1, 1, 1)),
        "5 programs, 2 tiles of 8 steps, programs 1 and 2 are slow": (5, 2, 8, None, (1, slow, 80, 1, 1)),
        "5 programs, 1 tile of 5 steps, program 0 is slow": (5, 1, 5, None, (slow, 1, 1, 1, 1)),
        "3 programs, 4 tiles of 5 steps, the last is slow": (3, 4, 5, None, (1, 1, slow)),
        f"{prime} programs, 5 tiles of 9 steps": (prime, 5, 9, 4, (1, 50, 3), SLOW_WARPS),
        "3 programs, 40 tiles of 2 steps": (3, 40, 2, None, (10,), SLOW_WARP),
    }  # fmt: skip
    return [Case(name, made(draw, *choices), driver=play_stream_k) for name, choices in given.items()]


CONTRACT = Contract(
    made,
    {"programs": (1, 2, 3, 4, 6, 13), "tiles": (1, 2, 3, 7), "steps": (1, 2, 5, 8),
     "room": (Level(1, "one at a time"), Level(2, "two at a time"), Level(None, "room for all")),
     "step_ticks": (Level((10,), ""), Level((400, 1), "even programs slow"), Level((1, 400, 30), "others slow")),
     "store_ticks": (Level(QUICK, ""), Level(SLOW_WARP, "a slow warp"), Level(SLOW_WARPS, "two slow warps"))},
    {"programs": "programs may be more than there are steps", "tiles": "at least 1", "steps": "at least 1",
     "room": "also for one", "step_ticks": "A step may take any time", "store_ticks": "so may a warp"},
    driver=play_stream_k, most=30,
)  # fmt: skip

LEAVE, BARRIER, RAISE = 'yield ("leave",)', 'yield ("barrier",)', 'yield ("raise",)'
WAIT, ADD = 'yield ("wait", other)', 'yield ("add", other)'
OWNER, BEFORE, SHARE = "stop == first + steps", "while start > first", "of * each + min(of, more)"
OTHER, START = "other = other - 1", "start = first_step(other, programs, tiles, steps)"
END, RANGE = "end = first_step(number + 1, programs, tiles, steps)", "start - first, stop - first"
WHOLE = "start == first and stop == first + steps"
CHANGES = (
    *edits("", ascending=("reversed(own)", "own")),
    *edits("The flag is raised before all four warps have stored. The order is: leave, barrier, raise.",
        raised_before_the_barrier=(BARRIER, RAISE, RAISE, BARRIER), raised_before_the_barrier__none=(BARRIER, "pass")),
    *edits("The flag is raised before the sums are stored. The order is: leave, barrier, raise.",
        raised_before_leaving=(LEAVE, RAISE, BARRIER, LEAVE, RAISE, BARRIER)),
    *edits("A program leaves sums but never raises its flag: the owner waits forever.", never_raised=(RAISE, "pass")),
    *edits("The flag is raised, but the sums were never left: the slot holds poison.", never_left=(LEAVE, "pass")),
    *edits("The owner adds a slot without waiting for its flag. The program before may not have stored yet, however "
        "early it began.", not_waited=(WAIT, "pass"), not_waited__added_first=(WAIT, ADD, ADD, WAIT)),
    *edits("The owner stores its own sums alone, without the parts of others.", not_added=(ADD, "pass")),
    *edits("A part is added twice.", added_twice=(ADD, f"{ADD}\n{ADD}")),
    *edits("Only the part of the program directly before was added. More programs may share a tile: go on to its first "
        "step.", middle_parts_forgotten=(BEFORE, "if start > first"), middle_parts_forgotten__the_first_alone=(OTHER,
        f"{OTHER}\n" "while first_step(other, programs, tiles, steps) > first:\n    other -= 1")),
    *edits("The owner adds the slots of all programs before it, also of those that have no step of its tile. Stop at "
        "the tile's first step.", too_many_parts=(START, "start = first + (other > 0)")),
    *edits("The owner also adds its own slot, in which it has left nothing. Begin with the program before it.",
        own_slot_added=(OTHER, "pass", START, f"{START}\nother -= 1")),
    *edits("The owner is the program with the tile's first step, so it waits for programs that come later. Where there "
        "is no room for them they never begin. Let the program with the last step own the tile.",
        owner_of_the_first_step=(OWNER, "start == first", BEFORE, "while stop < first + steps",
        OTHER, "other = other + 1", START, "stop = first_step(other + 1, programs, tiles, steps)")),
    *edits("Nobody owns a shared tile: its parts are left, and none adds them.", shared_never_stored=(OWNER, WHOLE)),
    *edits("Parts of a tile are stored as the whole result.", parts_stored=(OWNER, "True", BEFORE, "while False")),
    *edits("A tile that lies whole within a program's share is left in the slot. It needs no repair: store it.",
        whole_tile_left=(OWNER, f"stop == first + steps and not ({WHOLE})")),
    *edits("Sums were left although the tile was finished, or stored although it was not. A program owns the tiles "
        "whose last step it has: end == (tile + 1) · steps.", wrong_owner=(OWNER, "stop != first + steps")),
    *edits("The steps that are left over by the division are never done. The first total % programs programs have one "
        "more.", remainder_dropped=(SHARE, "of * each")),
    *edits("The steps are not shared evenly. Each program has total // programs of the total = tiles · steps, and the "
        "first total % programs programs one more.", uneven=(SHARE, "min(total, of * -(-total // programs))"),
        uneven__last=(SHARE, "(of * each if of < programs else total)")),
    *edits("The wrong programs have one step more. The first total % programs programs should.",
        **ways("others_have_one_more", SHARE, "of * each + max(0, of - (programs - more))", "of * total // programs")),
    *edits("Whole tiles were shared out. Share their steps.", **ways("tiles_shared_out", SHARE,
        "(of * (tiles // programs) + min(of, tiles % programs)) * steps", f"({SHARE}) // steps * steps")),
    *edits("A range of steps is one step off. Program p does first(p) … first(p + 1) - 1, and `multiply` begin … end - "
        "1.", one_step_off=(END, f"{END} - 1"), end_included=("stop - first)", "stop - first - 1)")),
    *edits("`multiply` takes a tile's own steps, not those over all tiles.", steps_of_all_tiles=(RANGE, "start, stop")),
    *edits("Each program that shares a tile does all of its steps. Cut them.", whole_tile_each=(RANGE, "0, steps")),
    *edits("Only the last tile of a program's share is worked on.", one_tile_alone=("reversed(own)", "own[-1:]")),
    *edits("The owner waits for others than those directly before it.", wrong_program=(OTHER, "other = other + 1")),
)  # fmt: skip


def in_the(key, *words):
    """A `when`: the machine's report has one of these words under a key, in an entry of it or by itself."""

    def when(case, seen, got):
        told = got.get(key, "") if isinstance(got, dict) else ""
        return any(word in entry for word in words for entry in (told.values() if isinstance(told, dict) else [told]))

    return when


EXERCISE = Exercise(
    id="18.3", title="Stream-K: the plan and the repair", entries=("program",), cases=stream_cases, oracle=played,
    contracts=(CONTRACT,), models=(model_of(played, CHANGES, (first_step, program), most_pairs=200),),
    mistakes=(
        Mistake("steps_not_consecutive", "Some program's steps leave gaps or come twice.", when=in_the("steps", ",")),
        Mistake("other_shares", "Some program does other steps than it should. Of total = tiles · steps each program "
            "has total // programs, and the first total % programs one more, in ascending order.", when=lambda case,
            seen, got: in_the("ending", "finished")(case, seen, got) and got["steps"] != played(*case.args)["steps"]),
        Mistake("waits_for_a_later_program", "A program waits for one that has no room to begin, so both wait forever. "
            "Programs begin in ascending order: let the owner of a tile be the program with its last step, which waits "
            "only for programs before it.", when=in_the("ending", "there is no room")),
        Mistake("waits_forever", "A program waits for a flag that nobody raises. Play one tile by hand: which programs "
            "share it, who of them raises a flag, and who waits for whom?", when=in_the("ending", "deadlock")),
        Mistake("names_what_does_not_exist", "An action names a program, a tile or a step that does not exist. "
            "`multiply` counts steps within a tile, and the plan over all tiles.", when=in_the("ending", "impossible")),
        Mistake("several_parts", "A program leaves more than one part, and its slot has room for one. Of the tiles of "
            "a program only one can go on in later programs. Store the others.", when=in_the("parts", "left")),
        Mistake("slot_read_too_early", "A slot was added before all of its four quarters were stored. Leave, barrier, "
            "raise; and wait before you add.", when=in_the("tiles", "not stored yet")),
        Mistake("not_stored_once", "Some tile is never stored, or more than once. The program with its last step "
            "stores it, whether others have left parts of it or not.", when=in_the("tiles", "never stored", "times")),
    ),
    hints=(
        "Take 2 programs, 3 tiles of 4 steps. Write down the steps 0 to 11 and cut them into two halves. Which tile is "
        "cut, which program has its first step, and which its last?",
        "The first step of program p is p · each + min(p, more), with each, more = divmod(tiles · steps, programs). It "
        "ends where program p + 1 begins.",
        "Go through your steps from the last to the first: tile = (end - 1) // steps, start = max(begin, tile · "
        "steps), and then end = start. `multiply` takes start and end minus tile · steps.",
        "If end is the tile's end, you own it. Otherwise leave, barrier, raise: at most one part, before all else.",
        "The owner's own part begins at start. While start > tile · steps, the steps before it belong to the program "
        "before: other -= 1, wait, add, start = the first step of other. Then store.",
    ),
)  # fmt: skip
