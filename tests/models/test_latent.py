"""Latent attention: both forms are one, the cache holds one row a token, and what does not fit together is said."""

import dataclasses

import pytest
import torch

from course_lib.kernels.attention.operator import attention as course_attention
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.latent.attention import latent_decode_attention
from course_lib.kernels.latent.reference import latent_decode_reference
from course_lib.models.config import Latent, ModelConfig, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.latent import LatentAttention
from course_lib.models.layers import rotary_angles
from course_lib.models.training import initialize, next_token_loss
from course_lib.serving.caches.contiguous import KVCache
from course_lib.serving.caches.latent import LatentCache
from course_lib.serving.caches.new import new_cache
from course_lib.serving.generation import generate

BASE = ModelConfig(vocabulary=61, layers=3, width=32, query_heads=4, key_heads=2, head_dim=16, hidden=48, context=64)
LATENTS = {
    "equal widths": Latent(latent_dim=16, rope_dim=8, nope_dim=16, value_dim=24),
    "narrow values": Latent(latent_dim=24, rope_dim=6, nope_dim=12, value_dim=10),
    "a latent wider than the heads": Latent(latent_dim=40, rope_dim=4, nope_dim=8, value_dim=8),
    "one number": Latent(latent_dim=1, rope_dim=2, nope_dim=1, value_dim=1),
}
NARROW = with_latent(BASE, LATENTS["narrow values"])
# Sums of at most a few hundred products of numbers of order 1 in float64: both forms round alike to some 1e-14.
ROUNDING = {"atol": 1e-12, "rtol": 1e-12}


def always(form):
    return lambda heads, context, query_tokens: form


def model_of(config=NARROW, seed=0):
    torch.manual_seed(seed)
    model = Decoder(config).eval()
    initialize(model)
    return model


def prompts(batch, length, seed=0):
    return torch.randint(0, BASE.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.parametrize("key_length, query_tokens", [(1, 1), (9, 1), (9, 4), (9, 9)])
def test_the_absorbed_form_equals_the_expanded_one(name, key_length, query_tokens):
    torch.manual_seed(1)
    layer = LatentAttention(with_latent(BASE, LATENTS[name])).double()
    x = torch.randn(2, key_length, BASE.width, dtype=torch.float64)
    positions = torch.arange(5, 5 + key_length).expand(2, -1)
    angles = rotary_angles(positions, layer.sizes.rope_dim, 1e4)
    rows = layer.rows(x, *angles)
    assert rows.shape == (2, key_length, layer.sizes.latent_dim + layer.sizes.rope_dim)
    queries = layer.queries(x[:, -query_tokens:], *(angle[:, -query_tokens:] for angle in angles))
    expanded = layer.expanded(queries, rows, attention_reference)

    def attend(query):
        return latent_decode_reference(query, rows, scale=layer.scale, value_dim=layer.sizes.latent_dim)

    torch.testing.assert_close(layer.absorbed(queries, attend), expanded, **ROUNDING)
    assert expanded.shape == (2, BASE.query_heads, query_tokens, layer.sizes.value_dim)


@pytest.mark.parametrize("name", LATENTS)
def test_the_expanded_form_is_the_papers_formula(name):
    """Head by head and token by token, as section 2.1 of arXiv 2405.04434 writes it."""
    sizes, heads = LATENTS[name], BASE.query_heads
    layer = LatentAttention(with_latent(BASE, sizes)).double()
    layer.latent_norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(1, 5, BASE.width, dtype=torch.float64)
    angles = rotary_angles(torch.arange(5)[None], sizes.rope_dim, 1e4)
    plain, turned = layer.queries(x, *angles)
    rows = layer.rows(x, *angles)
    down = x @ layer.compress.weight.T
    latent = down * torch.rsqrt(down.square().mean(-1, keepdim=True) + BASE.norm_epsilon) * layer.latent_norm.weight
    torch.testing.assert_close(rows[..., : sizes.latent_dim], latent, atol=1e-6, rtol=1e-6)  # its norm is in float32
    latent, rotary_key = rows[0, :, : sizes.latent_dim], rows[0, :, sizes.latent_dim :]
    for head in range(heads):
        key = latent @ layer.expand_key.weight[head * sizes.nope_dim : (head + 1) * sizes.nope_dim].T
        value = latent @ layer.expand_value.weight[head * sizes.value_dim : (head + 1) * sizes.value_dim].T
        for t in range(5):
            scores = key[: t + 1] @ plain[0, head, t] + rotary_key[: t + 1] @ turned[0, head, t]
            weights = torch.softmax(scores / (sizes.nope_dim + sizes.rope_dim) ** 0.5, dim=0)
            found = layer.expanded((plain, turned), rows, attention_reference)[0, head, t]
            torch.testing.assert_close(found, weights @ value[: t + 1], **ROUNDING)


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.parametrize("prompt_length", [1, 7])
@pytest.mark.parametrize("form", [None, "absorbed", "expanded"])
def test_generation_with_a_cache_equals_generation_without(name, prompt_length, form):
    model, prompt = model_of(with_latent(BASE, LATENTS[name])), prompts(3, prompt_length)
    cache = new_cache(model, 3, 32, choose_form=form and always(form))
    assert torch.equal(generate(model, prompt, 16, cache=cache), generate(model, prompt, 16, cached=False))


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (5, 7), (11, 1), (1, 4, 1, 6)])
def test_a_prompt_may_be_prefilled_in_any_pieces_and_either_form(pieces, form):
    model, tokens = model_of(), prompts(2, 12)
    cache, logits, start = new_cache(model, 2, 12, choose_form=always(form)), [], 0
    for piece in pieces:
        logits.append(model(tokens[:, start : start + piece], cache))
        start += piece
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens))


