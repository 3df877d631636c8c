"""The model a run starts from: a preset's configuration, a local model folder, or a GGUF file.

Whatever it was, the ranks start from a folder in hub format, the given one or one inside the work folder: they need to
know one form only, and a quantised file is expanded once instead of once per rank.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from colonnade.cluster.mesh import Axis
from colonnade.errors import ConfigError, explain
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.shardformer.inference import infer_policy
from colonnade.tools.explain.stages import PipelineChoice, StagePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def quiet_transformers() -> None:
    """Let transformers report errors only: every rank would repeat its notes and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def quiet_inference() -> None:
    """Let the inference of policies only warn in this process: its ranks, or an explanation, say what it has found."""
    logging.getLogger(infer_policy.__module__).setLevel(logging.WARNING)


def first_line(error: Exception) -> str:
    """The error's message, cut to its first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(frozen=True)
class ModelFiles:
    """A local model: its folder, and the name of the GGUF file in it where it is one."""

    folder: Path
    gguf_file: str | None = None

    def _keywords(self) -> dict[str, str]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    def config(self) -> PretrainedConfig:
        """The model's configuration.

        Raises:
            ConfigError: when transformers cannot read it.
        """
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, **self._keywords())
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                explain(
                    f"transformers cannot read the configuration of the model in {self.folder}.",
                    [("reason", first_line(error)), ("needs", "config.json or .gguf of a causal language model")],
                )
            ) from error

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own tokenizer.

        Raises:
            ConfigError: when the folder has none that transformers can load.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, **self._keywords())
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                explain(
                    f"the model in {self.folder} has no tokenizer that transformers can load.",
                    [("reason", first_line(error)), ("needs", "tokenizer.json or the model's own files")],
                )
            ) from error

    def expand(self, folder: Path) -> None:
        """Write the model of a GGUF file to `folder` in hub format, in float32."""
        from transformers import AutoModelForCausalLM

        quantised = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, **self._keywords())
        # transformers refuses to save the model it read from a GGUF file, though its weights are plain float32 by now.
        plain = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        plain.load_state_dict(quantised.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = quantised.generation_config
        plain.save_pretrained(folder)


def find_model(path: Path) -> ModelFiles:
    """See what kind of model lies at a path.

    Raises:
        ConfigError: when there is none, or more than one.
    """
    forms = "a folder with config.json and safetensors files, a .gguf file, or a folder with one .gguf file"
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.parent, path.name)
    if not path.is_dir():
        found = "a file of another kind" if path.is_file() else "nothing there"
        raise ConfigError(explain(f"--model {path} is not a local model.", [("found", found), ("needs", forms)]))
    if (path / "config.json").is_file():
        return ModelFiles(path)
    quantised = sorted(file.name for file in path.glob("*.gguf"))
    if len(quantised) == 1:
        return ModelFiles(path, quantised[0])
    if quantised:
        raise ConfigError(
            explain(
                f"--model {path} holds {len(quantised)} GGUF files.",
                [("found", ", ".join(quantised)), ("try", f"--model {path / quantised[0]}")],
            )
        )
    raise ConfigError(
        explain(f"--model {path} holds no model.", [("found", "no config.json and no .gguf file"), ("needs", forms)])
    )


def check_layout(config: PretrainedConfig, tp: int, pipeline: PipelineChoice | None = None) -> None:
    """See, without weights or processes, whether a model can be cut into stages, and its layers be shared out over `tp` ranks.

    Raises:
        ConfigError: when some rank would hold nothing.
        PolicyError: when no policy is written for the model's family, and none that is inferred passes its check; or when
            the model, cut, computes something else.
    """
    from transformers import AutoModelForCausalLM

    if tp == 1 and pipeline is None:
        return
    quiet_inference()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if pipeline is not None:
        StagePlan(model, pipeline)
    if tp == 1:
        return
    # An axis without a process group: preparing only looks, and whichever rank it is for, the answer is the same.
    axis = Axis("tp", tp, 0, tuple(range(tp)), None)
    ShardFormer(ShardConfig(axis)).prepare(model)


def build_model(start: Path, from_scratch: bool, seed: int) -> PreTrainedModel:
    """The model on this rank, in float32, before it is laid out; the same on every rank.

    Args:
        start: folder with the configuration, and the weights unless `from_scratch`.
        seed: of the random initial weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not from_scratch:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    else:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(start), dtype=torch.float32)
    return model.train()  # from_pretrained returns it in evaluation mode
