"""Guessed tokens: the text is the one without them, whatever was guessed, in fewer steps, and no page is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.models.tiny import tiny_text
from course_lib.models.trained import trained_model
from course_lib.serving.conversation import Conversation
from course_lib.serving.engine import Engine
from course_lib.serving.memory.prefix_allocator import PrefixAllocator
from course_lib.serving.proposals import LONGEST, SHORTEST, PromptLookup, accepted
from course_lib.serving.requests import Job, Request, Sampling
from course_lib.serving.scheduler import Scheduler
from tests.serving.talkers import byte_tokenizer, random_model
from tests.serving.test_captured import by_calling
from tests.serving.test_engine import MODEL, fast_engine, new_engine, nothing_left, run, run_all, tokens_of

SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0, seed=3),
    "top-k": Sampling(temperature=1.0, top_k=9, seed=2**40),
    "top-p": Sampling(temperature=0.8, top_p=0.7, min_p=0.01, seed=5),
}
GUESSES = {
    "right": lambda number: True,
    "wrong": lambda number: False,
    "partly right": lambda number: number % 3 != 2,
}
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 8, 7]]


def requests_of(new_tokens=13, sampling=SAMPLINGS["greedy"], **options):
    return [Request(prompt, new_tokens, sampling, **options) for prompt in PROMPTS]


def texts_of(engine, requests):
    """Prompt and text of each, in tokens."""
    return [[*request.prompt, *tokens_of(events)] for request, events in zip(requests, run_all(engine, requests))]


def guess(monkeypatch, texts, right=GUESSES["right"]):
    """Let each guess be the token of one of the texts where `right` says so of its place, and another one elsewhere."""

    def propose(_, tokens, most):
        text = next(text for text in texts if text[: len(tokens)] == tokens)
        places = range(len(tokens), len(tokens) + most)
        true = [text[place] if place < len(text) else 0 for place in places]
        return tuple(token if right(place) else (token + 1) % 256 for place, token in zip(places, true))

    monkeypatch.setattr(PromptLookup, "propose", propose)


def shared(engine):
    """The tokens on all ways through the tree of prefixes."""
    for node in engine.scheduler.allocator.tree.nodes():
        path = []
        while node.parent is not None:
            path, node = [*node.tokens, *path], node.parent
        yield path


def steps_of(engine, request):
    engine.submit(request)
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("right", [*GUESSES.values(), None], ids=[*GUESSES, "looked up"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_text_is_the_one_without_guesses(monkeypatch, sampling, right, page_size):
    """Across the ends of pages, with one guess a step, some, and more than are left of the text."""
    options = {"pages": 256 // page_size, "page_size": page_size}
    plain = texts_of(new_engine(**options), requests_of(sampling=sampling))
    if right is not None:
        guess(monkeypatch, plain, right)
    for speculate in (1, 5, 16):
        engine = new_engine(budget=64, **options)
        assert texts_of(engine, requests_of(sampling=sampling, speculate=speculate)) == plain
        assert nothing_left(engine) and (right is None or engine.metrics.report()["proposed"] > 0)


def test_right_guesses_take_fewer_steps(monkeypatch):
    """13 tokens: one behind the prompt with 4 guesses, and so on; and all wrong, as many as without."""
    plain = texts_of(new_engine(), requests_of())
    assert steps_of(new_engine(), requests_of()[0]) == 13
    guess(monkeypatch, plain)
    engine = new_engine()
    assert steps_of(engine, requests_of(speculate=4)[0]) == 3
    assert engine.metrics.report()["proposed"] == engine.metrics.report()["accepted"] == 10
    guess(monkeypatch, plain, GUESSES["wrong"])
    engine = new_engine()
    assert steps_of(engine, requests_of(speculate=4)[0]) == 13
    assert engine.metrics.report()["proposed"] > 30 and engine.metrics.report()["accepted"] == 0


def test_a_text_may_end_with_the_last_page_of_the_memory(monkeypatch):
    """3 tokens and 13 more, in 4 pages of 4: a guess behind the text's end would find no place."""
    plain = texts_of(new_engine(), requests_of())
    guess(monkeypatch, plain, GUESSES["partly right"])
    for new_tokens in (1, 2, 3, 12, 13):
        engine = new_engine(pages=4, page_size=4, budget=32, most_running=1)
        request = Request(PROMPTS[0], new_tokens, speculate=16)
        assert texts_of(engine, [request]) == [plain[0][: 3 + new_tokens]] and nothing_left(engine)


