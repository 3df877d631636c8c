"""What a policy says about one class of modules: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LocalArgument:
    """This rank's heads of a tensor with which a module is called (a bias by distance, made for all heads at once).

    Args:
        dim: the dimension along which heads lie.
        units, heads: as of `LocalShare`; the last of them that is given is the extent of that dimension.
        folded: the dimension is rows × heads.
    """

    dim: int
    units: int | str
    heads: int | str | None = None
    folded: bool = False


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
        argument_replacement: name of an argument of the forward → which share of it the module gets.
        method_replacement: method name → function taking the module as `self`. The last resort: it ties the policy to
            one release of the model's code.
        optional: the model may have no module of this class (a head on top of a base model).
    """

    attribute_replacement: dict[str, Any] = field(default_factory=dict)
    param_replacement: list[Callable[[Any], None]] = field(default_factory=list)
    sub_module_replacement: list[SubModuleReplacementDescription] = field(default_factory=list)
    method_replacement: dict[str, Callable[..., Any]] = field(default_factory=dict)
    optional: bool = False
    argument_replacement: dict[str, LocalArgument] = field(default_factory=dict)

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
            self.argument_replacement | other.argument_replacement,
        )


@dataclass(frozen=True)
class LocalShare:
    """This rank's share of a number that a module keeps as an attribute (a count of heads, a width).

    Args:
        units: number of blocks in it, or the config's name for that; by default the number itself.
        heads: number of heads in it, or the config's name for that, where a block may be cut into heads. As of the
            layers: see `Linear1D_Col`.
    """

    units: int | str | None = None
    heads: int | str | None = None


@dataclass(frozen=True)
class LocalRatio:
    """How many of this rank's query heads read one of its key/value heads.

    The whole model's ratio, but where there are fewer key/value heads than ranks.

    Args:
        units, heads: number of key/value heads and of query heads, or the config's names for them.
    """

    units: int | str
    heads: int | str


@dataclass(frozen=True)
class LocalConfig:
    """The module's own copy of its config, with some whole numbers as this rank's share. The shared one stays as it is.

    Args:
        shares: what becomes of which number.
    """

    shares: dict[str, LocalShare | LocalRatio]
