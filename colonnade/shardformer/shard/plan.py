"""Matching a policy with a model: which rule touches which module. Nothing is changed here.

All problems are found before anything is touched, and reported together.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colonnade.errors import ConfigError, PolicyError, explain
from colonnade.shardformer.description import ModulePolicyDescription, SubModuleReplacementDescription
from colonnade.shardformer.layer.embedding import Embedding1D, VocabParallelEmbedding1D
from colonnade.shardformer.layer.linear import ColumnParallel, RowParallel


@dataclass
class Replacement:
    """One sub-module to be replaced."""

    name: str
    native: nn.Module
    target: Any
    kwargs: dict[str, Any]


@dataclass
class Match:
    """One module to which a description applies."""

    name: str
    module: nn.Module
    description: ModulePolicyDescription
    replacements: list[Replacement] = field(default_factory=list)


def match(model: nn.Module, policy_map: dict[Any, ModulePolicyDescription], policy_name: str) -> list[Match]:
    """Find the modules that each rule is about, parents before children.

    Raises:
        PolicyError: a rule whose class is not in the model, a sub-module that does not exist, or one named twice.
    """
    matches, problems, used = [], [], set()
    for name, module in model.named_modules():
        by_class = _rule_for(type(module), policy_map)
        keys = [by_class] * (by_class is not None) + [name] * (name in policy_map and name != by_class)
        for key in keys:
            used.add(key)
            found = Match(name, module, policy_map[key])
            for rule in found.description.sub_module_replacement:
                problem = _add(found, rule, model)
                if problem and problem not in problems:
                    problems.append(problem)
            matches.append(found)
    for key in policy_map.keys() - used:
        if not policy_map[key].optional:
            problems.append(_no_such_class(key, model))
    problems += _named_twice(matches)
    if problems:
        raise PolicyError(
            explain(f"{policy_name} does not fit {type(model).__name__}.", [("rule", problem) for problem in problems])
        )
    return matches


def rule_name(found: Match, policy_map: dict[Any, ModulePolicyDescription]) -> str:
    """Under which name a policy speaks of a matched module: a class, or a path with block numbers replaced by *."""
    if policy_map.get(found.name) is found.description:
        return _compact([found.name])
    key = _rule_for(type(found.module), policy_map)
    return key if isinstance(key, str) else key.__name__


def _rule_for(kind: type, policy_map: dict[Any, ModulePolicyDescription]) -> Any:
    """The key of the nearest class in the module's ancestry for which there is a rule."""
    for ancestor in kind.__mro__:
        for key in (ancestor, ancestor.__name__):
            if key in policy_map:
                return key
    return None


def _add(found: Match, rule: SubModuleReplacementDescription, model: nn.Module) -> str | None:
    native: Any = found.module
    for part in rule.suffix.split("."):
        native = getattr(native, part, None)
    if isinstance(native, nn.Module):
        kwargs = dict(rule.kwargs or {})
        if isinstance(kwargs.get("units"), str):
            kwargs["units_name"] = kwargs["units"]
            kwargs["units"] = config_number(model, kwargs["units"], found.module)
        path = f"{found.name}.{rule.suffix}".lstrip(".")
        found.replacements.append(Replacement(path, native, rule.target_module, kwargs))
        return None
    if rule.ignore_if_not_exist:
        return None
    return _no_such_child(found.module, rule.suffix)


def _no_such_child(module: nn.Module, suffix: str) -> str:
    done: list[str] = []
    parent = module
    for part in suffix.split("."):
        child = getattr(parent, part, None)
        if not isinstance(child, nn.Module):
            break
        parent = child
        done.append(part)
    have = [name for name, _ in parent.named_children()]
    near = difflib.get_close_matches(part, have, 1)
    hint = f' (did you mean "{".".join([*done, *near])}"?)' if near else ""
    place = f'; its "{".".join(done)}" has ' if done else "; it has "
    return f'{type(module).__name__} has no "{suffix}"{hint}{place}{", ".join(have) or "no sub-modules"}'


