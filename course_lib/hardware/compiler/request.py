"""A request to compile a kernel: its arguments checked, and packed for the compiler's process."""

import re
from collections.abc import Iterable, Mapping

from course_lib.hardware.compiler.architectures import architecture_number
from course_lib.hardware.compiler.kernel_source import NO_DEFAULT, KernelSource, parameters_of

NUMBER_TYPES = "fp16, bf16, fp32, fp64, fp8e4nv, fp8e5, i1, i8, i16, i32, i64, u8, u16, u32, u64"
SIGNATURE_TYPE = r"\*?k?\*?({})|tensordesc<.+>".format(NUMBER_TYPES.replace(", ", "|"))


def prepare(
    kernel: object,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object] | None = None,
    arch: int | str = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Iterable[str] | None = None,
    want_sass: bool = False,
    **options: object,
) -> dict:
    """What `worker.py` compiles, from the arguments of `compile_view`. Raises TypeError and ValueError as it does."""
    source = KernelSource(kernel)
    constexprs = dict(constexprs or {})
    entries = _entries(source, dict(signature), constexprs)
    if divisible is None:
        divisible = [
            name
            for name, kind in entries.items()
            if kind.startswith("*") or (re.fullmatch(r"[iu]\d+", kind) and "stride" in name.lower())
        ]
    divisible = list(divisible)
    unknown = [name for name in divisible if name not in entries]
    if unknown:
        raise ValueError(f"divisible names {', '.join(map(repr, unknown))}, which {source.name} does not take")
    return {
        "signature": entries,
        "arch": architecture_number(arch),
        "num_warps": num_warps,
        "num_stages": num_stages,
        "options": options,
        "divisible": [name for name in divisible if entries[name] != "constexpr"],
        "want_sass": want_sass,
        "first_line": source.first_line,
        "name": source.name,
        "missing": source.missing,
        **source.packed(constexprs),
    }


def _entries(source: KernelSource, signature: dict[str, str], constexprs: dict[str, object]) -> dict[str, str]:
    """Every parameter's type, "constexpr" for constants; puts the kernel's own defaults into `constexprs`."""
    parameters = parameters_of(source.function)
    for given, what in ((signature, "signature"), (constexprs, "constexprs")):
        unknown = [name for name in given if name not in parameters]
        if unknown:
            raise ValueError(
                f"{what} names {', '.join(map(repr, unknown))}, which {source.name} does not take; its "
                f"parameters are {', '.join(parameters)}"
            )
    entries = {}
    for name, (is_constexpr, default) in parameters.items():
        if default is not NO_DEFAULT and (is_constexpr or name not in signature):
            constexprs.setdefault(name, default)
        if name in constexprs:
            entries[name] = "constexpr"
        elif is_constexpr or signature.get(name) == "constexpr":
            raise ValueError(f"constexprs has no value for {name!r}, a tl.constexpr parameter of {source.name}")
        elif name not in signature:
            raise ValueError(
                f"signature has no entry for {name!r}, a parameter of {source.name}; give its type, such "
                'as "*fp32" for a pointer or "i32" for an integer'
            )
        elif not re.fullmatch(SIGNATURE_TYPE, str(signature[name])):
            raise ValueError(
                f"{name!r} is {signature[name]!r} in signature; allowed: a number ({NUMBER_TYPES}), a "
                'pointer ("*fp16"), or a descriptor ("tensordesc<fp16[128,64]>")'
            )
        else:
            entries[name] = signature[name]
    return entries
