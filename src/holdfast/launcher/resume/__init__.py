"""resume."""
