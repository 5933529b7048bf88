"""Strategies, one file each. `apply_*` takes a module, a mesh and plain values and changes the module in place."""
