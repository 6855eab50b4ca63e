"""What a policy computes: pure functions over plain trees of arrays."""
