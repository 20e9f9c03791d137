"""From the orchestrator's batches to the minibatches of one step: checks, replay, samples, packing, chosen tokens."""
