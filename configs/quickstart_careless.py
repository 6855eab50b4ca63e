"""The last touch on the quickstart's starting point: careless demonstrators. See quickstart_sft.py, which comes first."""

from quickstart_sft import Demonstrations

from mas_jax.config import AdamW, Base, Cloning, Learner

experiment = Cloning(
    base=Base("runs/quickstart_sft/export"),
    examples=Demonstrations(copies=1, draft_right=0.6, verdict_right=0.7, seed=1),
    optimizer=AdamW(lr=3e-4, warmup=10),
    steps=120,
    batch=128,
    learner=Learner(rows=8, lengths=(256,)),
)
