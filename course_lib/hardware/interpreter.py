"""Make Triton 3.6's interpreter work with NumPy 2.4 and later.

A loop over a run-time bound calls `int()` on a loaded scalar, which the interpreter holds as an array of shape [1].
NumPy 2.4 refuses that ("only 0-dimensional arrays can be converted"); Triton 3.7 squeezes the array first. Here the
older interpreter is given the same behaviour. Triton patches its tensor class anew at every launch, so its patching
function is wrapped rather than the class.
"""
import importlib.metadata

FIXED_IN = (3, 7)
BREAKS_FROM_NUMPY = (2, 4)


def version_pair(distribution: str) -> tuple[int, int] | None:
    """(major, minor) of an installed package, or None."""
    try:
        major, minor = importlib.metadata.version(distribution).split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def needs_repair() -> bool:
    """True for the pairs of Triton and NumPy on which a loop with a run-time bound fails."""
    triton, numpy = version_pair("triton"), version_pair("numpy")
    return triton is not None and numpy is not None and triton < FIXED_IN and numpy >= BREAKS_FROM_NUMPY


def repair_interpreter() -> bool:
    """Apply the repair where it is needed; True when it is in force. Imports Triton only on the affected pairs."""
    if not needs_repair():
        return False
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "squeezes_scalars", False):
        return True

    def patch_lang_tensor(tensor, scope, *arguments):
        original(tensor, scope, *arguments)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_lang_tensor.squeezes_scalars = True
    interpreter._patch_lang_tensor = patch_lang_tensor
    return True
