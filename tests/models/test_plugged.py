"""What a learner writes runs the model: the same tokens as with the library's attention, and it is said whose it is."""

import dataclasses
from functools import partial

import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.hardware.meter.traffic import repair_interpreter
from course_lib.kernels.attention.backward_reference import attention_backward_reference
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.reference import decode_attention_reference
from course_lib.kernels.latent.reference import latent_decode_reference
from course_lib.kernels.quantised.formats import quantise_int4, restored_int4, unpack_int4
from course_lib.models.config import Latent, ModelConfig, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.plugged import (
    counted_tokens,
    decode_in_splits,
    differentiable,
    each_member,
    int4_decode_of_codes,
    is_the_courses,
    latent_decode_of_a_token,
    who_runs,
    whole_attention,
)
from course_lib.models.torch_attention import torch_attention
from course_lib.models.training import initialize, next_token_loss
from course_lib.serving.caches.latent_sequences import LatentRows
from course_lib.serving.caches.new import new_cache
from course_lib.serving.caches.quantised import Int4KVCache
from course_lib.serving.generation import generate
from course_lib.serving.together import write_together

CONFIG = ModelConfig(vocabulary=61, layers=2, width=32, query_heads=4, key_heads=2, head_dim=16, hidden=48, context=64)
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}


@pytest.fixture(autouse=True, scope="module")
def as_in_a_notebook():
    repair_interpreter()


def model_of(key_heads=2, seed=0):
    torch.manual_seed(seed)
    model = Decoder(dataclasses.replace(CONFIG, key_heads=key_heads)).eval()
    initialize(model)
    return model


