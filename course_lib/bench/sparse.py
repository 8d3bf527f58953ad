"""`python -m course_lib bench sparse`: block lists, a decode step with a window, and chosen keys, in one run.

Four tables in 16-bit floats, in microseconds: medians of repeated runs with the L2 cache flushed before each, in short
turns of all columns in changing order.

    block lists    beside FlexAttention on the same mask, and full attention over everything; beside FlashAttention 4
                   where all tiles are full and its package is installed
    prefill        at several lengths: all keys, a window, and block lists of as many tiles in every row; making those
    a window       one query token against a long paged cache, of which it sees the last keys, beside a cache that
                   holds no more than these keys, and the whole cache; beside FlashInfer, where it is installed
    chosen keys    the indexer's scores, the choice, and attention over the list, beside attention over all keys

Steps of decode and forwards are replayed CUDA graphs. Figures go to sparse.json, in the course's bench folder.
"""

import functools
import warnings
from collections.abc import Callable

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.bench.attention import LARGEST_DIFFERENCE, compiled_flex_attention
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure, measure_together
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.decode.tiles import decode_plan
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.kernels.sparse.attention import block_sparse_attention
from course_lib.kernels.sparse.block_lists import block_lists, given_block_lists
from course_lib.kernels.sparse.choose import choose_keys
from course_lib.kernels.sparse.indexer import index_scores
from course_lib.kernels.sparse.listed import listed_decode_attention

SECONDS_PER_FIGURE = 0.2
LENGTH, HEADS, HEAD_DIM, BLOCK = 16384, 16, 128, 128
LENGTHS, TILES_A_ROW = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536), 16
QUERY_HEADS, KEY_HEADS, PAGE_SIZE = 32, 8, 16
CONTEXT, WINDOW, CHOSEN = 131072, 4096, 2048
INDEX_HEADS = 64


def sixteen_bits() -> torch.dtype:
    return torch.bfloat16 if supports_bfloat16() else torch.float16


