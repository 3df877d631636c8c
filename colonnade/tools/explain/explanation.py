"""Explain a layout: shard a model on the meta device, and read off what has become of each module."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.model.layout import layout_of
from colonnade.model.twin import build
from colonnade.shardformer import LocalRatio, LocalShare, Policy, ShardConfig, ShardFormer
from colonnade.shardformer.description import LocalConfig
from colonnade.shardformer.inference.policy import InferredPolicy
from colonnade.shardformer.layer.partial import summed_elements
from colonnade.shardformer.policy import WholePolicy
from colonnade.shardformer.shard.plan import Match, match, rule_name
from colonnade.shardformer.shard.sharder import ModelSharder
from colonnade.shardformer.shard.shares import numbers_of
from colonnade.tools.explain.decision import Decision, Regions, decide
from colonnade.tools.explain.findings import Findings, findings_of
from colonnade.tools.explain.stages import PipelineChoice, Stages, plan_stages
from colonnade.tools.explain.tree import Node, Traffic, fold, without_lists
from colonnade.tools.explain.trial import SAME, try_on_twin

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FP32_BYTES = 4
ADAM_BYTES = 16  # weight, gradient and two moments, all float32; as many in mixed precision with master weights


@dataclass(frozen=True)
class Explanation:
    """What a layout makes of a model.

    Args:
        model: class of the model.
        tp: number of tensor-parallel ranks.
        policy: class of the policy.
        policy_source: where that is from, and whether it has been checked.
        tree: the model; its root has the empty name.
        blocks: number of repeated blocks, 0 where they were not found.
        per_block: all-reduces of whole hidden states that each block makes in a step; None where blocks differ.
        hidden: width of the hidden states.
        fullest: parameter entries of the rank that holds most; rank 0 but where it has fewer heads than others.
        uneven: what is shared out unequally, in words; empty where nothing is to speak of.
        findings: of an inferred policy; None for one that somebody wrote.
        fault: what a tiny twin did otherwise than one process when it was split by a policy of the reader's own; empty
            where it did the same, or where that was not tried.
        stages: of a pipeline; None where none was asked for.
    """

    model: str
    tp: int
    policy: str
    policy_source: str
    tree: Node
    blocks: int
    per_block: int | None
    hidden: int
    fullest: int
    uneven: str
    findings: Findings | None = None
    fault: str = ""
    stages: Stages | None = None

    @property
    def all_reduces(self) -> int:
        """All-reduces of b·s·hidden elements that a training step makes."""
        return sum(n for traffic, n in self.tree.messages() if _is_hidden(traffic, self.hidden))

    @property
    def formula(self) -> str:
        """The number of all-reduces as blocks and rest, such as "4·32 + 2 = 130"."""
        if not self.blocks or self.per_block is None:
            return str(self.all_reduces)
        return (
            f"{self.per_block}·{self.blocks} + {self.all_reduces - self.per_block * self.blocks} = {self.all_reduces}"
        )

    @property
    def other_traffic(self) -> Counter[Traffic]:
        """Everything else that is communicated in a step, and how often."""
        counted: Counter[Traffic] = Counter()
        for traffic, times in self.tree.messages():
            if not _is_hidden(traffic, self.hidden):
                counted[traffic] += times
        return counted

    def calls(self) -> Counter[str]:
        """Number of collectives in a step by operation, as the ledger counts those over tp in forward and backward."""
        counted: Counter[str] = Counter()
        for traffic, times in self.tree.messages():
            counted[traffic.operation] += times
        return counted

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        whole, local = self.tree.total, self.tree.local_total
        return {
            "model": self.model,
            "tp": self.tp,
            "uneven": self.uneven,
            "policy": {"name": self.policy, "source": self.policy_source, "fault": self.fault}
            | (self.findings.to_json() if self.findings else {}),
            "tree": self.tree.to_json(),
            **({"stages": self.stages.to_json()} if self.stages else {}),
            "totals": {
                "parameters": whole,
                "local_parameters": local,
                "fp32_bytes": whole * FP32_BYTES,
                "fullest_parameters": self.fullest,
                "local_fp32_bytes": self.fullest * FP32_BYTES,
                "local_adam_bytes": self.fullest * ADAM_BYTES,
                "hidden": self.hidden,
                "blocks": self.blocks,
                "all_reduces_of_hidden": self.all_reduces,
                "all_reduce_formula": self.formula,
                "calls": dict(self.calls()),
            },
        }


def explain_config(
    config: PretrainedConfig,
    tp: int,
    policy: Policy | None = None,
    fused_norms: bool = False,
    check: bool = True,
    pipeline: PipelineChoice | None = None,
) -> Explanation:
    """Explain a model of this configuration; nothing of its size is allocated. Arguments as `explain_model`, and
    `pipeline`, the stages into which it is to be cut.

    A policy that is given passes no check before it is used, as the reader may want something else than the model does;
    here it is tried on a tiny twin all the same, and what comes out is told.
    """
    with torch.device("meta"):
        model = build(config)
    plan = None if pipeline is None else plan_stages(config, pipeline, check)
    explanation = explain_model(model, tp, policy, fused_norms, check)
    if plan is not None:
        explanation = replace(explanation, stages=plan.explain(model))
    if policy is None or tp == 1:
        return explanation
    fault, verdict = try_on_twin(policy, config, tp) if check else ("", "not checked")
    return replace(explanation, fault=fault, policy_source=f"{explanation.policy_source}; {verdict}")


def explain_model(
    model: nn.Module, tp: int, policy: Policy | None = None, fused_norms: bool = False, check: bool = True
) -> Explanation:
    """Shard a model as rank 0 of `tp` would, and say what has become of each module. The model is changed.

    Args:
        model: the unmodified model, best on the meta device.
        tp: number of tensor-parallel ranks.
        policy: the policy to use; by default the one for its family.
        fused_norms: as the plugin's `enable_fused_normalization`.
        check: let an inferred policy pass its check on a tiny twin, as it has to before it is used.

    Raises:
        PolicyError, ConfigError: the policy does not fit the model, there is none, or some rank would hold nothing.
    """
    # An axis without a process group: on the meta device nothing is communicated.
    axis = Axis("tp", tp, 0, tuple(range(tp)), None)
    given, pristine = policy is not None, copy.deepcopy(model)
    native = {name: type(module).__name__ for name, module in model.named_modules()}
    whole = {id(p): p.numel() for p in model.parameters()}
    config = ShardConfig(axis, enable_fused_normalization=fused_norms, check_inferred_policy=check)
    sharder = ShardFormer(config).prepare(model, policy)
    rules = sharder.policy.module_policy()
    matches = match(sharder.model, rules, type(sharder.policy).__name__)
    before = [_attributes(found) for found in matches]
    most_of_others = _most_of_others(pristine, sharder, matches)
    findings = findings_of(sharder.policy, pristine)
    sharder.shard()
    told = _Told(native, whole, findings)
    regions = Regions(sharder.model, findings.reads if findings else {})
    for found, values in zip(matches, before):
        told.rules[found.name] = rule_name(found, rules)
        told.changes.setdefault(found.name, []).extend(_changes(found, values))
        if found.description.param_replacement and findings is None:
            told.changes[found.name].append("its parameters are changed by the policy")
        for replacement in found.replacements:
            module = sharder.model.get_submodule(replacement.name)
            told.decisions[replacement.name] = decide(replacement.name, module, replacement, tp, regions)
            told.rules[replacement.name] = rule_name(found, rules)
            told.owners |= {id(p): replacement.name for p in module.parameters(recurse=False)}
    tree = _node("", "", sharder.model, told, tp)
    hidden = _hidden_size(sharder.model)
    blocks, per_block = _blocks(sharder.model, sharder.policy, told, hidden, tp)
    source = _source(sharder.policy, given, check)
    return Explanation(
        *(native[""], tp, type(sharder.policy).__name__, source, tree, blocks, per_block, hidden),
        fullest=max(tree.local_total, most_of_others),
        uneven=sharder.uneven,
        findings=findings,
    )


def _most_of_others(model: nn.Module, sharder: ModelSharder, matches: Sequence[Match]) -> int:
    """Parameter entries of the fullest of the other ranks, where some of these get more heads than rank 0; else 0.

    Args:
        model: a copy of the unmodified model.
        sharder: of rank 0.
        matches: what its policy matched.
    """
    axis, most = sharder.axis, 0
    shares = [number.shares(axis.size) for number in numbers_of(matches)]
    if all(share[0] == max(share) for share in shares):
        return 0
    for rank in range(1, axis.size):
        config = replace(sharder.shard_config, tensor_parallel_process_group=replace(axis, rank=rank))
        other = ShardFormer(config).prepare(copy.deepcopy(model), copy.copy(sharder.policy))
        other.shard()
        most = max(most, sum(p.numel() for p in other.model.parameters()))
    return most


@dataclass
class _Told:
    """What was found out about the modules, by their paths."""

    native: Mapping[str, str]
    whole: Mapping[int, int]  # id of a parameter → its entries before sharding
    findings: Findings | None  # of an inferred policy
    owners: dict[int, str] = field(default_factory=dict)  # id of a parameter → the replaced module that has it
    decisions: dict[str, Decision] = field(default_factory=dict)
    rules: dict[str, str | None] = field(default_factory=dict)
    changes: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)  # id of a parameter → where it was met first


def _node(name: str, path: str, module: nn.Module, told: _Told, tp: int) -> Node:
    own = list(module.parameters(recurse=False))
    elsewhere = told.seen if path in told.decisions else told.owners | told.seen
    fresh = [p for p in own if id(p) not in elsewhere]
    tied = {elsewhere[id(p)] for p in own if id(p) in elsewhere}
    told.seen |= {id(p): path for p in fresh}
    children = [_node(n, f"{path}.{n}".lstrip("."), child, told, tp) for n, child in module.named_children()]
    decision = told.decisions.get(path) or _undecided(module, path, told, tp)
    gathered = told.findings.gathered.get(path, "") if told.findings else ""
    notes = [
        decision.why,
        gathered,
        *(f"shares the weight of {where}" for where in sorted(tied)),
        *told.changes.get(path, []),
    ]
    summed = [p for p in fresh if summed_elements(p)]
    if any(layout_of(p).partial_axes for p in summed):
        notes.append("the gradient is summed over the ranks, each of which has the share of its heads")
    holders = max((len(box.holders) for p in summed for box in layout_of(p).boxes), default=0)
    if holders > 1:
        notes.append(f"{_shared_parts(summed[0])}held by {holders} ranks, gradient summed")
    return Node(
        name=name,
        native=told.native.get(path, type(module).__name__),
        kind=decision.kind or ("attributes" if told.changes.get(path) else ""),
        why="; ".join(note for note in notes if note),
        rule=told.rules.get(path),
        parameters=sum(told.whole.get(id(p), p.numel()) for p in fresh),
        local_parameters=sum(p.numel() for p in fresh),
        traffic=(*decision.traffic, *(Traffic("all_reduce", "backward", fixed=summed_elements(p)) for p in summed)),
        children=without_lists(fold(children)),
    )


def _undecided(module: nn.Module, path: str, told: _Told, tp: int) -> Decision:
    """What has become of the tensors of a module that was not replaced: a policy may have changed them in place."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    own = {name: t for name, t in tensors if id(t) not in told.owners}
    cut = [name for name, t in own.items() if layout_of(t).sharded_axes]
    summed = [name for name, t in own.items() if layout_of(t).partial_axes]
    if not cut and not summed:
        parameters = [t for t in own.values() if isinstance(t, nn.Parameter)]
        stacked = tp > 1 and any(p.dim() > 2 for p in parameters) and "expert" in path
        why = "experts cannot be split yet: whole on every rank" if stacked else _no_rule(told, path, tp)
        return Decision("replicated", why) if parameters else Decision("")
    told_of = []
    for names, what in ((cut, "cut to this rank's share"), (summed, "whole on every rank")):
        label = "" if len(names) == len(own) else f"{', '.join(names)} "
        if names:
            told_of.append(f"{label}{what}")
    return Decision("split" if cut else "replicated", f"inside the region: {', '.join(told_of)}")


