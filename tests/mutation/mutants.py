"""The small wrong changes: from a right answer to everything that differs from it by one slip.

Each operator takes a `Text` and yields changed sources. What does not parse, or is the same program, is dropped. A
mutant is known by the line that it changes, before and after, which stays true when lines above it move.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.mutation.edits import OPERATORS, Text, called, named, names

OTHER_CALLS = {
    "exp": ("exp2",),
    "exp2": ("exp",),
    "log": ("log2",),
    "log2": ("log",),
    "max": ("sum", "min"),
    "sum": ("max",),
    "amax": ("sum", "amin"),
    "maximum": ("minimum",),
    "minimum": ("maximum",),
    "isqrt": ("sqrt",),
    "ones": ("zeros",),
    "cdiv": (),
}
OTHER_OPERATORS = {
    "+": ("-",),
    "-": ("+",),
    "*": (),
    "/": ("*",),
    "//": (),
    "%": ("//",),
    "&": ("|",),
    "|": ("&",),
    "@": (),
    "**": (),
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
}
DROPPABLE = {"mask", "other", "axis", "dim", "keepdim", "dtype", "default", "key"}
ROUNDED_EARLY = {"exp", "exp2", "dot", "sum", "max", "amax", "load", "zeros", "where"}
KERNEL_KINDS = ("_pointer", "_head_stride", "_row_stride", "_batch_stride", "_stride", "_length")


@dataclass(frozen=True)
class Mutant:
    """One wrong answer.

    Attributes:
        exercise: its id.
        operator: the kind of slip.
        line: number of the first changed line in the right answer.
        before, after: the changed lines, without indentation; "" where a line is gone.
        source: the whole cell.
    """

    exercise: str
    operator: str
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What names it within its exercise: the change, and how many of the same line's kind come before."""
        return self.before, self.after, self.occurrence

    occurrence: int = 0

    def __str__(self) -> str:
        again = f" (place {self.occurrence + 1})" if self.occurrence else ""
        return f"{self.exercise} {self.operator}, line {self.line}{again}: {self.before}  ->  {self.after or '(gone)'}"


def mutants_of(exercise: str, source: str) -> list[Mutant]:
    """Every mutant of a right answer, in the order of its lines, each program once."""
    text = Text(source)
    programs = {node.end_lineno: ast.dump(node) for node in text.tree.body}
    seen, located = set(), []
    for name, operator in OPERATORS_BY_NAME.items():
        for changed in operator(text):
            if changed is None or changed == source:
                continue
            line, before, after = _difference(source, changed)
            end, program = _changed_part(text, changed, line)
            if program and program != programs[end] and (end, program) not in seen:
                seen.add((end, program))
                located.append((line, before, after, name, changed))
    result, times = [], {}
    for line, before, after, name, changed in sorted(located, key=lambda item: (item[0], item[2], item[3])):
        count = times[before, after] = times.get((before, after), -1) + 1
        result.append(Mutant(exercise, name, line, before, after, changed, count))
    return result


def _changed_part(text: Text, changed: str, line: int) -> tuple[int, str]:
    """The last line of the function that a change lies in, and what that function has become; "" if it is no Python.

    Only that function is parsed: a cell has many mutants.
    """
    node = next(node for node in text.tree.body if node.end_lineno >= line)
    first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])
    old, new = text.source.splitlines(), changed.splitlines()
    part = "\n".join(new[first - 1 : len(new) - (len(old) - node.end_lineno)])
    try:
        return node.end_lineno, "".join(map(ast.dump, ast.parse(part).body))
    except SyntaxError:
        return node.end_lineno, ""


def _difference(old: str, new: str) -> tuple[int, str, str]:
    """(first changed line, the stretch of lines before, the stretch after), joined by " ; "."""
    a, b = old.splitlines(), new.splitlines()
    first = next(i for i, (mine, yours) in enumerate(zip([*a, None], [*b, None])) if mine != yours)
    tails = zip([*a[first:][::-1], None], [*b[first:][::-1], ""])
    alike = next(i for i, (mine, yours) in enumerate(tails) if mine != yours)

    def stretch(lines):
        return " ; ".join(filter(None, (line.split("#")[0].strip() for line in lines[first : len(lines) - alike])))

    return first + 1, stretch(a), stretch(b)


# ------------------------------------------------------------------------------------------------------- the slips