def prompts(batch, length, seed=0):
    return torch.randint(0, CONFIG.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def of_one_head(query, key, value, causal):
    """A learner's attention: heads only, as many of queries as of keys."""
    assert query.dim() == key.dim() == 3 and query.shape[0] == key.shape[0] and query.stride(-1) == 1
    return attention_reference(query[None], key[None], value[None], causal=causal)[0]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_attention_of_one_sequence_writes_the_librarys_tokens(kind, batch, cached):
    model, prompt = model_of(HEADS[kind]), prompts(batch, 7)
    wanted = generate(model, prompt, 9)
    model.attention = whole_attention(of_one_head)
    assert torch.equal(generate(model, prompt, 9, cached=cached), wanted)


def test_the_courses_answer_to_4_5_writes_the_librarys_tokens():
    (ragged,) = catalog.reference("4.5")
    model, prompt = model_of(), prompts(1, 5)
    wanted = generate(model, prompt, 4)
    model.attention = whole_attention(ragged)
    assert torch.equal(generate(model, prompt, 4, cached=False), wanted)


@pytest.mark.parametrize("kind", HEADS)
def test_every_member_of_a_group_meets_its_own_kv_head(kind):
    torch.manual_seed(1)
    query, (key, value) = torch.randn(3, 4, 16), torch.randn(2, 3, HEADS[kind], 9, 16)
    lengths = torch.tensor([9, 1, 4], dtype=torch.int32)

    def ungrouped(query, key_cache, value_cache, lengths):
        assert query.shape[1] == key_cache.shape[1]
        return decode_attention(query, key_cache, value_cache, lengths)

    torch.testing.assert_close(
        each_member(ungrouped)(query, key, value, lengths), decode_attention(query, key, value, lengths)
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_the_courses_splits_write_the_librarys_tokens(splits):
    (split,), (combine,) = catalog.reference("8.2"), catalog.reference("8.3")
    model, prompt = model_of(), prompts(2, 5)
    cache = new_cache(model, 2, 16, decode=decode_in_splits(split, combine, splits))
    assert torch.equal(generate(model, prompt, 5, cache=cache), generate(model, prompt, 5))


def test_the_courses_grouped_kernel_fits_as_it_is():
    (grouped,) = catalog.reference("7.5")
    model, prompt = model_of(1), prompts(2, 5)
    cache = new_cache(model, 2, 16, decode=grouped)
    assert torch.equal(generate(model, prompt, 5, cache=cache), generate(model, prompt, 5))


def of_a_token(query, cache, lengths, scale, value_dim, splits=1):
    """A learner's latent decode: one token of each sequence."""
    assert query.dim() == 3 and query.stride(-1) == 1 and splits in (1, 4)
    return latent_decode_reference(query[:, None], cache, lengths, scale=scale, value_dim=value_dim)[:, 0]


def latent_model():
    torch.manual_seed(0)
    config = with_latent(dataclasses.replace(CONFIG, vocabulary=256), Latent(16, 16, 16, 32))
    model = Decoder(config).eval()
    initialize(model)
    return model


@pytest.mark.parametrize("options", [{}, {"splits": 4}])
def test_a_latent_decode_of_one_token_writes_the_librarys_tokens(options):
    model, prompt = latent_model(), prompts(2, 5)
    decode = latent_decode_of_a_token(of_a_token, **options)
    wanted = generate(model, prompt, 6, cached=False)
    assert torch.equal(generate(model, prompt, 6, cache=new_cache(model, 2, 16, decode=decode)), wanted)
    texts = ("Alice", "Down, down")
    cache, alone = (LatentRows(model.config, 2, 16, **choice) for choice in ({"decode": decode}, {}))
    assert write_together(model, cache, texts, 4).texts == write_together(model, alone, texts, 4).texts


def test_a_latent_decode_of_one_token_refuses_several():
    model = latent_model()
    decode = latent_decode_of_a_token(of_a_token)
    cache = new_cache(model, 1, 16, decode=decode, choose_form=lambda heads, context, query_tokens: "absorbed")
    with pytest.raises(ValueError, match="query has 3 tokens.*choose_form"):
        model(prompts(1, 3), cache)


def test_it_is_said_whose_function_runs():
    (lent,) = catalog.reference("4.5")
    assert is_the_courses(lent) and is_the_courses(partial(lent, causal=True)) and not is_the_courses(of_one_head)
    assert who_runs({"attention (4.5)": of_one_head}) == "Yours: attention (4.5)."
    words = who_runs({"append (5.3)": of_one_head, "step (5.5)": lent})
    assert words == "Yours: append (5.3). The course's own, until your answer has passed its check: step (5.5)."


def test_a_class_of_the_courses_is_known_too():
    (allocator,) = catalog.reference("6.2")
    assert is_the_courses(allocator) and not is_the_courses(Decoder)


def test_the_tokens_of_each_run_are_counted_and_no_longer_than_asked():
    model, prompt = model_of(), prompts(2, 5)
    with counted_tokens(model) as runs:
        generate(model, prompt, 3)
    assert runs == [10, 2, 2]
    with counted_tokens(model) as again:
        generate(model, prompt, 3, cached=False)
    assert again == [10, 12, 14] and len(runs) == 3


def _forward(query, key, value, causal):
    output, log_sum_exp = attention_reference(query[None], key[None], value[None], causal=causal, return_lse=True)
    return output[0], log_sum_exp[0]


def _backward(query, key, value, output, log_sum_exp, output_gradient, causal):
    """As exercise 10.6 asks for it, in PyTorch."""
    assert output.is_contiguous() and log_sum_exp.is_contiguous()
    gradients = attention_backward_reference(query[None], key[None], value[None], output_gradient[None], causal=causal)
    return tuple(gradient[0] for gradient in gradients)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_gradients_pass_through_a_learners_forward_and_backward(key_heads, causal):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 7, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, key_heads, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    found = []
    for attention in (differentiable(_forward, _backward), attention_reference):
        tensors = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = attention(*tensors, causal=causal)
        output.sum().backward()  # dO is a one with strides of 0
        found.append([output, *(tensor.grad for tensor in tensors)])
    for mine, theirs in zip(*found):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_the_courses_answers_to_4_6_and_10_6_train_as_pytorch_does():
    (forward,), (backward,) = catalog.reference("4.6"), catalog.reference("10.6")
    found = []
    for attention in (differentiable(forward, backward), attention_reference):
        model = model_of()
        model.attention = attention
        model.requires_grad_(True)
        next_token_loss(model, prompts(2, 9)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def decode_of_codes(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, lengths):
    """What exercise 12.5 asks for, in PyTorch."""
    keys = unpack_int4(key_codes) * key_scale.float().repeat_interleave(64, 2)
    keys = keys + key_middle.float().repeat_interleave(64, 2)
    values = unpack_int4(value_codes) * value_scale.float().repeat_interleave(64, 3)
    values = values + value_middle.float().repeat_interleave(64, 3)
    return decode_attention_reference(query, keys, values, lengths)


def test_a_function_that_reads_codes_alone_decodes_with_a_group_that_is_not_full():
    """130 tokens, one by one: what is attended to is what the codes of all tokens stand for, the last 2 too."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 130, 64), torch.randn(1, 2, 130, 64), torch.randn(1, 2, 130, 64)
    config = dataclasses.replace(CONFIG, layers=1, query_heads=4, key_heads=2, head_dim=64)
    cache = Int4KVCache(config, 1, 130, decode=int4_decode_of_codes(decode_of_codes))
    for token in range(130):
        cache.append(0, key[:, :, token : token + 1], value[:, :, token : token + 1])
        attended = cache.attend(0, query[:, :, token : token + 1])
        cache.advance(1)
    groups = [restored_int4(quantise_int4(part, 2)) for part in key.split(64, dim=2)]  # 64, 64 and 2 tokens
    keys, values = torch.cat(groups, dim=2), restored_int4(quantise_int4(value, 3))
    torch.testing.assert_close(attended, torch_attention(query[:, :, 129:], keys, values, causal=True))
    assert torch.equal(cache.layers[0].key_window[:, :, :2], key[:, :, 128:])
