"""Exercise 16.6: the scheduler, judged by an engine that does what it plans."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level


def serve(functions, texts, budget, pages, page_size, steps):
    """Run an engine on `plan`, and tell each step, up to a plan that breaks a promise. Its source alone is sent."""
    keys = ("id", "prompt", "written", "cached", "pages")  # texts: id, arrival, prompt, written, cached, to write
    books = {t[0]: dict(zip(keys, (t[0], *t[2:5], -(-t[4] // page_size)))) for t in texts}
    story, unfinished = [], list(texts)

    def troubles():
        running = [one["id"] for one in here if one["pages"]]
        newer = {n: [*running, n][running.index(n) if n in running else -1 :] for n in gone}
        yield from ["the requests were changed"] * (given != here)
        yield from (f"{n} is planned, and is not there (any more)" for n in [*tokens, *gone] if n not in left)
        yield from (f"{n} has an entry of {count} tokens" for n, count in tokens.items() if count < 1)
        yield from (f"{n} is preempted, and computes {tokens[n]} tokens" for n in gone if n in tokens)
        yield from (f"{n} computes {new} tokens, and has {left[n]} left" for n, new in tokens.items() if new > left[n])
        yield from (f"{n} is preempted, and holds no page" for n in gone if n not in running)
        yield from (f"{n} is preempted, and another one is newer" for n in gone if not {*newer[n]} <= {*gone})
        yield from [f"{sum(tokens.values())} tokens, and the budget is {budget}"] * (sum(tokens.values()) > budget)
        back = free + sum(books[n]["pages"] for n in gone)
        more = sum(-(-(books[n]["cached"] + tokens[n]) // page_size) - books[n]["pages"] for n in tokens)
        yield from [f"{more} new pages, and {back} are free"] * (more > back)
        yield from [f"nobody computes: budget {budget}, {back} pages free"] * bool(here and not tokens)
        waits = [n for n in running if left[n] == 1 and n not in (*tokens, *gone)]
        prompts = (n for n in tokens if waits and (left[n] > 1 or n not in running))
        yield from (f"{waits[0]} does not decode, and {n} computes {tokens[n]}" for n in prompts)

    for step in range(1, steps + 1):
        here = [books[text[0]] for text in unfinished if text[1] <= step]
        given, free = [dict(one) for one in here], pages - sum(one["pages"] for one in books.values())
        left = {one["id"]: one["prompt"] + one["written"] - one["cached"] for one in here}
        returned = functions["plan"](given, budget, free, page_size)
        pair = isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[0], dict)
        if not pair or any(type(n) is not int for n in returned[0].values()) or isinstance(returned[1], (str, int)):
            raise TypeError(f"plan returned {returned!r}; asked for is (tokens, preempted): a dict and a list")
        tokens, gone = dict(returned[0]), list(returned[1])
        for broken in troubles():
            return [*story, f"step {step}: {broken}", *["not run any more"] * (steps - step)]
        for name in gone:
            books[name].update(pages=0, cached=0)
        for name, count in tokens.items():
            one = books[name]
            one["cached"] += count
            one["written"] += count == left[name]
            one["pages"] = -(-one["cached"] // page_size)
        for text in [text for text in unfinished if books[text[0]]["written"] == text[5]]:
            unfinished.remove(text)
            books[text[0]]["pages"] = 0
        computed = ", ".join(f"{name} {tokens[name]}" for name in left if name in tokens) or "nothing"
        back = ", ".join(f"{name}" for name in left if name in gone)
        story.append(f"step {step}: {computed}" + (f"; preempted {back}" if back else ""))
    return story


class Step:
    """The judge's own plan, whose slips are edits."""

    def __init__(self, requests, budget, free, page_size):
        self.requests = [{**one, "left": one["prompt"] + one["written"] - one["cached"]} for one in requests]
        self.running = [one for one in self.requests if one["pages"] > 0]
        self.tokens, self.gone, self.budget, self.free, self.page_size = {}, [], budget, free, page_size

    def grows(self, one, count):
        return -(-(one["cached"] + count) // self.page_size) - one["pages"]

    def preempt(self):
        newest = self.running.pop(-1)
        self.gone.append(newest["id"])
        self.free += newest["pages"]

    def compute(self, one, count):
        self.tokens[one["id"]] = count
        self.budget -= count
        self.free -= self.grows(one, count)

    def decode(self):
        for one in [one for one in self.running if one["left"] == 1]:
            if self.budget > 0 and one in self.running and self.grows(one, 1) > self.free:
                self.preempt()
            if self.budget > 0 and one in self.running and self.grows(one, 1) <= self.free:
                self.compute(one, 1)

    def fill(self):
        for one in self.requests:
            if one["id"] not in self.gone and one["id"] not in self.tokens:
                room = (one["pages"] + self.free) * self.page_size - one["cached"]
                count = min(one["left"], self.budget, room)
                if count > 0:
                    self.compute(one, count)

    def plan(self):
        self.decode()
        self.fill()
        if self.requests and not self.tokens:
            self.preempt()
            self.fill()
        return self.tokens, self.gone


def told(*arguments):
    try:
        return serve({"plan": lambda *state: Step(*state).plan()}, *arguments)
    except (IndexError, KeyError):
        return None


def served(name, texts, budget, pages, page_size):
    """A case that goes on until a right plan has written all texts, and one step more."""
    story = told(texts, budget, pages, page_size, 300)
    while len(story) > 1 and story[-2].endswith(": nothing"):
        story.pop()
    return Case(name, (texts, budget, pages, page_size, len(story)), driver=serve)


def traffic(draw, count, longest, written, together):
    step, texts = 1, []
    for name in draw.permutation(count).tolist():
        texts.append((name, step, 1 + draw.integer(0, longest), 0, 0, 1 + draw.integer(0, written)))
        step += 0 if together else draw.integer(0, 6)
    return texts


def scheduler_cases(draw):
    return [
        served("no requests", [], 8, 4, 16),
        served("one prompt of 5 tokens", [("a", 1, 5, 0, 0, 3)], 8, 4, 4),
        served("a prompt of 39 tokens, a budget of 8", [("a", 1, 39, 0, 0, 3)], 8, 12, 4),
        served("a decode beside a prompt of 8", [("b", 1, 4, 0, 0, 6), ("a", 2, 8, 0, 0, 2)], 8, 12, 4),
        served("older ones wait", [("b", 1, 30, 0, 0, 2), ("c", 1, 9, 0, 5, 2), ("a", 1, 4, 0, 3, 4)], 8, 14, 4),
        served("more decodes than the budget, no page is free", [(n, 1, 4, 1, 4, 3) for n in "dcba"], 1, 4, 4),
        served("a decode finds no page", [("b", 1, 8, 1, 8, 4), ("a", 1, 8, 1, 8, 4)], 8, 4, 4),
        served("the newest holds 3 pages", [*((n, 1, 4, 1, 4, 4) for n in "cb"), ("a", 1, 11, 1, 11, 3)], 16, 5, 4),
        served("the newest finds no page itself", [("b", 1, 20, 0, 13, 2), ("a", 1, 3, 6, 8, 9)], 8, 11, 2),
        served("a prompt fills a page, and none is free", [("b", 1, 20, 0, 13, 2), ("a", 1, 11, 1, 11, 4)], 8, 7, 4),
        served("preempted after 9 written tokens", [("b", 1, 4, 1, 4, 9), ("a", 1, 3, 9, 11, 12)], 6, 4, 4),
        served("all hold pages, nobody can grow", [(0, 1, 12, 0, 8, 2), ("a", 1, 12, 0, 8, 2)], 8, 4, 4),
        served("one cannot grow, the next has room", [("b", 1, 12, 0, 8, 2), ("a", 1, 9, 0, 5, 2)], 8, 4, 4),
        served("a decode is preempted, a chunk follows", [("b", 1, 24, 0, 16, 1), ("a", 1, 12, 5, 16, 7)], 8, 8, 4),
        served("a prompt of one token", [("b", 1, 8, 1, 8, 6), ("c", 2, 1, 0, 0, 3), ("a", 2, 1, 0, 0, 3)], 2, 4, 4),
        served("pages of one token", traffic(draw, 4, 6, 5, together=False), 4, 12, 1),
        served("12 requests, one after another", traffic(draw, 12, 20, 8, together=False), 10, 12, 4),
        served("8 requests at once, few pages", traffic(draw, 8, 16, 12, together=True), 16, 9, 4),
    ]  # fmt: skip


CONTRACT = Contract(
    lambda draw, *, budget, page_size, count, spare: served(
        "", traffic(draw, count, 3 * page_size + 4, 6, draw.integer(0, 2) == 0),
        budget, -(-(3 * page_size + 10) // page_size) + spare * count, page_size).args,
    choices={"budget": (1, 2, 7, 64), "page_size": (1, 3, 4, 16), "count": (1, 3, 7),
             "spare": (Level(0, "few pages"), Level(1, "more pages"))},
    says={"budget": "tokens of a step, at least 1", "page_size": "tokens of a page, at"}, driver=serve, most=12,
)  # fmt: skip

LEFT = 'one["prompt"] + one["written"] - one["cached"]'
LEFT_OF_PROMPT, IN_PROMPT = 'one["prompt"] - one["cached"]', 'one["cached"] < one["prompt"]'
ROUND_UP, DECODES = '-(-(one["cached"] + count) // self.page_size)', '[one for one in self.running if one["left"] == 1]'
NEEDED, ITS_TURN = "self.grows(one, 1) > self.free", "self.budget > 0 and one in self.running"
PREEMPT, OTHERS = f"if {ITS_TURN} and {NEEDED}:\n    self.preempt()", 'if one["id"] not in self.gone and'
CHUNK, COUNT = 'min(one["left"], self.budget)', 'min(one["left"], self.budget, room)'
ROOM, BACK = '(one["pages"] + self.free) * self.page_size - one["cached"]', 'self.free += newest["pages"]'
ALL, SORTED = "for one in self.requests:", "for one in sorted(self.requests, key=lambda one: {}):"
GIVEN, ORDER = "if count > 0:\n    self.compute(one, count)", "self.decode()\nself.fill()"

BROKEN = {  # what the engine says of a plan that it cannot run
    "were changed": ("requests_changed", "The requests were changed. Keep what you count in variables of your own."),
    "does not decode": ("decode_waits", "A decode got no token, and a prompt did. Decodes come first, always."),
    "is not there": ("not_there", "The plan has an id that no request has. Keep nothing from call to call."),
    "has an entry of": ("empty_entry", "A request has an entry without any token. Leave it out of the dict."),
    "tokens, and has": ("computed_twice", "A request computes more tokens than it has left: some are computed twice."),
    "is newer": ("not_the_newest", "A request was preempted although a newer one runs. So the oldest may never end."),
    "holds no page": ("waiting_preempted", "A request that waits was preempted. Look among those that run."),
    "and computes": ("preempted_computes", "A preempted request computes in the same step, though its pages are gone."),
    "and the budget is": ("too_many_tokens", "A step has more tokens than the budget. Subtract what each one gets."),
    "new pages, and": ("pages_overdrawn", "A step needs more pages than are free. A chunk may have no more tokens than "
        "fit into its request's pages and the free ones. Round up: what it takes is not free for the next."),
    "nobody computes": ("nobody_computes", "Nobody computes, although each request fits by itself. If all hold full "
        "pages, each waits for another one's: preempt the newest by rule 3, and apply rule 2 again."),
}  # fmt: skip
CHANGES = (
    *edits("The budget was counted down before a request was preempted. Subtract a token when a decode gets it.",
        budget_before_preemption=(ORDER, f"before = self.budget - len({DECODES})\nself.decode()\n"
        "self.budget = max(before, 0)\nself.fill()")),
    *edits("A decode that finds no page was passed over. The newest that runs is preempted, even if it is the decode.",
        passed_over=(PREEMPT, "pass"),
        passed_over__as_the_newest=(NEEDED, f"{NEEDED} and self.running[-1] is not one")),
    *edits("A request was preempted for a decode for which no budget is left. Look at the budget before the pages.",
        preempts_without_budget=(PREEMPT, PREEMPT.replace("self.budget > 0 and ", ""))),
    *edits("A request was preempted although the decode's last page has room. Does it need a page at all?",
        preempts_without_need=(NEEDED, "self.free == 0")),
    *edits("", no_second_look=(f"{ITS_TURN} and self.grows(one, 1) <= self.free", ITS_TURN)),
    *edits("The pages of a preempted request did not become free in this step, or not all. Add all of them at once.",
        pages_kept=(BACK, "pass"), pages_kept__not_full=(BACK, 'self.free += newest["cached"] // self.page_size'),
        pages_kept__one=(BACK, "self.free += 1"), pages_kept__again=(BACK, "pass", PREEMPT, f"while{PREEMPT[2:]}")),
    *edits("A request computes only its prompt. One that was preempted has lost the keys and values of what it wrote "
        "too: it has prompt + written - cached tokens left.",
        prompt_alone=(LEFT, f"{LEFT_OF_PROMPT} if {IN_PROMPT} else 1"), prompt_alone__ever=(LEFT, LEFT_OF_PROMPT),
        prompt_alone__waiting=(LEFT, LEFT.replace('["written"]', '["written"] * (one["pages"] > 0)')),
        prompt_alone__then_the_rest=(COUNT, f"min({LEFT_OF_PROMPT} if {IN_PROMPT} else {LEFT}, self.budget, room)")),
    *edits("A preempted request whose prompt is in the cache was taken for a decode. A decode has 1 token left.",
        decode_by_prompt=(DECODES, f"[one for one in self.running if not {IN_PROMPT}]")),
    *edits("A prompt's last token was not taken for a decode. What runs and has 1 token left is one, written or not.",
        last_of_a_prompt=(DECODES, DECODES.replace("== 1", '== 1 and one["written"] > 0'))),
    *edits("A request that waits was taken for a decode because it has 1 token left. A decode runs: it holds pages.",
        waiting_decodes=(DECODES, DECODES.replace("self.running", "self.requests"),
        ITS_TURN, 'self.budget > 0 and one["id"] not in self.gone')),
    *edits("A request was preempted for a prompt. As long as anybody computes, this is done only for decodes.",
        prompts_preempt=(f"room = {ROOM}", f"if {ITS_TURN} and {ROOM} == 0:\n    self.preempt()\n"
        f"    if one not in self.running:\n        continue\nroom = {ROOM}")),
    *edits("A request was left out because budget or pages do not hold all that it has left. Cut it to what fits.",
        left_out=(COUNT, f"{CHUNK} * (room >= {CHUNK})"), left_out__pages=(COUNT, f"{CHUNK} * (room >= {LEFT})"),
        left_out__budget=(COUNT, f"min({LEFT}, room) * ({LEFT} <= self.budget)")),
    *edits("The room in a request's last page was forgotten: (pages + free) · page_size tokens fit, with those cached.",
        last_page_forgotten=(ROOM, "self.free * self.page_size"),
        last_page_forgotten__new_pages=(f'{ROUND_UP} - one["pages"]', "-(-count // self.page_size)")),
    *edits("Where the tokens fill their pages, one page too many was counted. Round up: -(-tokens // page_size).",
        one_page_too_many=(ROUND_UP, '((one["cached"] + count) // self.page_size + 1)')),
    *edits("The round of prompts ended too early, after the first, or after one that found no page. Try all of them.",
        round_ended=(GIVEN, f"{GIVEN}\n    break"), round_ended__without_a_page=(GIVEN, f"{GIVEN}\nelse:\n    break")),
    *edits("Requests were not taken in order of arrival, which is that of the list, whether they run or wait.",
        not_by_arrival=(ALL, f"{ALL[:-1]}[::-1]:"), not_by_arrival__decodes=(DECODES, f"{DECODES}[::-1]"),
        not_by_arrival__waiting=(ALL, SORTED.format('one["pages"] > 0')), not_by_arrival__shortest=(ALL, SORTED.format(
        'one["left"]')), not_by_arrival__running=(ALL, SORTED.format('one["pages"] == 0'))),
    *edits(BROKEN["is newer"][1], not_the_newest=("pop(-1)", "pop(0)"), not_the_newest__by_id=("pop(-1)",
        'pop(max(range(len(self.running)), key=lambda at: str(self.running[at]["id"])))')),
    *edits(BROKEN["nobody computes"][1], nobody_computes=("self.requests and not self.tokens", "False")),
    *edits('A request whose id is 0 or "" was left out. Python takes these for false: ask whether the id is in a list.',
        id_taken_for_false=(OTHERS, f'{OTHERS} one["id"] and')),
)  # fmt: skip

EXERCISE = Exercise(
    id="16.6", title="The scheduler", entries=("plan",), cases=scheduler_cases, oracle=told, contracts=(CONTRACT,),
    models=(model_of(told, CHANGES, (Step,)),),
    mistakes=tuple(Mistake(name, sentence, when=lambda case, seen, got, words=words: any(words in line for line in got
        or ())) for words, (name, sentence) in BROKEN.items()),
    hints=(
        "Count the budget that is left, the pages that are free, and who runs: the last one is the newest. A chunk is "
        "the least of prompt + written - cached, the budget, and (pages + free) · page_size - cached.",
        "For each decode in order: is the budget used up? Then stop. Was it preempted meanwhile? Then go on. Does it "
        "need a page, and none is free? Preempt the last of those who run, and see whether it was the decode itself.",
        "Subtract a token from the budget when a request gets it, not before: then the token of a preempted decode is "
        "left for a prompt. Make the loop over prompts a function, because rule 3 needs it a second time.",
    ),
)  # fmt: skip
