"""Running numbers along a response, in the order of `TokenBatch.position`; masked tokens do not count."""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.core.tokens import TokenBatch


class InOrder:
    """The tokens sorted by response and position, masked ones last; a running number goes back unsorted."""

    def __init__(self, b: TokenBatch, method: str):
        """Raises ValueError where the batch has no `position`."""
        position = torch.where(b.mask, b.need("position", method), 0)
        response = torch.where(b.mask, b.response, b.n_responses)
        first = position.argsort(dim=-1, stable=True)
        self.order = first.gather(-1, response.gather(-1, first).argsort(dim=-1, stable=True))
        self.response = response.gather(-1, self.order)
        self.mask, index = b.mask, torch.arange(response.shape[-1], device=response.device)
        new = self.response != self.response.roll(1, -1)
        start = torch.where(new | (index == 0), index, 0)
        self.start = (
            start.cummax(-1).values if index.numel() else start
        )  # first token of the response
        self.rank = index - self.start  # tokens of the response before this one

    def _back(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x).scatter(-1, self.order, x)
        return torch.where(self.mask, out, 0)

    def count(self) -> Tensor:
        """1 for the first token of a response, 2 for the next: `[..., N]`, int64; 0 where masked."""
        return self._back(self.rank + 1)

    def sums(self, x: Tensor) -> Tensor:
        """The sum of x over the response up to each token, itself included: `[..., N]`, no gradient."""
        x = torch.where(self.mask, x.detach(), 0).gather(-1, self.order).double()
        total = x.cumsum(-1)
        before = (total - x).gather(-1, self.start)
        return self._back((total - before).to(x.dtype))

    def smallest_before(self, x: Tensor) -> Tensor:
        """The smallest x of the response before each token, inf for its first: `[..., N]`, no gradient."""
        x = torch.where(self.mask, x.detach(), 0).gather(-1, self.order)
        n = x.shape[-1]
        if not n:
            return x
        by_size = x.argsort(dim=-1)
        # ranks of x, smaller from response to response, so that no minimum looks back beyond its own
        key = torch.zeros_like(by_size).scatter(
            -1, by_size, torch.arange(n, device=x.device).expand(x.shape)
        )
        key = (key - n * self.response).cummin(-1).values + n * self.response
        smallest = x.gather(-1, by_size.gather(-1, key))
        before = torch.where(self.rank == 0, torch.inf, smallest.roll(1, -1))
        return self._back(before)
