"""Models of transformers on the course's attention: what they compute with their own, and what is refused."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

from course_lib.models import transformers_attention
from course_lib.models.torch_attention import torch_attention
from course_lib.models.transformers_attention import (
    course_attention,
    plan_for,
    register_with_transformers,
)

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", minversion="5")

SMALL = {
    "vocab_size": 80, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
KINDS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 4},  # every layer has a window, and the batch is longer
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
}
LENGTHS = (9, 4, 4, 7)
PATHS = pytest.mark.parametrize("name", ["course", "course-in-pytorch"])


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_with_transformers()
    register_with_transformers("course-in-pytorch", kernels=False)


def small(kind="Llama", **changes):
    """A random model of transformers in float32, with its own plain attention."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | KINDS.get(kind, {}) | changes)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


def padded(lengths=LENGTHS, side="left"):
    """Random texts of these lengths in one batch: tokens and their mask, [batch, longest]."""
    places = torch.arange(max(lengths)).expand(len(lengths), -1)
    sizes = torch.tensor(lengths)[:, None]
    mask = (places >= max(lengths) - sizes if side == "left" else places < sizes).long()
    tokens = torch.randint(2, 80, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens * mask, "attention_mask": mask}


def both(model, name, run, own="eager"):
    """What `run(model)` gives with an attention of transformers' own and with the one registered as `name`."""
    results = []
    for implementation in (own, name):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(run(model))
    return results


def assert_same_logits(model, name, batch, own="eager"):
    """At tokens: what a model says at padding is nobody's business. 1e-4 of the largest: float32 in another order."""
    expected, found = both(model, name, lambda model: model(**batch).logits, own)
    at = batch["attention_mask"].bool() if "attention_mask" in batch else ...
    torch.testing.assert_close(found[at], expected[at], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def runs(monkeypatch):
    """A list that gets the shapes of query and key where a kernel would run; PyTorch computes here."""
    seen = []

    def counted(query, key, *rest, **options):
        seen.append((tuple(query.shape), tuple(key.shape)))
        return torch_attention(query, key, *rest, **options)

    monkeypatch.setattr(transformers_attention, "kernel_attention", counted)
    return seen


@PATHS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_a_padded_batch_are_the_models_own(kind, side, name):
    assert_same_logits(small(kind), name, padded(side=side))


@PATHS
@pytest.mark.parametrize("kind", KINDS)
def test_logits_without_padding_are_the_models_own(kind, name):
    assert_same_logits(small(kind), name, {"input_ids": padded()["input_ids"]})


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(
    "kind, name, lengths",
    [*((kind, "course-in-pytorch", lengths) for kind in KINDS for lengths in (LENGTHS, (3, 3))),
     ("Llama", "course", LENGTHS), ("Qwen3", "course", (3, 3)), ("Qwen2", "course", (9, 4))],
)  # fmt: skip
def test_it_generates_what_the_model_does_by_itself(kind, name, lengths, cache):
    """Greedy, past the window, where a cache of a sliding layer has begun to forget; every step's logits too."""
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True,
               "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    expected, found = both(small(kind), name, lambda model: model.generate(**padded(lengths), **options))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_the_kernels_run_at_every_step_of_a_padded_batch(kind, cache, monkeypatch):
    """Three begin at places of their own, two of which follow each other with one length: three cuts a layer."""
    seen = runs(monkeypatch)
    model = small(kind)
    model.set_attn_implementation("course")
    model.generate(**padded(), max_new_tokens=3, do_sample=False, cache_implementation=cache, disable_compile=True)
    prefill, decode = ([shapes for shapes in seen if (shapes[0][2] == 1) == single] for single in (False, True))
    assert len(prefill) == 3 * 2 and [query[2] for query, _ in prefill[:3]] == [9, 4, 7]
    assert {query[1] for query, _ in seen} == {4} and {key[1] for _, key in seen} == {2}  # no key is repeated
    if kind in ("Llama", "Qwen3"):
        assert len(decode) == 2 * 3 * 2 and [key[2] for _, key in decode[:3]] == [10, 5, 8]
    else:  # within a window all sequences may see as many keys
        assert decode


def test_without_its_mask_function_a_padded_batch_is_wrong_in_silence():
    """What transformers does for an attention that has no mask function: the layers get no mask."""
    transformers.AttentionInterface.register("maskless", course_attention)
    batch, at = padded(), padded()["attention_mask"].bool()
    expected, found = both(small(), "maskless", lambda model: model(**batch).logits)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)  # the longest has no padding
    assert (found[at] - expected[at]).abs().max() > 0.01 * expected.abs().max()


@PATHS
def test_several_tokens_after_a_cache_are_aligned_to_its_end(name):
    """Five tokens after eight: transformers' name for it is a continued prefill."""
    batch = padded((8, 5))
    more = torch.randint(2, 80, (2, 5), generator=torch.Generator().manual_seed(2))
    whole = torch.cat([batch["attention_mask"], torch.ones_like(more)], dim=1)

    def run(model):
        cache = model(**batch, use_cache=True).cache
        return model(input_ids=more, attention_mask=whole, cache=cache).logits

    expected, found = both(small(), name, run)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("hole", [True, False], ids=["a hole in the padding", "packed texts"])
def test_a_mask_that_no_cut_describes_goes_to_pytorch(hole, monkeypatch):
    seen = runs(monkeypatch)
    batch = padded()
    if hole:
        batch["attention_mask"][0, 4] = 0
    else:
        batch = {"input_ids": batch["input_ids"], "use_cache": False,
                 "position_ids": torch.cat([torch.arange(4), torch.arange(5)])[None]}  # fmt: skip
    assert_same_logits(small(), "course", batch)
    assert not seen