def _shared_parts(param: nn.Parameter) -> str:
    """Which of the parts that are fused in a layer's output several ranks hold; nothing where it is all of it."""
    boxes = layout_of(param).boxes
    parts = [str(number) for number, box in enumerate(boxes, 1) if len(box.holders) > 1]
    if len(parts) == len(boxes):
        return ""
    return f"part{'s' * (len(parts) > 1)} {' and '.join(parts)} of {len(boxes)} "


def _no_rule(told: _Told, path: str, tp: int) -> str:
    if tp == 1:
        return "one rank: nothing is split"
    if told.findings is not None:
        return told.findings.modules.get(path, "outside the regions: whole on every rank")
    return "no rule for it: whole on every rank" if path not in told.rules else "its own parameters stay whole"


def _attributes(found: Match) -> dict[str, Any]:
    """Present values of the attributes that the policy replaces."""
    values = {}
    for path in found.description.attribute_replacement:
        owner: Any = found.module
        for part in path.split("."):
            owner = getattr(owner, part, None)
        values[path] = owner
    return values


def _changes(found: Match, before: Mapping[str, Any]) -> list[str]:
    description = found.description
    after = _attributes(found)
    lines = []
    for name, value in description.attribute_replacement.items():
        if isinstance(value, LocalConfig):
            numbers = ", ".join(f"{n} {getattr(before[name], n)} → {getattr(after[name], n)}" for n in value.shares)
            lines.append(f"its own copy of {name}: {numbers}")
            continue
        share = isinstance(value, (LocalShare, LocalRatio))
        if share and before[name] == after[name]:
            continue
        shares = " (this rank's share)" if share else ""
        lines.append(f"{name} {before[name]!r} → {after[name]!r}{shares}")
    lines += [f"its argument {name} is cut to this rank's heads" for name in description.argument_replacement]
    lines += [f"method {name} is replaced" for name in description.method_replacement]
    return lines


