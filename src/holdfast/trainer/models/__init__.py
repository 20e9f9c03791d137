"""The models that are trained, their adapters, and their weights as files that others read."""
