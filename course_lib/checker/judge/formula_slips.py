"""Slips in a formula, made from the formula itself: a factor left out, a name for another, rounded the other way.

Where an exercise asks for numbers, its oracle is a few lines of arithmetic. Each small change of these lines is a slip,
and what it makes of the cases is known without anyone having written it down.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

from course_lib.checker.specification.model import Model, Slip

MOST_FOR_PAIRS = 80  # slips of a formula; of more, two at once are not looked for
LONGEST_RANGE = 5000
BINARY = {1e3: 1 << 10, 1e6: 1 << 20, 1e9: 1 << 30, 1e12: 1 << 40}
MOST_RESULTS = 3  # of a formula that gives several, whose own slips are looked for
ORDINALS = ("first", "second", "third", "fourth")
UNITS = {1e3: "thousand", 1e6: "million", 1e9: "billion", 1e12: "trillion"}


@functools.cache
def formula_model(
    oracle: Callable, entry: str | None = None, taught: tuple[Slip, ...] = (), made: bool = True
) -> Model | None:
    """A model of a Python formula with the slips that its author wrote and, if asked for, its small changes.

    None where there are no slips: no source, and nothing taught. A formula that only hands its arguments to another
    function of its module is changed there too.
    """
    versions = _versions(oracle) if made else {}
    if not versions and not taught:
        return None
    taught = tuple(form for slip in taught for form in _forms(slip))
    written = {slip.id: slip.formula for slip in taught if callable(slip.formula)}
    changes = {
        change.slip.id: (version, change)
        for version, (_, tree) in versions.items()
        for change in _changes(tree, version, inspect.signature(oracle).parameters)
    }
    parameters = list(inspect.signature(oracle).parameters)
    results = {slip.id: (slip, change) for slip, change in _changes_of_the_result(parameters)} if versions else {}

    @functools.cache
    def changed(names: frozenset[str]) -> Callable | None:
        """The formula with these changes; None where two of them are of two versions of one function."""
        mine = [changes[name] for name in names if name in changes]
        edited = {versions[version][0]: version for version, _ in mine}
        if len(edited) < len({version for version, _ in mine}):
            return None
        scope = {**oracle.__globals__, "range": _short_range}
        for function, version in {oracle.__name__: "", **edited}.items():
            tree = _Edit([change for of, change in mine if of == version]).visit(_numbered(versions[version][1]))
            exec(compile(ast.fix_missing_locations(tree), f"<{function}>", "exec"), scope)
        return scope[oracle.__name__]

    names = [*changes, *results]

    def compute(chosen: frozenset[str], *args: Any) -> Any:
        told = next((slip for slip in written if slip in chosen), None)
        if told is not None:
            return written[told](*args)
        made = chosen.intersection(names)
        function = changed(made) if versions else oracle
        if function is None:
            return NotImplemented
        try:
            result = function(*(_changed_kind(value, _guarded) if made else value for value in args))
            for name in made & {*results}:
                result = results[name][1](result, args)
        except Exception:  # a changed formula may divide by zero, or look for what is not there
            if not made:
                raise
            return NotImplemented
        return _changed_kind(result, _usual)

    automatic = [change.slip for _, change in changes.values()] + [slip for slip, _ in results.values()]
    in_pairs = sum(not slip.alone for slip in automatic) <= MOST_FOR_PAIRS
    slips = [*taught, *automatic]
    return Model(
        compute,
        tuple(slips),
        entry=entry,
        pairs=in_pairs,
        first_of_equals=True,
        none_is_a_result=made,
        may_be_silent=not made,
        in_float32=not made,
    )


class _NoNumber:
    """An argument that is repeated where a changed formula lets it stand for a number, which raises here instead.

    Times a context and a head dimension, a name of four letters or a tuple of three rates would take gigabytes.
    """

    __slots__ = ()

    def __mul__(self, _):
        raise TypeError("neither a text nor a sequence is a number")

    __rmul__ = __mul__


class _Word(_NoNumber, str):
    __slots__ = ()


class _Row(_NoNumber, tuple):
    __slots__ = ()


class _List(_NoNumber, list):
    __slots__ = ()


_guarded: dict[type, type] = {str: _Word, tuple: _Row, list: _List}
_usual: dict[type, type] = {guarded: usual for usual, guarded in _guarded.items()}


def _changed_kind(value: Any, kinds: dict[type, type]) -> Any:
    """A value as the kind that stands for its own, if one does."""
    return kinds[type(value)](value) if type(value) in kinds else value


def _short_range(*limits: int) -> range:
    """`range` for changed formulas, in which a budget of bytes may stand where a number of heads belongs."""
    asked = range(*limits)
    if len(asked) > LONGEST_RANGE:
        raise ValueError(f"{len(asked):,} are too many")
    return asked


def _forms(slip: Slip) -> Iterator[Slip]:
    """A slip for each form that it takes."""
    forms = slip.formula if isinstance(slip.formula, tuple) else (slip.formula,)
    for number, formula in enumerate(forms, start=1):
        yield replace(slip, id=f"{slip.id}__{number}", formula=formula, alone=True)


def _versions(oracle: Callable) -> dict[str, tuple[str, ast.Module]]:
    """Version to function and tree: the formula, the same with its names replaced by what they are, its helpers."""
    tree = _parsed(oracle)
    if tree is None:
        return {}
    versions = {"": (oracle.__name__, tree)}
    if (inlined := _inlined(tree)) is not tree:
        versions["inlined_"] = (oracle.__name__, inlined)
    if ast.dump(spread := _Spread().visit(copy.deepcopy(inlined))) != ast.dump(inlined):
        versions["spread_"] = (oracle.__name__, spread)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for name in sorted(called):
        helper = oracle.__globals__.get(name)
        if not inspect.isfunction(helper) or helper.__module__ != oracle.__module__:
            continue
        if parsed := _parsed(helper):
            versions[f"{name}_"] = (name, parsed)
    return versions


def _parsed(function: Callable) -> ast.Module | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    if any(isinstance(node, ast.While) for node in ast.walk(tree)):
        return None  # with a small change it may never end
    return tree if len(tree.body) == 1 and isinstance(tree.body[0], ast.FunctionDef) else None


@dataclass(frozen=True)
class _Names:
    """A formula's parameters, which learners know, what its other names stand for, and names that all parts share."""

    parameters: list[str]
    meant: dict[str, ast.expr]
    in_all: frozenset[str] = frozenset()

    def within(self, whole: ast.expr) -> _Names:
        """Names with which a part of this sum is told from its other parts; those that all parts share tell nothing."""
        parts = [self.used(part) for part in _summands(whole)]
        return replace(self, in_all=frozenset.intersection(*parts))

    def used(self, node: ast.expr) -> frozenset[str]:
        """All names that a part of a formula is made of."""
        found: set[str] = set()
        todo: list[ast.AST] = [node]
        while todo:
            used = {part.id for part in ast.walk(todo.pop()) if isinstance(part, ast.Name)} - found
            found |= used
            todo += [self.meant[name] for name in used if name in self.meant]
        return frozenset(found)