def one_in_eight() -> Callable:
    """A mask of tiles: one in eight, drawn, and each row's own."""
    tiles = LENGTH // BLOCK
    drawn = torch.rand(tiles, tiles, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < 1 / 8
    kept = drawn | torch.eye(tiles, dtype=torch.bool, device="cuda")
    return lambda batch, head, query, key: kept[query // BLOCK, key // BLOCK]


def causal() -> Callable:
    return lambda batch, head, query, key: query >= key


def window() -> Callable:
    return lambda batch, head, query, key: (query >= key) & (query - key < WINDOW // 4)


MASKS = {"one tile in eight": one_in_eight, "causal": causal, "window 1024": window}


def timed(prepare: dict[str, Callable[[], Callable]]) -> dict[str, dict]:
    """{column: {"us"} or {"missing"}}, of what each prepares: a call that gives a tensor, all of them the same one."""
    results: dict[str, dict] = {}
    ready, reference = {}, None
    for name, prepared in prepare.items():
        try:
            call = prepared()
            found = call().float().clone()
        except (
            RuntimeError,
            ValueError,
            AssertionError,
            ImportError,
        ) as error:  # what this machine or this PyTorch lacks
            results[name] = {"missing": str(error).strip().splitlines()[0][:120]}
            continue
        reference = found if reference is None else reference
        difference = ((found - reference).norm() / reference.norm()).item()
        results[name] = {"difference": difference}
        if not difference < LARGEST_DIFFERENCE:
            results[name] = {"missing": f"wrong: differs by {difference:.1e}"}
            continue
        ready[name] = call
    timings = measure_together(ready, seconds=SECONDS_PER_FIGURE) if ready else {}
    for name, timing in timings.items():
        results[name]["us"] = timing.median * 1e6
    return results


def flash_attention_4(flex_mask) -> Callable:
    """Attention over the full tiles of a mask that has no others."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    if flex_mask.kv_num_blocks.any():
        raise ValueError("the mask has partial tiles, which FlashAttention 4 takes as a function of its own language")
    lists = BlockSparseTensorsTorch(flex_mask.kv_num_blocks, flex_mask.kv_indices, flex_mask.full_kv_num_blocks,
                                    flex_mask.full_kv_indices, block_size=(BLOCK, BLOCK))  # fmt: skip

    def attend(*inputs):
        output, *_ = _flash_attn_fwd(*(tensor.transpose(1, 2) for tensor in inputs), block_sparse_tensors=lists)
        return output.transpose(1, 2)

    return attend


def with_block_lists(mask: Callable, backward: bool) -> dict[str, dict]:
    from torch.nn.attention.flex_attention import create_block_mask

    torch.compiler.reset()
    compiled_flex_attention.cache_clear()
    shape = 1, HEADS, LENGTH, HEAD_DIM
    inputs = [torch.randn(shape, device="cuda", dtype=sixteen_bits()).requires_grad_(backward) for _ in range(3)]
    gradient = torch.randn_like(inputs[0])
    lists = block_lists(mask, LENGTH, LENGTH, device=torch.device("cuda"))
    flex_mask = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cuda", BLOCK_SIZE=BLOCK)
    columns = {
        "flex": lambda *inputs: compiled_flex_attention()(*inputs, block_mask=flex_mask),
        "block lists": lambda query, key, value: block_sparse_attention(query, key, value, lists),
    }

    def prepared(attend):
        if not backward:
            return captured(functools.partial(attend, *inputs))
        output = attend(*inputs)
        return lambda: torch.cat(
            [tensor.flatten() for tensor in torch.autograd.grad(output, inputs, gradient, retain_graph=True)]
        )

    ready: dict[str, Callable] = {name: functools.partial(prepared, attend) for name, attend in columns.items()}
    if not backward:
        ready["FA4"] = lambda: prepared(flash_attention_4(flex_mask))
    results = timed(ready)
    if not backward:
        results |= timed({"all tiles": lambda: captured(functools.partial(attention, *inputs))})
    return results


def with_lengths(length: int) -> dict[str, dict]:
    """A query tile's own tile of keys, under the diagonal, and 15 drawn ones before it; all where there are fewer."""
    tiles = length // BLOCK
    drawn = torch.rand(tiles, tiles, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).tril(-1)
    earlier = drawn.topk(min(TILES_A_ROW - 1, tiles)).indices
    counts = torch.arange(tiles, device="cuda").clamp(max=earlier.shape[1])[None, None]
    own = torch.ones_like(counts), torch.arange(tiles, device="cuda")[None, None, :, None]
    make = functools.partial(given_block_lists, (counts, earlier[None, None]), own, causal(), query_length=length,
                             key_length=length)  # fmt: skip
    lists = make()
    shape = 1, HEADS, length, HEAD_DIM
    query, key, value = inputs = [torch.randn(shape, device="cuda", dtype=sixteen_bits()) for _ in range(3)]
    results: dict[str, dict] = {}
    for name, call in {
        "all keys": functools.partial(attention, *inputs, causal=True),
        f"a window of {WINDOW // 4:,}": functools.partial(attention, *inputs, causal=True, window=WINDOW // 4 - 1),
        f"{TILES_A_ROW} tiles a row": functools.partial(block_sparse_attention, query, key, value, lists),
    }.items():
        results |= timed({name: functools.partial(captured, call)})
    return results | {"their lists": {"us": measure(make, warmup=1, repeats=5).median * 1e6}}


def paged_cache(batch: int, context: int):
    """(query, key pages, value pages, tables, lengths): pages in random order, full."""
    blocks = context // PAGE_SIZE
    pool = batch * blocks, KEY_HEADS, PAGE_SIZE, HEAD_DIM
    keys, values = (torch.randn(pool, device="cuda", dtype=sixteen_bits()) for _ in range(2))
    tables = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
    query = torch.randn(batch, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=sixteen_bits())
    return query, keys, values, tables, torch.full((batch,), context, dtype=torch.int32, device="cuda")


def a_step(query, keys, values, tables, lengths, longest: int, **options) -> Callable:
    batch, query_heads, head_dim = query.shape
    splits = decode_plan(query, KEY_HEADS, longest).splits
    given = {"output": torch.empty_like(query), "workspace": decode_workspace(batch, query_heads, head_dim, splits)}
    step = functools.partial(paged_decode_attention, query, keys, values, tables, lengths, validate=False, **given)
    return lambda: captured(functools.partial(step, **options))


def flashinfer_step(query, keys, values, tables, window: int = -1) -> Callable:
    """FlashInfer's decode over full pages, planned once, as its users do; window: keys before the query's own."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    batch, blocks = tables.shape
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"), "HND", use_tensor_cores=True
    )
    begins = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * blocks
    last = torch.full((batch,), PAGE_SIZE, dtype=torch.int32, device="cuda")
    wrapper.plan(begins, tables.flatten(), last, QUERY_HEADS, KEY_HEADS, HEAD_DIM, PAGE_SIZE, window_left=window,
                 q_data_type=query.dtype, kv_data_type=keys.dtype)  # fmt: skip
    return captured(lambda: wrapper.run(query, (keys, values)))


def with_a_window(batch: int) -> dict[str, dict]:
    query, keys, values, tables, lengths = paged_cache(batch, CONTEXT)
    last = tables[:, -WINDOW // PAGE_SIZE :].contiguous()
    results = timed({
        "these keys alone": a_step(query, keys, values, last, torch.full_like(lengths, WINDOW), WINDOW),
        "window": a_step(query, keys, values, tables, lengths, WINDOW, window=WINDOW - 1),
        "FlashInfer, these keys alone": lambda: flashinfer_step(query, keys, values, last),
        "FlashInfer, window": lambda: flashinfer_step(query, keys, values, tables, WINDOW - 1),
    })  # fmt: skip
    return results | timed({"all keys": a_step(query, keys, values, tables, lengths, CONTEXT)})


def with_chosen_keys(batch: int, context: int) -> dict[str, dict]:
    query, keys, values, tables, lengths = paged_cache(batch, context)
    small = torch.randn(batch, 1, INDEX_HEADS, HEAD_DIM, device="cuda", dtype=sixteen_bits())
    weights = torch.rand(batch, 1, INDEX_HEADS, device="cuda")
    index_keys = torch.randn(batch, context, HEAD_DIM, device="cuda", dtype=sixteen_bits())
    scores = index_scores(small, weights, index_keys)
    chosen = choose_keys(scores, CHOSEN)
    listed = functools.partial(listed_decode_attention, query, keys, values, tables, lengths, chosen, validate=False)
    results: dict[str, dict] = {}
    for name, call in {
        "scores": functools.partial(index_scores, small, weights, index_keys),
        "the choice": functools.partial(choose_keys, scores, CHOSEN),
        "over the list": listed,
    }.items():
        results |= timed({name: functools.partial(captured, call)})
    return results | timed({"all keys": a_step(query, keys, values, tables, lengths, context)})


def measured_tables():
    for name, mask in MASKS.items():
        yield f"{name}, forward", with_block_lists(mask(), backward=False)
        yield f"{name}, backward", with_block_lists(mask(), backward=True)
    for length in LENGTHS:
        yield f"prefill, {length:,} tokens", with_lengths(length)
    for batch in (1, 64):
        yield f"decode, batch {batch}, window {WINDOW:,} of {CONTEXT:,}", with_a_window(batch)
    for batch, context in ((1, 8192), (1, 32_768), (1, CONTEXT), (1, 4 * CONTEXT), (16, CONTEXT)):
        yield f"decode, batch {batch}, {CHOSEN:,} keys of {context:,}", with_chosen_keys(batch, context)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; returns the exit status."""
    if machine().tier == "none":
        print("bench sparse needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(0)
    before, table = clocks(), {}
    for name, results in measured_tables():
        table[name] = results
        cells = [f"{column} {result['us']:,.1f} µs" if "us" in result else f"{column}: {result['missing']}"
                 for column, result in results.items()]  # fmt: skip
        print(f"{name:<46}{'   '.join(cells)}", flush=True)
        torch.cuda.empty_cache()
    write_record("sparse", before, tables=table)
    return 0
