"""What can be chosen of a pipeline, and how it is refused: in the caller's names, all of it in one error, before there are groups."""

import pytest

from colonnade.booster.plugin import HybridParallelPlugin, PipelineGradientCheckpointConfig
from colonnade.booster.plugin.pipeline_options import PipelineOptions
from colonnade.errors import ConfigError
from colonnade.pipeline.schedule import STYLES


@pytest.mark.parametrize(
    "options, words",
    [
        ({"pp_style": "2f2b"}, ["pp_style='2f2b'", *STYLES]),
        ({"pp_style": None}, ["pp_style=None", *STYLES]),
        ({"num_model_chunks": 2}, ["num_model_chunks=2", "1f1b cannot work with 2 stages", "interleaved or zbv"]),
        ({"pp_style": "zbv", "num_model_chunks": 3}, ["num_model_chunks=3", "zbv cannot work with 3 stages"]),
        ({"pp_style": "interleaved", "num_model_chunks": 1}, ["num_model_chunks=1", "at least 2 stages"]),
        ({"num_model_chunks": 0}, ["num_model_chunks=0", "at least 1"]),
        ({"pp_style": "interleaved", "num_model_chunks": "2"}, ["num_model_chunks='2'"]),
        ({"pp_style": "interleaved", "num_model_chunks": True}, ["num_model_chunks=True"]),
        ({"num_layers_per_stage": 3}, ["num_layers_per_stage=3", "[2, 1]"]),
        ({"num_layers_per_stage": "22"}, ["num_layers_per_stage='22'"]),
        ({"num_layers_per_stage": ["2", "2"]}, ["num_layers_per_stage=['2', '2']"]),
        ({"num_layers_per_stage": [True, 3]}, ["num_layers_per_stage=[True, 3]"]),
        ({"num_layers_per_stage": [2.0, 2.0]}, ["num_layers_per_stage=[2.0, 2.0]"]),
        ({"gradient_checkpoint_config": 0.5}, ["gradient_checkpoint_config=0.5", "PipelineGradientCheckpointConfig("]),
        ({"zero_stage": 2}, ["zero_stage=2", "zero_stage=1"]),
        ({"microbatch_size": 0}, ["microbatch_size=0"]),
        ({"num_microbatches": True}, ["num_microbatches=True"]),
        ({"microbatch_size": 1, "num_microbatches": 2}, ["microbatch_size and num_microbatches are both given"]),
        ({"pp_size": 1, "num_model_chunks": 1}, ["num_model_chunks needs pp_size > 1"]),
        (
            {"pp_size": 1, "num_layers_per_stage": [4], "gradient_checkpoint_config": PipelineGradientCheckpointConfig(1.0)},
            ["num_layers_per_stage, gradient_checkpoint_config need pp_size > 1", "gradient_checkpointing_enable()"],
        ),
        ({"pp_size": "2"}, ["pp_size='2'"]),
        ({"pp_size": 0}, ["pp_size=0"]),
    ],
)  # fmt: skip
def test_one_thing_that_cannot_be(options, words):
    with pytest.raises(ConfigError) as caught:
        HybridParallelPlugin(**{"pp_size": 2} | options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_several_things_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        HybridParallelPlugin(
            pp_size=2, pp_style="2f2b", num_layers_per_stage=3, zero_stage=2, microbatch_size=0, num_microbatches=2
        )
    message = str(caught.value)
    assert message.startswith("5 of the options cannot be.")
    given = ["pp_style='2f2b'", "num_layers_per_stage=3", "zero_stage=2", "microbatch_size=0", "both given"]
    assert all(f"\n  {number}.  " in message and word in message for number, word in enumerate(given, 1)), message
    places = [message.index(word) for word in given]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "one of gradient_checkpointing_ratio"),
        ({"gradient_checkpointing_ratio": 0.5, "num_ckpt_layers_per_stage": [1]}, "one of gradient_checkpointing_ratio"),
        ({"gradient_checkpointing_ratio": 1.5}, "gradient_checkpointing_ratio=1.5"),
        ({"gradient_checkpointing_ratio": [0.5, -1]}, "gradient_checkpointing_ratio=.0.5, -1."),
        ({"gradient_checkpointing_ratio": "half"}, "gradient_checkpointing_ratio='half'"),
        ({"gradient_checkpointing_ratio": [0.5, None]}, "gradient_checkpointing_ratio="),
        ({"num_ckpt_layers_per_stage": 2}, "num_ckpt_layers_per_stage=2"),
        ({"num_ckpt_layers_per_stage": [1.5, 2]}, "num_ckpt_layers_per_stage=.1.5, 2."),
    ],
)  # fmt: skip
def test_recomputation_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        PipelineGradientCheckpointConfig(**options)


def test_what_can_be():
    for style, found in STYLES.items():
        assert PipelineOptions(style).stages_per_rank == found.chunks
    assert PipelineOptions("interleaved", 3, (1, 2)).stages_per_rank == 3
    assert PipelineGradientCheckpointConfig(0.5).blocks_of([4, 3]) == [2, 2]
    with pytest.raises(ConfigError, match="does not fit the pipeline"):
        PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 4]).blocks_of([4, 3])
