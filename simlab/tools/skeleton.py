"""`simlab new my_rule.py`: a method, or an advantage, that keeps the promises; its middle is yours to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from simlab.study.command_line import parse
from simlab.study.strict import Strict

METHOD = '''"""{title}: S = sg[w] A log pi, w = r where |d| < width, else 0.

Source: your own. d = log pi - log mu, r = exp(d), A the advantage; sg[.] keeps no gradient.
`simlab methods {file}` checks this file, and says what the rule cuts and reweighs;
`simlab methods {file} --plot weight.png` draws its weight beside PPO's;
`simlab compare --method-file {file} --methods ppo {name} --quick` compares the two.
"""

from typing import Annotated

from simlab.core.arguments import Interval
from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask, ratio


def surrogate(b: TokenBatch, *, width: Annotated[float, Interval("(0, inf)")] = 0.5) -> Surrogate:
    """S of every token, where it has a gradient, and numbers to log. `on_mask` puts 0 under the mask."""
    A = on_mask(b, b.advantage)
    d = log_ratio(b).detach()  # without .detach() the ratio would have a gradient too
    kept = d.abs() < width
    S = (ratio(d) * kept).detach() * A * on_mask(b, b.logp)
    return Surrogate(S, kept & (A != 0), {{}})
'''

ADVANTAGE = '''"""{title}: A = R - median of the group's rewards.

`simlab compare --advantage-file {file} --quick` compares methods under it.
"""

from torch import Tensor


def advantage(reward: Tensor, length: Tensor) -> Tensor:
    """Rewards and lengths [..., P, G]: P prompts, G answers; NaN is a missing reward and gets 0."""
    middle = reward.nanmedian(-1, keepdim=True).values
    return (reward - middle).nan_to_num(0.0)
'''
KINDS = {"method": METHOD, "advantage": ADVANTAGE}


class New(Strict):
    """Write a file to start from, which keeps the promises as it is. An existing file is left alone."""

    path: Annotated[Path, tyro.conf.Positional]
    """The new file, such as my_rule.py; its name becomes the name of the method."""
    kind: Literal["method", "advantage"] = "method"
    """What it holds: a method for --method-file, or an advantage for --advantage-file."""


def run_new(words: list[str]) -> None:
    """`simlab new`."""
    options = parse(New, words, "simlab new")
    write(options.path, options.kind)
    command = "methods" if options.kind == "method" else "compare --quick --advantage-file"
    print(f"{options.path} is written; next: simlab {command} {options.path}")


def write(path: Path, kind: str) -> None:
    """Write the file of this kind. Raises ValueError for a name that could not be used, or that exists."""
    from simlab.stabilizers import NAMES

    name = path.stem
    if path.suffix != ".py" or not name.isidentifier() or name.startswith("_"):
        raise ValueError(
            f"{path}: the name must be a word and .py, as my_rule.py; it becomes a name here"
        )
    if kind == "method" and name in NAMES:
        raise ValueError(f"{path}: there is a stabilizer {name} already; choose another name")
    title = name.replace("_", " ").capitalize()
    text = KINDS[kind].format(title=title, name=name, file=path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(
            f"{path}: is there already and is left alone; choose another name"
        ) from None
