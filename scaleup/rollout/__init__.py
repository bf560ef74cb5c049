"""SGLang: engines, checked weight pushes, a pool that routes and restarts. Imports models and world."""
