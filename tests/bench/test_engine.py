"""The peer of the engine's benchmark runs what it is compared for: a step of decode behind a context."""

import dataclasses

import pytest
import torch

from course_lib.bench import engine as bench
from tests.serving.talkers import CONFIG


def test_transformers_steps_choose_what_its_model_chooses_without_a_cache():
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    config = dataclasses.replace(CONFIG, context=2048)
    model = bench.transformers_model(config, "cpu", torch.float32)
    tokens, chosen = [0] * 12, []

    def called(function):
        return lambda: chosen.append(function()) or chosen[-1]

    step = bench.transformers_step(model, 2, 11, called)
    for _ in range(4):
        step()
        with torch.no_grad():
            right = model(torch.tensor([tokens])).logits[0, -1].argmax().item()
        assert chosen[-1].tolist() == [[right]] * 2
        tokens.append(right)


def test_prompts_are_those_that_the_figures_name():
    assert (len(bench.PROMPTS), bench.PROMPTS[0], bench.PROMPTS[-1]) == (64, 64, 883)
    prompts = [bench.prompt_of(20, seed, CONFIG) for seed in range(2)]
    assert prompts[0] != prompts[1] and bench.tokenizer_of(CONFIG).decode(prompts[0]).count("w") == 20
