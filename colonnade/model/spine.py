"""Spine: where a model begins, repeats and ends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from colonnade.errors import PolicyError, explain
from colonnade.model.adapters import plain_model


@dataclass(frozen=True)
class Spine:
    """Names of the parts every transformer has. Pipeline cut, recomputation, wrapping and reports read it.

    A model with adapters of peft around it is asked like the one inside.

    Args:
        base: attribute of the full model that holds the base model; the base model itself may be given instead.
        embed: modules of the base that turn ids into the first hidden states.
        blocks: the list of repeated blocks, in the base.
        norm: the norm after the last block, in the base; None where there is none.
        head: what turns hidden states into the output, beside the base; None where there is none.
    """

    base: str
    embed: tuple[str, ...] | str
    blocks: str
    norm: str | None = None
    head: str | None = None

    def base_of(self, model: nn.Module) -> nn.Module:
        """The base model inside a full one, or the model itself if it is the base.

        Raises:
            PolicyError: the model has neither the base nor the blocks.
        """
        model = plain_model(model)
        base = _find(model, self.base)
        if base is None:
            base = model
        if not isinstance(_find(base, self.blocks), nn.ModuleList):
            raise PolicyError(
                explain(
                    f"{type(model).__name__} has no list of blocks where its policy looks for it.",
                    [
                        ("looked for", f"{self.base}.{self.blocks}, then {self.blocks}"),
                        ("try", "a Spine that names them"),
                    ],
                )
            )
        return base

    def blocks_of(self, model: nn.Module) -> nn.ModuleList:
        """The repeated blocks, in order."""
        return _find(self.base_of(model), self.blocks)  # type: ignore[return-value]

    def embeds_of(self, model: nn.Module) -> list[nn.Module]:
        """The embedding modules that the model has."""
        names = (self.embed,) if isinstance(self.embed, str) else self.embed
        found = [_find(self.base_of(model), name) for name in names]
        return [module for module in found if module is not None]

    def norm_of(self, model: nn.Module) -> nn.Module | None:
        """The norm after the last block."""
        return _find(self.base_of(model), self.norm)

    def head_of(self, model: nn.Module) -> nn.Module | None:
        """The head; None for a base model."""
        return _find(plain_model(model), self.head)


def _find(model: nn.Module, path: str | None) -> nn.Module | None:
    if not path:
        return None
    for name in path.split("."):
        model = getattr(model, name, None)  # type: ignore[assignment]
        if not isinstance(model, nn.Module):
            return None
    return model
