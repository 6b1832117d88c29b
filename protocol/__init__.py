"""What the processes of a cluster say to each other: errors, requests, messages, membership, instants. Knows nothing of tensors, Ray or HTTP."""
