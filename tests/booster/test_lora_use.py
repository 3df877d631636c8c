"""LoRA in use: adapters saved and loaded, switched and merged, and what is refused."""

import re
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from lora_runs import LAYOUTS, adapted, base, batch, logits_of, lora_config, trained

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colonnade.cluster.mesh import Axis
from colonnade.errors import CheckpointError, PolicyError, UsageError
from colonnade.model.adapters import plain_model, without_adapters
from colonnade.model.layout import layout_of
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.shardformer.registry import find_policy
from colonnade.testing.ranks import on_ranks, run_on_ranks


def save_and_load(name, plugin_class, options, folder, lora, use_safetensors):
    booster, model, _ = trained(name, plugin_class(precision="fp32", **options), **lora)
    path = Path(folder) / "adapter"
    booster.save_lora_as_pretrained(model, path, use_safetensors)
    files = sorted(file.name for file in path.iterdir())
    assert files == ["adapter_config.json", f"adapter_model.{'safetensors' if use_safetensors else 'bin'}"]
    wanted = logits_of(model, name)
    plain = peft.PeftModel.from_pretrained(base(name), path)
    found = logits_of(plain, name)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (logits_of(base(name), name) - wanted).abs().max() > 1e-2 * wanted.abs().max(), "adapters that matter"
    merged = logits_of(plain.merge_and_unload(), name)
    assert (merged - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    again = booster.enable_lora(base(name), pretrained_dir=path)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.unwrap().parameters()]
    again, *_ = Booster(plugin=plugin_class(precision="fp32", **options)).boost(again)
    assert (logits_of(again, name) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "layout", ["one process", "ddp 2", "tp 2", "tp 4", "tp 2 × dp 2", "zero 2", "tp 2 × zero 1", "fsdp 2"]
)
@pytest.mark.parametrize("name", ["LL", "G2", "bert"])
def test_saved_adapters_load_in_plain_peft_and_go_on(layout, name, tmp_path):
    ranks, plugin_class, options = (LAYOUTS | {"one process": (1, TorchDDPPlugin, {})})[layout]
    run_on_ranks(ranks, save_and_load, name, plugin_class, options, str(tmp_path), {}, True)


def test_saved_as_a_pickle_and_with_everything_that_peft_saves(tmp_path):
    lora = {"target_modules": ["embed_tokens", "lm_head", "q_proj", "o_proj"], "modules_to_save": ["norm"]}
    run_on_ranks(2, save_and_load, "LL", HybridParallelPlugin, {"tp_size": 2}, str(tmp_path / "a"), lora, False)
    lora = {"bias": "all"}
    run_on_ranks(2, save_and_load, "OP", HybridParallelPlugin, {"tp_size": 2}, str(tmp_path / "b"), lora, True)


def saved_twice(folder):
    """A second save replaces the first as a whole; a rank that fails leaves it as it was, and every rank raises."""
    booster, model, optimizer = trained("LL", HybridParallelPlugin(tp_size=2, precision="fp32"), second={"r": 2})
    path = Path(folder) / "adapter"
    booster.save_lora_as_pretrained(model, path)
    writes = booster.plugin.mesh.world.rank == 0  # and so is the one that can look without a race
    first = (path / "adapter_model.safetensors").read_bytes() if writes else b""
    if writes:
        assert (path / "second" / "adapter_config.json").is_file()
        (path / "README.md").write_text("mine")
    booster.backward(model(**batch()).loss, optimizer)
    optimizer.step()
    configs = model.unwrap().peft_config
    if not writes:
        configs["gone"] = configs["default"]
    with pytest.raises(CheckpointError, match="rank 1"):
        booster.save_lora_as_pretrained(model, path)
    configs.pop("gone", None)
    if writes:
        assert (path / "adapter_model.safetensors").read_bytes() == first
        assert [p.name for p in path.parent.iterdir()] == ["adapter"]
    booster.save_lora_as_pretrained(model, path)
    if writes:
        assert (path / "adapter_model.safetensors").read_bytes() != first
        assert (path / "README.md").read_text() == "mine"


def test_a_save_is_whole_or_not_there(tmp_path):
    run_on_ranks(2, saved_twice, str(tmp_path))


