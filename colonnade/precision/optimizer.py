"""ParallelOptimizer: any torch optimizer, with gradients reduced, measured and clipped over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.reducer import GradientReducer
from colonnade.errors import ConfigError, UsageError, explain
from colonnade.model.layout import has_layout, layout_of
from colonnade.precision.grad_norm import clip_gradients, gradient_norm
from colonnade.precision.master import MasterWeights


class ParallelOptimizer(Optimizer):
    """Wraps the user's optimizer; parameters, groups and state stay the user's own objects.

    Args:
        inner: the optimizer to step.
        mesh: where parameters are split.
        dtype: format that the model is about to be cast to. Where it is not float32, the weights as they are now become
            the master weights.
        max_norm: gradients are clipped to this global norm; 0 leaves them.

    Attributes:
        reducer: averages gradients over data-parallel ranks; None where something else does.
        covered: says which parameters that something else averages.
        check_replicas: `step` raises where ranks hold different gradients for what they all hold.
    """

    def __init__(
        self, inner: Optimizer, mesh: ParallelMesh, dtype: torch.dtype = torch.float32, max_norm: float = 0.0
    ) -> None:
        # Optimizer.__init__ is not called: groups, state and hooks are those of the wrapped optimizer
        self.inner, self.mesh, self.max_norm = inner, mesh, check_max_norm(max_norm)
        self.reducer: GradientReducer | None = None
        self.covered: Callable[[nn.Parameter], bool] | None = None
        self.check_replicas = True
        _check_elementwise(inner)
        shard_optimizer_state(inner)
        self.master = MasterWeights(inner if dtype != torch.float32 else None)
        self._norm: torch.Tensor | None = None

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of all groups."""
        return [param for group in self.inner.param_groups for param in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's own groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's own state."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.inner.defaults

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradient before clipping, the same on every rank; None before the first step."""
        return None if self._norm is None else float(self._norm)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass, and the reduction of its gradients unless inside `no_sync`."""
        if self.reducer is None:
            loss.backward(**kwargs)
        else:
            self.reducer.backward(loss, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the next backward outside the block reduces them."""
        if self.reducer is None:
            yield
        else:
            with self.reducer.paused():
                yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Measure, clip, and step the wrapped optimizer.

        Raises:
            ConfigError: a closure is given; it would run the model several times a step, outside of the reduction.
        """
        if closure is not None:
            raise ConfigError("step(closure) is not possible: call booster.backward(loss, optimizer), then step().")
        self._complete_reduction()
        with self.master.stepping():
            parameters = self.parameters()
            self._norm = gradient_norm(parameters, self.mesh, self.check_replicas)
            if self.max_norm > 0:
                clip_gradients(parameters, self.max_norm, self._norm)
            return self.inner.step()

    def _complete_reduction(self) -> None:
        """Average what was only accumulated, and refuse gradients that nothing averages."""
        if self.reducer is not None and self.reducer.unreduced:
            self.reducer.finish()
        covers = (
            self.covered if self.covered is not None else (self.reducer.covers if self.reducer is not None else None)
        )
        missed = sum(p.grad is not None and not covers(p) for p in self.parameters()) if covers is not None else 0
        if missed:
            raise UsageError(
                explain(
                    f"{missed} parameters have gradients that are not averaged over data-parallel ranks.",
                    [
                        ("reason", "they were added, or thawed, after boost"),
                        ("try", "add modules and parameter groups, and thaw, before boost"),
                    ],
                )
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state: this rank's share."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on a rank of the same layout."""
        with self.master.swapped():  # torch casts state to the format of the parameters it finds
            self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.inner.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"ParallelOptimizer({self.inner!r})"


NOT_ELEMENTWISE = ("Adafactor", "Muon", "LBFGS", "Lamb", "LARS", "Shampoo", "SOAP", "GaLore", "CAME")


def _check_elementwise(optimizer: Optimizer) -> None:
    """Refuse optimizers that look at a whole matrix, where matrices are split.

    Raises:
        ConfigError: naming the optimizer.
    """
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    whole = next((name for name in NOT_ELEMENTWISE if any(name.lower() in kind for kind in kinds)), None)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if whole is not None and any(layout_of(p).sharded_axes for p in params):
        raise ConfigError(
            explain(
                f"{type(optimizer).__name__} cannot step on split parameters: its update looks at whole matrices.",
                [("try", "AdamW, SGD or another optimizer that treats each entry by itself, or tp_size=1")],
            )
        )


def check_max_norm(max_norm: float) -> float:
    """Refuse a clipping norm that is negative or not a number."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise ConfigError(f"max_norm={max_norm!r} must be a number ≥ 0 (0 switches clipping off).")
    return float(max_norm)


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """Cut state that belongs to whole parameters to this rank's share, for an optimizer that has stepped before boost."""
    for param, state in optimizer.state.items():
        if isinstance(param, torch.Tensor) and has_layout(param):
            layout = layout_of(param)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == layout.shape != param.shape:
                    state[key] = layout.extract(value)
