"""What an advantage of a user's file promises: reward and length `[..., P, G]` to advantages `[..., P, G]`.

`load` takes a function `advantage(reward, length)` out of a file, `check` raises BrokenPromise in one
sentence at the first promise that it breaks. All entries of `ADVANTAGES` keep them. A reward of NaN is
a missing one, an answer of length 0 has no token; reward units and scale are free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from simlab.contract.require import BrokenPromise, close, need
from simlab.core.advantages import ADVANTAGES, Advantage
from simlab.core.user_files import LOADED, module_of

FLAT = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.1, 0.1, 0.1))  # 0.1 does not average exactly


def load(path: Path, anew: bool = False) -> Advantage:
    """The function `advantage` of a user's file. Raises ValueError in one sentence without one.

    `anew` runs the file in any case, not only if its content is another than the last time.
    """
    if path.stem in ADVANTAGES:
        raise ValueError(f"{path}: there is an advantage {path.stem} already, rename the file")
    module = module_of(path, __name__, anew)
    if not callable(getattr(module, "advantage", None)):
        raise ValueError(f"{path}: has no function advantage(reward, length)")
    return module.advantage


def loaded(path: Path) -> Advantage:
    """The function as this process loaded it, whatever has become of the file since."""
    _, module = LOADED.get(path.resolve(), (b"", None))
    return load(path) if module is None else module.advantage


def draw(seed: int, lanes: tuple[int, ...] = (), P: int = 5, G: int = 4) -> tuple[Tensor, Tensor]:
    """Rewards in steps of a quarter, the first group flat, and lengths 1 to 6: `[*lanes, P, G]`."""
    rng = torch.Generator().manual_seed(seed)
    reward = torch.randint(0, 5, (*lanes, P, G), generator=rng).double() / 4
    reward[..., :1, :] = reward[..., :1, :1]
    return reward, torch.randint(1, 7, (*lanes, P, G), generator=rng)


# ---------------------------------------------------------------- promises
def shape(f: Advantage) -> None:
    """One finite number an answer, also for one answer, one prompt, no prompt."""
    for seed, (P, G) in enumerate(((5, 4), (1, 4), (3, 1), (0, 4))):
        reward, length = draw(seed, (), max(P, 1), G)
        reward, length = reward[:P], length[:P]
        got = f(reward, length)
        need(isinstance(got, Tensor), f"it returns {type(got).__name__}, not a tensor")
        given, back = list(reward.shape), list(got.shape)
        need(given == back, f"rewards {given} give advantages {back}")
        need(got.isfinite(), f"an advantage of rewards {given} is not finite: guard the division")
    need(f(*draw(0)).abs().sum() > 0, "every advantage is 0")


def precision(f: Advantage) -> None:
    """Float64 rewards give float64 advantages, float32 rewards the same to float32."""
    reward, length = draw(1)
    want = f(reward, length)
    need(want.dtype == torch.float64, f"float64 rewards give {want.dtype}: keep reward.dtype")
    got = f(reward.float(), length)
    need(got.is_floating_point(), f"float32 rewards give {got.dtype}")
    close(got.double(), want, "float32 rewards give other advantages than float64", 1e-4)


def untouched(f: Advantage) -> None:
    """Rewards and lengths stay as they are, and the same ones give the same bits."""
    reward, length = draw(2)
    copies = reward.clone(), length.clone()
    got, state = f(reward, length), torch.get_rng_state()
    need(torch.equal(reward, copies[0]), "it writes into reward: work on a copy")
    need(torch.equal(length, copies[1]), "it writes into length: work on a copy")
    f(*draw(3))
    need(torch.equal(f(reward, length), got), "it differs from call to call: keep and draw nothing")
    need(torch.equal(torch.get_rng_state(), state), "it draws from torch's generator")


def order(f: Advantage) -> None:
    """The order of groups, and of answers within a group, does not matter."""
    reward, length = draw(4)
    want, groups, answers = f(reward, length), [3, 0, 4, 1, 2], [2, 3, 1, 0]
    got = f(reward[groups], length[groups])
    close(got, want[groups], "advantages depend on the order of groups")
    got = f(reward[:, answers], length[:, answers])
    close(got, want[:, answers], "advantages depend on the order of answers")


def lanes(f: Advantage) -> None:
    """Leading axes are runs side by side, which do not see each other."""
    reward, length = draw(5, (2, 3))
    got = f(reward, length)
    need(got.shape == reward.shape, f"rewards {list(reward.shape)} give {list(got.shape)}")
    alone = f(reward[1, 2], length[1, 2])
    close(got[1, 2], alone, "a lane depends on the other lanes: reduce over the last two axes only")


def flat(f: Advantage) -> None:
    """Groups whose answers all got one reward teach nothing: where all are flat, all get 0."""
    for row in (*FLAT, (0.5,)):
        reward = torch.tensor([row, row], dtype=torch.float64)
        got = f(reward, torch.ones_like(reward).long())
        what = "a group of one answer" if len(row) == 1 else f"equal rewards of {row[0]:g}"
        need(got.abs() < 1e-9, f"{what} give {got.flatten()[0]:.3g}, not 0: subtract a baseline")


def missing(f: Advantage) -> None:
    """A reward of NaN, a group of them and a response of length 0 are handled, or refused by ValueError."""
    reward, length = draw(6)
    reward[0, 1], reward[1, 0], reward[3] = 1.0, torch.nan, torch.nan
    try:
        got = f(reward, length)
    except ValueError:
        pass  # its own sentence
    else:
        need(got.isfinite(), "a missing reward (NaN) makes advantages NaN: leave it out, or refuse")
        need(got[reward.isnan()] == 0, "an answer without a reward has an advantage other than 0")
    reward, length = draw(7)
    length[0, 1], length[2] = 0, 0
    need(f(reward, length).isfinite(), "answers without a token make an advantage not finite")


PROMISES: dict[str, Callable[[Advantage], None]] = {
    f.__name__: f for f in (shape, untouched, precision, order, lanes, flat, missing)
}


def check(name: object, function: Advantage) -> None:
    """Raises BrokenPromise in one sentence, naming the promise, at the first that does not hold."""
    for promise, holds in PROMISES.items():
        summary = (holds.__doc__ or promise).splitlines()[0].rstrip(".")
        try:
            holds(function)
        except Exception as error:  # whatever a user's code may raise
            text = " ".join(str(error).split())[:200]
            kind = "" if isinstance(error, BrokenPromise) else f"{type(error).__name__}: "
            raise BrokenPromise(
                f"{name}: the advantage breaks the promise {promise} ({summary}): {kind}{text}"
            ) from error
