"""The inference server: vLLM behind routes of our own, whose weights are swapped while it runs.

Nothing else of the project imports vLLM.
"""
