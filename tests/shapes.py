"""The one tiny model and the one set of shapes that tests use, so that they share compiled programs."""

from dataclasses import replace

from mas_jax.models.rope import Rope
from mas_jax.models.transformer import LayerKind, ModelConfig

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

EXPERTS = replace(TINY, family="qwen3_moe", mlp=16, experts=8, experts_per_token=2, normed_gates=True)

# Local layers whose window begins inside a chunk and ends in the next, and a layer that sees everything.
GEMMA = replace(
    TINY, family="gemma3", kinds=(LayerKind(Rope(1e4), CHUNK + 3), LayerKind(Rope(1e6))), pattern=(0, 1),
    sandwich_norms=True, zero_centred_norms=True, activation="gelu_tanh", attention_scale=0.5, final_softcap=5.0,
    scaled_embeddings=True,
)  # fmt: skip
