"""Tiny random transformers models of every family and variant, and the golden ones recorded beside this file.

A golden is a model with its logits, greedy tokens and some gradients. Run from the root of the checkout, in the environment
that has torch:

    .venv-parity/bin/python tests/goldens/make_goldens.py
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

HERE = Path(__file__).parent
LENGTHS = (2, 9, 14)
NEW = 24
# Settings of the goldens are not their families' defaults, so one that is not read shows; the epsilon is large to show at all.
SIZES = {
    "vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128, "initializer_range": 0.3, "rms_norm_eps": 1e-2,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
EIGHT = {"head_dim": 8}
WINDOW = {"sliding_window": 8}  # shorter than most prompts
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(kind: str, theta: float, **settings: float) -> dict[str, object]:
    """Rotary settings as transformers 5 has them."""
    return {"rope_type": kind, "rope_theta": theta, **settings}


# With these bases and original positions, of the four pairs of a head some are kept, some stretched and some between.
LLAMA_3_ROPE = rope(
    "llama3", 100.0, factor=4.0, original_max_position_embeddings=8, low_freq_factor=0.25, high_freq_factor=1.0
)
YARN = rope("yarn", 20.0, factor=4.0, original_max_position_embeddings=16)
STRETCHED = {"max_position_embeddings": 64}
BASE = {"rope_parameters": rope("default", 1000.0)}
GEMMA = EIGHT | WINDOW | {"query_pre_attn_scalar": 3, "layer_types": [SLIDING, FULL]}
GEMMA_3_ROPE = {"rope_parameters": {SLIDING: rope("default", 30.0), FULL: rope("linear", 300.0, factor=4.0)}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# name: (architecture, settings beyond SIZES)
GOLDENS = {
    "llama_tied": ("Llama", EIGHT | {"rope_parameters": LLAMA_3_ROPE}),
    "llama_untied": ("Llama", EIGHT | UNTIED | BASE),
    "mistral_untied": ("Mistral", BASE | UNTIED | WINDOW | {"head_dim": 16}),
    "qwen2_tied": ("Qwen2", BASE),
    "qwen3_tied": ("Qwen3", EIGHT | BASE),
    "qwen3_untied": ("Qwen3", EIGHT | UNTIED | BASE),
    "smollm3_tied": ("SmolLM3", BASE | {"no_rope_layers": [1, 0]}),
    "gemma2_tied": ("Gemma2", BASE | GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3_tied": ("Gemma3Text", GEMMA | GEMMA_3_ROPE),
    "qwen3moe_tied": ("Qwen3Moe", EIGHT | BASE | EXPERTS | {"norm_topk_prob": True}),
}
FOUR = {"num_hidden_layers": 4}
BIASES = {"attention_bias": True}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
VARIANTS = GOLDENS | {
    "llama_linear": ("Llama", EIGHT | {"rope_parameters": rope("linear", 100.0, factor=4.0)}),
    "llama_yarn": ("Llama", EIGHT | STRETCHED | {"rope_parameters": YARN}),
    "llama_biases": ("Llama", EIGHT | BIASES | {"mlp_bias": True}),
    "mistral_whole": ("Mistral", EIGHT | {"sliding_window": None}),
    "qwen2_untied": ("Qwen2", UNTIED),
    "qwen2_windows": ("Qwen2", FOUR | WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3_yarn": (
        "Qwen3",
        EIGHT | STRETCHED
        | {"rope_parameters": YARN | {"beta_fast": 1.5, "beta_slow": 0.5, "attention_factor": 1.2, "truncate": False}},
    ),
    "qwen3_windows": (
        "Qwen3",
        EIGHT | FOUR | WINDOW | {"use_sliding_window": True, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
    ),
    "qwen3_biases": ("Qwen3", EIGHT | BIASES),
    "qwen3moe_plain": ("Qwen3Moe", EIGHT | UNTIED | BIASES | EXPERTS | {"num_experts_per_tok": 1}),
    "qwen3moe_windows": ("Qwen3Moe", EIGHT | WINDOW | EXPERTS | {"use_sliding_window": True}),
    "smollm3_windows": ("SmolLM3", FOUR | WINDOW | {"use_sliding_window": True, "no_rope_layer_interval": 2}),
    "smollm3_biases": ("SmolLM3", FOUR | BIASES | {"mlp_bias": True}),
    "gemma2_uncapped": ("Gemma2", GEMMA | BIASES | UNCAPPED),
    "gemma3_default": ("Gemma3Text", EIGHT | WINDOW | {"num_hidden_layers": 7, "query_pre_attn_scalar": 8}),
    "gemma3_capped": ("Gemma3Text", GEMMA | BIASES | UNTIED | {"final_logit_softcapping": 3.0}),
}  # fmt: skip


def make_model(name: str, seed: int) -> PreTrainedModel:
    """A model whose every parameter is random, and large enough for attention, norms, biases and positions to show in the logits.

    Weights are those that bfloat16 can hold, computed with in float32: they are saved in half the space.
    """
    architecture, settings = VARIANTS[name]
    config = getattr(transformers, f"{architecture}Config")(**(SIZES | settings))
    kind = getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(seed)
    # The other implementations know no soft cap.
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("norm.weight", "bias")):
                weight.add_(0.2 * torch.randn_like(weight))
            if key == "model.embed_tokens.weight" and architecture.startswith("Gemma"):
                # It will be scaled up; as it is, no layer could make a token say anything but itself.
                weight.mul_(0.3)
            weight.copy_(weight.bfloat16())
    return model.float().eval()


@torch.no_grad()
def answers(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """Ragged prompts one behind the other with the logits of each, and NEW greedy tokens with their top-2 margins."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, length) for length in LENGTHS]
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


def gradients(model: PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Of the mean log-probability of tokens [B, T] from the second on, for every parameter."""
    ids = torch.tensor(tokens)
    model.zero_grad()
    logs = torch.log_softmax(model(ids).logits[:, :-1], dim=-1)
    torch.gather(logs, 2, ids[:, 1:, None]).mean().backward()
    return {key: weight.grad.numpy() for key, weight in model.named_parameters()}


def main() -> None:
    """Write every golden directory."""
    families: dict[str, int] = {}
    for seed, name in enumerate(GOLDENS):
        target = HERE / name
        model = make_model(name, seed)
        golden = answers(model, seed)
        # Of the longest prompt, for all that is not a matrix and few that are: the whole tree would not be small.
        grads = gradients(model, golden["tokens"][None, -LENGTHS[-1] :])
        kept = {
            f"grad/{key}": grad
            for key, grad in grads.items()
            if grad.ndim == 1 or key.endswith(("0.self_attn.k_proj.weight", "0.mlp.gate.weight"))
        }
        model.bfloat16().save_pretrained(target)
        np.savez_compressed(target / "golden.npz", **golden, **kept)
        size = sum(file.stat().st_size for file in target.iterdir())
        family = name.split("_")[0]
        families[family] = families.get(family, 0) + size
        print(f"{name}: {size / 1000:.0f} kB, margin clear at {np.mean(golden['margins'] > 1e-2):.0%}")
    assert max(families.values()) < 200_000, families


if __name__ == "__main__":
    main()
