"""One optimizer step over the mesh: what ranks must agree on (loss weights, norm, overflow, skips) and the update."""
