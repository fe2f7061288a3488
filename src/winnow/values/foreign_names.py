"""Names of another engine's arguments: replaced by Winnow's, left out where they change nothing, or refused."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from winnow.errors import known_names
from winnow.values.checks import ErrorClass, show

ANY = ("any value",)
"""Marker in place of harmless values: all of them are."""

Called = TypeVar("Called", bound=Callable[..., Any])
Class = TypeVar("Class")


@dataclass(frozen=True)
class ForeignName:
    """A name that another engine has and Winnow has not.

    Attributes:
        note: what Winnow has instead, or why every value is accepted; it ends the message of a refusal.
        harmless: values that ask for what Winnow does anyway, as `spelled` writes them. None always does.
        same_as: the name of another argument; a value that is equal to its value is harmless too.
        means: Winnow's name of the same; None: there is none.
        convert: Winnow's value of the other engine's.
        switch: the flag takes no value.
        short: a second flag on the command line, such as -tp.
        secret: the value is not repeated in a message.
    """

    note: str
    harmless: tuple[str, ...] = ()
    same_as: str = ""
    means: str | None = None
    convert: Callable[[Any], Any] = lambda value: value
    switch: bool = False
    short: str = ""
    secret: bool = False

    def is_harmless(self, value: Any, others: Mapping[str, Any]) -> bool:
        if self.harmless == ANY or spelled(value) in ("none", *self.harmless):
            return True
        return self.same_as in others and spelled(value) == spelled(others[self.same_as])


def spelled(value: Any) -> str:
    """Return a value as both Python and a command line spell it: true, none, 1, auto; an empty collection is none."""
    if value is None or (isinstance(value, list | tuple | dict) and not value):
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def translate(
    values: Mapping[str, Any],
    names: Mapping[str, ForeignName],
    known: Collection[str],
    error: ErrorClass,
    kind: str | None,
) -> dict[str, Any]:
    """Return arguments under Winnow's names, without those that ask for what Winnow does anyway.

    Args:
        names: the other engine's; names in `known`, Winnow's own, come first.
        kind: what an unknown name is called in the message; None: unknown names are returned as they are.

    Raises:
        WinnowError: `error`; a name is known to neither, a value asks for what Winnow does not do (names what it has
            instead), or something is given under both names.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        foreign = None if name in known else names.get(name)
        if name in known or (foreign is None and kind is None):
            found[name] = value
        elif foreign is None:
            raise error(f"unknown {kind} {name!r}; {known_names(name, sorted(known), also=names)}")
        elif foreign.is_harmless(value, values):
            continue
        elif foreign.means is None:
            raise error(f"{name}{'' if foreign.secret else f'={show(value)}'}: {foreign.note}")
        elif foreign.means in found or foreign.means in values:
            raise error(f"{name} and {foreign.means} mean the same, give one")
        else:
            found[foreign.means] = foreign.convert(value)
    return found


def accept_arguments(names: Mapping[str, ForeignName], error: ErrorClass) -> Callable[[Called], Called]:
    """Make a function accept foreign arguments; an unknown name is Python's TypeError."""

    def decorate(called: Called) -> Called:
        return _translating(called, names, tuple(signature(called).parameters), error, None)

    return decorate


def accept_fields(
    names: Mapping[str, ForeignName], error: ErrorClass, kind: str
) -> Callable[[type[Class]], type[Class]]:
    """Make a dataclass accept foreign names of its fields; an unknown name is an `error`."""

    def decorate(made: type[Class]) -> type[Class]:
        known = tuple(each.name for each in fields(cast(Any, made)))
        made.__init__ = _translating(made.__init__, names, known, error, kind)  # type: ignore[method-assign]
        return made

    return decorate


def _translating(
    called: Called,
    names: Mapping[str, ForeignName],
    known: Collection[str],
    error: ErrorClass,
    kind: str | None,
) -> Called:
    own = frozenset(known)

    @wraps(called)
    def call(*positional: Any, **named: Any) -> Any:
        if named.keys() <= own:
            return called(*positional, **named)
        return called(*positional, **translate(named, names, known, error, kind))

    return call  # type: ignore[return-value]
