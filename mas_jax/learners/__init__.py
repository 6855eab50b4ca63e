"""How policies change: credit, losses, packing, updates."""