def operators_exchanged(text: Text) -> Iterator[str | None]:
    """`<` becomes `<=`, `+` becomes `-`, and so on."""
    for node in text.expressions():
        if isinstance(node, ast.BinOp):
            old, right = OPERATORS.get(type(node.op)), node.right
            yield from (text.between(node.left, right, old, new) for new in OTHER_OPERATORS.get(old, ()))
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            old, right = OPERATORS.get(type(node.ops[0])), node.comparators[0]
            yield from (text.between(node.left, right, old, new) for new in OTHER_OPERATORS.get(old, ()))
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield text.with_replaced(((text.span(node.values[0])[1], text.span(node.values[1])[0]), f" {new} "))
        elif isinstance(node, ast.AugAssign):
            old = OPERATORS.get(type(node.op))
            yield text.between(node.target, node.value, f"{old}=", "=")
            if old == "+":
                yield text.between(node.target, node.value, "+=", "-=")


def operands_dropped(text: Text) -> Iterator[str]:
    """A rescale, a scale, an offset, a mask left out: `a * b` becomes `a`, or `b`."""
    for node in text.expressions():
        if isinstance(node, ast.BinOp):
            yield text.replaced(node, text.operand(node.left))
            if not isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)):
                minus = "-" if isinstance(node.op, ast.Sub) else ""
                yield text.replaced(node, minus + text.operand(node.right))
        elif isinstance(node, ast.BoolOp):
            for kept in node.values:
                yield text.replaced(node, text.operand(kept))


def operands_exchanged(text: Text) -> Iterator[str]:
    """exp(old - new) becomes exp(new - old)."""
    for node in text.expressions():
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.MatMult)):
            changes = (
                (text.span(node.left), text.operand(node.right)),
                (text.span(node.right), text.operand(node.left)),
            )
            yield text.with_replaced(*changes)


