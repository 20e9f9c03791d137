"""The inference servers, as the orchestrator sees them: readiness, ownership, requests, answers, and loss of one."""