def config_number(model: nn.Module, name: str, module: nn.Module | None = None) -> int:
    """A whole number of the model's config, by name; a module's own config comes first."""
    for owner in (module, model):
        config = getattr(owner, "config", None)
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise PolicyError(
        f"the policy counts by {name!r}, which is no whole number in the config of {type(model).__name__}."
    )


def _no_such_class(key: Any, model: nn.Module) -> str:
    name = key if isinstance(key, str) else key.__name__
    have = sorted({type(module).__name__ for module in model.modules()})
    near = difflib.get_close_matches(name, have, 1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    return f"{name} matches no module{hint}; the model is made of {', '.join(have)}"


def _named_twice(matches: Iterable[Match]) -> Iterator[str]:
    seen: dict[int, str] = {}
    for found in matches:
        for replacement in found.replacements:
            if id(replacement.native) in seen:
                yield f"{replacement.name} is replaced twice, first as {seen[id(replacement.native)]}"
            seen[id(replacement.native)] = replacement.name


def check_tied(model: nn.Module, matches: Iterable[Match]) -> None:
    """Refuse a policy that splits a weight for one of its users and leaves another, tied to it, whole.

    Raises:
        PolicyError: naming the module that was left out, and the word that takes it in.
    """
    replaced = {r.native for found in matches for r in found.replacements if _splits(r.target)}
    split = {p for native in replaced for p in native.parameters(recurse=False)}
    for path, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            if param in split and module not in replaced:
                parent, _, name = path.rpartition(".")
                word = "vocab_embedding" if isinstance(module, nn.Embedding) else "lm_head"
                owner = type(model.get_submodule(parent)).__name__
                raise PolicyError(
                    explain(
                        f"{path}.{leaf} shares its weight with a layer that the policy splits, but is itself left whole.",
                        [
                            ("module", f"{path} ({type(module).__name__})"),
                            ("try", f'"{owner}": {word}("{name}") in the policy'),
                        ],
                    )
                )


def _splits(target: Any) -> bool:
    kinds = (ColumnParallel, RowParallel, VocabParallelEmbedding1D, Embedding1D)
    return isinstance(target, type) and issubclass(target, kinds)


def check_divisible(matches: Iterable[Match], size: int, model_name: str) -> None:
    """Refuse head counts and widths that the ranks cannot share out evenly. (A vocabulary may be uneven.)

    Raises:
        ConfigError: with every number that does not divide, where it stands, and the sizes that work.
    """
    numbers: dict[tuple[str, int], list[str]] = {}
    for found in matches:
        for r in found.replacements:
            number = _split_number(r)
            if number is not None:
                numbers.setdefault(number, []).append(r.name)
    bad = {(label, n): names for (label, n), names in numbers.items() if n % size}
    if not bad:
        return
    common = math.gcd(*(n for _, n in numbers))
    works = [t for t in range(1, common + 1) if common % t == 0]
    rows = [
        (label, f"{n} = {size} × {n // size} + {n % size}   ({_compact(names)})") for (label, n), names in bad.items()
    ]
    raise ConfigError(
        explain(
            f"tp_size={size} does not fit {model_name} ({len(bad)} problem{'s' * (len(bad) != 1)}).",
            [*rows, ("try", "tp_size=" + " or ".join(map(str, works[:8])))],
        )
    )


def _split_number(replacement: Replacement) -> tuple[str, int] | None:
    target, kwargs = replacement.target, replacement.kwargs
    if not isinstance(target, type) or getattr(target, "uneven", False):
        return None
    weight = getattr(replacement.native, "weight", None)
    if weight is None or not issubclass(target, (ColumnParallel, RowParallel)):
        return None
    if kwargs.get("units") is not None:
        return kwargs.get("units_name", "blocks"), kwargs["units"]
    output = issubclass(target, ColumnParallel)
    transposed = hasattr(replacement.native, "nf")
    width = weight.shape[0 if output != transposed else 1]
    pieces: Any = kwargs.get("pieces") or getattr(target, "PIECES", 1)
    parts = pieces if isinstance(pieces, int) else len(pieces)
    return f"{'output' if output else 'input'} width", width // parts


def _compact(names: list[str]) -> str:
    """Paths with block numbers replaced by *, each once."""
    short = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return ", ".join(short)
