"""Where the processes of a run are: on this machine, or on the hosts of a cluster."""
