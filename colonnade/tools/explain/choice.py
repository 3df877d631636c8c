"""What the person named: a model (folder, config.json or model type) and a policy (module:Class)."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.errors import ConfigError, PolicyError, explain
from colonnade.model.default_configs import default_config
from colonnade.model.twin import model_class
from colonnade.shardformer import Policy
from colonnade.tools.explain.stages import PipelineChoice, shrink_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FORMS = "a folder with config.json, a config.json file, or a model type of transformers such as llama or gpt2"


@dataclass(frozen=True)
class Choice:
    """The configuration of the model that was named.

    Args:
        config: the configuration.
        source: where it is from, for the reader.
    """

    config: PretrainedConfig
    source: str

    @property
    def class_name(self) -> str:
        """Name of the transformers class that trains it."""
        return model_class(self.config).__name__


def find_config(name: str, multiple: int = 2, pipeline: PipelineChoice | None = None) -> Choice:
    """The configuration for what was given as MODEL.

    Args:
        name: path of a folder or of a config.json, or a model type; the latter gives tiny sizes.
        multiple: for a model type, what counts of heads are to be divisible by; see `shrink`.
        pipeline: for a model type, the stages that it is to have layers for.

    Raises:
        ConfigError: there is no such thing, or transformers cannot read it or has no language model for it.
    """
    path = Path(name)
    if path.exists():
        config, source = _read(path), f"sizes of {path}"
    else:
        config, source = _default(name), f"tiny sizes, as only the type {name!r} was given"
    try:
        model_class(config)
    except ValueError as error:
        raise ConfigError(explain(f"{name} cannot be used here: {error}.", [("needs", FORMS)])) from error
    return Choice(config if path.exists() else shrink_for(config, multiple, pipeline), source)


def _read(path: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        if path.is_dir() and not (path / "config.json").is_file():
            raise ConfigError(explain(f"{path} holds no config.json.", [("needs", FORMS)]))
        return AutoConfig.from_pretrained(path)
    except ConfigError:
        raise
    except Exception as error:  # transformers has no common class for what can be wrong with a configuration
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            explain(f"transformers cannot read the configuration {path}.", [("reason", reason), ("needs", FORMS)])
        ) from error


def _default(name: str) -> PretrainedConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, 3)
        rows = [("found", "no file or folder, and no model type of that name"), ("needs", FORMS)]
        raise ConfigError(
            explain(f"there is no model {name!r}.", [*rows, *([("near", ", ".join(near))] if near else [])])
        )
    try:
        return default_config(name)
    except Exception as error:
        raise ConfigError(f"transformers cannot make a default configuration for {name!r}: {error}") from error


def load_policy(name: str | None) -> Policy | None:
    """The policy for what was given as --policy: `package.module:Class` or `path/to/file.py:Class`; None for None.

    Raises:
        PolicyError: there is no such module or class, or it is no policy.
    """
    if name is None:
        return None
    where, colon, kind = name.rpartition(":")
    if not colon or not where or not kind:
        raise PolicyError(f"--policy {name!r} has another form than module:Class, such as my_policies:MyLlama.")
    try:
        found: Any = getattr(_module(where), kind, None)
    except (ImportError, OSError, SyntaxError) as error:
        raise PolicyError(
            explain(
                f"--policy {name}: {where} cannot be imported.",
                [("reason", f"{type(error).__name__}: {error}"), ("needs", "module:Class or path/to/file.py:Class")],
            )
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        have = [n for n, v in vars(_module(where)).items() if isinstance(v, type) and issubclass(v, Policy)]
        raise PolicyError(
            explain(f"--policy {name}: there is no policy {kind!r} in {where}.", [("found", ", ".join(have) or "none")])
        )
    return found()


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        here = str(Path.cwd())
        if here not in sys.path:  # as `python -m` has it
            sys.path.insert(0, here)
        return importlib.import_module(where)
    path = Path(where).resolve()
    if str(path) in _FILES:
        return _FILES[str(path)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _FILES[str(path)] = module
    return module


_FILES: dict[str, Any] = {}
