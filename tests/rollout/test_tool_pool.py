"""Tools in their processes: what a config file defines runs there too."""

from mas_jax import cli
from mas_jax.config import Experiment
from mas_jax.rollout.tool_pool import ToolPool
from mas_jax.rollout.workflow import Tool

CONFIG = """
from mas_jax import Base, Call, Experiment, Reward, Role, Tool, user, workflow

FACTOR = 3

def triple(number):
    return FACTOR * number

@workflow(roles=("solver",))
def flow(task, team):
    yield Tool("triple", 7)

experiment = Experiment(
    workflow=flow, tasks=lambda: ([], []), rewards=(Reward(lambda trace: 1.0, name="one"),), params={"a": Base("a")},
    roles={"solver": Role("a")}, tools={"triple": triple},
)
"""


def test_a_tool_that_a_config_file_defines_runs_in_a_process_that_cannot_import_the_file(tmp_path):
    path = tmp_path / "team_with_tool.py"
    path.write_text(CONFIG)
    pool = ToolPool(cli.load_config(path, Experiment).tools, workers=1, seconds=60.0)
    try:
        pool.submit("call", Tool("triple", 7))
        assert pool.poll(wait=True) == [("call", (21, ""))]
    finally:
        pool.close()
