"""The command `evaluate`: find the policy, start what serves it, have it evaluated, and show what came out."""
