"""Matching a policy with a model: which rule touches which module. Nothing is changed here.

All problems are found before anything is touched, and reported together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colonnade.errors import PolicyError, explain
from colonnade.model.adapters import adapted_layer, is_from_peft, plain_model
from colonnade.shardformer.description import ModulePolicyDescription, SubModuleReplacementDescription
from colonnade.shardformer.layer.adapter import ALONE, why_not
from colonnade.shardformer.layer.embedding import Embedding1D, VocabParallelEmbedding1D
from colonnade.shardformer.layer.linear import ColumnParallel, RowParallel
from colonnade.shardformer.roles import HeadNorm, Norm, Replicated


@dataclass
class Replacement:
    """One sub-module to be replaced.

    Args:
        adapter: what peft has put around it; None where there is nothing.
    """

    name: str
    native: nn.Module
    target: Any
    kwargs: dict[str, Any]
    adapter: nn.Module | None = None


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
        return compact([found.name])
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
        for key in ("units", "heads"):
            value = kwargs.get(key)
            if isinstance(value, str):
                kwargs[f"{key}_name"] = value
            if isinstance(value, (list, tuple)):
                kwargs[key] = [number_of(n, model, found.module) for n in value]
            elif value is not None:
                kwargs[key] = number_of(value, model, found.module)
        path = f"{found.name}.{rule.suffix}".lstrip(".")
        adapter = None
        if is_from_peft(native) and not _stays_whole(rule.target_module):
            adapter, native = native, adapted_layer(native) or native
        found.replacements.append(Replacement(path, native, rule.target_module, kwargs, adapter))
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


def number_of(number: int | str | None, model: nn.Module, module: nn.Module | None = None) -> int | None:
    """A number, or the whole number of a config that has this name; a module's own config comes before the model's."""
    if not isinstance(number, str):
        return number
    for owner in (module, model):
        value = getattr(getattr(owner, "config", None), number, None)
        if isinstance(value, int):
            return value
    raise PolicyError(
        f"the policy counts by {number!r}, which is no whole number in the config of {type(model).__name__}."
    )


def _no_such_class(key: Any, model: nn.Module) -> str:
    name = key if isinstance(key, str) else key.__name__
    have = sorted({type(module).__name__ for module in model.modules()})
    near = difflib.get_close_matches(name, have, 1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    return f"{name} matches no module{hint}; the model is made of {', '.join(have)}"


def _named_twice(matches: Iterable[Match]) -> Iterator[str]:
    """Modules for which two rules hold. One that has several places in the model may be named at each of them."""
    seen: dict[nn.Module, Replacement] = {}
    for found in matches:
        for replacement in list(found.replacements):
            first = seen.setdefault(replacement.native, replacement)
            if first is replacement:
                continue
            same = first.target is replacement.target and first.kwargs == replacement.kwargs
            if same and first.name != replacement.name:
                found.replacements.remove(replacement)  # every place gets what replaces it; see `places_of`
            else:
                yield f"{replacement.name} is replaced twice, first as {first.name}"


def places_of(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """For every module below the model, its parents and its names there: several where a module is used in several places."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for leaf, child in vars(parent)["_modules"].items():
            if child is not None:
                places.setdefault(child, []).append((parent, leaf))
    return places


def check_tied(model: nn.Module, matches: Iterable[Match]) -> None:
    """Refuse a policy that splits a weight for one of its users and leaves another, tied to it, whole.

    A module that has the replaced one inside and registers its parameter once more, as BERT's head does with the bias of
    its decoder, is no other user.

    Raises:
        PolicyError: naming the module that was left out, and the word that takes it in.
    """
    replaced = {r.native: r.name for found in matches for r in found.replacements if _splits(r.target)}
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for native in replaced:
        for param in native.parameters(recurse=False):
            holders.setdefault(param, []).append(native)
    for path, module in model.named_modules():
        if module in replaced:
            continue
        for leaf, param in module.named_parameters(recurse=False):
            if param not in holders or any(native in module.modules() for native in holders[param]):
                continue
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


def check_adapters(model: nn.Module, matches: Iterable[Match]) -> None:
    """Refuse adapters of the peft package around layers that a policy splits, where they cannot be split alike.

    Args:
        model: as it was given, wrappers of peft included.

    Raises:
        PolicyError: naming the layers, and saying how such a model can be trained.
    """
    problems: dict[str, list[str]] = {}
    wrapper: Any = model
    while wrapper is not plain_model(wrapper):
        configs = getattr(wrapper, "peft_config", None) or {}
        for name, config in configs.items():
            for problem in _unsuitable(config):
                problems.setdefault(problem, []).append(f"adapter {name}")
        wrapper = next(m for m in wrapper.children() if m is plain_model(wrapper) or is_from_peft(m))
    trained_whole = [m for m in model.modules() if is_from_peft(m) and "modules_to_save" in m._modules]
    for found in matches:
        for replacement in found.replacements:
            if replacement.adapter is not None and (why := why_not(replacement.adapter, replacement.target)):
                problems.setdefault(why, []).append(replacement.name)
            elif _splits(replacement.target) and any(replacement.native in m.modules() for m in trained_whole):
                problems.setdefault("modules_to_save trains a copy of what it is part of", []).append(replacement.name)
    if problems:
        raise PolicyError(
            explain(
                f"{type(plain_model(model)).__name__} has adapters of peft that cannot be split over ranks.",
                [
                    *((compact(names), why) for why, names in problems.items()),
                    ("try", "plain LoRA on layers that are split: LoraConfig(target_modules=…) without these"),
                    ("or", ALONE),
                    ("or", "model = model.merge_and_unload() before boost: all weights are then trained, split"),
                ],
            )
        )


def _unsuitable(config: Any) -> Iterator[str]:
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
    if kind != "LORA":
        yield f"peft_type={kind} changes the model otherwise than LoRA does"
    for option in ("ensure_weight_tying", "trainable_token_indices"):
        if getattr(config, option, None):
            yield f"{option} lets layers share what would be split differently"


def _stays_whole(target: Any) -> bool:
    """Whether a module stays as it is on every rank, outside of any region, so that an adapter around it may too."""
    return isinstance(target, type) and issubclass(target, (Replicated, Norm)) and not issubclass(target, HeadNorm)


def _splits(target: Any) -> bool:
    kinds = (ColumnParallel, RowParallel, VocabParallelEmbedding1D, Embedding1D)
    return isinstance(target, type) and issubclass(target, kinds)


def compact(names: list[str]) -> str:
    """Paths with block numbers replaced by *, each once."""
    short = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return ", ".join(short)