def test_a_prompt_is_expanded_and_a_single_token_absorbed():
    seen = []

    def decode(query, cache, lengths, *, scale, value_dim):
        seen.append((tuple(query.shape), tuple(cache.shape), lengths.tolist(), lengths.dtype, value_dim))
        return latent_decode_reference(query, cache, lengths, scale=scale, value_dim=value_dim)

    model, tokens = model_of(), prompts(2, 6)
    cache = new_cache(model, 2, 9, decode=decode)
    model(tokens[:, :5], cache)
    assert not seen
    torch.testing.assert_close(model(tokens[:, 5:], cache), model(tokens)[:, 5:])
    assert seen == [((2, 1, 4, 30), (2, 9, 30), [6, 6], torch.int32, 24)] * 3


def test_the_form_is_chosen_by_heads_context_and_query_tokens():
    asked = []

    def choose(heads, context, query_tokens):
        asked.append((heads, context, query_tokens))
        return "absorbed"

    model = model_of()
    cache = new_cache(model, 1, 9, choose_form=choose)
    model(prompts(1, 5), cache)
    model(prompts(1, 2), cache)
    assert asked == [(4, 5, 5)] * 3 + [(4, 7, 2)] * 3
    with pytest.raises(ValueError, match="choose_form gave 'both'"):
        model(prompts(1, 1), new_cache(model, 1, 9, choose_form=always("both")))


def test_the_cache_holds_one_row_a_token_and_nothing_else():
    config = with_latent(BASE, Latent(latent_dim=24, rope_dim=6, nope_dim=12, value_dim=10))
    cache = new_cache(Decoder(config), batch=3, capacity=17)
    assert cache.rows.shape == (3, 3, 17, 30)
    assert cache.bytes == config.cache_bytes(3, 17, item_bytes=4) == 3 * 3 * 17 * 30 * 4


def test_nothing_behind_the_length_is_read():
    for form in ("absorbed", "expanded"):
        model, tokens = model_of(), prompts(2, 6)
        cache = new_cache(model, 2, 20, choose_form=always(form))
        cache.rows.fill_(torch.nan)
        assert torch.isfinite(model(tokens, cache)).all()


def test_truncated_tokens_are_forgotten():
    model, tokens = model_of(), prompts(1, 9)
    cache = new_cache(model, 1, 9)
    model(prompts(1, 9, seed=1), cache)
    cache.truncate(2)
    cache.truncate(0)
    model(tokens[:, :4], cache)
    torch.testing.assert_close(model(tokens[:, 4:], cache), model(tokens)[:, 4:])
    with pytest.raises(ValueError, match="length is 12"):
        cache.truncate(12)


