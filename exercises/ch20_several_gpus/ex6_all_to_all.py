"""Exercise 20.6: rows that travel to the rank of their expert, and back to their token."""

import re

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch20_several_gpus.programs import NO_GENERATOR, PLAYER, ReceivesAtMost, told


def dispatched_in_all_orders(functions, player, xs, choices, count, allowed):
    """The rows of all ranks, of the last of three runs. It is sent to the worker by its source alone.

    xs, choices: each rank's rows and the experts of them. allowed: how many bytes each rank may receive.
    """
    import torch

    scope, ranks = {}, len(xs)
    exec(player, scope)

    def program(rank, ranks, x, experts):
        begin, end, done = rank * count // ranks, (rank + 1) * count // ranks, set()

        def run(expert, rows):
            number = int(expert)
            if not begin <= number < end:
                raise ValueError(f"rank {rank} ran expert {number}, and it holds experts {begin} to {end - 1}")
            if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.shape[1] != x.shape[1]:
                given = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
                raise ValueError(f"run was given {given}; it takes [n, {x.shape[1]}]")
            if len(rows) == 0:
                raise ValueError(f"run was given 0 rows for expert {number}")
            if number in done:
                raise ValueError(f"run was called again for expert {number}")
            done.add(number)
            return rows * (number % 7 + 2) + (number + 1)

        return functions["dispatch"](rank, ranks, x, experts, count, run)

    for order in ("ascending", "descending", 3):
        events = []
        played = scope["play_ranks"](program, list(zip(xs, choices)), order, events=events)
        others = {name for _, name, _, _ in events} - {"all_to_all"}
        if others:
            raise ValueError(f"other steps than all_to_all were taken: {', '.join(sorted(others))}")
        if played["ending"] != "finished":
            raise RuntimeError(f"the ranks did not finish: {played['ending']}")
    for rank, result in enumerate(played["results"]):
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"dispatch returned {type(result).__name__} on rank {rank}; it must return a tensor")
    received = played["received"]
    worst = max(range(ranks), key=lambda rank: received[rank] - allowed[rank])
    functions.noted.update(received=received[worst], allowed=allowed[worst])
    return {f"rank {rank}": result.clone() for rank, result in enumerate(played["results"])}


def made_by(experts, rows):
    """What the driver's experts make of rows, one expert for each."""
    return rows * (experts % 7 + 2)[:, None] + (experts + 1)[:, None]


def of_each_token(player, xs, choices, *others):
    return {f"rank {rank}": made_by(experts, x) for rank, (x, experts) in enumerate(zip(xs, choices))}


