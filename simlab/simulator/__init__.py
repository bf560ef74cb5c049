"""The toy world, exact and sampled, and `simlab compare`. Imports everything of simlab but verify."""
