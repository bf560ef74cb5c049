"""Tasks, policies, sampling and the Gymnasium face of the world agree with each other."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from scipy import stats

import simlab.simulator.env  # registers the id
from simlab.core.advantages import group_advantage
from simlab.simulator.config import WorldSpec
from simlab.simulator.exact import evaluate, values, visitation
from simlab.simulator.policies import POLICIES
from simlab.simulator.pretrain import pretrain
from simlab.simulator.rng import SAMPLE, Generators
from simlab.simulator.sample import cumulative, full_distribution, sample, token_batch
from simlab.simulator.tasks import TASKS
from simlab.study.strict import ConfigError

SIZES = {name: (4, 3, 3) if name == "tree" else (4, 6, 5) for name in TASKS}


def make(task, seed=0):
    P, T, V = SIZES[task]
    return TASKS[task].build(Generators([seed], 0).generators[0], P=P, T=T, V=V)


@pytest.mark.parametrize("task", TASKS)
def test_a_world_is_a_probability_model(task):
    """Base rows sum to 1, next states and start exist, rewards lie in [0, 1]; same seed, same world."""
    world = make(task)
    P, T, M, _ = world.sizes
    assert torch.allclose(world.base.exp().sum(-1), torch.ones(1, P, T, M, dtype=torch.float64))
    assert world.next_state.min() >= 0
    assert world.next_state.max() < M
    assert world.start.max() < M
    assert world.reward.min() >= 0
    assert world.reward.max() <= 1
    assert torch.equal(world.base, make(task).base)
    assert not torch.equal(world.base, make(task, 1).base)


def test_rewards_of_known_answers():
    """health heals and kills, needle forgives nothing, modsum counts, tree remembers the prefix."""
    health = make("health")
    step = health.next_state[0, 0, 0]
    assert (step[0] == 0).all()
    assert sorted(step[2].tolist()) == [1, 1, 1, 1, 2]
    assert sorted(step[1].tolist()) == [0, 0, 0, 0, 2]
    assert health.reward[0, 0].tolist() == [0, 1, 1]
    needle = make("needle").next_state[0, 0, 0]
    assert (needle[0] == 0).all()
    assert sorted(needle[1].tolist()) == [0, 0, 0, 0, 1]
    modsum = make("modsum").next_state[0, 0, 0]
    assert ((modsum[1] - modsum[0]) % 3 == (modsum[2] - modsum[1]) % 3).all()
    tree = make("tree").next_state[0, 0]
    assert tree[2, tree[1, tree[0, 0, 2], 0], 1] == 2 * 9 + 0 * 3 + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_pretraining_fits_the_base_policy(policy):
    """Tabular exactly, the others well below the entropy of guessing; lanes do not see each other."""
    spec = WorldSpec(policy=policy)
    world, X, w = pretrain(spec, (0, 1))
    logp = torch.log_softmax(POLICIES[policy].logits(w, X), -1).double().view(world.base.shape)
    kl = (world.base.exp() * (world.base - logp)).sum(-1).mean().item()
    assert kl < {"tabular": 1e-6, "linear": 1.0, "moe": 0.6}[policy]
    alone = pretrain(spec, (1,))
    assert torch.allclose(alone[2][next(iter(w))][0], w[next(iter(w))][1], atol=2e-3)


def test_default_world_has_room_both_ways():
    """J before training is near 0.3, as the experiments assume."""
    world, X, w = pretrain(WorldSpec(), tuple(range(8)))
    logp = torch.log_softmax(POLICIES["moe"].logits(w, X), -1).view(8, *world.sizes)
    J = evaluate(world, logp, logp)["J"]
    assert 0.2 < J.mean().item() < 0.4


def batched(world, logp, G, seed=0):
    P, T = world.sizes[:2]
    return sample(world, cumulative(logp), Generators([seed], SAMPLE).uniform(P, G, T))


@pytest.mark.parametrize("task", TASKS)
def test_sampler_has_the_exact_mean_and_visits(task):
    """Mean reward and state visits of 4,000 answers a prompt agree with the dynamic program."""
    world = make(task)
    P, T, M, V = world.sizes
    answers = batched(world, world.base, 4000)
    J, _ = values(world, world.base.exp())
    error = answers.reward.std().item() / np.sqrt(4000 * P)
    assert answers.reward.mean().item() == pytest.approx(J.item(), abs=4 * error)
    counts = torch.bincount(answers.slot[0], minlength=P * T * M * V).view(P, T, M, V) / 4000
    expected = visitation(world, world.base.exp())[0, ..., None] * world.base[0].exp()
    assert (counts - expected).abs().max() < 4 * 0.5 / np.sqrt(4000)


def test_sampler_never_draws_what_mu_excludes():
    """A token with log mu = -inf is never sampled, also at the ends of the row."""
    world = make("health")
    logp = world.base.clone()
    logp[..., 0], logp[..., -1] = -torch.inf, -torch.inf
    slots = batched(world, torch.log_softmax(logp, -1), 2000).slot
    assert set((slots % 5).unique().tolist()) <= {1, 2, 3}


def test_token_batch_reads_the_tables():
    """Log-probs come from the right state and token, advantages are constant per answer."""
    world = make("health")
    answers = batched(world, world.base, 4)
    tables = {"logp": world.base, "logp_mu": world.base - 1, "logp_prox": world.base - 2}
    advantage = group_advantage(answers.reward)
    b = token_batch(answers, tables, advantage, age=7)
    P, T, _, _ = world.sizes
    assert b.logp.shape == (1, P * 4 * T)
    assert torch.equal(b.logp_mu, b.logp - 1)
    assert torch.equal(b.logp_prox, b.logp - 2)
    assert (b.age == 7).all()
    assert b.n_responses == P * 4
    per_answer = b.advantage.view(P, 4, T)
    assert (per_answer == per_answer[..., :1]).all()
    assert b.logp[0, 0] == world.base.flatten()[answers.slot[0, 0]]


def test_the_full_distribution_at_the_state_of_a_token():
    """Entropy, Gini, TV, top-k and position, against sums over the row of each sampled token."""
    world = make("health")
    P, T, _, V = world.sizes
    answers = batched(world, world.base, 4)
    logp, logp_mu = (torch.log_softmax(world.base + k * world.base.sin(), -1) for k in (1, 2))
    wanted = ("entropy_mu", "entropy_prox", "gini_mu", "tv", "topk", "topk_mu", "stratum")
    tables = {"logp": logp, "logp_mu": logp_mu, "logp_prox": logp}
    found = full_distribution(wanted, answers, tables, T)
    assert set(found) == set(wanted)
    p, m = logp.exp().view(-1, V), logp_mu.exp().view(-1, V)
    for i in range(0, P * 4 * T, 7):
        state, token = divmod(int(answers.slot[0, i]), V)
        row, other = m[state], p[state]
        assert found["entropy_mu"][0, i] == pytest.approx(float(-(row * row.log()).sum()))
        assert found["entropy_prox"][0, i] == pytest.approx(float(-(other * other.log()).sum()))
        assert found["gini_mu"][0, i] == pytest.approx(float(1 - (row**2).sum()))
        assert found["tv"][0, i] == pytest.approx(float((row - other).abs().sum() / 2))
        assert found["stratum"][0, i] == i % T
        likeliest = row.topk(V).indices
        mass = [0.0 if j == token else float(row[j]) for j in likeliest]
        assert found["topk_mu"][0, i].exp().tolist() == pytest.approx(mass)
        mass = [0.0 if j == token else float(other[j]) for j in likeliest]
        assert found["topk"][0, i].exp().tolist() == pytest.approx(mass)


ID = "simlab/TokenMDP-v0"


@pytest.mark.filterwarnings("error")
def test_check_env():
    """Gymnasium's own checker passes without a warning, on every task."""
    for task in TASKS:
        small = {"horizon": 3, "vocab": 3} if task == "tree" else {}
        check_env(gymnasium.make(ID, task=task, **small).unwrapped)