def test_the_courses_attention_runs_the_expanded_form():
    """Values of 24 in heads of 32 numbers: zeros fill them up, and nothing of them is left in the output."""
    model, tokens = model_of(with_latent(BASE, Latent(16, 16, 16, 24))), prompts(1, 9)
    wanted = model(tokens)
    model.attention = course_attention
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("new_tokens", [1, 3])
def test_the_courses_decode_kernel_plugs_in(new_tokens):
    """It takes several tokens at a time too, as a step that checks guessed tokens has them."""
    model, tokens = model_of(with_latent(BASE, Latent(16, 16, 16, 24))), prompts(2, 7)
    cache = new_cache(model, 2, 9, decode=latent_decode_attention, choose_form=always("absorbed"))
    with torch.inference_mode():
        model(tokens[:, :-new_tokens], cache)
        found = model(tokens[:, -new_tokens:], cache)
        torch.testing.assert_close(found, model(tokens)[:, -new_tokens:], atol=1e-4, rtol=1e-4)


def test_every_weight_gets_a_gradient_and_both_forms_the_same():
    found = []
    for form in (None, "absorbed", "expanded"):
        model = model_of().double()
        tokens = prompts(2, 9)
        if form is None:
            loss = next_token_loss(model, tokens)
        else:
            cache = NotWrittenOver(model.config, 2, 8, dtype=torch.float64, choose_form=always(form))
            logits = model(tokens[:, :-1], cache)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in found[0].values())
    for name, gradient in found[0].items():
        # Norm and rotation round to float32, so the forms' last digits of float64 become differences of 1e-7.
        for other in found[1:]:
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-5)


class NotWrittenOver(LatentCache):
    """A cache through which gradients pass: it keeps the rows as they come."""

    def append(self, layer, rows):
        self.kept = rows

    def attend(self, layer, query):
        return self.form.attend(query, self.kept, self.ends(query.shape[1]))

    def seen(self, layer, new_tokens):
        return self.kept


@pytest.mark.parametrize("name", LATENTS)
def test_the_count_of_parameters_is_that_of_the_decoder(name):
    config = with_latent(BASE, LATENTS[name])
    assert sum(parameter.numel() for parameter in Decoder(config).parameters()) == config.parameters


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"latent_dim": 0}, "latent_dim is 0"),
        ({"nope_dim": 2.5}, "nope_dim is 2.5"),
        ({"value_dim": True}, "value_dim is True"),
        ({"rope_dim": 7}, "rope_dim is 7; it must be even"),
        ({"value_dim": 19}, "value_dim is 19; it may be at most nope_dim [+] rope_dim, which is 18"),
    ],
)
def test_sizes_of_a_latent_that_make_no_sense_are_named(wrong, name):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(LATENTS["narrow values"], **wrong)


@pytest.mark.parametrize("wrong, name", [({"key_heads": 2}, "key_heads is 2"), ({"head_dim": 16}, "head_dim is 16")])
def test_a_config_and_its_latent_fit_together(wrong, name):
    with pytest.raises(ValueError, match=name + ".*with_latent"):
        dataclasses.replace(NARROW, **wrong)


def test_heads_of_an_odd_dimension_are_fine_where_only_a_part_turns():
    config = with_latent(BASE, Latent(latent_dim=8, rope_dim=4, nope_dim=7, value_dim=5))
    assert config.head_dim == 11 and torch.isfinite(model_of(config)(prompts(1, 3))).all()


def test_each_kind_of_cache_refuses_the_other_kind_of_model():
    with pytest.raises(ValueError, match="config.latent is Latent.*Use LatentCache"):
        KVCache(NARROW, 1, 4)
    with pytest.raises(ValueError, match="config.latent is None.*Use KVCache"):
        LatentCache(BASE, 1, 4)
    with pytest.raises(ValueError, match="config.latent is None"):
        LatentAttention(BASE)


def test_a_cache_takes_only_its_own_shape_and_what_fits():
    cache = LatentCache(NARROW, 2, 4)
    with pytest.raises(ValueError, match=r"rows has shape \(2, 1, 29\).*\[2, new_tokens, 30\]"):
        cache.append(0, torch.zeros(2, 1, 29))
    cache.append(0, torch.ones(2, 3, 30))
    cache.advance(3)
    with pytest.raises(ValueError, match="holds 3 of 4 tokens and 2 more do not fit"):
        cache.append(0, torch.zeros(2, 2, 30))
    assert cache.rows[0, :, :3].eq(1).all()
