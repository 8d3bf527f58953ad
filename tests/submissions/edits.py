"""Wrong answers made from right ones."""

from course_lib.checker.specification.catalog import solution_source


def edited(source, *replacements):
    """A source with each (old, new) replaced wherever it stands; an old that is not there is an error."""
    for old, new in replacements:
        assert old in source, f"the answer does not hold {old!r}, so nothing can be changed there"
        source = source.replace(old, new)
    return source


def changed(identity, *replacements):
    """The course's answer with each (old, new) replaced, as `edited` does it."""
    return edited(solution_source(identity), *replacements)


def rounded(identity, entry, places):
    """The course's answer with the floats that a function returns rounded to so many places."""
    return (
        solution_source(identity)
        + f"""

in_full = {entry}


def {entry}(*args):
    def few(number):
        return round(number, {places}) if isinstance(number, float) else number

    result = in_full(*args)
    return tuple(map(few, result)) if isinstance(result, tuple) else few(result)
"""
    )


def in_tf32(identity):
    """The course's answer with `tl.dot`'s default precision, which on a GPU cuts float32 operands to tf32."""
    return changed(identity, (', input_precision="ieee"', ""))