def test_reset_is_seeded_once_and_then_continues():
    """Case C095: reset(seed=7), reset(), reset() gives the same observations in two copies."""

    def three(env):
        return [env.reset(seed=7)[0].tolist(), env.reset()[0].tolist(), env.reset()[0].tolist()]

    assert three(gymnasium.make(ID)) == three(gymnasium.make(ID))


def test_episode_ends_with_the_reward():
    """Bool flags, a float reward on the last token only, and the next-step autoreset of case C097."""
    env = gymnasium.make_vec(ID, num_envs=1, horizon=2)
    env.reset(seed=0)
    ended = [bool(env.step(np.array([0]))[2][0]) for _ in range(6)]
    assert ended == [False, True, False, False, True, False]
    one = gymnasium.make(ID, horizon=1).unwrapped
    one.reset(seed=0)
    _, reward, terminated, truncated, _ = one.step(0)
    assert terminated is True
    assert truncated is False
    assert isinstance(reward, float)


def test_an_action_that_cannot_be():
    """No token, a negative index, a step after the end: a sentence."""
    env = gymnasium.make(ID, horizon=1, vocab=4).unwrapped
    with pytest.raises(ValueError, match="call reset"):
        env.step(0)
    env.reset(seed=0)
    for action in (-1, 4, 0.5):
        with pytest.raises(ValueError, match="action must be one of 4 tokens, got"):
            env.step(action)
    env.step(3)
    with pytest.raises(ValueError, match="call reset"):
        env.step(0)


def test_vector_env_agrees_with_the_batched_sampler():
    """Same world, same policy: final rewards and last automaton states have the same distribution."""
    V, T, episodes = 4, 4, 3000
    env = gymnasium.make_vec(ID, num_envs=50, prompts=2, horizon=T, vocab=V, world_seed=3)
    world = env.envs[0].unwrapped.world
    rng = np.random.default_rng(0)
    p = world.base[0].exp().numpy()
    states, _ = env.reset(seed=1)
    ends = []
    while len(ends) < episodes:
        playing = states[:, 1] < T
        rows = p[states[:, 0], np.minimum(states[:, 1], T - 1), states[:, 2]]
        actions = (rows.cumsum(-1) < rng.random((50, 1))).sum(-1).clip(max=V - 1)
        states, _, done, _, _ = env.step(actions)
        ends += [tuple(s) for s, d, live in zip(states, done, playing, strict=True) if d and live]
    count = np.zeros((2, 3))
    for prompt, _, m in ends:
        count[prompt, m] += 1
    slots = batched(world, world.base, 3000).slot.view(2, 3000, T)[..., -1]
    m_last = world.next_state.flatten()[slots]
    other = np.array([[int((m_last[q] == m).sum()) for m in range(3)] for q in range(2)])
    for q in range(2):
        table = np.stack([count[q], other[q]])
        assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-3
    assert stats.binomtest(int(count[0].sum()), len(ends)).pvalue > 1e-3


@pytest.mark.parametrize(
    "arguments", [{"task": "helth"}, {"horizon": 0}, {"vocab": 1}, {"prompts": -1}]
)
def test_impossible_worlds_are_refused(arguments):
    """The environment checks its arguments like the command line does."""
    with pytest.raises(ConfigError):
        simlab.simulator.env.TokenMDPEnv(**arguments)
    with pytest.raises(ConfigError, match="at most 4,194,304"):
        simlab.simulator.env.TokenMDPEnv(task="tree")
