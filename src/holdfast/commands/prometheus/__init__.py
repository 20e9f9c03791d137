"""A run for Prometheus: the launcher serves at `/metrics` what the files of the run say, and which processes live."""
