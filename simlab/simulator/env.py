"""The token MDP as a Gymnasium environment: one answer per episode, one token per step.

    import gymnasium, simlab.simulator.env
    env = gymnasium.make("simlab/TokenMDP-v0", task="health")

Importing this module registers the id (`gymnasium.make("simlab.simulator.env:simlab/TokenMDP-v0")` does it in
one go). The reward comes with the last token. For millions of tokens use `sample.sample`, which
agrees with this environment in distribution (tested) and runs lanes of worlds at once.
"""

from __future__ import annotations

import gymnasium
import numpy as np

from simlab.simulator.config import WorldSpec
from simlab.simulator.rng import WORLD, Generators
from simlab.simulator.tasks import TASKS


class TokenMDPEnv(gymnasium.Env):
    """Observation (prompt, position, automaton state); action = token; the prompt is drawn at reset.

    `world_seed` fixes the MDP (the same number gives the simulator's world of that seed); `reset`
    seeds only what happens in it. Arguments are checked like those of `simlab compare`.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own convention)

    def __init__(
        self,
        task: str = "health",
        prompts: int = 8,
        horizon: int = 10,
        vocab: int = 8,
        world_seed: int = 0,
        render_mode: None = None,
    ):
        WorldSpec(task=task, prompts=prompts, horizon=horizon, vocab=vocab)
        rng = Generators([world_seed], WORLD).generators[0]
        self.world = TASKS[task].build(rng, P=prompts, T=horizon, V=vocab)
        P, T, M, V = self.world.sizes
        self.observation_space = gymnasium.spaces.MultiDiscrete([P, T + 1, M])
        self.action_space = gymnasium.spaces.Discrete(V)
        self.render_mode = render_mode
        self._next, self._reward = self.world.next_state[0].numpy(), self.world.reward[0].numpy()
        self._state = None

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """A prompt drawn uniformly, position 0."""
        super().reset(seed=seed)
        prompt = int(self.np_random.integers(self.world.sizes[0]))
        self._state = prompt, 0, int(self.world.start[0, prompt])
        return np.array(self._state), {}

    def step(self, action: int):
        """One token; terminated, with the answer's reward, after the last one.

        Raises ValueError for an action that is no token, and outside of an episode.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"action must be one of {self.action_space.n} tokens, got {action!r}")
        if self._state is None:
            raise ValueError("the answer is over (or not begun): call reset()")
        prompt, t, m = self._state
        m = int(self._next[prompt, t, m, action])
        self._state = prompt, t + 1, m
        seen, done = np.array(self._state), t + 1 == self.world.sizes[1]
        self._state = None if done else self._state
        return seen, float(self._reward[prompt, m]) if done else 0.0, done, False, {}


gymnasium.register("simlab/TokenMDP-v0", entry_point="simlab.simulator.env:TokenMDPEnv")
