"""Rollout and update against transformers and torch, and the host's share of a rollout. Run by `make bench`.

    python benchmarks/first.py                      # everything, 7 rounds, about 40 minutes on 2 CPU cores
    python benchmarks/first.py --only update --rounds 3 --layers 6

Both sides run the same weights (random, of SmolLM2-135M's shape unless --layers is smaller), in float32, on all cores. In every round the
sides alternate; what is reported is the median and quartiles of the per-round ratios, ours over theirs, so that a busy machine troubles
both alike.

rollout   64 ragged requests (prompts of 16 to 96 tokens, 8 to 48 new tokens each), sampling at temperature 1. transformers generates
          in static batches of 16 until the longest of a batch is done; useful tokens count on both sides.
update    gradient of the mean log-probability of the new tokens, the same 64 rows; torch pads batches of 8 rows sorted by length.
host      share of a rollout of the Eval-Opt team that is spent outside the engine's device calls.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "mas_jax" / "jax"))

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from mas_jax.config import AdamW, Limits, Loss, Role
from mas_jax.graph import Task
from mas_jax.learners.packing import TrainRow, pack
from mas_jax.learners.update import Learner, make_optimizer, on_device, policy_loss
from mas_jax.mesh import make_mesh
from mas_jax.models import hf
from mas_jax.models.tokenizer import ByteTokenizer
from mas_jax.rollout.driver import Completion, Driver, Request, stream_key
from mas_jax.rollout.engine import NativeEngine
from mas_jax.rollout.sampling_plan import independent
from mas_jax.rollout.scheduler import Scheduler, Shapes
from mas_jax.rollout.tool_pool import ToolPool
from mas_jax.rollout.workflows.eval_opt import eval_opt

CONTEXT, NEW = 160, 48
VOCAB = 49152


def smollm2(layers: int, path: Path) -> transformers.PreTrainedModel:
    """A random model of SmolLM2-135M's shape, saved to `path`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100_000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


