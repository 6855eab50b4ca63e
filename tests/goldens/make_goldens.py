"""Writes the golden models beside this file: tiny random transformers models, their logits and greedy tokens.

Run from the root of the checkout, in the environment that has torch:

    .venv-parity/bin/python tests/goldens/make_goldens.py
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
KINDS = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
LENGTHS = (3, 9, 16)
NEW = 24


def make_model(family: str, tied: bool, seed: int) -> PreTrainedModel:
    """A model whose weights are large enough that attention, norms and rotary positions all show in the logits."""
    config, kind = KINDS[family]
    torch.manual_seed(seed)
    model = kind(config(
        vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.3,
        rope_theta=10000.0 if family == "llama" else 1000000.0, rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=257,
        pad_token_id=258,
    ))  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(0.2 * torch.randn_like(weight))
    return model.float().eval()


@torch.no_grad()
def answers(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """Ragged prompts one behind the other with the logits of each, and NEW greedy tokens with their top-2 margins."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 272, length) for length in LENGTHS]
    logits, greedy, margins = [], [], []
    for prompt in prompts:
        ids = torch.tensor(prompt)[None]
        logits.append(model(ids).logits[0].numpy())
        for _ in range(NEW):
            top = model(ids).logits[0, -1].topk(2)
            greedy.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            ids = torch.cat([ids, top.indices[None, :1]], dim=1)
    shape = (len(prompts), NEW)
    return {
        "lengths": np.array(LENGTHS), "tokens": np.concatenate(prompts), "logits": np.concatenate(logits),
        "greedy": np.array(greedy).reshape(shape), "margins": np.array(margins, np.float32).reshape(shape),
    }  # fmt: skip


def main() -> None:
    """Write every golden directory."""
    names = [(family, tied) for family in KINDS for tied in (True, False)]
    for seed, (family, tied) in enumerate(names):
        target = HERE / f"{family}_{'tied' if tied else 'untied'}"
        model = make_model(family, tied, seed)
        model.save_pretrained(target)
        golden = answers(model, seed)
        np.savez_compressed(target / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in target.iterdir())
        print(f"{target.name}: {size / 1000:.0f} kB, margin clear at {np.mean(golden['margins'] > 1e-2):.0%}")


if __name__ == "__main__":
    main()
