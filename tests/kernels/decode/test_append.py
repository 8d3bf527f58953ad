"""New tokens land in the cache where they belong, and nothing else changes."""

from random import Random

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.decode.append import (
    append_to_cache,
    append_to_cache_reference,
    append_to_pages,
    append_to_pages_reference,
)
from tests.kernels.decode.cases import odd_strides, random_tensor

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]


def assert_same_as(reference, append, new, caches, indices):
    """Bit for bit, in the whole caches; compared as integers, so that NaN equals NaN."""
    expected = [cache.clone() for cache in caches]
    reference(*new, *expected, indices)
    append(*new, *caches, indices)
    assert all(torch.equal(cache, right) for cache, right in zip(caches, expected))


@pytest.mark.parametrize("seed", range(10))
def test_tokens_go_to_their_positions(seed):
    draw = Random(seed)
    batch, heads, new_tokens, head_dim = (
        draw.randint(1, 3),
        draw.randint(1, 3),
        draw.choice([1, 2, 9]),
        draw.choice([16, 33, 128]),
    )
    capacity = new_tokens + draw.randint(0, 20)
    new = [random_tensor(draw, batch, heads, new_tokens, head_dim, dtype=DTYPES[seed % 4]) for _ in range(2)]
    caches = [random_tensor(draw, batch, heads, capacity, head_dim, dtype=DTYPES[seed % 4]) for _ in range(2)]
    if draw.random() < 0.5 and DTYPES[seed % 4].is_floating_point:
        new, caches = [odd_strides(tensor) for tensor in new], [odd_strides(tensor) for tensor in caches]
    positions = torch.tensor([draw.choice([0, capacity - new_tokens]) for _ in range(batch)], dtype=torch.int32)
    assert_same_as(append_to_cache_reference, append_to_cache, new, caches, positions)


@pytest.mark.parametrize("seed", range(10))
def test_tokens_go_to_their_slots(seed):
    draw = Random(seed)
    pages, heads, page_size, head_dim = (
        draw.randint(1, 4),
        draw.randint(1, 3),
        draw.choice([1, 3, 16]),
        draw.choice([16, 33, 128]),
    )
    slots = draw.sample(range(pages * page_size), draw.randint(1, pages * page_size))
    slots = [draw.choice([-1, slot, slot]) for slot in slots]
    new = [random_tensor(draw, len(slots), heads, head_dim, dtype=DTYPES[seed % 4]) for _ in range(2)]
    pools = [random_tensor(draw, pages, heads, page_size, head_dim, dtype=DTYPES[seed % 4]) for _ in range(2)]
    if draw.random() < 0.5 and DTYPES[seed % 4].is_floating_point:
        new, pools = [odd_strides(tensor) for tensor in new], [odd_strides(tensor) for tensor in pools]
    slots = torch.tensor(slots, dtype=draw.choice([torch.int32, torch.int64]))
    assert_same_as(append_to_pages_reference, append_to_pages, new, pools, slots)


def cache_inputs():
    new, cache = torch.zeros(2, 1, 3, 16), torch.zeros(2, 1, 8, 16)
    return {
        "key": new,
        "value": new,
        "key_cache": cache,
        "value_cache": cache.clone(),
        "positions": torch.tensor([0, 5]),
    }


@pytest.mark.parametrize(
    "change, words",
    [
        ({"positions": torch.tensor([0, 6])}, ["positions[1]", "6", "0 to 5", "8"]),
        ({"positions": torch.tensor([-1, 5])}, ["positions[0]", "-1"]),
        ({"positions": torch.tensor([0])}, ["positions", "(1,)", "2"]),
        ({"value": torch.zeros(2, 1, 2, 16)}, ["value", "(2, 1, 2, 16)", "(2, 1, 3, 16)"]),
        ({"key_cache": torch.zeros(2, 1, 8, 16).half()}, ["key_cache", "float16", "float32"]),
        (dict.fromkeys(("key_cache", "value_cache"), torch.zeros(2, 2, 8, 16)), ["key_cache", "number of heads 2"]),
        ({"value_cache": torch.zeros(2, 1, 9, 16)}, ["value_cache", "(2, 1, 9, 16)"]),
    ],
)
def test_bad_positions_and_shapes_are_refused_and_nothing_is_written(change, words):
    inputs = cache_inputs() | {"key": torch.ones(2, 1, 3, 16)} | change
    with pytest.raises(ValueError) as refusal:
        append_to_cache(**inputs)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert not inputs["key_cache"].any()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"slot_mapping": torch.tensor([0, 8])}, ["slot_mapping[1]", "8", "0 to 7"]),
        ({"slot_mapping": torch.tensor([0, -2])}, ["slot_mapping[1]", "-2", "-1 skips"]),
        ({"slot_mapping": torch.tensor([0])}, ["slot_mapping", "(1,)", "2"]),
        ({"slot_mapping": torch.tensor([0.0, 1.0])}, ["slot_mapping", "float32"]),
        (dict.fromkeys(("key_pages", "value_pages"), torch.zeros(2, 3, 4, 16)), ["key_pages", "number of heads 3"]),
        ({"key": torch.ones(2, 1, 1, 16)}, ["key", "[tokens, key_heads, head_dim]"]),
    ],
)
def test_bad_slots_are_refused_and_nothing_is_written(change, words):
    inputs = {
        "key": torch.ones(2, 1, 16),
        "value": torch.ones(2, 1, 16),
        "key_pages": torch.zeros(2, 1, 4, 16),
        "value_pages": torch.zeros(2, 1, 4, 16),
        "slot_mapping": torch.tensor([0, 1]),
    } | change
    with pytest.raises(ValueError) as refusal:
        append_to_pages(**inputs)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert not inputs["key_pages"].any()
