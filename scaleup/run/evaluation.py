"""Evaluations of a run: problems with seeds of their own, and avg@k and pass@k with intervals.

    avg@k = mean over problems of the mean over the k samples of a problem of the score (1 if right)

A sample is one response to a problem. With repeats the same problems are answered R times by k
samples; avg@k is then the mean of the R values, which is the mean over problems of the mean over all
R k samples.

Samples of one problem are not independent: they share its difficulty. The interval therefore has
one value per problem: it is Student's t over the problems' means, for problems drawn from a larger
population. `noise` is another question: how far avg@k would move if the same problems were answered
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb, floor
from typing import Any

import numpy as np

from scaleup.recipe import RunSpec
from scaleup.rollout.pool import Pool
from scaleup.run.sampling import EVALUATION, make_task, request, seeds
from simlab.study.intervals import mean_interval, share_interval
from simlab.study.settings import RunError

UNSEEN = 1_000_003  # the seed of evaluation tasks, which no run trains on


class Evaluator:
    """Asks the problems of `world.evaluation`. Raises RunError where its task has fewer of them."""

    def __init__(self, spec: RunSpec, config: dict[str, Any], tokenizer):
        self.spec, self.settings = spec, spec.world.evaluation
        name, options = self.settings.task, self.settings.task_options
        self.task = make_task(spec, config, tokenizer, name, options, UNSEEN)
        if (n := self.settings.problems) > self.task.size:
            long = self.task.counts.get("long", 0)
            raise RunError(
                f"world.evaluation: {n} problems, but the task has {self.task.size} "
                f"({long} with prompts that are too long are left out)"
            )

    def due(self, step: int, before: int) -> bool:
        """Whether a push of version `step`, after one of version `before`, calls for an evaluation."""
        every = self.spec.world.evaluate_every
        return step // every > before // every

    def evaluate(self, pool: Pool, step: int) -> dict[str, float]:
        """avg@k of the weights that are served after `step` steps; nothing else may be in flight."""
        settings, numbers, scores = self.settings, range(self.settings.problems), {}
        n = settings.samples * settings.repeats
        draws = [seeds(self.spec, EVALUATION, step, i, n) for i in numbers]
        pool.begin([request(self.spec, self.task, i, -1, i, draws[i]) for i in numbers])
        while pool.in_flight:
            for asked, samples in pool.collect(0.5):
                prompts = [self.task.prompt(asked.index)] * n
                scores[asked.index] = self.task.rewards(prompts, [s.output for s in samples])
        by_problem = np.array([scores[i] for i in numbers])
        by_repeat = by_problem.reshape(-1, settings.repeats, settings.samples).swapaxes(0, 1)
        score = avg_at_k(by_repeat)
        return {
            "avg_at_k": score.avg,
            "avg_at_k_low": score.low,
            "avg_at_k_high": score.high,
            "avg_at_k_noise": score.noise,
        }

    def close(self) -> None:
        """End what the task runs."""
        self.task.close()


@dataclass(frozen=True)
class Score:
    """avg@k of one model."""

    avg: float  # avg@k
    low: float  # interval for the mean over a population of problems
    high: float
    noise: float  # standard error of avg for these problems; NaN where each has one sample
    problems: int  # P
    samples: int  # k, of one problem in one repeat
    repeats: int  # R
    each: tuple[float, ...]  # avg@k of every repeat


def _checked(scores) -> np.ndarray:
    """Scores as float64 [R, P, k]. Raises ValueError for another shape or range."""
    x = np.asarray(scores, dtype=float)
    x = x[None] if x.ndim == 2 else x
    if x.ndim != 3 or not x.size:
        raise ValueError(
            f"scores must be [problems, samples] or [repeats, problems, samples], got {x.shape}"
        )
    if not ((x >= 0) & (x <= 1)).all():
        raise ValueError("scores must be in [0, 1]")
    return x


def avg_at_k(scores, level: float = 0.95) -> Score:
    """avg@k of scores [P, k] or [R, P, k] in [0, 1], with an interval over problems.

    Where all problems have the same mean (all wrong, say) t has no width; the interval is then the
    exact binomial one, with a problem as one draw, around the counts next to that mean. With one
    problem it is (0, 1). Raises ValueError for scores of another shape or outside of [0, 1].
    """
    x = _checked(scores)
    R, P, k = x.shape
    means = x.mean((0, 2))
    if P == 1:
        avg, low, high = float(means[0]), 0.0, 1.0
    elif means.max() == means.min():
        avg, count = float(means[0]), float(means[0]) * P
        low = share_interval(floor(count), P, level)[1]
        high = share_interval(ceil(count), P, level)[2]
    else:
        avg, low, high = mean_interval(means, level)
    noise = np.nan
    if R * k > 1:
        spread = x.transpose(1, 0, 2).reshape(P, R * k).var(1, ddof=1)
        noise = float(np.sqrt(spread.sum() / (R * k)) / P)
    each = tuple(x.mean((1, 2)).tolist())
    return Score(avg, max(low, 0.0), min(high, 1.0), noise, P, k, R, each)


def pass_at_k(scores, k: int) -> float:
    """Mean over problems of the chance that one of k samples is right; unbiased, from n >= k samples.

    For c right ones of n it is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).
    Scores are [P, n] or [R, P, n] of 0 and 1; repeats are pooled. Raises ValueError for other
    scores and for k outside of 1..n.
    """
    x = _checked(scores)
    n = x.shape[0] * x.shape[2]
    if not np.isin(x, (0, 1)).all():
        raise ValueError("pass@k needs scores of 0 and 1")
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= {n} samples of a problem, got k = {k}")
    right = x.sum((0, 2)).astype(int).tolist()
    return float(np.mean([1 - comb(n - c, k) / comb(n, k) for c in right]))
