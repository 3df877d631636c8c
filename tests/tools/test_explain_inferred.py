"""`colonnade explain` of policies that are inferred, and the trial of a policy of one's own on a twin."""

from __future__ import annotations

import pytest
from test_explain import WRONG, nodes, small

from colonnade.cli.main import main
from colonnade.errors import PolicyError
from colonnade.model.twin import twin_model
from colonnade.shardformer.inference.infer import find_regions
from colonnade.shardformer.inference.policy import GATHERED, InferredPolicy, without
from colonnade.tools.explain.explanation import explain_config, explain_model
from colonnade.tools.explain.text import plain_text
from colonnade.tools.explain.tree import Traffic
from colonnade.tools.explain.trial import SAME
from colonnade.tools.train.source import check_layout


def no_policy(*args, **kwargs):
    raise PolicyError("no policy could be inferred for it.")


def test_a_model_without_a_policy_is_explained(monkeypatch, capsys):
    monkeypatch.setattr("colonnade.shardformer.shard.shardformer.infer_policy", no_policy)
    assert main(["explain", "ctrl"]) == 2
    assert "colonnade explain: no policy could be inferred for it." in capsys.readouterr().err


def test_an_inferred_policy_is_told_as_such_and_folded():
    explanation = explain_config(small("gptj"), 2)
    found = nodes(explanation)
    assert explanation.policy_source == f"inferred from one forward of the model; {SAME}"
    assert str(explanation.findings) == "4 of 4 regions split, vocabulary split"
    k = found["transformer.h.0–1.attn.k_proj"]
    assert (k.kind, k.rule) == ("column", "transformer.h.*.attn")
    assert "entered once, for k_proj, v_proj and q_proj" in k.why
    assert explanation.blocks == 2


def test_parameters_inside_a_region_are_told():
    """An inferred policy changes them in place: no layer is replaced."""
    explanation = explain_config(small("gemma3_text"), 2)
    norm = next(n for n, _ in explanation.tree.walk() if n.name == "q_norm")
    assert norm.kind in ("replicated", "head norm") and "inside the region: whole on every rank" in norm.why
    assert norm.traffic == (Traffic("all_reduce", "backward", fixed=16),)


def test_a_policy_that_was_not_checked_says_so(capsys, monkeypatch):
    monkeypatch.setattr("colonnade.shardformer.inference.infer.search", None)
    assert main(["explain", "gptj", "--no-check"]) == 0
    assert "policy InferredPolicy: inferred from one forward of the model; not checked\n" in capsys.readouterr().out
    assert main(["explain", "llama", "--no-check", "--policy", f"{WRONG}:RightLlama"]) == 0
    assert "given by you (module wrong_policies); not checked\n" in capsys.readouterr().out


def test_a_low_rank_stage_is_told():
    found = nodes(explain_config(small("deepseek_v3"), 2))
    block = "model.layers.0.self_attn"
    latent, keys = found[f"{block}.kv_a_proj_with_mqa"], found[f"{block}.kv_b_proj"]
    assert latent.kind == "latent" and "the region begins behind it" in latent.why
    assert [t.operation for t in latent.traffic] == ["all_reduce"] and not keys.traffic
    assert keys.kind == "column" and keys.why.endswith("its input is inside the region already")
    assert found[f"{block}.q_b_proj"].why.endswith("its input is entered here")
    assert found["model.layers.1.mlp.gate"].why == "outside the regions: whole on every rank"
    assert found["model.layers.1.mlp.experts"].why == "experts cannot be split yet: whole on every rank"


def test_arguments_and_numbers_that_are_shared_out_are_told():
    node = nodes(explain_config(small("bloom"), 2))["transformer.h.0–1.self_attention"]
    assert node.why == "num_heads 4 → 2 (this rank's share); its argument alibi is cut to this rank's heads"


def test_norms_over_the_split_width_are_told():
    node = nodes(explain_config(small("olmo2"), 2))["model.layers.0–1.self_attn.q_norm"]
    assert node.kind == "split norm" and "32 of 64 entries; normed by a statistic of all" in node.why


def test_tensors_that_are_cut_in_place_are_told():
    """Sinks, one for each head, are a parameter of attention itself."""
    node = nodes(explain_config(small("gpt_oss"), 2))["model.layers.0–1.self_attn"]
    assert node.kind == "split" and node.why.startswith("inside the region: cut to this rank's share")
    assert (node.parameters, node.local_parameters) == (16, 8)


def test_a_bias_that_the_head_shares_is_counted_with_the_head():
    found = nodes(explain_config(small("bert"), 2))
    parent, head = found["cls.predictions"], found["cls.predictions.decoder"]
    assert parent.parameters == 0 and "shares the weight of cls.predictions.decoder" in parent.why
    assert (head.parameters, head.local_parameters) == (67, 34)


