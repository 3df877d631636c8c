"""What the parity tests run on the ranks: layouts, models and batches by name."""

import torch

from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.tiny import ids, tiny_model

VOCAB = 67  # does not divide by 2 or 4
ROWS, TOKENS = 4, 12
LAYERS = 2
MAX_NORM = 1.0

# name: (ranks, plugin, options)
LAYOUTS = {
    "tp 2": (2, HybridParallelPlugin, {"tp_size": 2}),
    "tp 4": (4, HybridParallelPlugin, {"tp_size": 4}),
    "dp 2": (2, HybridParallelPlugin, {}),
    "dp 2, small buckets": (2, HybridParallelPlugin, {"bucket_bytes": 1 << 10}),
    "ddp 2": (2, TorchDDPPlugin, {}),
    "tp 2 × dp 2": (4, HybridParallelPlugin, {"tp_size": 2}),
    "zero 1": (2, LowLevelZeroPlugin, {"stage": 1}),
    "zero 2": (2, LowLevelZeroPlugin, {"stage": 2}),
    "tp 2 × zero 1": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "tp 2 × zero 2": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 2}),
}


def plain():
    """Two global batches in which every token is a target."""
    batches = []
    for seed in (7, 8):
        x = ids(ROWS, TOKENS, seed, VOCAB)
        batches.append({"input_ids": x, "labels": x.clone()})
    return batches


def unequal():
    """The first half of the rows has a third of the targets of the second."""
    batches = plain()
    for batch in batches:
        batch["labels"][: ROWS // 2, 4:] = -100
    return batches


def lopsided():
    """A row with one target and a row with none, all of them on the first of two data-parallel ranks."""
    batches = plain()
    for batch in batches:
        batch["labels"][0, 2:] = -100
        batch["labels"][1] = -100
    return batches


def one_rank_without_targets():
    batches = plain()
    for batch in batches:
        batch["labels"][ROWS // 2 :] = -100
    return batches


def padded(side):
    """Rows of different lengths, with a mask; what is padding is no target."""
    batches = plain()
    for batch in batches:
        mask = torch.ones_like(batch["input_ids"])
        for row, gap in enumerate((5, 0, 3, 1)):
            if gap:
                mask[row, slice(gap) if side == "left" else slice(-gap, None)] = 0
        batch["attention_mask"] = mask
        batch["input_ids"] = batch["input_ids"].masked_fill(mask == 0, 1)
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batches


def rows(number):
    batches = []
    for seed in (7, 8):
        x = ids(number, TOKENS, seed, VOCAB)
        labels = x.clone()
        labels[0, 4:] = -100
        batches.append({"input_ids": x, "labels": labels})
    return batches


def build(name, **overrides):
    return tiny_model(name, **{"vocab_size": VOCAB, "num_hidden_layers": LAYERS} | overrides)


def run(layout, name, batches, plugin_options=None, overrides=None, **options):
    """One comparison on the ranks of a layout; returns the report as text."""
    _, plugin_class, layout_options = LAYOUTS[layout]
    options = {"steps": 3, "max_norm": 0.0} | options
    plugin_options = layout_options | {"precision": "fp32", "max_norm": options["max_norm"]} | (plugin_options or {})
    report = assert_same_as_single(
        lambda: build(name, **(overrides or {})), batches, lambda: plugin_class(**plugin_options), **options
    )
    assert not report.undetermined, "every weight is compared"
    return str(report)


def run_each(layout, cases):
    """Several comparisons in one launch; a failure says which."""
    for label, kwargs in cases.items():
        try:
            run(layout, **kwargs)
        except AssertionError as error:
            raise AssertionError(f"{layout}, {label}: {error}") from error


def world(layout):
    return LAYOUTS[layout][0]
