"""The claims of theory/, attacked and written up: `simlab verify`. Imports theory and simulator."""