def _hidden_size(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "hidden_size", 0) or 0


def _blocks(model: nn.Module, policy: Policy, told: _Told, hidden: int, tp: int) -> tuple[int, int | None]:
    """Number of repeated blocks, and the all-reduces of each."""
    if policy.spine is not None:
        blocks = list(policy.spine.blocks_of(model))
    else:
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = max(lists, key=len, default=[])
    names = {id(module): name for name, module in model.named_modules()}
    again = _Told(told.native, told.whole, told.findings, told.owners, told.decisions, told.rules, told.changes)
    counts = [
        sum(n for traffic, n in _node("", names[id(block)], block, again, tp).messages() if _is_hidden(traffic, hidden))
        for block in blocks
    ]
    return len(counts), counts[0] if len(set(counts)) == 1 else None


def _is_hidden(traffic: Traffic, hidden: int) -> bool:
    return traffic.operation == "all_reduce" and traffic.per_token == hidden


def _source(policy: Policy, given: bool, check: bool) -> str:
    if isinstance(policy, WholePolicy):
        return "nothing to do"
    if isinstance(policy, InferredPolicy):
        return f"inferred from one forward of the model; {SAME if check else 'not checked'}"
    where = type(policy).__module__
    return f"given by you (module {where})" if given else f"the family's own, {where.replace('.', '/')}.py"
