"""What the three processes say to one another.

inference_api    HTTP between the orchestrator, or a launcher, and the inference server: every route, body and answer
rollouts         batches of rollouts, from the orchestrator to the trainer
arrays           numbers per token, packed, in both
sampling         the distribution that tokens are sampled from
sampled_checks   what no policy can have sampled
canary           log-probabilities of a fixed text, by which trainer and engine show that they hold the same policy
admin_token      the secret that the server's admin routes ask for
"""