def test_layers_that_read_other_tensors_enter_by_themselves():
    found = nodes(explain_config(small("t5"), 2, check=False))
    cross = next(path.removesuffix(".q") for path in found if path.endswith("EncDecAttention.q"))
    assert found[f"{cross}.q"].why.endswith("its input is entered here") and found[f"{cross}.q"].traffic
    assert "entered once, for k and v" in found[f"{cross}.k"].why and found[f"{cross}.k"].traffic


def test_what_stays_whole_is_told_with_its_reason():
    """Here for reasons that are made up: which ones there are changes with what can be split."""
    model = twin_model(small("gptj"))
    levels = dict.fromkeys(["transformer.h.*.mlp.fc_out"], 1)
    regions = without(find_regions(model), {"transformer.h.*.attn.out_proj": "the moon is full"})
    policy = InferredPolicy(regions, levels, "whole")
    policy.refused = {"vocabulary": "the loss is 2 instead of 1"}
    explanation = explain_model(model, 2, policy)
    found, text = nodes(explanation), plain_text(explanation, "")
    assert "\n2 of 4 regions split, vocabulary whole\n" in text
    assert "  transformer.h.*.attn.out_proj: the moon is full\n" in text
    assert "  vocabulary: split, its twin fails: the loss is 2 instead of 1\n" in text
    for layer in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert found[f"transformer.h.0–1.attn.{layer}"].why == "left whole: the moon is full"
    for layer in ("transformer.wte", "lm_head"):
        assert found[layer].why == "left whole: split, its twin fails: the loss is 2 instead of 1"
    told = explanation.to_json()["policy"]
    assert (told["regions_split"], told["regions"], told["vocabulary"]) == (2, 4, "whole")
    assert told["whole"]["transformer.h.*.attn.out_proj"] == "the moon is full"


def test_a_region_of_which_only_the_weights_are_split_is_told():
    model = twin_model(small("gptj"))
    pattern = "transformer.h.*.attn.out_proj"
    levels = dict.fromkeys([pattern, "transformer.h.*.mlp.fc_out"], 0)
    policy = InferredPolicy(without(find_regions(model), {pattern: "the moon is full"}), levels | {pattern: GATHERED})
    explanation = explain_model(model, 2, policy)
    found = nodes(explanation)
    q, out = (found[f"transformer.h.0–1.attn.{layer}"] for layer in ("q_proj", "out_proj"))
    assert q.kind == "column" and "its output is collected on every rank" in q.why
    assert out.kind == "row" and out.why.endswith("only the region's weights are split: the moon is full")
    assert [t.operation for t in out.traffic] == ["all_reduce", "all_gather"]
    assert str(explanation.findings) == "4 of 4 regions split, vocabulary split"
    assert explanation.findings.whole == {pattern: "only its weights are split: the moon is full"}


def test_gathered_logits_are_told_with_their_reason():
    model = twin_model(small("gptj"))
    policy = InferredPolicy(find_regions(model), 0, "gathered")
    policy.refused = {"vocabulary": "the loss is 2 instead of 1"}
    explanation = explain_model(model, 2, policy)
    head = nodes(explanation)["lm_head"]
    assert "its logits are gathered on every rank; left split, its twin fails: the loss is 2" in head.why
    assert "vocabulary split and its logits gathered\n  logits: left split, its twin fails" in plain_text(
        explanation, ""
    )


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [
        ("RightLlama", 0, SAME),
        ("KeysCutOtherwise", 1, "its tiny twin does NOT compute what one process computes: the loss is"),
        ("WrongGradient", 1, "its tiny twin does NOT compute what one process computes: the gradient of"),
    ],
)
def test_a_policy_of_ones_own_is_tried_on_a_twin(name, code, verdict, capsys):
    assert main(["explain", "llama", "--policy", f"{WRONG}:{name}"]) == code
    assert f"policy {name}: given by you (module wrong_policies); {verdict}" in capsys.readouterr().out


def test_a_twin_that_does_not_train_is_no_fault_of_the_policy(capsys, monkeypatch):
    def twin(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("colonnade.tools.explain.trial.Twin", twin)
    assert main(["explain", "llama", "--policy", f"{WRONG}:RightLlama"]) == 0
    assert (
        "not checked, as its tiny twin does not train in one process: RuntimeError: out of luck"
        in capsys.readouterr().out
    )


def test_a_model_that_is_refused_is_refused_before_a_run_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("COLONNADE_CACHE", str(tmp_path))
    monkeypatch.setattr("colonnade.shardformer.inference.infer.search", no_policy)
    with pytest.raises(PolicyError, match="no policy could be inferred"):
        check_layout(small("codegen"), 2)