def requests(count: int = 64) -> list[Request]:
    """Ragged requests; ids of special tokens are left out, so that nothing stops early."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        prompt = rng.integers(10, VOCAB, rng.integers(16, 97)).tolist()
        limit = int(rng.integers(8, NEW + 1))
        found.append(Request(f"r{i}", "role", prompt, "", stream_key(i), limit, 1.0, ()))
    return found


class Sampler:
    """Engine and scheduler, as a policy group holds them; counts the seconds spent in device calls."""

    name, context = "model", CONTEXT

    def __init__(self, config: hf.ModelConfig, params: dict, slots: int, rows: int, chunk: int, block: int) -> None:
        shapes = Shapes(slots, CONTEXT, rows, chunk, block, slots * CONTEXT // chunk + 1)
        self.engine = NativeEngine(config, shapes, dtype=jnp.float32, mesh=make_mesh())
        self.params, self.state = self.engine.load_params(params), self.engine.init_decode_state()
        self.scheduler, self.tokenizer, self.device_seconds = Scheduler(shapes), ByteTokenizer(), 0.0

    def submit(self, requests: list[Request]) -> None:
        self.scheduler.submit(requests)

    def cancel(self, ids: list[str]) -> None:
        self.scheduler.cancel(ids)

    def poll(self) -> list[Completion]:
        while (work := self.scheduler.prefill_work()) is not None:
            started = time.perf_counter()
            self.state, hidden = self.engine.prefill(self.params, self.state, work)
            self.device_seconds += time.perf_counter() - started
            self.scheduler.prefilled(hidden)
        for slot, prefix, request in self.scheduler.insertions():
            self.state = self.engine.insert(prefix, self.state, slot, request)
        if not self.scheduler.decoding:
            return []
        started = time.perf_counter()
        self.state, block = self.engine.generate(self.params, self.state)
        self.device_seconds += time.perf_counter() - started
        return self.scheduler.decoded(block.tokens, block.logprobs, block.valid)

    def run(self, work: list[Request]) -> list[Completion]:
        """Sample all of them."""
        self.scheduler.new_version(self.scheduler.version + 1)
        self.submit(work)
        done = []
        while self.scheduler.busy:
            done += self.poll()
        return done


def rollout(
    theirs: transformers.PreTrainedModel, config: hf.ModelConfig, params: dict, rounds: int, slots: int
) -> dict:
    work = requests()
    useful = sum(request.max_tokens for request in work)
    ours = Sampler(config, params, slots=slots, rows=4, chunk=32, block=8)

    def run_ours() -> int:
        return sum(len(completion.tokens) for completion in ours.run(work))

    def run_theirs() -> int:
        for at in range(0, len(work), 16):
            batch = work[at : at + 16]
            width = max(len(request.prompt) for request in batch)
            ids = torch.full((len(batch), width), 2)
            mask = torch.zeros((len(batch), width), dtype=torch.long)
            for i, request in enumerate(batch):
                ids[i, width - len(request.prompt) :] = torch.tensor(request.prompt)
                mask[i, width - len(request.prompt) :] = 1
            longest = max(request.max_tokens for request in batch)
            with torch.inference_mode():
                theirs.generate(
                    ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None,
                    max_new_tokens=longest, min_new_tokens=longest, pad_token_id=2,
                )  # fmt: skip
        return useful

    return compare("rollout tokens/s", run_ours, run_theirs, rounds)


def update(theirs: transformers.PreTrainedModel, config: hf.ModelConfig, params: dict, rounds: int) -> dict:
    rng = np.random.default_rng(1)
    rows = []
    for request in requests():
        tokens = np.array([*request.prompt, *rng.integers(10, VOCAB, request.max_tokens)], np.int32)
        sampled = np.arange(len(tokens)) >= len(request.prompt)
        zeros = np.zeros(len(tokens), np.float32)
        rows.append(TrainRow("role", tokens, sampled, 1.0, zeros + 1, sampled / np.float32(2000), zeros - 10, zeros))
    total = sum(len(row.tokens) for row in rows)
    mesh = make_mesh()
    loss = lambda p, batch: policy_loss(config, Loss(), jnp.float32, False, p, batch)
    learner = Learner(config, mesh, make_optimizer(AdamW()), loss, dtype=jnp.float32)
    batches = [on_device(batch, mesh) for batch in pack(rows, lines=4, lengths=(CONTEXT,))]

    def run_ours() -> int:
        jax.block_until_ready(learner.gradient(params, batches)[0])
        return total

    ordered = sorted(rows, key=lambda row: len(row.tokens))

    def run_theirs() -> int:
        theirs.zero_grad(set_to_none=True)
        for at in range(0, len(ordered), 8):
            batch = ordered[at : at + 8]
            width = max(len(row.tokens) for row in batch)
            ids = torch.full((len(batch), width), 2)
            mask = torch.zeros((len(batch), width), dtype=torch.long)
            weight = torch.zeros((len(batch), width))
            for i, row in enumerate(batch):
                n = len(row.tokens)
                ids[i, :n], mask[i, :n] = torch.tensor(row.tokens.astype(np.int64)), 1
                weight[i, :n] = torch.tensor(row.weight.astype(np.float32))
            logits = theirs(ids, attention_mask=mask).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(logprobs * weight[:, 1:]).sum()).backward()
        return total

    return compare("update tokens/s", run_ours, run_theirs, rounds)


def host(config: hf.ModelConfig, params: dict, rounds: int, slots: int) -> dict:
    """Share of a rollout outside device calls: 32 episodes of Eval-Opt, one round of judgement."""
    sampler = Sampler(config, params, slots=slots, rows=4, chunk=32, block=8)
    roles = {name: Role(params="model", max_tokens=16) for name in ("generator", "evaluator")}
    tasks = [Task(f"t{i}", f"{i}*7=") for i in range(8)]
    shares = []
    for number in range(rounds + 1):
        sampler.scheduler.new_version(number)
        sampler.device_seconds = 0.0
        driver = Driver(_short, roles, {"model": sampler}, limits=Limits(), tools=ToolPool({}), seed=number)
        started = time.perf_counter()
        driver.play(independent(tasks, 4, f"round {number}"))
        elapsed = time.perf_counter() - started
        if number:
            shares.append(1 - sampler.device_seconds / elapsed)
    return {
        "name": "host share of a rollout",
        "median": float(np.median(shares)),
        "quartiles": np.quantile(shares, [0.25, 0.75]).tolist(),
    }


def _short(task: Task, team: object):
    from mas_jax.rollout.workflows.eval_opt import Prompts

    say = Prompts(solve="{problem}", judge="{problem} {draft}?", refine="{problem} {draft} {review}")
    return (yield from eval_opt(task, team, rounds=1, say=say))


def compare(name: str, ours: Callable[[], int], theirs: Callable[[], int], rounds: int) -> dict:
    """Rates of both, alternating, after one warm-up of each."""
    ours(), theirs()
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        for side, run in sorted((("ours", ours), ("theirs", theirs)), reverse=bool(number % 2)):
            started = time.perf_counter()
            tokens = run()
            rates[side].append(tokens / (time.perf_counter() - started))
        print(
            f"  {name} round {number + 1}/{rounds}: ours {rates['ours'][-1]:.0f}, theirs {rates['theirs'][-1]:.0f}",
            flush=True,
        )
    ratios = np.array(rates["ours"]) / np.array(rates["theirs"])
    return {
        "name": name, "median": float(np.median(ratios)), "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "ours": float(np.median(rates["ours"])), "theirs": float(np.median(rates["theirs"])),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("rollout", "update", "host"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=30, help="fewer than SmolLM2's 30 for a quick look")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = smollm2(args.layers, Path(folder))
        config, params = hf.load(folder)
    results = []
    if args.only in (None, "rollout"):
        results.append(rollout(theirs, config, params, args.rounds, args.slots))
    if args.only in (None, "update"):
        results.append(update(theirs, config, params, args.rounds))
    if args.only in (None, "host"):
        results.append(host(config, params, args.rounds, args.slots))
    print(
        f"\ntorch {torch.__version__} with {torch.get_num_threads()} threads, jax {jax.__version__}, {os.cpu_count()} cores"
    )
    for r in results:
        low, high = r["quartiles"]
        rates = f"   ours {r['ours']:.0f}/s, theirs {r['theirs']:.0f}/s" if "ours" in r else ""
        print(f"{r['name']:26} median {r['median']:.3f}  quartiles [{low:.3f}, {high:.3f}]{rates}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
