"""What a step may consist of, over pipeline stages: accumulation, frozen parameters, groups, optimizers, adapters, recomputation."""

import pytest
import torch
from torch.optim import SGD, AdamW

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, PipelineGradientCheckpointConfig
from colonnade.pipeline.schedule import STYLES
from colonnade.testing.parity import rows_of
from colonnade.testing.ranks import run_on_ranks
from tests.optim.test_optimizers_on_models import OPTIMIZERS
from tests.pipeline.pipeline_models import MAX_NORM, TOKENS, adapted, batch, build, compare, compare_each
from tests.pipeline.test_pipeline_parity import LAYOUTS, run

ONE_STAGE_A_RANK = [style for style, found in STYLES.items() if found.most_chunks == 1]

# how a step is made, of whatever model
WAYS = {
    "clipped": {"max_norm": MAX_NORM},
    "accumulation": {"accumulate": 3, "max_norm": MAX_NORM},
    "no_sync": {"accumulate": 3, "no_sync": True, "max_norm": MAX_NORM},
    "no_sync, small buckets": {
        "accumulate": 3,
        "no_sync": True,
        "layout": {"bucket_bytes": 1000, "microbatch_size": 2},
    },
    "a row or two on each replica": {"rows": 3},
    "replicas with different numbers of rows": {"rows": 5, "layout": {"microbatch_size": 1}, "accumulate": 2},
    "one micro-batch, accumulated": {"layout": {"num_microbatches": 1}, "accumulate": 3},
    "many steps": {"steps": 6, "max_norm": MAX_NORM},
}


@pytest.mark.sample("llama tied-dp 2, pp 2*-1f1b", "llama tied-pp 2-*")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama tied", "t5"])
def test_every_way_to_make_a_step(name, layout, style):
    run(layout, {
        way: {"name": name} | options | {"layout": {"pp_style": style} | options.get("layout", {})}
        for way, options in WAYS.items()
    })  # fmt: skip