@on_ranks(2)
def test_configs_frozen_weights_and_the_second_adapter_stay_as_they_were():
    plain = base("LL")
    config, before = plain.config.to_dict(), {n: p.detach().clone() for n, p in plain.named_parameters()}
    options = lora_config("LL")
    given = options.to_dict()
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    model = booster.enable_lora(plain, options)
    assert isinstance(model, peft.PeftModel)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    for _ in range(2):
        booster.backward(model(**batch()).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert model.unwrap().get_base_model().config.to_dict() == config and options.to_dict() == given
    inner = plain_model(model.unwrap())
    for name, parameter in inner.named_parameters():
        if "lora_" not in name:
            wanted = layout_of(parameter).extract(before[name.replace(".base_layer", "")])
            assert torch.equal(parameter, wanted) and not parameter.requires_grad
    keys = model.unwrap().state_dict().keys()
    assert all(set(layout_of(p).names) <= keys for p in model.parameters() if layout_of(p).names)
    assert all(layout_of(p).names for n, p in model.named_parameters() if "q_proj.lora_" in n)


@on_ranks(2)
def test_adapters_can_be_switched_off_merged_and_exchanged():
    model = adapted("LL", second={"r": 2})
    wanted = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        wanted[name] = logits_of(model, "LL")
    with model.disable_adapter():
        wanted["none"] = logits_of(model, "LL")
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    boosted, *_ = booster.boost(model)

    def same(name):
        return (logits_of(boosted, "LL") - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max()

    for name in ("default", "second", "default"):
        boosted.unwrap().set_adapter(name)
        assert same(name)
    with boosted.unwrap().disable_adapter():
        assert same("none")
    boosted.unwrap().merge_adapter()
    assert same("default")
    boosted.unwrap().unmerge_adapter()
    assert same("default")
    ids = batch()["input_ids"][:1, :4]
    made = boosted.unwrap().generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert made.shape == (1, 7)


TWO = Axis("tp", 2, 0, (0, 1), None)


def split(model):
    return ShardFormer(ShardConfig(TWO)).prepare(model)


REFUSED = {
    "use_dora": ({"use_dora": True}, "use_dora=True.*whole weight"),
    "the head trained whole": ({"modules_to_save": ["lm_head"]}, "lm_head +modules_to_save trains a copy of it"),
    "the embedding trained whole": ({"modules_to_save": ["embed_tokens"]}, "modules_to_save trains a copy of it"),
    "what a layer is part of": (
        {"modules_to_save": ["mlp"], "target_modules": ["q_proj"]},
        "gate_proj.*modules_to_save trains a copy of what",
    ),
    "trained tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "tied adapters": ({"ensure_weight_tying": True}, "ensure_weight_tying"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(case):
    lora, reason = REFUSED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted("LL", **lora)
    before = [p.shape for p in model.parameters()]
    with pytest.raises(PolicyError) as caught:
        split(model)
    text = str(caught.value)
    assert "TorchDDPPlugin" in text and "merge_and_unload" in text
    assert re.search(reason, text.replace("\n", " ")), text
    assert [p.shape for p in model.parameters()] == before


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
)
def test_other_kinds_of_adapters_are_refused(config):
    with pytest.raises(PolicyError, match="peft_type="):
        split(peft.get_peft_model(base("LL"), config))
    with pytest.raises(UsageError, match=r"takes a peft\.LoraConfig"):
        Booster(plugin=TorchDDPPlugin(precision="fp32")).enable_lora(base("LL"), config)


@on_ranks(2)
def test_mistakes_are_named():
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    options = lora_config("LL")
    for model, kwargs, text in [
        (base("LL"), {}, "which adapters"),
        (base("LL"), {"lora_config": "folder"}, "pretrained_dir="),
        (base("LL"), {"lora_config": options, "quantize": True}, "quantized"),
        (adapted("LL"), {"lora_config": options}, "has adapters already"),
        (base("LL"), {"lora_config": lora_config("LL", target_modules=["nowhere"])}, "nowhere"),
        (None, {"lora_config": options}, "takes a torch module"),
    ]:
        with pytest.raises(UsageError, match=text):
            booster.enable_lora(model, **kwargs)
    with pytest.raises(CheckpointError, match="no adapter was loaded"):
        booster.enable_lora(base("LL"), pretrained_dir="/nowhere/at/all")
    whole, *_ = booster.boost(base("LL"))
    with pytest.raises(UsageError, match="boosted model"):
        booster.enable_lora(whole, options)
    with pytest.raises(UsageError, match="it has none"):
        booster.save_lora_as_pretrained(whole, "anywhere")
    model, *_ = booster.boost(adapted("LL"))
    for call in (booster.save_model, booster.load_model):
        with pytest.raises(UsageError, match="without adapters"):
            call(model, "anywhere")
    with pytest.raises(UsageError, match="save_lora_as_pretrained"):
        model.unwrap().save_pretrained("anywhere")
    with pytest.raises(UsageError, match="save_lora_as_pretrained"):
        model.unwrap().get_base_model().save_pretrained("anywhere")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"colonnade\[lora\]"):
        Booster(plugin=TorchDDPPlugin(precision="fp32")).enable_lora(base("LL"), object())


@on_ranks(2)
def test_adapters_that_were_injected_without_a_wrapper_are_split_too():
    model = peft.inject_adapter_in_model(lora_config("LL"), base("LL"))
    wanted = logits_of(model, "LL")
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    boosted, *_ = booster.boost(model)
    assert (logits_of(boosted, "LL") - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with pytest.raises(UsageError, match="without a PeftModel"):
        booster.save_lora_as_pretrained(boosted, "anywhere")


@on_ranks(2)
def test_bf16_trains_adapters_on_float32_masters():
    booster, model, optimizer = trained("LL", HybridParallelPlugin(tp_size=2, precision="bf16"), steps=2)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(torch.tensor(optimizer.grad_norm))


def test_a_model_is_seen_through_its_wrappers():
    model = adapted("LL")
    inner = plain_model(model)
    assert inner is model.get_base_model() and plain_model(inner) is inner
    spine = find_policy(model).spine
    assert len(spine.blocks_of(model)) == 2 and spine.head_of(model) is inner.lm_head
    assert spine.norm_of(model) is inner.model.norm
    bare = without_adapters(model)
    native = base("LL")
    assert {n: type(m) for n, m in bare.named_modules()} == {n: type(m) for n, m in native.named_modules()}
    own = {id(p) for p in model.parameters()}
    assert all(id(p) in own for p in bare.parameters()), "no second copy of any weight"