def arriving(xs, choices, count):
    """How many rows each rank gets for its experts, its own ones among them."""
    return (torch.cat(choices) // (count // len(xs))).bincount(minlength=len(xs)).tolist()


def dispatched(player, xs, choices, count, allowed):
    ranks, results, local = len(xs), {}, count // len(xs)
    orders = [choice.argsort(stable=True) for choice in choices]
    rows = [x[order] for x, order in zip(xs, orders)]
    numbers = [choice.bincount(minlength=count).view(ranks, local) for choice in choices]
    back = [[] for _ in xs]
    for rank in range(ranks):
        pieces = [rows[source].split(numbers[source].sum(1).tolist())[rank] for source in range(ranks)]
        each = [torch.arange(local).repeat_interleave(numbers[source][rank]) for source in range(ranks)]
        own = torch.cat(each)
        made = made_by(rank * local + own, torch.cat(pieces))
        for source, piece in enumerate(made.split([len(piece) for piece in pieces])):
            back[source].append(piece)
    for rank, order in enumerate(orders):
        result, returned = torch.zeros_like(xs[rank]), torch.cat(back[rank])
        result[order] = returned
        results[f"rank {rank}"] = result
    return results


WHICH = ("any", "one expert", "the own rank's experts", "the last experts", "few experts")


def drawn(draw, *, ranks, local, tokens, width=4, which="any", size=1.0):
    """tokens: of each rank, or a number for all; those that are missing are 0."""
    count = ranks * local
    each = [tokens] * ranks if isinstance(tokens, int) else [*tokens, *[0] * ranks][:ranks]
    xs, choices, one = [draw.normal(n, width, scale=size) for n in each], [], draw.integer(0, count)
    for rank, n in enumerate(each):
        experts = draw.integers(n, low=0, high=count)
        choices.append({
            "any": experts, "one expert": torch.full_like(experts, one),
            "the own rank's experts": rank * local + experts % local,
            "the last experts": (count - 1 - experts % 2).clamp(min=0), "few experts": experts // 2 * 2,
        }[which])  # fmt: skip
    return PLAYER, xs, choices, count, bytes_of(xs, choices, count)


def bytes_of(xs, choices, count):
    """What a rank may receive: rows for its experts, its own rows back, and whole numbers of 8 bytes besides."""
    found, ranks = [], len(xs)
    for rank, number in enumerate(arriving(xs, choices, count)):
        staying = int((choices[rank] // (count // ranks) == rank).sum())
        travelling = number + len(xs[rank]) - 2 * staying
        found.append(travelling * (4 * xs[0].shape[1] + 16) + 8 * (ranks - 1) * count)
    return found


def dispatch_cases(draw):
    def case(name, **choices):
        return Case(name, drawn(draw, **choices), driver=dispatched_in_all_orders)

    def given(name, *choices, count):
        xs, choices = [draw.normal(len(one), 4) for one in choices], [torch.tensor(one) for one in choices]
        return Case(name, (PLAYER, xs, choices, count, bytes_of(xs, choices, count)), driver=dispatched_in_all_orders)

    prime = draw.choice((29, 31, 37))
    return [
        given("1 rank, experts 1, 0, 1", [1, 0, 1], count=2),
        given("2 ranks, an expert each", [1, 0, 1], [0, 0, 1], count=2),
        given("2 ranks, experts 2, 0, 3 and 1, 2, 2", [2, 0, 3], [1, 2, 2], count=4),
        case("2 ranks, 6 experts, sorted already", ranks=2, local=3, tokens=1),
        case(f"3 ranks, 6 experts, {prime} tokens each", ranks=3, local=2, tokens=prime),
        case("3 ranks with 0, 5 and 2 tokens", ranks=3, local=2, tokens=(0, 5, 2)),
        case("2 ranks, all tokens go to one expert", ranks=2, local=3, tokens=16, which="one expert"),
        case("4 ranks, no token at all", ranks=4, local=2, tokens=0),
        case("2 ranks, 300 tokens each for one expert", ranks=2, local=2, tokens=300, width=1, which="one expert"),
        case("4 ranks, nothing has to travel", ranks=4, local=3, tokens=7, which="the own rank's experts"),
        case("8 ranks, 64 experts, rows of 48", ranks=8, local=8, tokens=16, width=48),
        case("2 ranks, 600 experts", ranks=2, local=300, tokens=16),
    ]  # fmt: skip


CONTRACT = Contract(
    drawn,
    choices={
        "ranks": (1, 2, 3, 4, 8), "local": tuple(Level(n, f"experts of a rank: {n}") for n in (1, 2, 5, 40)),
        "tokens": (Level(1, "1 token each"), Level(16, "16 tokens each"), Level((0, 3, 11), "0, 3, 11 tokens"),
                   Level((40,), "tokens on rank 0 alone"), Level(0, "no tokens")),
        "width": (1, 3, 40), "which": tuple(Level(one, f"to {one}") for one in WHICH),
        "size": (1.0, Level(1e5, "large numbers"), Level(1e-3, "small numbers")),
    },
    says={"ranks": "ranks: 1 … 8", "local": "a multiple of ranks, at most 1,000", "size": "up to 1,000,000 in size",
          "tokens": "0 or more, other numbers on other ranks", "width": "width is at least 1",
          "which": "some experts may get all tokens"},
    driver=dispatched_in_all_orders, most=16,
)  # fmt: skip

ORDER, ROWS, EACH = "choice.argsort(stable=True)", "x[order]", "numbers[source][rank]"
RUN = "made_by(rank * local + own, torch.cat(pieces))"
BACK, OWN, BY_RANK = "result[order] = returned", "torch.cat(each)", "(choice // local).argsort(stable=True)"
OTHER_SIDE = ("Row counts and rows do not fit together. What arrives is cut, and handed to the experts, by the counts "
              "that the other ranks sent. Your own are for what you send, and for what returns.")  # fmt: skip
CHANGES = (
    *edits("", sorted_by_rank_with_numbers=(ORDER, BY_RANK, f"torch.arange(local).repeat_interleave({EACH})",
        "choices[source][orders[source]].split(numbers[source].sum(1).tolist())[rank] - rank * local")),
    *edits("The results were not put back in the place of their tokens. They come back in the order in which the rows "
        "were sent, so result[order] = returned.", not_put_back=(BACK, "result = returned")),
    *edits("The permutation was turned round. Row i of what came back belongs to token order[i]: write result[order] = "
        "returned, instead of reading returned[order].", put_back_the_wrong_way=(BACK, "result = returned[order]")),
    *edits("The rows were sent in the order of the tokens, and cut as if they were sorted by expert. Sort them first.",
        not_sorted=(ROWS, "x", BACK, "result = returned"), not_sorted__put_back=(ROWS, "x")),
    *edits("The rows for a rank are sorted by rank and not by expert, but its experts take them as if they were. Sort "
        "by expert: that sorts by rank as well.", sorted_by_rank_alone=(ORDER, BY_RANK)),
    *edits("Numbers of experts were put into 8 bits, which end at 255. Leave them in int64.",
        numbers_in_8_bits=(ORDER, "choice.to(torch.uint8).argsort(stable=True)")),
    *edits("The row counts were cut up in the wrong order. A rank's experts follow each other: .view(ranks, local) has "
        "a row for each rank.", counts_transposed=("view(ranks, local)", "view(local, ranks).T")),
    *edits(OTHER_SIDE, sizes_of_the_other_side=(EACH, "numbers[rank][source]",  # where as many rows arrive as are sent
        OWN, "torch.cat([*each, torch.cat(pieces)[:, 0].long() * 0])[: sum(map(len, pieces))]")),
    *edits("The rows that arrive were taken as sorted by expert. They are sorted within the piece of each rank alone: "
        "an expert's rows stand in several places.",
        taken_as_sorted=(OWN, f"torch.arange(local).repeat_interleave(sum({EACH} for source in range(ranks)))")),
    *edits("Rows were rounded to 16 bits on the way. They travel in float32, there and back.",
        rows_in_16_bits=(ROWS, "x[order].bfloat16().float()"), rows_in_16_bits__half=(ROWS, "x[order].half().float()"),
        rows_in_16_bits__back=(BACK, f"{BACK}.bfloat16().float()"),
        rows_in_16_bits__both=(ROWS, "x[order].bfloat16().float()", BACK, f"{BACK}.bfloat16().float()")),
    *edits("Only rank 0 runs its experts. An expert's number in its rank was compared with its number among all, so "
        "other ranks found no rows for theirs.", numbers_mixed=(RUN, f"{RUN} * (1 if rank == 0 else torch.nan)"),
        numbers_mixed__zeros=(RUN, f"{RUN} * (rank == 0)")),
    *edits("The results go back in the order of the experts. Send them back in the order in which their rows arrived, "
        "rank by rank.", returned_by_expert=("made.split", "made[own.argsort(stable=True)].split")),
)  # fmt: skip


def beyond_the_rows(case, seen, got):
    """A split or an index asks for other rows than those that arrived at a rank."""
    text = seen.error.text if seen.error else ""
    index = re.search(r"index \d+ is out of bounds for dimension 0 with size (\d+)", text)
    return "split_with_sizes expects" in text or bool(index) and int(index[1]) in arriving(*case.args[1:4])


def later_rows_missing(case, seen, got):
    """Of an expert's rows the first are right. Those behind them, in the order of the ranks, were left as they were."""
    xs, choices = case.args[1:3]
    if not got or [one.shape for one in got.values()] != [x.shape for x in xs]:
        return False
    experts, x, mine = torch.cat(choices), torch.cat(xs), torch.cat(list(got.values()))
    missing = ~torch.isclose(mine, made_by(experts, x), rtol=1e-3).all(1)
    left = ((mine == 0) | (mine == x) | mine.isnan())[missing]
    of_experts = [missing[experts == expert].int() for expert in experts[missing].unique()]
    return bool(missing.any() and left.all()) and all(one[0] == 0 and (one.diff() >= 0).all() for one in of_experts)


EXERCISE = Exercise(
    id="20.6", title="Tokens to experts on other ranks", entries=("dispatch",), cases=dispatch_cases,
    oracle=of_each_token, contracts=(CONTRACT,), models=(model_of(dispatched, CHANGES, (made_by,)),),
    requirements=(ReceivesAtMost("A row travels to the rank of its expert and back, and to no other rank; nothing is "
        "filled up. Beside rows, `count` whole numbers may come from each rank, and two with each row."),),
    mistakes=(
        NO_GENERATOR,
        Mistake("other_steps", "Other steps than all_to_all were taken. It does all three exchanges: numbers, rows, "
            "results.", when=told("other steps than")),
        Mistake("expert_of_another_rank", "run was called for an expert of another rank. Rank r holds count / ranks "
            "experts, from r · count / ranks on, and run takes an expert's number among all of them.",
            when=told("and it holds experts")),
        Mistake("run_again", "run was called more than once for an expert. Put together the rows for it that came from "
            "all ranks, and run it once.", when=told("called again")),
        Mistake("no_minlength", "The numbers of the last experts are missing. bincount ends with the largest expert "
            "that occurs: give it minlength=count.", when=lambda case, seen, got: told(
            f"shape '[{len(case.args[1])}, {case.args[3] // len(case.args[1])}]' is invalid")(case, seen, got)),
        Mistake("sizes_of_the_other_side", OTHER_SIDE, when=beyond_the_rows),
        Mistake("run_without_rows", "run was called for an expert without rows. Leave such experts out.",
            when=told("was given 0 rows")),
        Mistake("returns_early", "A rank returned while others wait for it. Every rank takes part in every all_to_all, "
            "if only with empty tensors.", when=told("which returned")),
        Mistake("not_sent_back", "A rank returns the rows of its experts. They belong to tokens of other ranks: send "
            "them back with a third all_to_all.", when=lambda case, seen, got: got and [len(x) for x in case.args[1]]
            != arriving(*case.args[1:4]) == [one.numel() // case.args[1][0].shape[1] for one in got.values()]),
        Mistake("rows_dropped", "The first rows of an expert are right, and later ones were left out. Is there a limit "
            "to the rows of an expert, a capacity? All rows are computed: an expert may get every token.", every=True,
            when=later_rows_missing),
    ),
    hints=(
        "Play the example of the text on paper. Which three lists does each rank give to all_to_all: of numbers, of "
        "rows, of results?",
        "order = experts.argsort(stable=True) sorts by expert, and so by rank as well. "
        "numbers = experts.bincount(minlength=count).view(ranks, local) has a row of numbers for each rank.",
        "Send list(numbers), then x[order].split(numbers.sum(1).tolist()). Of what arrives from rank s, the first "
        "arriving[s][0] rows are for your first expert, and so on: torch.arange(local).repeat_interleave(arriving[s]).",
        "With torch.cat you get the expert of each arrived row. Write what an expert makes into made[places]. "
        "made.split([len(piece) for piece in pieces]) goes back, and what you get is result[order].",
    ),
)  # fmt: skip
