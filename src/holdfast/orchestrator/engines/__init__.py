"""The inference servers, as the orchestrator sees them: readiness, requests, answers, teachers."""
