"""What the three processes say to one another: batches, requests, digests of a policy."""
