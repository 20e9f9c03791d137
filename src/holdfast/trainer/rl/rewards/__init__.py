"""From what environments and reward models say to the rewards that advantages are computed from."""
