"""Rollout and update against transformers and torch, and the host's share of a rollout. Run by `make bench`.

    python benchmarks/first.py                      # everything, 7 rounds, about 40 minutes on 2 CPU cores
    python benchmarks/first.py --only update --rounds 3 --layers 6

Both sides run the same weights (random, of SmolLM2-135M's shape unless --layers is smaller), in float32, on all cores. In every round the
sides alternate; what is reported is the median and quartiles of the per-round ratios, ours over theirs, so that a busy machine troubles
both alike.

rollout   64 ragged requests (prompts of 16 to 96 tokens, 8 to 48 new tokens each), sampling at temperature 1. transformers generates
          in static batches of 16 until the longest of a batch is done; useful tokens count on both sides.
update    gradient of the mean log-probability of the new tokens, the same 64 rows; torch pads batches of 8 rows sorted by length.
host      share of a training step of the Eval-Opt team that is spent outside the device calls of engine and learner.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "mas_jax" / "jax"))

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from rich.console import Console

from mas_jax import AdamW, Base, Experiment, Loss, Mesh, Reward, Role, Rollout, Task, train
from mas_jax import Learner as LearnerSettings
from mas_jax.learners.packing import TrainRow, pack
from mas_jax.learners.update import Compute, Learner, make_optimizer, on_device, policy_loss
from mas_jax.mesh import make_mesh
from mas_jax.models import hf
from mas_jax.models.tokenizer import save_char_tokenizer
from mas_jax.progress import Reporter
from mas_jax.rollout.driver import Completion, Request, stream_key
from mas_jax.rollout.engine import NativeEngine
from mas_jax.rollout.scheduler import Scheduler, Shapes
from mas_jax.rollout.workflows.eval_opt import Prompts, eval_opt

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
    """Engine and scheduler, as a policy group holds them."""

    def __init__(self, config: hf.ModelConfig, params: dict, slots: int) -> None:
        shapes = Shapes(slots, CONTEXT, prefill_rows=4, chunk=32, block=8, pages=slots * CONTEXT // 32 + 1)
        self.engine = NativeEngine(config, shapes, dtype=jnp.float32, mesh=make_mesh())
        self.params, self.state = self.engine.load_params(params), self.engine.init_decode_state()
        self.scheduler = Scheduler(shapes)

    def run(self, work: list[Request]) -> list[Completion]:
        """Sample all of them, with nothing prefilled."""
        self.scheduler.new_version(self.scheduler.version + 1)
        self.scheduler.submit(work)
        done = []
        while self.scheduler.busy:
            while (chunks := self.scheduler.prefill_work()) is not None:
                self.state, hidden = self.engine.prefill(self.params, self.state, chunks)
                self.scheduler.prefilled(hidden)
            for slot, prefix, request in self.scheduler.insertions():
                self.state = self.engine.insert(prefix, self.state, slot, request)
            self.state, block = self.engine.generate(self.params, self.state)
            done += self.scheduler.decoded(block.tokens, block.logprobs, block.valid)
        return done


def rollout(
    theirs: transformers.PreTrainedModel, config: hf.ModelConfig, params: dict, rounds: int, slots: int
) -> dict:
    work = requests()
    useful = sum(request.max_tokens for request in work)
    ours = Sampler(config, params, slots)

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
    compute = Compute(jnp.float32, remat=True)
    learner = Learner(config, mesh, make_optimizer(AdamW()), partial(policy_loss, Loss()), compute)
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


def host(folder: Path, rounds: int, slots: int) -> dict:
    """Share of a training step outside device calls: 4 tasks x 4 episodes of Eval-Opt, one round of judgement, one update."""
    save_char_tokenizer(folder, "".join(map(chr, range(32, 127))) + "\n")
    say = Prompts(solve="{problem}", judge="{problem} {draft}?", refine="{problem} {draft} {review}")
    experiment = Experiment(
        workflow=partial(eval_opt, rounds=1, say=say),
        tasks=lambda: ([Task(f"t{i}", f"{i}*7=") for i in range(32)], [Task("held out", "1*1=")]),
        rewards=(Reward(lambda trace: float(sum(trace.turns[0].tokens) % 3), name="noise"),),
        params={"model": Base(str(folder))},
        roles={name: Role(params="model", max_tokens=16) for name in ("generator", "evaluator")},
        batch=4,
        group_size=4,
        steps=1 << 20,
        mesh=Mesh(fsdp=1),
        learner=LearnerSettings(rows=4, lengths=(CONTEXT,)),
        rollout=Rollout(slots=slots, context=CONTEXT, prefill_rows=4, chunk=32, block=8),
    )
    with Reporter(Console(file=io.StringIO())) as reporter:
        run = train.open_run(experiment, folder / "run", reporter)
        train.resume(run)
        (group,) = run.groups.values()
        timed = Timed()
        calls = (
            (group.engine, ("prefill", "generate", "load_params")),
            (group.learner, ("score", "gradient", "apply")),
        )
        for owner, names in calls:
            for name in names:
                vars(owner)[name] = timed(vars(type(owner))[name].__get__(owner))
        shares = []
        for number in range(rounds + 1):
            timed.seconds, started = 0.0, time.perf_counter()
            train.step(run)
            if number:
                shares.append(1 - timed.seconds / (time.perf_counter() - started))
    quartiles = np.quantile(shares, [0.25, 0.75]).tolist()
    return {"name": "host share of a step", "median": float(np.median(shares)), "quartiles": quartiles}


class Timed:
    """Adds up the seconds that functions take until their results are there."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, fn: Callable) -> Callable:
        def run(*args: object) -> object:
            started = time.perf_counter()
            result = fn(*args)
            jax.block_until_ready([leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)])
            self.seconds += time.perf_counter() - started
            return result

        return run


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
            results.append(host(Path(folder), args.rounds, args.slots))
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
