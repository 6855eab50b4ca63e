"""Train teams of language-model agents with reinforcement learning, natively in JAX."""

from mas_jax.config import AdamW, Base, Evaluation, Experiment, Learner, Limits, Loss, Mesh, Reward, Role, Rollout, Task
from mas_jax.graph import Trace, Turn
from mas_jax.rollout.workflow import Call, Reply, Tool, ToolResult, assistant, system, user, workflow

__all__ = [
    "AdamW", "Base", "Call", "Evaluation", "Experiment", "Learner", "Limits", "Loss", "Mesh", "Reply", "Reward", "Role", "Rollout",
    "Task", "Tool", "ToolResult", "Trace", "Turn", "assistant", "system", "user", "workflow",
]  # fmt: skip

__version__ = "0.1.0"