@pytest.mark.parametrize("by", ["word", "token"])
def test_a_text_ends_in_the_middle_of_right_guesses(monkeypatch, by):
    engine = new_engine()
    text = texts_of(engine, requests_of())[0]
    written = text[3:]
    pieces = [engine.tokenizer.decode([token]) for token in written]
    place = next(place for place in range(4, 10) if pieces[place].isascii() and pieces[place] not in pieces[:place])
    whole = engine.tokenizer.decode(written[:place])
    guess(monkeypatch, [text])
    stops = (pieces[place],) if by == "word" else ()
    engine = Engine(
        MODEL, byte_tokenizer(() if by == "word" else (written[place],)), pages=64, page_size=4, kernels=False
    )
    events = run_all(engine, [Request(PROMPTS[0], 13, stops=stops, speculate=16)])[0]
    assert "".join(event.text for event in events) == whole and events[-1].ended == "stop"
    assert tokens_of(events) == written[: place + 1] and nothing_left(engine)
    assert all(path == text[: len(path)] and len(path) < 3 + place + 1 for path in shared(engine))


def test_texts_that_are_sent_back_go_on_as_they_would(monkeypatch):
    requests = [Request([5, 6, n], 20, Sampling(0.9, seed=n)) for n in range(4)]
    plain = texts_of(new_engine(), requests)
    guess(monkeypatch, plain, GUESSES["partly right"])
    engine = new_engine(pages=12, page_size=4, budget=12, most_running=4)
    speculating = [Request(one.prompt, 20, one.sampling, speculate=6) for one in requests]
    assert texts_of(engine, speculating) == plain
    assert engine.metrics.report()["preempted"] > 0 and nothing_left(engine)


def test_a_guess_that_was_wrong_is_shared_with_nobody(monkeypatch):
    """All that the tree of prefixes holds is a beginning of a text; and who asks for text and guess gets his own."""
    text = texts_of(new_engine(), requests_of())[0]
    wrong = [(token + 1) % 256 for token in text]
    for right in GUESSES.values():
        with monkeypatch.context() as patch:
            guess(patch, [text], right)
            engine = new_engine(page_size=2)
            numbers = [engine.submit(Request(PROMPTS[0], 13, speculate=5))]
            while engine.busy:
                engine.step()
                assert all(path == text[: len(path)] for path in shared(engine))
        for known in (4, 7, 10):
            prompt = [*text[:known], *wrong[known : known + 4]]
            assert texts_of(engine, [Request(prompt, 6)]) == texts_of(new_engine(), [Request(prompt, 6)])
        assert numbers == [0] and nothing_left(engine)


def test_what_right_guesses_have_computed_is_there_for_others(monkeypatch):
    text = texts_of(new_engine(), requests_of())[0]
    guess(monkeypatch, [text])
    engine = new_engine(page_size=2)
    texts_of(engine, [Request(PROMPTS[0], 13, speculate=5)])
    assert len(engine.scheduler.allocator.tree.match(text)[0]) == 15 // 2, "all but the newest token"


def test_a_text_that_was_given_up_leaves_nothing_behind(monkeypatch):
    plain = texts_of(new_engine(), requests_of())
    for name, right in GUESSES.items():
        guess(monkeypatch, plain, right)
        engine = new_engine(page_size=2)
        numbers = [engine.submit(request) for request in requests_of(speculate=3)]
        first = engine.step()
        engine.cancel(numbers[1])
        events = run(engine)
        assert events[numbers[1]][-1].ended == "cancelled" and nothing_left(engine), name
        written = [*(event.token for event in first if event.number == 2), *tokens_of(events[2])]
        assert [*PROMPTS[2], *written] == plain[2]


