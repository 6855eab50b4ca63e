"""How agents act: the generator contract, the driver that plays episodes, and the engine that samples."""
