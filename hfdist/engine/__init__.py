"""One optimizer step over the mesh: what ranks must agree on (weights of losses, norm, overflow, skips) and the update."""
