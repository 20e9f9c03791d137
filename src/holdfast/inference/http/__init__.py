"""The web server in front of the engine: who may use which route, what a request may hold, and what answers it."""
