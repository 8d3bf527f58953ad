"""What the compiler makes of the decode kernels: wide copies, as many tiles in flight with pages as without."""

import dataclasses

import pytest

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.decode import attention as decode_attention
from course_lib.kernels.paged import attention as paged_attention


def shipped(module, arch) -> list[CompileCase]:
    """At head dimension 128 with four query heads to a KV head: the large cut, the medium one, the small one."""
    cases = [case for case in module.compile_cases() if case.archs == (arch,)]
    return [case for case in cases if case.label.startswith("bf16 128 group 4 ")]


@pytest.mark.parametrize("arch", [80, 90])
def test_pages_leave_the_pipeline_as_deep_and_all_keys_arrive_in_copies_of_16_bytes(arch):
    """A page number loaded in the step that needs it used to leave one tile of keys in flight, whatever the stages."""
    cases = {"contiguous": shipped(decode_attention, arch), "paged": shipped(paged_attention, arch)}
    views = iter(compile_many([request for of in cases.values() for case in of for request in case.requests()]))
    shared = {}
    for name, of in cases.items():
        assert len(of) == 3
        shared[name] = []
        for case in of:
            view, key_rows = next(views), case.constexprs["BLOCK_N"]
            buffers = 2 * (case.num_stages - 1) * key_rows * 128 * 2  # of keys and values, 16 bits
            assert buffers <= view.shared_bytes <= buffers + 16384
            # Copies of each thread for the tiles in flight and the next; the merge adds its own.
            copies = 2 * case.num_stages * key_rows * 128 * 2 // (16 * 32 * case.num_warps)
            assert view.ptx.count("cp.async.cg.shared.global") >= copies
            shared[name].append(view.shared_bytes)
    assert shared["paged"] == shared["contiguous"]


def test_a_page_number_loaded_in_its_own_step_would_be_seen():
    """The check above can fail: with fewer stages the same kernel has fewer buffers."""
    case = shipped(paged_attention, 90)[0]
    shallow = dataclasses.replace(case, num_stages=2)
    deep, flat = compile_many([*case.requests(), *shallow.requests()])
    assert deep.shared_bytes >= flat.shared_bytes + 2 * case.constexprs["BLOCK_N"] * 128 * 2
