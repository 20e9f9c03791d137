"""Views of a run from its files: state, console, `monitor`, rollouts as text, `report` and experiment trackers."""
