"""Settings of `trainer` that advantages need."""

from typing import Any

ONLINE_DPO_LOSS = {"type": "policy_gradient", "ratio_to": "old", "aggregation": "constant", "constant_tokens": 1,
                   "correction": {"type": "none"}}  # fmt: skip

NEEDED: dict[str, dict[str, Any]] = {
    "gdpo": {"rewards": {"weights": {"reward": 1.0, "other": 0.5}}},
    "pass_at_k": {"advantage": {"type": "pass_at_k", "k": 2}}, "gae": {"critic": {}},
    "distillation": {"kl": {"reference": "teacher"}}, "online_dpo": {"kl": {}, "loss": ONLINE_DPO_LOSS},
}  # fmt: skip
"""Settings that advantages do not do without, by name."""
