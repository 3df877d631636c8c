"""What a policy says about one class of modules: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SubModuleReplacementDescription:
    """Replace one sub-module.

    Args:
        suffix: path of the sub-module below the described module ("q_proj", "mlp.up_proj").
        target_module: class whose `from_native_module(module, process_group, **kwargs)` makes the replacement.
        kwargs: further arguments for it. `units` may be a string: a number of the model's config.
        ignore_if_not_exist: the sub-module may be missing (None, or not there at all).
    """

    suffix: str
    target_module: Any
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """What happens to every module of one class.

    Args:
        attribute_replacement: attribute → new value, or a `LocalShare` of the present one. A dotted path reaches into
            sub-modules.
        param_replacement: functions called with the module, to change its parameters in place.
        sub_module_replacement: sub-modules to replace.
        method_replacement: method name → function taking the module as `self`. The last resort: it ties the policy to
            one release of the model's code.
        optional: the model may have no module of this class (a head on top of a base model).
    """

    attribute_replacement: dict[str, Any] = field(default_factory=dict)
    param_replacement: list[Callable[[Any], None]] = field(default_factory=list)
    sub_module_replacement: list[SubModuleReplacementDescription] = field(default_factory=list)
    method_replacement: dict[str, Callable[..., Any]] = field(default_factory=dict)
    optional: bool = False

    def __post_init__(self) -> None:
        self.attribute_replacement = self.attribute_replacement or {}
        self.param_replacement = self.param_replacement or []
        self.sub_module_replacement = self.sub_module_replacement or []
        self.method_replacement = self.method_replacement or {}

    def __add__(self, other: ModulePolicyDescription) -> ModulePolicyDescription:
        """Both descriptions together; optional only where both are."""
        return ModulePolicyDescription(
            self.attribute_replacement | other.attribute_replacement,
            self.param_replacement + other.param_replacement,
            self.sub_module_replacement + other.sub_module_replacement,
            self.method_replacement | other.method_replacement,
            self.optional and other.optional,
        )


@dataclass(frozen=True)
class LocalShare:
    """This rank's share of a number that a module keeps as an attribute (a count of heads, a width).

    Args:
        units: number of indivisible blocks in it, or the config's name for that; by default the number itself.
    """

    units: int | str | None = None


@dataclass(frozen=True)
class LocalConfig:
    """The module's own copy of its config, with some whole numbers as this rank's share. The shared one stays as it is.

    Args:
        names: of those numbers.
        units: number of indivisible blocks in each, or the config's name for that; by default the number itself.
    """

    names: tuple[str, ...]
    units: int | str | None = None
