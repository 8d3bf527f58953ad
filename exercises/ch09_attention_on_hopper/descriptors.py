"""The types of the tiles that Gluon's kernels of chapter 09 are given."""

from __future__ import annotations


def tile_type(rows: int, columns: int) -> str:
    """A descriptor of bfloat16 tiles in the layout that the launchers choose, as the compiler spells it."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows},{columns}],{layout!r}>"
