"""Every error the library raises on purpose.

The class says who has to act: `ConfigError` the person who chose the layout, `PolicyError` whoever wrote the policy,
`ShapeError` the data, `UsageError` the calling code, `CheckpointError` the files, `CommunicationError` the cluster.
Classes also derive from the built-in exception people already catch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ColonnadeError(Exception):
    """Base class of all errors raised by Colonnade."""


class ConfigError(ColonnadeError, ValueError):
    """A layout or an option that cannot work; raised before anything has been built."""


class PolicyError(ColonnadeError, ValueError):
    """A sharding policy that does not fit the model it is applied to."""


class ShapeError(ColonnadeError, ValueError):
    """A batch or a tensor whose shape or content the layout cannot take."""


class UsageError(ColonnadeError, RuntimeError):
    """A call that is not possible in the present state."""


class CheckpointError(ColonnadeError, RuntimeError):
    """Files that are missing, incomplete, or belong to another model."""


class CommunicationError(ColonnadeError, RuntimeError):
    """A collective that did not complete, with the operation, the axis and the ranks that took part."""


def explain(headline: str, rows: Iterable[tuple[str, str]] = ()) -> str:
    """Lay out an error message: one headline, then aligned `label  text` rows.

    Args:
        headline: what was asked and does not work, with its numbers.
        rows: pairs such as ("needs", "a multiple of 2") and ("try", "tp_size=2").
    """
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    indent = "\n" + " " * (width + 4)
    return headline + "".join(f"\n  {label:<{width}}  {text.replace(chr(10), indent)}" for label, text in rows)


def refuse(problems: Sequence[str]) -> None:
    """Raise one error for all that is wrong with what was chosen; nothing where nothing is.

    Args:
        problems: a message for each.

    Raises:
        ConfigError: there are any.
    """
    if len(problems) > 1:
        numbered = [(f"{number}.", problem) for number, problem in enumerate(problems, 1)]
        raise ConfigError(explain(f"{len(problems)} of the options cannot be.", numbered))
    if problems:
        raise ConfigError(problems[0])