def _sum_around(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> ast.expr:
    """The whole sum that an addition is a part of."""
    while isinstance(above := parents.get(node), ast.BinOp) and isinstance(above.op, ast.Add):
        node = above
    return node


def _summands(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _summands(node.left)
        yield from _summands(node.right)
    else:
        yield node


def _assigned_once(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """What a function's own names stand for, where that is said in one place."""
    meant: dict[str, list[ast.expr]] = {}
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Name):
                meant.setdefault(target.id, []).append(value)
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for name, part in zip(target.elts, value.elts):
                    if isinstance(name, ast.Name):
                        meant.setdefault(name.id, []).append(part)
    return {name: values[0] for name, values in meant.items() if len(values) == 1}


class _Change:
    """One change of a formula: the node it replaces, by its number in the tree, or all nodes of one name."""

    def __init__(self, slip: Slip, node: int | None, replacement: ast.expr | Callable[[Any], ast.expr]):
        self.slip, self.node, self.replacement = slip, node, replacement


class _Edit(ast.NodeTransformer):
    """Applies changes to a numbered tree."""

    def __init__(self, changes: list[_Change]):
        self.changes = {change.node: change for change in changes}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        change = self.changes.get(getattr(node, "number", None))
        node = super().generic_visit(node)
        if change is None:
            return node
        return change.replacement(node) if callable(change.replacement) else change.replacement


def _numbered(tree: ast.Module) -> ast.Module:
    """A copy of a tree whose nodes carry their numbers."""
    copied = ast.parse(ast.unparse(tree))
    for number, node in enumerate(ast.walk(copied)):
        node.number = number  # type: ignore[attr-defined]
    return copied


def _inlined(tree: ast.Module) -> ast.Module:
    """The same formula with every name that is assigned once replaced by what it is; the tree itself without such."""
    function = copy.deepcopy(tree).body[0]
    assert isinstance(function, ast.FunctionDef)
    meant: dict[str, ast.expr] = {}
    kept: list[ast.stmt] = []
    for statement in function.body:
        statement = _Meanings(meant).visit(statement)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Name):
                meant[target.id] = value
                continue
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                meant |= {name.id: part for name, part in zip(target.elts, value.elts) if isinstance(name, ast.Name)}
                continue
        kept.append(statement)
    if not meant or not all(isinstance(statement, (ast.Return, ast.Expr)) for statement in kept):
        return tree
    function.body = kept
    return ast.Module([function], [])


class _Spread(ast.NodeTransformer):
    """Products over sums written out, so that a factor can be missing from one part of a sum."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Mult):
            for whole, factor in ((left, right), (right, left)):
                if isinstance(whole, ast.BinOp) and isinstance(whole.op, (ast.Add, ast.Sub)):
                    parts = (ast.BinOp(copy.deepcopy(factor), ast.Mult(), part) for part in (whole.left, whole.right))
                    return self.visit_BinOp(ast.BinOp(next(parts), whole.op, next(parts)))
        return ast.BinOp(left, node.op, right)


class _Meanings(ast.NodeTransformer):
    def __init__(self, meant: dict[str, ast.expr]):
        self.meant = meant

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.meant[node.id]) if isinstance(node.ctx, ast.Load) and node.id in self.meant else node


def _changes(tree: ast.Module, version: str, parameters: Container[str]) -> Iterator[_Change]:
    """All changes of a tree, each once; the version sets the ids of two trees apart."""
    seen = set()
    for change in _all_changes(_numbered(tree), parameters):
        name, _, way = change.slip.id.partition("__")
        alone = bool(version) or name in ("wrong_name", "taken_as_fixed")
        change.slip = replace(change.slip, id=f"{name}__{version}{way}", alone=alone or change.slip.alone)
        if change.slip.id not in seen:
            seen.add(change.slip.id)
            yield change


def _all_changes(tree: ast.Module, public: Container[str]) -> Iterator[_Change]:
    """Changes that can be told by the names that learners know, those of the formula's parameters."""
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    parameters = [argument.arg for argument in function.args.args if argument.arg in public]
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    names = _Names(parameters, _assigned_once(function))
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in parameters:
            yield from _of_a_name(node, parents.get(node), parameters)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield from _of_a_number(node, parents.get(node))
        elif isinstance(node, ast.BinOp):
            whole = _sum_around(node, parents)
            yield from _of_an_operation(node, parents.get(node), names.within(whole))
            if isinstance(node.op, ast.Add) and not isinstance(parents.get(whole), ast.Call):
                yield from _of_a_sum(node, names.within(whole))
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _of_a_comparison(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("math.ceil", "math.floor"):
            yield from _of_a_call(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
            yield from _of_a_limit(node, parameters)


def _of_a_name(node: ast.Name, parent: ast.AST | None, parameters: list[str]) -> Iterator[_Change]:
    number = node.number  # type: ignore[attr-defined]
    for size in (2, 4) if node.id.endswith("_bytes") else ():
        slip = Slip(f"taken_as_fixed__{number}_{size}", f"`{node.id}` is taken to be {size}, whatever is given.")
        yield _Change(slip, number, ast.Constant(size))
    for count in (1, 2) if isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Add, ast.Sub)) else ():
        slip = Slip(f"taken_as_fixed__{number}_{count}", f"`{node.id}` is taken to be {count}, whatever is given.")
        yield _Change(slip, number, ast.Constant(count))
    for other in parameters:
        if other != node.id:
            slip = Slip(f"wrong_name__{number}_{other}", f"`{other}` stands where `{node.id}` belongs.")
            yield _Change(slip, number, ast.Name(other, ast.Load()))
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Mult, ast.Div, ast.FloorDiv)):
        below = parent.right is node and not isinstance(parent.op, ast.Mult)
        said = f"It is not divided by `{node.id}`." if below else f"`{node.id}` is missing as a factor."
        yield _Change(Slip(f"factor_missing__{number}", said), number, ast.Constant(1))
        for other in parameters if isinstance(parent.op, ast.Mult) else ():
            if other != node.id:
                product = ast.BinOp(ast.Name(node.id, ast.Load()), ast.Mult(), ast.Name(other, ast.Load()))
                slip = Slip(f"factor_too_many__{number}_{other}", f"`{other}` is a factor too many.", alone=True)
                yield _Change(slip, number, product)
        square = ast.BinOp(ast.Name(node.id, ast.Load()), ast.Mult(), ast.Name(node.id, ast.Load()))
        said = f"It is divided by `{node.id}` twice." if below else f"`{node.id}` is counted twice."
        yield _Change(Slip(f"factor_twice__{number}", said), number, square)


