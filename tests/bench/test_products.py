"""What `bench products` measures: the products of Llama-3.2-1B's step, and tiles that a sweep can try."""

import dataclasses

import pytest
import torch

from course_lib.bench import products
from course_lib.bench.products import LAYERS, PRODUCTS, candidates, in_pytorch
from course_lib.kernels.products.few_rows import few_rows_product_reference
from course_lib.models.config import PRESETS


def test_the_products_are_those_of_the_published_model():
    config = PRESETS["Llama-3.2-1B"]
    heads = config.query_heads + 2 * config.key_heads
    shapes = [(product.outer, product.inner) for product in PRODUCTS]
    assert LAYERS == config.layers and shapes == [
        (heads * config.head_dim, config.width), (config.width, config.query_heads * config.head_dim),
        (2 * config.hidden, config.width), (config.width, config.hidden), (config.vocabulary, config.width),
    ]  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_what_torch_compile_gets_means_the_same_as_the_kernel(product, monkeypatch):
    monkeypatch.setattr(products, "random", lambda *shape: torch.randn(*shape, dtype=torch.float64))
    small = dataclasses.replace(product, outer=8, inner=products.PARTS)
    x, (weight,), options = small.x(3), small.weights(1), small.options(3)
    found, exact = (function(x, weight, **options) for function in (in_pytorch, few_rows_product_reference))
    if product.residual:
        (found, (rows, squares)), (exact, behind) = found, exact
        torch.testing.assert_close((rows, squares.double()), tuple(behind), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_a_sweep_tries_few_enough_tiles_and_no_empty_parts(product, rows, monkeypatch):
    monkeypatch.setattr(products, "machine", lambda: type("H100", (), {"sm_count": 132}))
    tried = list(candidates(product, rows))
    assert 10 <= len(tried) == len(set(tried)) < 100
    assert all(tiles.splits * tiles.inner <= product.inner for tiles in tried)
