"""The reference: one seed at a time, in Python and numpy, the same numbers as simlab.simulator.train.

Written as well as that allows: cumulative tables made once per broadcast, nested lists and bisect
for the draws, closed-form gradients over all tokens of the seed's batch, no autograd, no float64
where float32 will do. For contrast, a second sampler is the usual env.step with rng.choice, and a
second gradient (`token_by_token`) evaluates the policy and its gradient for one token after another.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from simlab.lag import Interval
from simlab.simulator.config import Cell
from simlab.simulator.env import TokenMDPEnv
from simlab.simulator.policies.moe import EXPERTS, UNITS
from simlab.simulator.pretrain import pretrain
from simlab.simulator.rng import NOISE, SAMPLE

LAG, SCALE, EPS = 8, 0.05, 0.2


ALL = slice(None)


def tabular(w: dict, X: np.ndarray, router: float | np.ndarray = 0.0, rows: slice = ALL):
    """Logits [S, V] of some states and the map from their gradient to the weights'."""

    def pull(dz):
        g = np.zeros_like(w["z"])
        g[rows] = dz
        return {"z": g}

    return w["z"][rows], pull


def moe(w: dict, X: np.ndarray, router: float | np.ndarray = 0.0, rows: slice = ALL):
    """The same for the mixture of experts of simlab.simulator.policies.moe; `router` is noise on its logits."""
    X = X[rows]
    g = X @ w["router"] + router
    share = np.exp(g - g.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    chosen = np.arange(EXPERTS) == g.argmax(-1)[:, None]
    gate = np.repeat(share * chosen, UNITS, axis=-1)
    h = np.tanh(X @ w["up"])
    y = h * gate

    def pull(dz):
        dy = dz @ w["down"].T
        dgate = (dy * h).reshape(-1, EXPERTS, UNITS).sum(-1)
        dg = (dgate * share * chosen).sum(-1, keepdims=True) * (chosen - share)
        return {"router": X.T @ dg, "up": X.T @ (dy * gate * (1 - h * h)), "down": y.T @ dz}

    return y @ w["down"], pull


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the bfloat16 grid, ties to even."""
    u = x.view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class Lane:
    """One seed: its world as Python lists, weights and features as arrays."""

    def __init__(self, c: Cell, seed: int):
        world, X, w = pretrain(c.world, c.seeds)
        i = c.seeds.index(seed)
        self.seed, self.sizes, self.lag = seed, world.sizes, Interval(LAG)
        self.net, self.lr, self.G = globals()[c.world.policy], c.training.lr, c.world.answers
        self.X, self.w = X[i].numpy(), {name: x[i].numpy().copy() for name, x in w.items()}
        P, T, M, _ = self.sizes
        block = np.arange(P * T).reshape(P, T, 1, 1) * M  # row = (prompt, t, m)
        self.after = (world.next_state[i].numpy() + block + M).reshape(P * T * M, -1).tolist()
        self.first = [p * T * M + m for p, m in enumerate(world.start[i].tolist())]
        self.last = [(p + 1) * T * M for p in range(P)]  # rows after T tokens start here
        self.reward = world.reward[i].tolist()
        self.uniforms = np.random.default_rng([seed, SAMPLE, 0])
        self.rng, self.env = np.random.default_rng(seed), TokenMDPEnv(world_seed=seed)

    def engine(self, step: int) -> np.ndarray:
        """log mu [S, V] of a broadcast."""
        P, T, M, V = self.sizes
        rng, router = np.random.default_rng([self.seed, NOISE, 0, step]), 0.0
        if "router" in self.w:
            router = SCALE * rng.standard_normal((P * T * M, EXPERTS), dtype=np.float32)
        z, _ = self.net({name: bf16(x) for name, x in self.w.items()}, self.X, router)
        noise = rng.standard_normal((P, T, M, V), dtype=np.float32).reshape(-1, V)
        return log_softmax(z + SCALE * noise)

    def bisect(self, levels: list[list[float]]) -> tuple[list, list]:
        """Answers by cumulative tables: slots (row * V + token) and rewards."""
        P, T, _, V = self.sizes
        slots, rewards, after = [], [], self.after
        u = self.uniforms.random((P, self.G, T)).tolist()
        for first, last, reward, group in zip(self.first, self.last, self.reward, u, strict=True):
            for answer in group:
                row = first
                for x in answer:
                    token = bisect_right(levels[row], x)
                    slots.append(row * V + token)
                    row = after[row][token]
                rewards.append(reward[row - last])
        return slots, rewards

    def gymnasium(self, p: np.ndarray) -> tuple[list, list]:
        """Answers by env.step and rng.choice."""
        P, T, M, V = self.sizes
        slots, rewards, env = [], [], self.env
        for prompt in range(P):
            for _ in range(self.G):
                env.reset()
                state, done = (prompt, 0, M - 1), False
                env._state = state  # the group's prompt instead of a drawn one
                while not done:
                    row = (state[0] * T + state[1]) * M + state[2]
                    token = self.rng.choice(V, p=p[row])
                    slots.append(row * V + token)
                    state, reward, done, _, _ = env.step(token)
                rewards.append(reward)
        return slots, rewards

    def table(self, log_mu: np.ndarray, sampler: str):
        """What the sampler reads, from log mu; made once per broadcast."""
        p = np.exp(log_mu.astype(np.float64))
        p /= p.sum(-1, keepdims=True)
        return p if sampler == "gymnasium" else p.cumsum(-1)[:, :-1].tolist()

    def advantages(self, rewards: list) -> np.ndarray:
        """GRPO's, one per token."""
        P, T, _, _ = self.sizes
        R = np.array(rewards).reshape(P, self.G)
        A = (R - R.mean(-1, keepdims=True)) / (R.std(-1, ddof=1, keepdims=True) + 1e-6)
        return np.repeat(A.astype(np.float32).ravel(), T)

    def gradient(self, log_mu: np.ndarray, slots: list, rewards: list):
        """Loss and gradients of PPO's clip on GRPO advantages, token mean."""
        z, pull = self.net(self.w, self.X)
        logp, slot, A = log_softmax(z), np.array(slots), self.advantages(rewards)
        r = np.exp(logp.ravel()[slot] - log_mu.ravel()[slot])
        up, down = (A > 0) & (r > 1 + EPS), (A < 0) & (r < 1 - EPS)
        loss = -(np.where(up, 1 + EPS, np.where(down, 1 - EPS, r)) * A).mean()
        weight = np.where(up | down, 0, r * A) / slot.size
        G = -np.bincount(slot, weight, logp.size).astype(np.float32).reshape(logp.shape)
        return loss, pull(G - np.exp(logp) * G.sum(-1, keepdims=True))

    def token_by_token(self, log_mu: np.ndarray, slots: list, rewards: list):
        """The same, one token after another."""
        loss, grads = 0.0, {name: np.zeros_like(x) for name, x in self.w.items()}
        for slot, A in zip(slots, self.advantages(rewards).tolist(), strict=True):
            row, token = divmod(slot, log_mu.shape[-1])
            z, pull = self.net(self.w, self.X, rows=slice(row, row + 1))
            logp = log_softmax(z)
            r = np.exp(logp[0, token] - log_mu[row, token])
            loss -= min(r * A, np.clip(r, 1 - EPS, 1 + EPS) * A) / len(slots)
            if A and not (r > 1 + EPS if A > 0 else r < 1 - EPS):
                dz = r * A / len(slots) * np.exp(logp)
                dz[0, token] -= r * A / len(slots)
                for name, g in pull(dz.astype(np.float32)).items():
                    grads[name] += g
        return loss, grads

    def train(self, steps: int, sampler: str = "bisect", gradient: str = "gradient") -> list[tuple]:
        """`steps` whole steps: (loss, gradient norm, mean reward) of each."""
        engine, rows = {}, []
        for step in range(steps):
            if self.lag.broadcast_now(step):
                log_mu = self.engine(step)
                engine[step] = log_mu, self.table(log_mu, sampler)
            log_mu, table = engine[self.lag.version(step)]
            slots, rewards = getattr(self, sampler)(table)
            loss, grads = getattr(self, gradient)(log_mu, slots, rewards)
            norm = sum((g.astype(np.float64) ** 2).sum() for g in grads.values()) ** 0.5
            self.w = {name: x - np.float32(self.lr) * grads[name] for name, x in self.w.items()}
            rows.append((loss, norm, sum(rewards) / len(rewards)))
        return rows
