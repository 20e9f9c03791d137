"""Training on pairs of a preferred and a rejected answer: policies (`dpo`) and reward models (`reward-model`)."""
