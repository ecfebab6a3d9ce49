"""Ray: connecting to a cluster, deploying replicas, and calling them from other processes."""
