"""Environments: the interface that users implement, built-in environments, tools, judges and harnesses."""
