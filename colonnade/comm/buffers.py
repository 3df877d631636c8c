"""A pool of flat buffers. Fresh memory is dear where its pages are touched for the first time; used memory is at hand."""

from __future__ import annotations

import torch

KEPT = 8  # free buffers of a kind: two buckets on the way, each with what it sends and receives, and two being filled


class BufferPool:
    """Lends out uninitialised flat tensors and takes them back; of those that are free it keeps the last `KEPT` of a kind."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of so many elements: of the smallest free buffer that is not over twice as large, else a fresh one."""
        free = self._free.setdefault((dtype, device), [])
        fitting = [buffer for buffer in free if numel <= buffer.numel() <= 2 * numel]
        if not fitting:
            return torch.empty(numel, dtype=dtype, device=device)
        best = min(fitting, key=torch.Tensor.numel)
        free[:] = [buffer for buffer in free if buffer is not best]
        return best[:numel]

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what was lent, whole again."""
        base = tensor if tensor._base is None else tensor._base
        free = self._free.setdefault((base.dtype, base.device), [])
        free.append(base)
        del free[:-KEPT]

    @property
    def nbytes(self) -> int:
        """Bytes of all free buffers."""
        return sum(buffer.nbytes for free in self._free.values() for buffer in free)
