"""What holds the policy back: divergence from its reference, coefficients of KL penalty and entropy bonus."""