def numbers_changed(text: Text) -> Iterator[str]:
    """Whole numbers off by one, 0.0 for 1.0 and 1.0 for 0.0, other numbers doubled."""
    for node in text.expressions():
        if not isinstance(node, ast.Constant) or isinstance(node.value, bool) or _is_axis(text, node):
            continue
        if isinstance(node.value, int):
            if not named(text, node).isupper():  # a block must be a power of two
                yield text.replaced(node, str(node.value + 1))
                if node.value > 0:
                    yield text.replaced(node, str(node.value - 1))
            if node.value >= 16:
                yield text.replaced(node, str(node.value // 2))
        elif isinstance(node.value, float):
            yield text.replaced(
                node, "1.0" if node.value == 0.0 else "0.0" if node.value == 1.0 else str(2 * node.value)
            )


def infinities_changed(text: Text) -> Iterator[str]:
    """A maximum that starts at 0, or at a large negative number; a hidden score of 0 or -1e30."""
    for node in text.expressions():
        if isinstance(node, (ast.UnaryOp, ast.Call)) and text.of(node) in ("-math.inf", 'float("-inf")'):
            yield from (text.replaced(node, new) for new in ("0.0", "-1e30", "-1e4"))


def bounds_moved(text: Text) -> Iterator[str]:
    """One past a bound: `i < n` becomes `i < n - 1`, `i <= n` becomes `i <= n + 1`."""
    for node in text.expressions():
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            right = node.comparators[0]
            sign = "-" if isinstance(node.ops[0], (ast.Lt, ast.GtE)) else "+"
            yield text.replaced(right, f"({text.of(right)}) {sign} 1")


def loops_cut(text: Text) -> Iterator[str]:
    """The first or the last tile skipped, one too many, every second one, only the first."""
    for node in text.expressions():
        if called(node) != "range" or not node.args:
            continue
        arguments = [text.of(argument) for argument in node.args]
        first, end, step = ("0", arguments[0], "1") if len(arguments) == 1 else (*arguments, "1")[:3]
        whole = f"{end} // {step} * {step}" if step != "1" else end  # the tail dropped, where there is one
        for a, b, c in (
            (f"{first} + {step}", end, step),
            (first, f"{end} - {step}", step),
            (first, f"{end} + {step}", step),
            (first, end, f"2 * {step}"),
            (first, f"{first} + {step}", step),
            (first, whole, step),
            (first, f"{end} - 1", step),
        ):
            if (a, b, c) == (first, end, step):
                continue
            yield text.replaced(node, f"range({a}, {b}, {c})")


def keywords_dropped(text: Text) -> Iterator[str]:
    """A load without its mask or its other, a sum without its axis."""
    for node in text.expressions():
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg in DROPPABLE:
                yield text.without(node, keyword)


def calls_exchanged(text: Text) -> Iterator[str]:
    """exp2 for exp, a sum for a maximum, a rounded-down division for one that rounds up."""
    for node in text.expressions():
        for other in OTHER_CALLS.get(called(node), ()):
            yield text.replaced(node.func, text.of(node.func)[: -len(called(node))] + other)
        if called(node) == "cdiv":
            yield text.replaced(node, f"({text.operand(node.args[0])} // {text.operand(node.args[1])})")
        if called(node) in ("zeros", "zeros_like"):
            wide = called(node) == "zeros" and text.of(node.func).startswith("tl.")
            rest = ", ".join([text.of(node.args[0]), "1.0", *map(text.of, [*node.args[1:], *node.keywords])])
            yield (
                text.replaced(node, f"tl.full({rest})")
                if wide
                else text.replaced(node.func, text.of(node.func).replace("zeros", "ones"))
            )


def calls_dropped(text: Text) -> Iterator[str]:
    """`f(x)` becomes `x`: no transpose, no rounding, no cast, no guard, no bound."""
    for node in text.expressions():
        if not isinstance(node, ast.Call):
            continue
        method = isinstance(node.func, ast.Attribute) and (
            not isinstance(node.func.value, ast.Name) or called(node) in ("to", "float", "masked_fill")
        )
        if called(node) in ("range", "load", "store", "arange", "program_id", "num_programs", "empty"):
            continue
        if method:
            yield text.replaced(node, text.operand(node.func.value))
        elif called(node) in ("trans", "maximum", "minimum", "max", "min", "log", "log2", "exp", "exp2", "where"):
            for argument in node.args:
                yield text.replaced(node, text.operand(argument))


def axes_exchanged(text: Text) -> Iterator[str]:
    """axis 0 for axis 1, the length of another dimension, another grid axis, [None, :] for [:, None]."""
    for node in text.expressions():
        if isinstance(node, ast.Constant) and _is_axis(text, node):
            others = {0: ("1", "2"), 1: ("0", "2"), 2: ("0", "1"), -1: ("0", "-2")}.get(node.value, ())
            yield from (text.replaced(node, other) for other in others)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
            yield text.exchanged(*node.slice.elts)


def _is_axis(text: Text, node: ast.Constant) -> bool:
    """Whether a number counts dimensions: `axis=1`, `x.shape[1]`, `tl.program_id(1)`, `x.stride(1)`."""
    parent = text.parents[node]
    if isinstance(node.value, bool) or not isinstance(node.value, int):
        return False
    if isinstance(parent, ast.UnaryOp):
        return False
    if isinstance(parent, ast.keyword):
        return parent.arg in ("axis", "dim")
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.value, ast.Attribute) and parent.value.attr == "shape"
    return called(parent) in ("program_id", "num_programs", "stride", "size")


def arguments_exchanged(text: Text) -> Iterator[str]:
    """Two neighbours in a call, a tuple or a return exchanged."""
    commute = {"maximum", "minimum", "range", "max", "min", "empty", "zeros", "logaddexp"}
    for node in text.expressions():
        items = node.args if isinstance(node, ast.Call) and called(node) not in commute else ()
        if (
            isinstance(node, ast.Tuple)
            and isinstance(node.ctx, ast.Load)
            and not isinstance(text.parents[node], ast.Subscript)
        ):
            items = node.elts
        if isinstance(text.parents.get(node), ast.Subscript) and isinstance(node, ast.Tuple):
            items = node.elts if called(text.parents[text.parents[node]]) else ()
        yield from (text.exchanged(one, other) for one, other in zip(items, items[1:]))


def names_confused(text: Text) -> Iterator[str]:
    """Another tensor's pointer or stride, the other length: a name for its neighbour of the same kind."""
    for function in text.functions():
        parameters = [argument.arg for argument in function.args.args]
        groups = [[p for p in parameters if _kind(p) == kind] for kind in KERNEL_KINDS]
        local = [name for name in ("rows", "keys", "queries", "positions", "columns") if name in names(function, True)]
        for node in ast.walk(function):
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            if getattr(text.parents[node], "attr", "") in ("device", "dtype"):
                continue  # the same for all
            for group in (*groups, local, ["query", "key", "value"], ["BLOCK_M", "BLOCK_N"]):
                if node.id in group and (group[0] in parameters or group is local):
                    others = [name for name in group if name != node.id]
                    nearest = others if group is local else others[:2]
                    yield from (text.replaced(node, other) for other in nearest)


def _kind(parameter: str) -> str | None:
    return next((kind for kind in KERNEL_KINDS if parameter.endswith(kind)), None)


def branches_fixed(text: Text) -> Iterator[str]:
    """A condition that is always true, or never; a choice that is always the one or the other."""
    for node in text.expressions():
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield text.replaced(node.test, "False")
            if not isinstance(node, ast.While):
                yield text.replaced(node.test, "True")
        if isinstance(node, ast.comprehension):
            yield from (text.replaced(test, "True") for test in node.ifs)


def rounded_early(text: Text) -> Iterator[str]:
    """A step's result rounded to float16 before it is used."""
    kernels = any("jit" in text.of(mark) for function in text.functions() for mark in function.decorator_list)
    cast = ".to(tl.float16).to(tl.float32)" if kernels else ".half().float()"
    for node in text.expressions():
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            parts = [part for part in ast.walk(node.value) if called(part) in ROUNDED_EARLY]
            if parts:
                yield text.replaced(node.value, f"({text.of(node.value)}){cast}")
            for part in parts:
                if called(part) in ("exp", "exp2", "dot"):
                    yield text.replaced(part, text.of(part) + cast)
            if isinstance(node, ast.AugAssign):  # what a loop adds to, kept in float16
                target, sign = text.of(node.target), OPERATORS[type(node.op)]
                yield text.replaced(node, f"{target} = ({target} {sign} {text.of(node.value)}){cast}")
            elif not parts and names(node, True) & names(node.value, False):
                yield text.replaced(node.value, f"({text.of(node.value)}){cast}")
        if isinstance(node, ast.Attribute) and text.of(node) in ("tl.float32", "torch.float32"):
            yield text.replaced(node, text.of(node).replace("32", "16"))
        if isinstance(node, ast.Attribute) and text.of(node) == "tl.int64":
            yield text.replaced(node, "tl.int32")


def statements_deleted(text: Text) -> Iterator[str]:
    """A statement left out where what remains still runs."""
    for function in text.functions():
        set_before: set[str] = {argument.arg for argument in function.args.args}
        for statement in sorted(
            (node for node in ast.walk(function) if isinstance(node, ast.stmt)), key=lambda node: node.lineno
        ):
            deletable = isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr))
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if deletable and not is_text and names(statement, stored=True) <= set_before:
                yield text.replaced(statement, "pass")
            set_before |= names(statement, stored=True) if deletable else set()


