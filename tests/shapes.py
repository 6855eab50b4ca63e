"""The one tiny model and the one set of shapes that tests use, so that they share compiled programs."""

from mas_jax.models.transformer import ModelConfig

# The vocabulary holds 256 bytes and specials, and divides by 8 devices.
TINY = ModelConfig(
    family="qwen3",
    vocab=272,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=64,
    qk_norm=True,
    max_positions=128,
)

SLOTS = 8
PREFILL_ROWS = 4
CHUNK = 16
BLOCK = 4
CONTEXT = 128

ROWS = 4
LENGTHS = (64, 128)
