"""One asynchronous run on Ray. Imports rollout, trainer, tasks, plan and recipe."""
