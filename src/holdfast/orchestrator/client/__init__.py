"""Client of the inference servers: asks several engines of one model, retries, and copes with lost engines."""
