"""Wrong answers to exercise 16.6, and unusual right ones."""

from tests.submissions.edits import changed

DECODES = """    for request in [request for request in running if missing(request) == 1]:
        if budget == 0:
            break
        if request in running and pages_for(request, 1) > free_pages:
            preempt_the_newest()
        if request in running:
            compute(request, 1)
"""
FILL = "    compute_prompts()\n    if requests"
STUCK = """    if requests and not tokens:
        preempt_the_newest()
        compute_prompts()
"""
NEW = "new = min(missing(request), budget, room)"
ROOM = 'room = (request["pages"] + free_pages) * page_size - request["cached"]'
MISSING = 'return request["prompt"] + request["written"] - request["cached"]'
PAGES = 'return -(-(request["cached"] + new) // page_size) - request["pages"]'
NEEDS = "if request in running and pages_for(request, 1) > free_pages:"
PREEMPT = f"        {NEEDS}\n            preempt_the_newest()\n"
LOOP = "        for request in requests:\n            if request"
CONTINUE = ":\n                continue"
TURN = "        if request in running:\n            compute"
GOT = "            if new > 0:\n                compute(request, new)\n"
RETURN = "    return tokens, preempted"


def wrong(*replacements):
    return changed("16.6", *replacements)


WRONG = {
    "decode_waits": wrong(
        (DECODES, ""), (FILL, "    compute_prompts()\n" + DECODES + "    if requests")),
    "decode_waits__in_order": wrong((DECODES, DECODES.replace(
        "        if budget == 0:", "        if any(missing(one) > 1 for one in running[: running.index(request)]) if "
        "request in running else True:\n            break\n        if budget == 0:"
    ))),
    "too_many_tokens": wrong(("budget -= new", "budget -= new if missing(request) > 1 else 0")),
    "budget_before_preemption": wrong(
        (DECODES, "    decoding = [request for request in running if missing(request) == 1][:budget]\n"
         "    left = budget - len(decoding)\n" + DECODES + "    budget = left\n")
    ),
    "passed_over": wrong((PREEMPT, ""),
                            (TURN, TURN.replace("request in running", "pages_for(request, 1) <= free_pages"))),
    "not_the_newest__oldest": wrong(("running.pop()", "running.pop(0)")),
    "not_the_newest__by_id_and_no_rule_3": wrong(("running.pop()", "running.pop(max(range(len(running)), "
        "key=lambda at: str(running[at]['id'])))"), (STUCK, "")),
    "not_the_newest__never_itself": wrong((
        PREEMPT, PREEMPT.replace("preempt_the", "running.sort(key=lambda one: one is not request)\n"
                                                    "            preempt_the"))),
    "passed_over__as_the_newest": wrong(
        (NEEDS, "if request in running and pages_for(request, 1) > free_pages and request is not running[-1]:"),
        (TURN, TURN.replace("running", "running and pages_for(request, 1) <= free_pages")),
    ),
    "not_the_newest__always_itself": wrong((
        PREEMPT, PREEMPT.replace("preempt_the", "running.sort(key=lambda one: one is request)\n"
                                                     "            preempt_the"))),
    "preempts_without_budget": wrong(
        ("        if budget == 0:\n            break\n", ""),
        (TURN, TURN.replace("running", "running and budget")),
    ),
    "preempts_without_need": wrong(("pages_for(request, 1) > free_pages", "free_pages == 0")),
    "preempted_computes": wrong((' or request["id"] in preempted', "")),
    "pages_kept": wrong(('        free_pages += newest["pages"]\n', "")),
    "pages_kept__one": wrong(('free_pages += newest["pages"]', "free_pages += 1")),
    "prompt_alone": wrong((MISSING, 'return max(request["prompt"] - request["cached"], 1)')),
    "prompt_alone__ever": wrong((MISSING, 'return request["prompt"] - request["cached"]')),
    "decode_by_prompt": wrong((
        "running if missing(request) == 1]", 'running if request["cached"] >= request["prompt"]]'
    )),
    "waiting_decodes": wrong(
        ("for request in running if", "for request in requests if"),
        ("request in running", 'request["id"] not in preempted'),
    ),
    "nobody_computes": wrong((STUCK, "")),
    "nobody_computes__still": wrong((STUCK, "    if requests and not tokens:\n        preempt_the_newest()\n")),
    "prompts_preempt": wrong(
        (f"            {ROOM}\n", f"            {ROOM}\n            if room == 0 and budget and request in running:\n"
         "                preempt_the_newest()\n                if request not in running:\n                    "
         f"continue\n                {ROOM}\n")
    ),
    "pages_overdrawn": wrong((NEW, "new = min(missing(request), budget)")),
    "pages_overdrawn__still_free": wrong(("        free_pages -= pages_for(request, new)\n", "")),
    "left_out": wrong((NEW, "new = min(missing(request), budget)\n            if new > room" + CONTINUE)),
    "left_out__budget": wrong((
        NEW, "new = min(missing(request), room)\n            if missing(request) > budget" + CONTINUE)),
    "last_page_forgotten": wrong((ROOM, "room = free_pages * page_size")),
    "pages_overdrawn__rounded_down": wrong((PAGES, 'return (request["cached"] + new) // page_size - request["pages"]')),
    "one_page_too_many": wrong((PAGES, 'return (request["cached"] + new) // page_size + 1 - request["pages"]')),
    "round_ended": wrong((GOT, GOT + "                break\n")),
    "round_ended__without_a_page": wrong((GOT, GOT + "            else:\n                break\n")),
    "empty_entry": wrong(("if new > 0:", "if True:")),
    "not_by_arrival": wrong((LOOP, LOOP.replace("requests", "sorted(requests, key=missing)"))),
    "not_by_arrival__newest": wrong((LOOP, LOOP.replace("requests", "reversed(requests)"))),
    "computed_twice": wrong(("new = min(missing(request), budget, room)", "new = min(budget, room)")),
    "requests_changed": wrong(("        budget -= new\n", '        budget -= new\n        request["done"] = True\n')),
    "waiting_preempted": wrong(("        newest = running.pop()\n", "        newest = requests[-1]\n        if newest "
                                "in running:\n            running.pop()\n")),
    "not_the_newest": wrong(("running.pop()", "running.pop(len(running) // 3)")),
    "last_of_a_prompt": wrong(("missing(request) == 1]", 'missing(request) == 1 and request["written"]]')),
    "not_by_arrival__running": wrong((
        LOOP, LOOP.replace("requests", 'sorted(requests, key=lambda r: r["pages"] == 0)'))),
    "preempted_computes__from_its_start": wrong((' or request["id"] in preempted', ""),
        ("free_pages += newest", "requests[requests.index(newest)] = {**newest, 'cached': 0, 'pages': 0}\n"
         "        free_pages += newest"),
        ("tokens, preempted = {}, []", "tokens, preempted, requests = {}, [], [*requests]")),
    "prompt_alone__waiting_and_last_page_forgotten": wrong((ROOM, "room = free_pages * page_size"),
        (MISSING, MISSING.replace('["written"]', '["written"] * (request["pages"] > 0)'))),
    "id_taken_for_false": wrong(('if request["id"] in tokens', 'if not request["id"] or request["id"] in tokens')),
    "not_there": wrong((RETURN, "    tokens.update({'before': 1} if not requests else {})\n" + RETURN)),
}  # fmt: skip
UNUSUAL = {
    "one loop that sorts decodes to the front": """# Exercise 16.6 · The scheduler
from math import ceil


def plan(requests, budget, free_pages, page_size):
    left = {r["id"]: r["prompt"] + r["written"] - r["cached"] for r in requests}
    alive = list(requests)
    gone, tokens = set(), {}

    def held():
        return free_pages + sum(r["pages"] for r in requests if r["id"] in gone) - sum(
            ceil((r["cached"] + tokens[r["id"]]) / page_size) - r["pages"] for r in requests if r["id"] in tokens
        )

    def throw_out():
        victim = next(r for r in reversed(requests) if r["pages"] and r["id"] not in gone)
        gone.add(victim["id"])

    for attempt in range(2):
        order = sorted(alive, key=lambda r: not (r["pages"] and left[r["id"]] == 1))
        for r in order:
            rest = budget - sum(tokens.values())
            if rest <= 0 or r["id"] in tokens or r["id"] in gone:
                continue
            if r["pages"] and left[r["id"]] == 1:
                if r["cached"] == r["pages"] * page_size and held() == 0:
                    throw_out()
                if r["id"] not in gone:
                    tokens[r["id"]] = 1
            else:
                slots = r["pages"] * page_size - r["cached"] + held() * page_size
                chunk = sorted((left[r["id"]], rest, slots))[0]
                if chunk:
                    tokens[r["id"]] = chunk
        if tokens or not requests:
            break
        throw_out()
    return tokens, gone
""",
    "a copy of the requests, changed at will": """# Exercise 16.6 · The scheduler
def plan(requests, budget, free_pages, page_size):
    table = [dict(request) for request in requests]
    gone, tokens = [], {}
    for one in table:
        one["left"] = one["prompt"] + one["written"] - one["cached"]
        one["out"] = False

    def evict():
        for one in table[::-1]:
            if one["pages"] > 0 and not one["out"]:
                one["out"] = True
                gone.insert(0, one["id"])
                return one["pages"]
        return 0

    for one in table:
        if one["pages"] and one["left"] == 1 and not one["out"] and budget:
            slack = one["pages"] * page_size - one["cached"]
            while not slack and not free_pages and not one["out"]:
                free_pages += evict()
            if not one["out"]:
                free_pages -= not slack
                tokens[one["id"]] = 1
                budget -= 1
    while True:
        for one in table:
            if one["out"] or one["id"] in tokens:
                continue
            slack = one["pages"] * page_size - one["cached"]
            count = min(one["left"], budget, slack + free_pages * page_size)
            if not count:
                continue
            free_pages -= max(0, (count - slack + page_size - 1) // page_size)
            budget -= count
            tokens[one["id"]] = count
        if tokens or not table:
            return [tokens, tuple(gone)]
        free_pages += evict()
""",
    "token by token": """# Exercise 16.6 · The scheduler
class Planner:
    def __init__(self, requests, budget, free, size):
        self.free, self.size, self.budget = free, size, budget
        self.requests = requests
        self.out = {}
        self.sent_back = []

    def end(self, r):
        return r["cached"] + self.out.get(r["id"], 0)

    def step(self, r):
        if self.budget == 0 or self.end(r) == r["prompt"] + r["written"]:
            return False
        if self.end(r) % self.size == 0:
            if self.free == 0:
                return False
            self.free -= 1
        self.out[r["id"]] = self.out.get(r["id"], 0) + 1
        self.budget -= 1
        return True

    def back(self):
        r = [r for r in self.requests if r["pages"] and r["id"] not in self.sent_back][-1]
        self.sent_back.append(r["id"])
        self.free += r["pages"]

    def go(self):
        decoding = [r for r in self.requests if r["pages"] and r["cached"] + 1 == r["prompt"] + r["written"]]
        for r in decoding:
            if self.budget and r["id"] not in self.sent_back and not self.step(r):
                self.back()
                if r["id"] not in self.sent_back:
                    self.step(r)
        self.others()
        if self.requests and not self.out:
            self.back()
            self.others()
        return self.out, self.sent_back

    def others(self):
        for r in self.requests:
            while r["id"] not in self.sent_back and self.step(r):
                pass


def plan(requests, budget, free_pages, page_size):
    return Planner(requests, budget, free_pages, page_size).go()
""",
}