def _of_a_number(node: ast.Constant, parent: ast.AST | None) -> Iterator[_Change]:
    number, value = node.number, node.value  # type: ignore[attr-defined]
    if not isinstance(parent, ast.BinOp) or not isinstance(value, (int, float)):
        return
    if isinstance(parent.op, (ast.Mult, ast.Div, ast.FloorDiv)) and value not in (0, 1):
        below = parent.right is node and not isinstance(parent.op, ast.Mult)
        said = f"It is not divided by {value:g}." if below else f"A factor of {value:g} is missing."
        yield _Change(Slip(f"factor_missing__{number}", said), number, ast.Constant(1))
    if isinstance(parent.op, (ast.Mult, ast.Div, ast.FloorDiv)) and value in (2, 4, 8):
        for wrong in sorted({value // 2, value - 1, value + 1, value * 2} - {1}):
            said = f"A factor is {wrong} where it should be {value}."
            slip = Slip(f"wrong_factor__{number}_{wrong}", said, alone=wrong % 2 == 1)
            yield _Change(slip, number, ast.Constant(wrong))
    if value in BINARY:
        said = f"A {UNITS[value]} is taken for 2^{BINARY[value].bit_length() - 1}, and it is {value:g}."
        yield _Change(Slip(f"units__{number}_binary", said), number, ast.Constant(BINARY[value]))
    if isinstance(parent.op, (ast.Add, ast.Sub)):
        yield _Change(Slip(f"off_by_one__{number}", f"It is off by {value:g}."), number, ast.Constant(0))


def _of_an_operation(node: ast.BinOp, parent: ast.AST | None, names: _Names) -> Iterator[_Change]:
    number = node.number  # type: ignore[attr-defined]
    if isinstance(node.op, (ast.Add, ast.Sub)):
        for kept, lost in ((node.left, node.right), (node.right, node.left)):
            if isinstance(node.op, ast.Sub) and kept is node.right:
                continue
            keep = functools.partial(_side, kept is node.left)
            yield _Change(Slip(f"term_missing__{number}_{kept is node.left}", _lost(lost, names)), number, keep)
        turned = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        said = (
            "Two parts are subtracted where they are added."
            if isinstance(node.op, ast.Add)
            else ("Two parts are added where one is taken from the other.")
        )
        yield _Change(Slip(f"wrong_sign__{number}", said), number, functools.partial(_with_operator, turned))
    if isinstance(node.op, ast.Mod):
        said = "A remainder is taken the wrong way round: `a % b` is what is left of a when it is divided by b."
        yield _Change(Slip(f"operands_exchanged__{number}", said), number, _operands_exchanged)
    if isinstance(node.op, ast.FloorDiv):
        up = isinstance(parent, ast.UnaryOp) and isinstance(node.left, ast.UnaryOp)  # -(-a // b) rounds up
        said = (
            "A quotient is rounded down where it must be rounded up."
            if up
            else ("A quotient is rounded up where it must be rounded down.")
        )
        yield _Change(Slip(f"rounded_wrong__{number}", said), number, _rounded_up)
        if up:
            said = "A quotient is rounded down and 1 added, which is one too many where it divides evenly."
            yield _Change(Slip(f"rounded_wrong__{number}_one_more", said), number, _one_more_than_down)
        said = f"A quotient is rounded to the nearest whole number where it must be rounded {'up' if up else 'down'}."
        yield _Change(Slip(f"rounded_wrong__{number}_nearest", said), number, _rounded_to_nearest)
        said = "A quotient is not rounded, and whole numbers are asked for."
        yield _Change(Slip(f"not_rounded__{number}", said), number, functools.partial(_with_operator, ast.Div()))


def _of_a_sum(node: ast.BinOp, names: _Names) -> Iterator[_Change]:
    number = node.number  # type: ignore[attr-defined]
    for term in (node.left, node.right):
        if depends := _depends_on(term, names):
            said = f"A part of a sum is counted twice, the one that depends on {depends}."
            once_more = functools.partial(_with_once_more, term is node.left)
            yield _Change(Slip(f"term_twice__{number}_{term is node.left}", said, alone=True), number, once_more)


def _of_a_call(node: ast.Call) -> Iterator[_Change]:
    """`math.ceil` and `math.floor` of a quotient."""
    number, up = node.number, ast.unparse(node.func) == "math.ceil"  # type: ignore[attr-defined]
    for name, said in (
        ("ceil", "A quotient is rounded up where it must be rounded down."),
        ("floor", "A quotient is rounded down where it must be rounded up."),
        ("one_more", "A quotient is rounded down and 1 added, which is one too many where it divides evenly."),
        (
            "nearest",
            f"A quotient is rounded to the nearest whole number where it must be rounded {'up' if up else 'down'}.",
        ),
    ):
        if (name == "ceil") == up and name in ("ceil", "floor") or name == "one_more" and not up:
            continue
        yield _Change(Slip(f"rounded_wrong__{number}_{name}", said), number, functools.partial(_rounded_as, name))
    said = "A quotient is not rounded, and whole numbers are asked for."
    yield _Change(Slip(f"not_rounded__{number}", said), number, functools.partial(_argument, 0))


def _of_a_comparison(node: ast.Compare) -> Iterator[_Change]:
    pairs = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    turned = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
    kind, number = type(node.ops[0]), node.number  # type: ignore[attr-defined]
    if kind in pairs:
        said = "A value exactly at a limit falls on the wrong side: is it < or <=?"
        yield _Change(Slip(f"at_the_limit__{number}", said), number, functools.partial(_compared, pairs[kind]))
        said = "A comparison is the wrong way round."
        yield _Change(Slip(f"wrong_way_round__{number}", said), number, functools.partial(_compared, turned[kind]))


def _of_a_limit(node: ast.Call, parameters: list[str]) -> Iterator[_Change]:
    assert isinstance(node.func, ast.Name)
    number = node.number  # type: ignore[attr-defined]
    least = node.func.id == "max"
    said = (
        "The smaller of two is taken where the larger counts."
        if least
        else ("The larger of two is taken where the smaller counts.")
    )
    other = ast.Name("min" if least else "max", ast.Load())
    yield _Change(Slip(f"other_end__{number}", said), number, functools.partial(_called, other))
    if len(node.args) == 2 and not node.keywords:
        for index, argument in enumerate(node.args):
            if isinstance(argument, ast.Constant):
                said = f"A limit is missing: it is never {'less' if least else 'more'} than {argument.value!r}."
                yield _Change(Slip(f"limit_missing__{number}", said), number, functools.partial(_argument, 1 - index))
            else:
                said = f"Only one of two things counts where the {'larger' if least else 'smaller'} of both should."
                kept = functools.partial(_argument, index)
                yield _Change(Slip(f"only_one_counts__{number}_{index}", said), number, kept)


def _changes_of_the_result(parameters: list[str]) -> Iterator[tuple[Slip, Callable[[Any, tuple], Any]]]:
    """What happens to a whole result, or to one of several: units, upside down, one too many, another order."""
    for name, said, change in _changes_of_a_number(parameters):
        yield Slip(name, said, alone=name.startswith("factor_")), functools.partial(_changed_everywhere, change)
        for place in range(MOST_RESULTS):
            slip = Slip(f"{name if '__' in name else name + '_'}_in_{place}", said, alone=True)
            yield slip, functools.partial(_changed_at, place, change)
    yield Slip("wrong_order", "The results are right and stand in the wrong order."), _reversed
    for one, other in itertools.combinations(range(MOST_RESULTS), 2):
        said = f"The {ORDINALS[one]} and the {ORDINALS[other]} result are exchanged."
        yield Slip(f"wrong_order__{one}_{other}", said, alone=True), functools.partial(_exchanged, one, other)


def _changes_of_a_number(parameters: list[str]) -> Iterator[tuple[str, str, Callable[[Any, tuple], Any]]]:
    """Id, sentence and `change(number, args)`."""
    for by, word in UNITS.items():
        yield f"units__{by:g}_large", f"The result is a {word} times too large: look at the units.", _times(by)
        yield f"units__{by:g}_small", f"The result is a {word} times too small: look at the units.", _times(1 / by)
    yield "units__bits", "The result is eight times too large: are bits counted where bytes are?", _times(8)
    yield "units__bytes", "The result is an eighth of what it should be: bits and bytes?", _times(1 / 8)
    for by, said in ((2, "twice what it should be"), (0.5, "half of what it should be")):
        sentence = f"The result is {said}: is something counted once that counts twice, or the other way round?"
        yield f"factor_of_two__{by}", sentence, _times(by)
    yield "upside_down", "The quotient is upside down.", lambda value, args: 1 / value if value else value
    for by in (1, -1):
        said = "one too large" if by > 0 else "one too small"
        yield f"off_by_one__{said.replace(' ', '_')}", f"The result is {said}.", functools.partial(_shifted, by)
    for place, name in enumerate(parameters):
        said = f"`{name}` is a factor too many, or is missing as a divisor."
        yield f"factor_too_many__{name}", said, functools.partial(_with_factor, place, True)
        said = f"`{name}` is missing as a factor, or divides where it should not."
        yield f"factor_missing__{name}", said, functools.partial(_with_factor, place, False)


def _times(by: float) -> Callable[[Any, tuple], Any]:
    return lambda value, args: value * by


def _shifted(by: int, value: Any, args: tuple) -> Any:
    return value + by if type(value) is int else value


def _with_factor(place: int, times: bool, value: Any, args: tuple) -> Any:
    """The number times one of the arguments, or divided by it; whole numbers stay whole where they can."""
    factor = args[place]
    if type(factor) not in (int, float):
        raise TypeError(f"{factor!r} is no number")
    if times:
        return value * factor
    whole = type(value) is int and type(factor) is int and value % factor == 0
    return value // factor if whole else value / factor


def _changed_everywhere(change: Callable[[Any, tuple], Any], result: Any, args: tuple) -> Any:
    def one(value: Any) -> Any:
        return change(value, args) if type(value) in (int, float) else value

    return type(result)(map(one, result)) if isinstance(result, (tuple, list)) else one(result)


def _changed_at(place: int, change: Callable[[Any, tuple], Any], result: Any, args: tuple) -> Any:
    """One of several results changed; an error where there is no such number."""
    if not isinstance(result, tuple) or type(result[place]) not in (int, float):
        raise TypeError("no number stands there")
    return (*result[:place], change(result[place], args), *result[place + 1 :])


def _exchanged(one: int, other: int, result: Any, args: tuple) -> Any:
    if not isinstance(result, tuple) or len(result) < 3:
        raise TypeError("there are not that many results")
    order = list(result)
    order[one], order[other] = order[other], order[one]
    return tuple(order)


def _reversed(result: Any, args: tuple) -> Any:
    return type(result)(reversed(result)) if isinstance(result, (tuple, list)) else result


def _lost(node: ast.expr, names: _Names) -> str:
    """What is missing, by the names in it."""
    if isinstance(node, ast.Constant):
        return f"It is off by {node.value!r}."
    depends = _depends_on(node, names)
    if not depends:
        return "One of the parts that are added is missing."
    return f"A part is missing from a sum, the one that depends on {depends}."


def _depends_on(node: ast.expr, names: _Names) -> str:
    """The parameters that a part of a formula is made of, listed; "" where there are none."""
    found = names.used(node) - names.in_all or names.used(node)
    listed = [f"`{name}`" for name in names.parameters if name in found]
    return " and ".join(filter(None, [", ".join(listed[:-1]), *listed[-1:]]))


def _with_once_more(left: bool, node: ast.BinOp) -> ast.expr:
    return ast.BinOp(node, ast.Add(), copy.deepcopy(node.left if left else node.right))


def _side(left: bool, node: ast.BinOp) -> ast.expr:
    return node.left if left else node.right


def _with_operator(operator: ast.operator, node: ast.BinOp) -> ast.expr:
    return ast.BinOp(node.left, operator, node.right)


def _rounded_up(node: ast.BinOp) -> ast.expr:
    minus = ast.UnaryOp(ast.USub(), node.left)
    return ast.UnaryOp(ast.USub(), ast.BinOp(minus, ast.FloorDiv(), node.right))


def _rounded_to_nearest(node: ast.BinOp) -> ast.expr:
    quotient = ast.BinOp(node.left, ast.Div(), node.right)
    return ast.Call(ast.Name("round", ast.Load()), [quotient], [])


def _one_more_than_down(node: ast.BinOp) -> ast.expr:
    """Of the -a // b in -(-a // b), what makes a // b + 1 of the whole."""
    assert isinstance(node.left, ast.UnaryOp)
    down = ast.BinOp(node.left.operand, ast.FloorDiv(), node.right)
    return ast.UnaryOp(ast.USub(), ast.BinOp(down, ast.Add(), ast.Constant(1)))


def _rounded_as(how: str, node: ast.Call) -> ast.expr:
    if how == "nearest":
        return ast.Call(ast.Name("round", ast.Load()), node.args, [])
    kind = ast.Attribute(ast.Name("math", ast.Load()), "ceil" if how == "ceil" else "floor", ast.Load())
    rounded = ast.Call(kind, node.args, [])
    return ast.BinOp(rounded, ast.Add(), ast.Constant(1)) if how == "one_more" else rounded


def _operands_exchanged(node: ast.BinOp) -> ast.expr:
    return ast.BinOp(node.right, node.op, node.left)


def _compared(kind: type[ast.cmpop], node: ast.Compare) -> ast.expr:
    return ast.Compare(node.left, [kind()], node.comparators)


def _called(function: ast.Name, node: ast.Call) -> ast.expr:
    return ast.Call(function, node.args, node.keywords)


def _argument(index: int, node: ast.Call) -> ast.expr:
    return node.args[index]
