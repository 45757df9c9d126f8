"""The tests of the whole repository, and the check of jattn's annotations that they run under."""

from collections.abc import Callable

import beartype

_checked: dict[tuple[str, str, str], Callable] = {}


def beartype_once(fn: Callable) -> Callable:
    """``beartype.beartype``, once for each definition and not at each run of it: a function within a function is defined
    again at every call of the outer one. ``fn`` is jaxtyping's, which only holds the annotations."""
    key = fn.__module__, fn.__qualname__, repr(fn.__annotations__)
    if key not in _checked:
        _checked[key] = beartype.beartype(fn)
    return _checked[key]
