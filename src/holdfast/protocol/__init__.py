"""Messages between processes: the HTTP API of the inference server, and the batches that the trainer reads."""