def test_a_mask_that_was_written_into_has_no_plan():
    """Its plan would describe the mask that was."""
    model = small()
    model.set_attn_implementation("course")
    embedded = torch.zeros(4, 9, 48)
    mask = transformers.masking_utils.create_causal_mask(
        config=model.config, inputs_embeds=embedded, attention_mask=padded()["attention_mask"], cache=None
    )
    assert plan_for(mask, 9, 9).causal
    assert plan_for(mask.clone(), 9, 9) is None
    mask[0, 0, 3, 1] = False
    assert plan_for(mask, 9, 9) is None


@PATHS
def test_an_encoder_sees_both_ways(name, monkeypatch):
    """BERT, whose layers are not causal: every token sees all tokens and no padding."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=80, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=64)  # fmt: skip
    seen = runs(monkeypatch)
    model = transformers.BertModel(config).eval()
    for batch in (padded(), padded(side="right"), {"input_ids": padded()["input_ids"]}):
        expected, found = both(model, name, lambda model: model(**batch).last_hidden_state)  # noqa: B023
        at = batch["attention_mask"].bool() if "attention_mask" in batch else ...
        torch.testing.assert_close(found[at], expected[at], rtol=1e-4, atol=1e-4)
    assert bool(seen) == (name == "course")


@pytest.mark.parametrize(
    "name, side", [("course", "left"), ("course-in-pytorch", "left"), ("course-in-pytorch", "right")]
)
def test_gradients_of_a_padded_batch_are_the_models_own(name, side):
    """With the loss that sdpa's zeros at padding have: the last padding before a text predicts its first token."""
    batch = padded((5, 3), side)
    model = small().train()
    gradients = []
    for implementation in ("sdpa", name):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("padding", [True, False])
def test_a_compiled_model_gives_the_same(padding):
    """A trace may not read the padding: with a mask PyTorch's attention runs, without one the course's operator."""
    batch = padded((5, 3)) if padding else {"input_ids": padded((5, 3))["input_ids"]}
    model = small()
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        model.set_attn_implementation("course")
        found = torch.compile(model, fullgraph=True, backend="eager")(**batch, use_cache=False).logits
    at = batch["attention_mask"].bool() if padding else ...
    torch.testing.assert_close(found[at], expected[at], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bias_and_attention_to_an_encoder(side):
    """T5 adds a bias to its scores, and its decoder attends to the padded texts of its encoder."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=80, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4,
                                   decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    model = transformers.T5ForConditionalGeneration(config).eval()
    expected, found = both(model, "course-in-pytorch", lambda model: model.generate(**padded(side=side), **options))
    assert torch.equal(found.sequences, expected.sequences)
    largest = max(float(logits.abs().max()) for logits in expected.logits)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4 * largest)


@pytest.mark.parametrize("size, dtype", [(8, torch.float32), (16, torch.float64)], ids=["head_dim 8", "float64"])
def test_what_no_kernel_takes_goes_to_pytorch(size, dtype, monkeypatch):
    seen = runs(monkeypatch)
    model = small(head_dim=size).to(dtype)
    for batch in (padded(), {"input_ids": padded()["input_ids"]}):
        assert_same_logits(model, "course", batch, own="sdpa")  # eager has NaN at padding in float64
    assert not seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_function_alone_by_its_meaning(causal, dtype):
    """No mask: causal is aligned to the last key, and a window counts the query's own key."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 16, generator=draw, dtype=dtype)
    key, value = (torch.randn(2, 2, 7, 16, generator=draw, dtype=dtype) for _ in range(2))
    layer = SimpleNamespace(is_causal=not causal, num_key_value_groups=2)
    places = torch.arange(4, 7)[:, None], torch.arange(7)[None]
    for window in (None, 2) if causal else (None,):
        visible = places[1] <= places[0] if causal else torch.ones(3, 7, dtype=torch.bool)
        if window is not None:
            visible = visible & (places[1] > places[0] - window)
        scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
        expected = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 1)
        output, weights = course_attention(layer, query, key, value, None, scaling=0.3, is_causal=causal,
                                           sliding_window=window)  # fmt: skip
        assert weights is None and output.shape == (2, 3, 4, 16) and output.is_contiguous()
        torch.testing.assert_close(output, expected.transpose(1, 2))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"dropout": 0.1}, "set attention_dropout to 0"),
        ({"softcap": 50.0}, "asks for softcap"),
        ({"s_aux": torch.zeros(4)}, "asks for s_aux"),
        ({"output_attentions": True}, "asks for output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "pass position_ids"),
        ({"is_causal": False, "sliding_window": 2}, "without a mask"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_nothing_here_computes_is_refused_in_a_sentence(options, told):
    tensor = torch.randn(1, 4, 3, 16)
    with pytest.raises(ValueError, match=re.escape(told)):
        course_attention(SimpleNamespace(is_causal=True), tensor, tensor, tensor, None, **options)


def test_a_model_that_caps_its_scores_is_refused():
    model = small("Gemma2", sliding_window=5)
    model.set_attn_implementation("course")
    with pytest.raises(ValueError, match="asks for softcap"):
        model(**padded())


def test_a_checkpoint_is_opened_with_it(tmp_path):
    small().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="course")
    assert model.config._attn_implementation == "course"
    assert_same_logits(model, "course", padded())


def test_without_transformers_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(transformers_attention, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'transformers"):
        register_with_transformers()


def test_a_transformers_whose_masks_are_made_otherwise_is_refused_in_a_sentence(monkeypatch):
    """Before version 5 a mask function got `cache_position`."""
    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", lambda batch_size, cache_position, **rest: None)
    with pytest.raises(ImportError, match="too old; run: pip install -U"):
        register_with_transformers()
