"""From optimizer step to the first token of the new version, by both transports."""
