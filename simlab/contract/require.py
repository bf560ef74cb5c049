"""How a promise speaks: BrokenPromise, and the two questions that raise it."""

from __future__ import annotations

import torch
from torch import Tensor


class BrokenPromise(ValueError):
    """A stabilizer does not do what every stabilizer must; the message says what, and the cure."""


def need(holds: bool | Tensor, detail: str) -> None:
    """Raises BrokenPromise(detail) unless `holds`, everywhere where it is a tensor."""
    if not bool(torch.as_tensor(holds).all()):
        raise BrokenPromise(detail)


def close(got: Tensor, want: Tensor, detail: str, tol: float = 1e-10) -> None:
    """Raises BrokenPromise(detail) unless both are equal to a relative `tol`, tol / 100 absolute."""
    need(torch.allclose(got, want, rtol=tol, atol=tol * 0.01), detail)