def test_between_two_steps_a_text_has_the_pages_that_it_fills(monkeypatch):
    plain = texts_of(new_engine(), requests_of())
    guess(monkeypatch, plain, GUESSES["partly right"])
    engine = new_engine(page_size=2)
    for request in requests_of(speculate=7):
        engine.submit(request)
    while engine.busy:
        engine.step()
        allocator = engine.scheduler.allocator
        for job in engine.scheduler.running:
            assert allocator.length(job.number) == job.computed == len(job.tokens) - 1
            assert len(allocator.table(job.number)) == -(-job.computed // 2)


def test_guesses_keep_nobody_waiting_and_send_nobody_back(monkeypatch):
    """Texts go first, then a prompt's pieces; guesses get what is left of the budget, and then of the pages."""
    monkeypatch.setattr(PromptLookup, "propose", lambda _, tokens, most: (0,) * most)

    def steps(pages, budget, prompts, count):
        scheduler = Scheduler(PrefixAllocator(pages, 4), budget=budget, most_running=4)
        for number, tokens in enumerate(prompts):
            scheduler.add(Job(number, Request([number] * tokens, 9, speculate=16)))
        for _ in range(count):
            parts = scheduler.plan()
            yield [(part.job.number, part.length) for part in parts]
            scheduler.ran(parts)
            for part in parts:
                if part.asks:
                    part.job.write(1)
                    scheduler.settle(part.job)
            assert not any(job.preempted for job in scheduler.running)

    pieces = [(0, 1), (1, 1), (2, 10)]
    assert list(steps(100, 12, (3, 3, 30), 4)) == [[(0, 3), (1, 3), (2, 6)], pieces, pieces, [(0, 6), (1, 2), (2, 4)]]
    assert list(steps(100, 99, (3,), 3)) == [[(0, 3 + 8)], [(0, 1 + 7)], [(0, 1 + 6)]], "9 tokens may be chosen"
    assert list(steps(3, 99, (3,), 1)) == [[(0, 3 + 8)]], "which fills three pages but for a place"
    assert list(steps(4, 99, (3, 3), 2)) == [[(0, 3 + 8), (1, 3 + 1)], [(1, 1), (0, 1 + 7)]]


def test_a_guess_fails_nobody(monkeypatch):
    """The model raises at a guessed token, or makes NaN of it that reaches what stands before it."""
    for poison in ("raises", "NaN"):
        model = random_model()
        plain = texts_of(new_engine(model), requests_of())
        token = next(token for token in range(256) if not any(token in text for text in plain))
        monkeypatch.setattr(PromptLookup, "propose", lambda _, tokens, most, token=token: (token,) * most)
        engine = new_engine(model)
        if poison == "NaN":
            model.embedding.weight[token] = float("nan")
        else:
            hidden = model.hidden

            def poisoned(tokens, cache, token=token, hidden=hidden):
                if (tokens == token).any():
                    raise RuntimeError("poisoned")
                return hidden(tokens, cache)

            model.hidden = poisoned
        assert texts_of(engine, requests_of(speculate=3)) == plain and nothing_left(engine)


def test_a_text_that_fails_behind_right_guesses_has_what_came_before(monkeypatch):
    """The sixth token makes NaN. Without guesses and with them, six tokens are known, and then an error."""
    model = random_model()
    text = texts_of(new_engine(model), requests_of())[0]
    assert text[8] not in text[:8]
    model.embedding.weight[text[8]] = float("nan")
    found = [run_all(new_engine(model), [Request(PROMPTS[0], 13)])[0]]
    guess(monkeypatch, [text])
    for speculate in (3, 8):
        engine = new_engine(model)
        found.append(run_all(engine, [Request(PROMPTS[0], 13, speculate=speculate)])[0])
        assert nothing_left(engine)
    assert [tokens_of(events) for events in found] == [text[3:9]] * 3
    assert all("NaN" in events[-1].error for events in found)


def test_the_kernels_write_the_same_with_guesses():
    """Plain steps, and fast ones for what nothing is guessed of."""
    requests = [Request([5, 6, 7, 5, 6], 4), Request([5, 6, 7, 5, 6], 5, Sampling(1.0, seed=1))]
    speculating = [Request(one.prompt, one.new_tokens, one.sampling, speculate=2) for one in requests]
    plain = texts_of(new_engine(), requests)
    engine = fast_engine()
    assert texts_of(engine, speculating) == plain and texts_of(new_engine(kernels=True), speculating) == plain
    assert engine.metrics.report()["proposed"] > 0 and engine.fast.replayed > 0 and nothing_left(engine)


def test_a_step_with_guesses_is_plain_and_one_without_is_fast(monkeypatch):
    text = texts_of(new_engine(), requests_of())[0]
    monkeypatch.setattr(PromptLookup, "propose", lambda _, tokens, most: (text[len(tokens)],) * (len(tokens) % 3 == 0))
    engine = new_engine(kernels=True, fast=True, capture=by_calling)
    asked, plainly = [], engine.fast.plainly
    monkeypatch.setattr(engine.fast, "plainly", lambda *given: asked.append(len(given[2])) or plainly(*given))
    launched, launch = [], engine.fast._launch
    monkeypatch.setattr(engine.fast, "_launch", lambda *given: launched.append(given) or launch(*given))
    assert texts_of(engine, [Request(PROMPTS[0], 8, speculate=1)]) == [text[:11]]
    assert asked == [2, 2, 2] and len(launched) == engine.fast.replayed == 2, "and none is begun that may not come"


def test_the_small_model_takes_fewer_steps_where_its_text_repeats():
    """What it writes after a sentence of Alice that stands twice: most of it stood there before."""
    model = trained_model("tiny")
    sentence = list(tiny_text().encode())[400:460]
    request = Request(sentence * 2 + sentence[:20], 40)
    engine, guessing = (Engine(model, byte_tokenizer(()), pages=64, kernels=False) for _ in range(2))
    steps = steps_of(engine, request)
    speculating = Request(request.prompt, 40, speculate=8)
    assert steps_of(guessing, speculating) < steps == 40
    assert texts_of(guessing, [speculating]) == texts_of(engine, [request])


def test_a_conversation_may_be_guessed():
    def answer(speculate):
        engine = Engine(random_model(), byte_tokenizer(()), pages=64, kernels=False)
        talk = Conversation(engine)
        return "".join(talk.say("go on and on and on", new_tokens=12, speculate=speculate)), talk.times

    (plain, nothing), (guessed, some) = answer(0), answer(4)
    assert plain == guessed and nothing.proposed == 0 < some.proposed
    assert f"{some.accepted} of {some.proposed} guesses were right" in str(some) and "guesses" not in str(nothing)


@pytest.mark.parametrize("speculate", [-1, 17, 1.0, True, None])
def test_what_makes_no_sense_is_named(speculate):
    with pytest.raises(ValueError, match=f"speculate is {speculate!r}; it must be a whole number from 0 to 16"):
        Request([1], 1, speculate=speculate)


@pytest.mark.parametrize(
    "text, proposed",
    [
        ([1, 2, 3], ()),
        ([1, 2, 3, 1], ()),
        ([1, 2, 3, 1, 2], (3, 1, 2, 3, 1)),
        ([7, 1, 2, 3, 4, 8, 2, 3, 5, 9, 1, 2, 3], (4, 8, 2, 3, 5)),  # three tokens go before two
        ([2, 3, 4, 9, 2, 3, 5, 8, 2, 3], (5, 8, 2, 3, 5)),  # the newest of equals
        ([6, 6], ()),
        ([6, 6, 6], (6, 6, 6, 6, 6)),
    ],
)
def test_what_followed_before_is_guessed(text, proposed):
    assert PromptLookup().propose(text, 5) == proposed


@settings(deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40), seed=st.integers(0, 2**32))
def test_an_index_that_grows_knows_what_a_new_one_knows(text, seed):
    """And both what a search through the text finds."""
    draw, lookup, end = random.Random(seed), PromptLookup(), 0
    while end < len(text):
        end = min(len(text), end + draw.randrange(1, 5))
        part, most = text[:end], draw.randrange(1, 7)
        assert lookup.propose(part, most) == PromptLookup().propose(part, most) == searched(part, most)


def searched(text, most):
    for size in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        for begin in range(len(text) - 1, size - 1, -1):
            if text[begin - size : begin] == text[len(text) - size :]:
                longer = list(text)
                for place in range(most):
                    longer.append(longer[begin + place])
                return tuple(longer[len(text) :])
    return ()


def test_a_long_text_is_read_once():
    """A step looks at what is new in it, and at the guess."""

    class Watched(list):
        looks = 0

        def __getitem__(self, which):
            self.looks += 1
            return super().__getitem__(which)

    draw = random.Random(0)
    text, lookup = Watched(draw.randrange(50) for _ in range(10_000)), PromptLookup()
    lookup.propose(text, 4)
    for _ in range(5):
        text.looks = 0
        text += [draw.randrange(50) for _ in range(3)]
        lookup.propose(text, 4)
        assert text.looks <= 3 * LONGEST + LONGEST + 4


def test_choices_count_as_long_as_guesses_were_right():
    assert [accepted((1, 2, 3), chosen) for chosen in ([1, 2, 3, 4], [1, 2, 9, 4], [9, 2, 3, 4])] == [3, 2, 0]
    assert accepted((), [5]) == 0 and accepted((5, 6), [5]) == 0, "nothing was chosen behind the first guess"