def grouped(model):
    """Two groups with their own rates; frozen parameters are in them too."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW([{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], eps=1e-3)


def momentum(model):
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.1)


FROZEN = {
    "all of the first stage": ("embed", "wte", "wpe", "layers.0.", "layers.1.", "h.0.", "h.1."),
    "all but the first stage": ("layers.2", "layers.3", "h.2.", "h.3.", "norm.weight", "ln_f", "lm_head"),
    "all but one norm": ("proj", "embed", "lm_head", "wte", "wpe", "layernorm", "c_attn", "c_fc", "ln_", ".mlp."),
}


class Frozen:
    """Whether a parameter is frozen, by its name."""

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, name):
        return any(part in name for part in self.parts)


@pytest.mark.sample("pp 2", "dp 2, pp 2, zero 1")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_parameters_and_groups(layout):
    cases = {}
    for name in ("llama", "llama tied"):
        for what, parts in FROZEN.items():
            for optimizer_fn in (grouped, momentum):
                cases[f"{name}, {what}, {optimizer_fn.__name__}"] = {
                    "name": name, "frozen": Frozen(parts), "optimizer_fn": optimizer_fn, "max_norm": MAX_NORM,
                }  # fmt: skip
    run(layout, cases)


def compare_with_optimizers(layout, names):
    worst = {}
    for name in names:
        for model in ("llama tied", "gpt2"):
            try:
                given = [batch(model, seed, 4, TOKENS) for seed in range(6)]  # nothing is learnt by heart
                found = compare(
                    model, layout, given=given, optimizer_fn=OPTIMIZERS[name], steps=len(given), max_norm=1.0
                )
            except Exception as error:
                raise AssertionError(f"{name}, {model}: {error}") from error
            worst = {kind: max(value, worst.get(kind, 0.0)) for kind, value in found.items()}
    return worst


@pytest.mark.sample("tp 2, pp 2")
@pytest.mark.parametrize("layout", ["pp 2", "tp 2, pp 2", "dp 2, pp 2, zero 1"])
def test_optimizers_of_whole_matrices(layout):
    ranks, options = LAYOUTS[layout]
    print(run_on_ranks(ranks, compare_with_optimizers, options, list(OPTIMIZERS), timeout_s=110)[0])


def traffic_of_a_step(name, pp_size, tp_size):
    """What `optimizer.step()` sends over stages, once everything is known."""
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tp_size, pp_size=pp_size, precision="fp32"))
    model = build("llama")
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](model))
    for step in range(2):
        booster.execute_pipeline(iter([batch("llama", 7 + step, 4, 8)]), model, None, optimizer)
        with colonnade.ledger() as ledger:
            optimizer.step()
        optimizer.zero_grad()
    return {operation: calls for (operation, axis), calls in ledger.calls.items() if axis == "pp"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_sends_nothing_over_stages(name):
    """But for the one number of the gradient norm."""
    assert run_on_ranks(4, traffic_of_a_step, name, 2, 2) == [{"all_gather": 1}] * 4


def lora(layout):
    worst = {}
    for name in ("llama", "llama tied", "gpt2"):
        for options in ({}, {"accumulate": 2}):
            found = compare(name, layout, model_fn=lambda name=name: adapted(name), max_norm=MAX_NORM, **options)
            worst = {kind: max(value, worst.get(kind, 0.0)) for kind, value in found.items()}
    return worst


@pytest.mark.sample("pp 2", "tp 2, pp 2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters(layout):
    ranks, options = LAYOUTS[layout]
    run_on_ranks(ranks, lora, options, timeout_s=110)


UNEVEN = {2: ([1, 3], [3, 1]), 4: ([1, 1, 1, 2], [2, 1, 1, 1])}


@pytest.mark.sample("pp 2-1f1b", "dp 2, pp 2, zero 1-1f1b")
@pytest.mark.parametrize("style", ONE_STAGE_A_RANK)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_of_chosen_sizes_and_recomputation(layout, style):
    p = LAYOUTS[layout][1]["pp_size"]
    cases = {}
    for counts in UNEVEN[p]:
        of_stages = [n // 2 + (stage == 0) * (n == 1) for stage, n in enumerate(counts)]
        for label, chosen in {
            "nothing recomputed": None,
            "all recomputed": PipelineGradientCheckpointConfig(1.0),
            "half recomputed": PipelineGradientCheckpointConfig(0.5),
            "on some stages": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=of_stages),
            "by ratios": PipelineGradientCheckpointConfig([0.0, 1.0] * (p // 2)),
        }.items():
            for name in ("llama tied", "gemma3"):
                cases[f"{name}, {counts}, {label}"] = {
                    "name": name, "model_fn": Built(name, sum(counts)), "max_norm": MAX_NORM,
                    "layout": {"pp_style": style, "num_layers_per_stage": counts, "gradient_checkpoint_config": chosen},
                }  # fmt: skip
    run(layout, cases)


class Built:
    """Makes a model; unlike a lambda it can be sent to ranks."""

    def __init__(self, name, blocks, **overrides):
        self.name, self.blocks, self.overrides = name, blocks, overrides

    def __call__(self):
        return build(self.name, self.blocks, **self.overrides)


def clipped_by_value(layout):
    """One step of SGD whose gradients are clipped entry by entry, beside torch in one process."""
    one = build("llama tied")
    data = batch("llama", 7, 6, 8)
    one(**data).loss.backward()
    torch.nn.utils.clip_grad_value_(one.parameters(), 0.01)
    before = {name: p.detach().clone() for name, p in one.named_parameters(remove_duplicate=False)}
    SGD(one.parameters(), lr=1.0).step()
    after = {name: p.detach() for name, p in one.named_parameters(remove_duplicate=False)}
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", max_value=0.01, microbatch_size=1, **layout))
    model = build("llama tied")
    model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=1.0))
    mesh = booster.plugin.mesh
    share = rows_of(data, mesh.rank("dp"), mesh.size("dp"))
    booster.execute_pipeline(iter([share]), model, None, optimizer)
    optimizer.step()
    for name, p in model.unwrap().named_parameters():
        extract = colonnade.model.layout.layout_of(p).extract
        moved = p.detach() - extract(before[name])
        assert moved.abs().max() <= 0.0100001
        torch.testing.assert_close(p.detach(), extract(after[name]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["pp 2", "tp 2, pp 2", "dp 2, pp 2", "dp 2, pp 2, zero 1"])
def test_entries_are_clipped(layout):
    ranks, options = LAYOUTS[layout]
    run_on_ranks(ranks, clipped_by_value, options)


def state_before_boost(layout):
    """An optimizer that has stepped before boost goes on with its state, each stage with its share."""
    data = batch("llama", 7, 6, 8)

    def start():
        model = build("llama tied")
        optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model(**data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    one, adam = start()
    one(**data).loss.backward()
    adam.step()
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **layout))
    model, optimizer = start()
    model, optimizer, *_ = booster.boost(model, optimizer)
    mesh = booster.plugin.mesh
    booster.execute_pipeline(iter([rows_of(data, mesh.rank("dp"), mesh.size("dp"))]), model, None, optimizer)
    optimizer.step()
    wanted = dict(one.named_parameters(remove_duplicate=False))
    for name, p in model.unwrap().named_parameters():
        share = colonnade.model.layout.layout_of(p).extract(wanted[name].detach())
        torch.testing.assert_close(p.detach(), share, rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", ["pp 2", "tp 2, pp 2", "dp 2, pp 2, zero 1"])
def test_an_optimizer_that_has_stepped_before(layout):
    ranks, options = LAYOUTS[layout]
    run_on_ranks(ranks, state_before_boost, options)


def test_cases_are_named_where_they_fail():
    """`compare_each` says which comparison failed."""
    with pytest.raises(AssertionError, match="the odd one"):
        run_on_ranks(1, compare_each, {"the odd one": {"name": "llama", "layout": {"pp_size": 2}}})
