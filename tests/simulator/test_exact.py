"""The dynamic program against brute-force enumeration of every answer, on tree and on small DFAs."""

import itertools

import numpy as np
import pytest
import torch

from simlab.simulator.exact import XI, evaluate, total_variation, values, visitation
from simlab.simulator.rng import Generators
from simlab.simulator.tasks import TASKS
from simlab.simulator.tasks.world import World

SHAPES = [
    ("tree", 2, 4, 3),
    ("tree", 1, 1, 2),
    ("health", 2, 4, 3),
    ("needle", 1, 3, 4),
    ("modsum", 2, 5, 2),
]


def instance(task, P, T, V, seed=0, support=False):
    """A world and two random policies; with `support`, mu misses some tokens that pi has."""
    rng = Generators([seed], 9).generators[0]
    world = TASKS[task].build(rng, P=P, T=T, V=V)
    z = torch.from_numpy(rng.normal(size=(1, P, T, world.sizes[2], V)))
    logp = torch.log_softmax(z, -1)
    moved = z + 0.7 * torch.from_numpy(rng.normal(size=z.shape))
    if support:
        moved = torch.where(torch.from_numpy(rng.random(z.shape)) < 0.3, -torch.inf, moved)
        moved[..., 0] = z[..., 0]
    return world, logp, torch.log_softmax(moved, -1)


def enumerate_answers(world: World, logp, logp_mu):
    """All quantities of `evaluate` by looping over V**T answers per prompt, in plain Python."""
    P, T, _, V = world.sizes
    p, m = logp[0].exp().numpy(), logp_mu[0].exp().numpy()
    total = dict.fromkeys(("J", "J_mu", "L_prime", "tv_sum"), 0.0)
    tv_max = 0.0
    for prompt in range(P):
        for answer in itertools.product(range(V), repeat=T):
            state, prob, prob_mu, drift = int(world.start[0, prompt]), 1.0, 1.0, 0.0
            tv_sum = 0.0
            for t, a in enumerate(answer):
                row, row_mu = p[prompt, t, state], m[prompt, t, state]
                tv = 0.5 * np.abs(row - row_mu).sum()
                if prob_mu > 0:
                    tv_max = max(tv_max, tv)
                tv_sum += tv
                prob, prob_mu = prob * row[a], prob_mu * row_mu[a]
                drift += row[a] / row_mu[a] - 1 if row_mu[a] > 0 else 0.0
                state = int(world.next_state[0, prompt, t, state, a])
            R = float(world.reward[0, prompt, state])
            total["J"] += prob * R / P
            total["J_mu"] += prob_mu * R / P
            total["L_prime"] += prob_mu * R * drift / P
            total["tv_sum"] += prob_mu * tv_sum / P
    return total | {"tv_max": tv_max}


@pytest.mark.parametrize(("task", "P", "T", "V"), SHAPES)
@pytest.mark.parametrize("support", [False, True])
def test_matches_enumeration(task, P, T, V, support):
    """J, J_mu, L', tv_sum and tv_max agree with enumeration to 1e-12, also where mu misses tokens."""
    world, logp, logp_mu = instance(task, P, T, V, support=support)
    found, truth = evaluate(world, logp, logp_mu), enumerate_answers(world, logp, logp_mu)
    for name, x in truth.items():
        assert found[name].item() == pytest.approx(x, abs=1e-12), name


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold(seed):
    """The remainder never exceeds either penalty, and is 0 for T = 1."""
    world, logp, logp_mu = instance("tree", 2, 4, 3, seed)
    x = {k: v.item() for k, v in evaluate(world, logp, logp_mu).items()}
    assert x["remainder"] <= min(x["penalty_mean"], x["penalty_max"]) + 1e-12
    assert x["penalty_mean"] == pytest.approx(4 * XI * x["tv_sum"])
    assert x["penalty_max"] == pytest.approx(2 * XI * 4 * 3 * x["tv_max"] ** 2)
    world, logp, logp_mu = instance("tree", 2, 1, 3, seed)
    assert evaluate(world, logp, logp_mu)["remainder"].item() == pytest.approx(0, abs=1e-14)


def test_equal_policies_are_at_distance_zero():
    """mu = pi: nothing to cover, no distance."""
    world, logp, _ = instance("health", 2, 4, 3)
    x = evaluate(world, logp, logp)
    for name in ("L_prime", "remainder", "tv_sum", "tv_max", "penalty_mean", "penalty_max"):
        assert x[name].item() == pytest.approx(0, abs=1e-15)


def test_lanes_are_independent():
    """Two worlds side by side give what each gives alone."""
    one, two = instance("health", 2, 4, 3, 1), instance("health", 2, 4, 3, 2)
    both = evaluate(
        World.stack([one[0], two[0]]), torch.cat([one[1], two[1]]), torch.cat([one[2], two[2]])
    )
    for lane, (world, logp, logp_mu) in enumerate((one, two)):
        for name, x in evaluate(world, logp, logp_mu).items():
            assert both[name][lane].item() == pytest.approx(x.item(), abs=1e-14)


def test_visits_and_values_are_consistent():
    """Visits sum to 1 at each position, and J equals visits times the one-step value."""
    world, logp, _ = instance("health", 3, 5, 4)
    p = logp.exp()
    visits, (J, q) = visitation(world, p), values(world, p)
    assert torch.allclose(visits.sum(-1), torch.ones(1, 3, 5, dtype=p.dtype))
    for t in range(5):
        through = (visits[:, :, t, :, None] * p[:, :, t] * q[:, :, t]).sum((2, 3)).mean(1)
        assert through.item() == pytest.approx(J.item(), abs=1e-13)
    assert total_variation(p, p).max() == 0
