"""What is done once, before the ranks start: checks, text, tokenizer, tokens, and the model to start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from colonnade.errors import ConfigError, explain
from colonnade.tools.train.corpus import evenly_spaced, join_tokens, unigram_entropy
from colonnade.tools.train.options import TrainOptions
from colonnade.tools.train.output import check_output, claim_output, remove_work
from colonnade.tools.train.presets import preset_config
from colonnade.tools.train.source import ModelFiles, check_layout, find_model, quiet_transformers
from colonnade.tools.train.text import Split, read_documents, split_documents
from colonnade.tools.train.vocabulary import encode_documents, learn_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PLAN = "plan.json"
TRAIN_TOKENS = "train.npy"
HELD_OUT_TOKENS = "held_out.npy"
TOKENIZER = "tokenizer"
START = "start"


@dataclass(frozen=True)
class Plan:
    """What the ranks are told: the options, and what was found out before they started."""

    options: TrainOptions
    start: Path  # folder with the configuration, and the weights unless `from_scratch`
    from_scratch: bool
    train_tokens: int
    train_texts: int
    held_out_texts: int
    held_out_rows: tuple[int, ...]  # the held-out sequences that are measured
    unigram_entropy: float  # nats per token

    def write(self, work: Path) -> None:
        """Put the plan where the ranks find it."""
        plain = asdict(self) | {"options": self.options.to_json(), "start": str(self.start)}
        (work / PLAN).write_text(json.dumps(plain), encoding="utf-8")

    @classmethod
    def read(cls, work: Path) -> Plan:
        """The plan in a work folder."""
        plain = json.loads((work / PLAN).read_text(encoding="utf-8"))
        plain["options"] = TrainOptions.from_json(plain["options"])
        plain["start"] = Path(plain["start"])
        plain["held_out_rows"] = tuple(plain["held_out_rows"])
        return cls(**plain)


@dataclass(frozen=True)
class Material:
    """Text as tokens, and the configuration of the model that is to read them."""

    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    split: Split
    train: np.ndarray  # [T] token ids
    held_out: np.ndarray  # [T] token ids


def prepare(options: TrainOptions, say: Callable[[str], None]) -> Path:
    """Check the options against the files, turn the text into tokens, and fill the work folder of the output.

    Nothing is written before everything has been checked.

    Args:
        say: takes lines that tell the person what is going on.

    Returns:
        The work folder, which a rank needs to take part in the run.

    Raises:
        ConfigError: for an output that may not be replaced, a model or a text that is not there or does not fit.
        PolicyError: for a family of models that cannot be split.
    """
    quiet_transformers()
    folder = options.output.folder
    given = [path for path in (options.model.path, options.data.path) if path is not None]
    check_output(folder, options.output.overwrite, tuple(given))
    source = None if options.model.path is None else find_model(options.model.path)
    config = _preset_config(options, None) if source is None else source.config()
    _check_positions(options, config)
    check_layout(config, options.layout.tp, options.layout.pipeline)
    material = _read(options, source, config, say)
    work = claim_output(folder, options.to_json())
    try:
        _fill(work, options, source, material, say)
    except OSError as error:
        remove_work(folder)
        raise ConfigError(explain(f"the run cannot be prepared in {folder}.", [("reason", str(error))])) from error
    except BaseException:
        remove_work(folder)
        raise
    return work


def _read(
    options: TrainOptions, source: ModelFiles | None, config: PretrainedConfig, say: Callable[[str], None]
) -> Material:
    documents = read_documents(options.data.path, leave_out=options.output.folder)
    split = split_documents(documents, options.data.held_out_percent)
    if source is None:
        tokenizer = learn_tokenizer(split.train, options.model.vocab_size, options.data.sequence)
        say(f"learned a vocabulary of {len(tokenizer):,} tokens from {len(split.train):,} texts")
        config = _preset_config(options, tokenizer)
    else:
        tokenizer = source.tokenizer()
    train, held_out = (join_tokens(encode_documents(tokenizer, part)) for part in (split.train, split.held_out))
    _check_amount(options, train, held_out)
    _check_vocabulary(config, train, held_out)
    say(f"training text {len(train):,} tokens, held-out text {len(held_out):,} tokens ({len(split.held_out):,} texts)")
    return Material(tokenizer, config, split, train, held_out)


def _fill(
    work: Path, options: TrainOptions, source: ModelFiles | None, material: Material, say: Callable[[str], None]
) -> None:
    """Write what the ranks read."""
    np.save(work / TRAIN_TOKENS, material.train)
    np.save(work / HELD_OUT_TOKENS, material.held_out)
    material.tokenizer.save_pretrained(work / TOKENIZER)
    start = work / START
    if source is None:
        material.config.save_pretrained(start)
    elif source.gguf_file is not None:
        say(f"expanding {source.gguf_file} to float32")
        source.expand(start)
    else:
        start = source.folder
    length = options.data.sequence
    rows = evenly_spaced(len(material.held_out) // length, max(1, options.data.eval_tokens // length))
    # The first token of a sequence is given, not predicted.
    targets = np.concatenate([material.held_out[row * length + 1 : (row + 1) * length] for row in rows])
    Plan(
        options=options,
        start=start.absolute(),
        from_scratch=source is None,
        train_tokens=len(material.train),
        train_texts=len(material.split.train),
        held_out_texts=len(material.split.held_out),
        held_out_rows=tuple(rows),
        unigram_entropy=unigram_entropy(material.train, targets, material.config.get_text_config().vocab_size),
    ).write(work)


def _preset_config(options: TrainOptions, tokenizer: PreTrainedTokenizerBase | None) -> PretrainedConfig:
    """Configuration of the preset; with a vocabulary of the size asked for while none has been learned."""
    return preset_config(
        options.model.preset or "",
        vocab_size=options.model.vocab_size if tokenizer is None else len(tokenizer),
        positions=options.data.sequence,
        bos=None if tokenizer is None else tokenizer.bos_token_id,
        eos=None if tokenizer is None else tokenizer.eos_token_id,
        pad=None if tokenizer is None else tokenizer.pad_token_id,
    )


def _check_positions(options: TrainOptions, config: PretrainedConfig) -> None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and options.data.sequence > positions:
        raise ConfigError(
            explain(
                f"--seq {options.data.sequence} is longer than the model's {positions} positions.",
                [("try", f"--seq {positions}")],
            )
        )


def _check_amount(options: TrainOptions, train: np.ndarray, held_out: np.ndarray) -> None:
    length, batch = options.data.sequence, options.optimizer.batch
    rows = []
    if len(train) // length < batch:
        found = f"{len(train):,} tokens = {len(train) // length} sequences"
        rows.append(("training text", f"{found}, fewer than a batch of {batch}"))
    if len(held_out) < length:
        rows.append(("held-out text", f"{len(held_out):,} tokens, fewer than a sequence of {length}"))
    if rows:
        advice = "more text (--data), shorter sequences (--seq), a smaller --batch, or another --held-out"
        rows.append(("try", advice))
        raise ConfigError(explain("there is too little text for this run.", rows))


def _check_vocabulary(config: PretrainedConfig, train: np.ndarray, held_out: np.ndarray) -> None:
    largest, vocab_size = max(int(train.max()), int(held_out.max())), config.get_text_config().vocab_size
    if largest >= vocab_size:
        raise ConfigError(
            explain(
                "the tokenizer does not belong to the model.",
                [("tokenizer", f"gives token {largest}"), ("model", f"has a vocabulary of {vocab_size}")],
            )
        )
