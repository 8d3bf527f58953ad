"""A draft model: the text is the one without it, each guess is what the draft writes alone, and no page is lost."""

import pytest
import torch

from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages_reference
from course_lib.models.config import ModelConfig
from course_lib.serving import packed
from course_lib.serving.draft import Draft
from course_lib.serving.engine import Engine
from course_lib.serving.generation import generate
from course_lib.serving.memory.prefix_allocator import PrefixAllocator
from course_lib.serving.proposals import Wanted
from course_lib.serving.requests import Job, Request, Sampling
from course_lib.serving.scheduler import Scheduler
from tests.serving.talkers import byte_tokenizer, random_model
from tests.serving.test_captured import by_calling
from tests.serving.test_engine import MODEL, OTHER, new_engine, nothing_left, run_all, tokens_of
from tests.serving.test_fast_step import in_pytorch
from tests.serving.test_speculation import PROMPTS, SAMPLINGS, requests_of, steps_of, texts_of

DRAFTS = {"itself": MODEL, "another": OTHER}


def every_guess_right(engine):
    told = engine.metrics.report()
    return told["proposed"] == told["accepted"] > 0


def compare_guesses(monkeypatch, model):
    """Let each guess be compared with what the draft writes by itself behind the text; returns how many were."""
    propose, lengths = Draft.propose, []

    def compared(draft, wanted):
        guesses = propose(draft, wanted)
        for one, guess in zip(wanted, guesses):
            with torch.no_grad():
                text = generate(model, torch.tensor([list(one.tokens)]), one.most)[0].tolist()
            assert list(guess) in ([], text[len(one.tokens) :])
            lengths.append(len(guess))
        return guesses

    monkeypatch.setattr(Draft, "propose", compared)
    return lengths


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["top-p"]], ids=["greedy", "top-p"])
def test_the_text_is_the_one_without_a_draft(sampling, draft, page_size):
    options = {"pages": 256 // page_size, "page_size": page_size}
    plain = texts_of(new_engine(**options), requests_of(sampling=sampling))
    for speculate in (1, 5):
        engine = new_engine(budget=64, draft=draft, **options)
        assert texts_of(engine, requests_of(sampling=sampling, speculate=speculate)) == plain
        assert nothing_left(engine) and engine.metrics.report()["proposed"] > 0
        assert draft is OTHER or sampling.temperature or every_guess_right(engine)


def test_a_model_that_is_its_own_draft_takes_fewer_steps():
    """13 tokens: one behind the prompt, then 5, 5 and 2."""
    engine, request = new_engine(draft=MODEL), requests_of(speculate=4)[0]
    assert steps_of(new_engine(), requests_of()[0]) == 13
    assert steps_of(engine, request) == 4 and every_guess_right(engine)


def test_texts_that_are_sent_back_are_guessed_as_they_were(monkeypatch):
    """A memory that is too small, prompts that begin alike, and a page that another text had before."""
    for draft in DRAFTS.values():
        requests = [Request([5, 6, 7, 8, 9, n], 17, Sampling(0.9 * (n % 2), seed=n)) for n in range(4)]
        plain = texts_of(new_engine(), requests)
        engine = new_engine(pages=8, page_size=4, budget=12, most_running=4, draft=draft)
        with monkeypatch.context() as patch:
            guesses = compare_guesses(patch, draft)
            speculating = [Request(one.prompt, 17, one.sampling, speculate=6) for one in requests]
            assert texts_of(engine, speculating) == plain and sum(guesses) > 20
        assert engine.metrics.report()["preempted"] > 0 and nothing_left(engine)


def test_a_draft_reads_a_long_prompt_in_pieces_of_the_budget(monkeypatch):
    """8 tokens a step: of 30 and the first that is written, the last are read in the fourth step of decode."""
    guesses = compare_guesses(monkeypatch, OTHER)
    request = Request([n % 11 for n in range(30)], 12, speculate=3)
    engine = new_engine(budget=8, most_running=1, draft=OTHER)
    assert texts_of(engine, [request]) == texts_of(new_engine(), [request])
    assert guesses[:6] == [0, 0, 0, 0, 3, 3] and nothing_left(engine)


def test_what_the_draft_has_read_it_does_not_read_again(monkeypatch):
    """Of a conversation's next question it reads what is new, whoever's pages hold the rest."""
    draft, read = random_model(OTHER.config), []
    engine, hidden = new_engine(page_size=4, draft=draft), draft.hidden
    first = texts_of(engine, [Request([*range(20)], 9, speculate=4)])[0]
    monkeypatch.setattr(draft, "hidden", lambda tokens, cache: read.append(tokens.shape[1]) or hidden(tokens, cache))
    texts_of(engine, [Request([*first, 7, 7, 7], 9, speculate=4)])
    assert read[0] <= 3 + 1 + 4 + 2 and read[1] == 1, "the question, a page that was not whole, and the newest tokens"


def test_a_page_with_another_text_is_known_for_what_it_holds():
    draft = new_draft()

    def guess(tokens, pages):
        with torch.no_grad():
            expected = generate(OTHER, torch.tensor([tokens]), 3)[0, len(tokens) :].tolist()
        assert draft.propose([Wanted(tokens, pages, 3)]) == [tuple(expected)]

    one, other = [1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 5, 6]
    for tokens, pages in ((one, (3, 1, 2)), (other, (4, 1, 5)), (one, (3, 1, 2)), (one, (3, 1, 2)), (other, (4, 0, 5))):
        guess(tokens, pages)
    assert draft._known(Wanted([*other, 0], (4, 1), 1)) == 4, "1 holds the same tokens behind another beginning"
    guess(one, (4, 1, 2))
    assert draft._known(Wanted([*one, 0], (4, 1), 1)) == 6, "and 4 did hold another beginning"
    assert draft._known(Wanted([1, 2, 3, 9], (4, 1), 1)) == 3 and draft._known(Wanted(other, (4, 1), 1)) == 0


def test_texts_share_the_budget_of_a_call():
    texts = [Wanted([1, 2, 3, 4, 5, 6], (0, 1, 2), 3), Wanted([9, 8, 7, 6, 5, 4], (3, 4, 5), 3)]
    draft = new_draft(budget=8)
    assert [len(guess) for guess in draft.propose(texts)] == [3, 0] and draft._known(texts[1]) == 2
    assert [len(guess) for guess in draft.propose(texts)] == [3, 3]


def test_what_failed_half_way_is_not_known():
    model, text = random_model(OTHER.config), Wanted([1, 2, 3, 4, 5, 6], (0, 1, 2), 3)
    draft = new_draft(model)
    draft.propose([text])
    model.hidden = _raise
    with pytest.raises(RuntimeError):
        draft.propose([Wanted([1, 2, 3, 4, 8, 8], (0, 1, 2), 3)])
    assert draft._known(text) == 4, "the first page was not touched"


def test_no_guess_comes_of_what_is_no_number():
    model = random_model(OTHER.config)
    model.embedding.weight[3] = float("nan")
    texts = [Wanted([1, 2], (0, 1), 3), Wanted([4, 3], (2, 3), 3)]
    assert [len(guess) for guess in new_draft(model).propose(texts)] == [3, 0]


def test_room_for_guesses_is_what_the_others_have_left_and_is_given_back():
    """What the draft leaves of it is free again before the step."""
    scheduler, asked = Scheduler(PrefixAllocator(4, 4), budget=8, most_running=2), []
    for number in range(2):
        scheduler.add(Job(number, Request([number] * 3, 9, speculate=4)))
    scheduler.draft = lambda wanted: asked.append([one.most for one in wanted]) or [(0,) * 2 for _ in wanted]
    for _ in range(2):
        scheduler.ran(parts := scheduler.plan())
        for part in parts:
            part.job.write(1)
    assert asked == [[4, 2]], "of 8 tokens, two of them written ones; and none behind a prompt"
    assert [scheduler.allocator.length(part.job.number) for part in parts] == [3 + 1 + 2] * 2


def new_draft(model=OTHER, budget=99):
    return Draft(model, 8, 4, budget=budget, most_running=4, kernels=False, fast=False)


def test_a_word_ends_a_text_in_the_middle_of_guesses():
    whole = new_engine().texts(requests_of()[:1])[0]
    stop = next(whole[place] for place in range(4, 10) if whole[place] not in whole[:place])
    engine = new_engine(draft=MODEL)
    assert engine.texts([Request(PROMPTS[0], 13, stops=(stop,), speculate=16)]) == [whole[: whole.index(stop)]]
    assert nothing_left(engine) and every_guess_right(engine)


def test_a_draft_fails_nobody():
    """It raises at a token, which is told once, and prompt lookup goes on in its place; or its logits are NaN."""
    plain = texts_of(new_engine(), requests_of())
    token = plain[0][5]
    for poison in ("raises", "NaN"):
        draft = random_model()
        engine = new_engine(draft=draft)
        if poison == "NaN":
            draft.embedding.weight[token] = float("nan")
            assert texts_of(engine, requests_of(speculate=3)) == plain
            assert engine.scheduler.draft is not None
        else:
            draft.hidden = _raise
            with pytest.warns(UserWarning, match="prompt lookup does instead. RuntimeError: poisoned") as told:
                assert texts_of(engine, requests_of(speculate=3)) == plain
            assert len(told) == 1
        assert nothing_left(engine)


def _raise(*_):
    raise RuntimeError("poisoned")


def test_single_steps_of_a_draft_are_fast_and_on_their_way_before_they_are_asked_for(monkeypatch):
    in_pytorch(monkeypatch)  # the interpreter would take minutes
    monkeypatch.setattr(packed, "rope_append_to_pages", lambda *given, **_: rope_append_to_pages_reference(*given[:7]))
    engine = new_engine(fast=True, capture=by_calling, draft=random_model(OTHER.config))
    guesses = compare_guesses(monkeypatch, OTHER)
    assert texts_of(engine, requests_of(speculate=4)) == texts_of(new_engine(), requests_of()) and sum(guesses) > 20
    fast = engine._draft.fast
    assert fast.replayed > fast.expected > fast.replayed / 2 and nothing_left(engine)


def test_a_draft_on_the_kernels_guesses_what_it_does_in_pytorch(monkeypatch):
    guesses = compare_guesses(monkeypatch, OTHER)
    engine = new_engine(kernels=True, fast=True, capture=by_calling, draft=random_model(OTHER.config))
    request = Request([5, 6, 7, 8], 4, speculate=2)
    assert texts_of(engine, [request]) == texts_of(new_engine(), [request]) and sum(guesses) > 1


def test_only_who_speculates_is_guessed():
    engine = new_engine(draft=MODEL)
    numbers = [engine.submit(one) for one in (requests_of()[0], requests_of(speculate=4)[1])]
    while engine.busy:
        engine.step()
    assert [engine.metrics.times[number].proposed > 0 for number in numbers] == [False, True]


def test_a_text_that_was_given_up_leaves_nothing_behind():
    engine = new_engine(page_size=2, draft=MODEL)
    numbers = [engine.submit(request) for request in requests_of(speculate=3)]
    engine.step(), engine.step(), engine.cancel(numbers[1])
    while engine.busy:
        engine.step()
    assert nothing_left(engine)
    assert [tokens_of(events) for events in run_all(engine, requests_of(speculate=3))] == [
        tokens_of(events) for events in run_all(new_engine(), requests_of())
    ]


@pytest.mark.parametrize(
    "config, device, told",
    [
        (ModelConfig(300, 1, 32, 2, 1, 16, 48, 256), "cpu", "the draft knows 300 tokens and the model 257"),
        (ModelConfig(257, 1, 32, 2, 1, 16, 48, 128), "cpu", "the draft was made for 128 tokens and the model for 256"),
        (OTHER.config, "meta", "the draft is on meta and the model on cpu"),
    ],
)
def test_a_draft_that_cannot_guess_is_refused(config, device, told):
    with pytest.raises(ValueError, match=told):
        Engine(MODEL, byte_tokenizer(), pages=8, kernels=False, draft=random_model(config).to(device))