def statements_exchanged(text: Text) -> Iterator[str]:
    """Two neighbours in the wrong order, where one reads what the other sets; a plain copy made too early."""
    for block in text.blocks():
        simple = [isinstance(statement, (ast.Assign, ast.AugAssign)) for statement in block]
        for index in range(len(block) - 1):
            one, other = block[index], block[index + 1]
            if simple[index] and simple[index + 1] and _interact(one, other):
                yield _in_order(text, block[index : index + 2], [other, one])
        for index, statement in enumerate(block):
            if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)):
                continue
            for start in range(index - 1, 0, -1):
                if names(block[start - 1], True) & names(statement, False):
                    stretch = block[start : index + 1]
                    yield _in_order(text, stretch, [statement, *stretch[:-1]])
                    break


def _interact(one: ast.stmt, other: ast.stmt) -> bool:
    return bool(names(one, True) & names(other, False) or names(other, True) & names(one, False))


def _in_order(text: Text, old: list[ast.stmt], new: list[ast.stmt]) -> str:
    written = [text.bytes[slice(*text.lines(statement))].decode() for statement in new]
    return text.with_replaced(((text.lines(old[0])[0], text.lines(old[-1])[1]), "".join(written)))


OPERATORS_BY_NAME: dict[str, Callable[[Text], Iterator[str | None]]] = {
    function.__name__: function
    for function in (
        keywords_dropped,
        operands_dropped,
        operators_exchanged,
        operands_exchanged,
        bounds_moved,
        loops_cut,
        infinities_changed,
        numbers_changed,
        calls_exchanged,
        calls_dropped,
        axes_exchanged,
        arguments_exchanged,
        names_confused,
        branches_fixed,
        rounded_early,
        statements_deleted,
        statements_exchanged,
    )
}
