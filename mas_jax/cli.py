"""The command line: `mas-jax COMMAND ...`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from mas_jax.config import Cloning, ConfigError, Experiment

USAGE = """\
usage: mas-jax COMMAND ...

Train teams of language-model agents with reinforcement learning.

  train CONFIG     train the team of a config file, or resume the run directory; every field is a flag
  eval CONFIG      score a team on held-out tasks, e.g. --params.team.path runs/quickstart/export/team
  sft CONFIG       behaviour cloning: a starting point from demonstrations or filtered traces
  export RUN_DIR   write Hugging Face directories from a run's newest checkpoint
  trace show FILE  print episodes of a run, turn by turn
  methods [NAME]   the credit-assignment methods and their sources

`mas-jax COMMAND --help` explains a command; a CONFIG before --help shows its fields. Start with:

  mas-jax train configs/quickstart.py

Exit codes: 0 done (also after SIGTERM, with everything saved), 1 the run failed, 2 a setting cannot work, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `mas-jax` script."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run one command; gives the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if argv[0] == "--version":
        from mas_jax import __version__

        print(__version__)
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        return _error(ConfigError("command", command, f"use one of {', '.join(COMMANDS)}"))
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        return COMMANDS[command](rest)
    except ConfigError as error:
        return _error(error)
    except KeyboardInterrupt:
        print("interrupted; run the same command to go on from the last checkpoint", file=sys.stderr)
        return 130


def _error(error: Exception) -> int:
    print(f"mas-jax: error: {error}", file=sys.stderr)
    return 2


def _stopped(error: Exception) -> int:
    print(f"mas-jax: the run stopped: {error}", file=sys.stderr)
    return 1


def _help(text: str, args: list[str]) -> bool:
    """Print `text` when a command was asked for help or given nothing."""
    if args and args[0] not in ("-h", "--help"):
        return False
    print(text, end="")
    return True


def load_config(path: Path, kind: type) -> Any:
    """The `experiment` of a config file. Raises ConfigError for a file that has none of this kind."""
    import cloudpickle

    if not path.is_file():
        raise ConfigError(
            "CONFIG", str(path), "no such file; a config is a Python file with `experiment = Experiment(...)`"
        )
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Its functions go to tool processes by value, since no module of that name can be imported there.
    cloudpickle.register_pickle_by_value(module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError("CONFIG", str(path), f"it raises {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    experiment = vars(module).get("experiment")
    if not isinstance(experiment, kind):
        found = "nothing of that name" if experiment is None else f"a {type(experiment).__name__}"
        raise ConfigError("CONFIG", str(path), f"it must set `experiment` to {kind.__name__}(...); there is {found}")
    return experiment


def parse(kind: type, default: Any, args: list[str], prog: str) -> Any:
    """Flags over a dataclass's defaults, by tyro. Wrong flags exit with 2."""
    import tyro

    description = None if kind.__doc__ is None else kind.__doc__.split("\n")[0]
    return tyro.cli(kind, default=default, args=args, prog=prog, description=description)


def _options(experiment: object, extra: type) -> type:
    """A dataclass of `extra`'s fields and, without a prefix, the experiment's."""
    from dataclasses import make_dataclass

    import tyro

    own = [(f.name, f.type, f) for f in fields(extra)]
    flat = Annotated[type(experiment), tyro.conf.arg(name="")]
    made = make_dataclass(extra.__name__, [*own, ("experiment", flat, experiment)], frozen=True)
    made.__doc__ = extra.__doc__
    return made


@dataclass(frozen=True)
class RunOptions:
    """Train, or go on with, the experiment of a config file."""

    run_dir: Path = Path("runs")
    """Where everything goes; by default runs/<name of the config file>."""
    force: bool = False
    """Go on although the run directory was made with another config."""


def _prepare_jax() -> None:
    """Settings that must stand before jax is imported: compiled programs are kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mas_jax" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    for noisy in ("absl", "orbax", "jax"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _read_run(args: list[str], kind: type, command: str) -> tuple[Path, list[str], Any]:
    """Config path, flags and parsed options of a command that trains."""
    path, flags = Path(args[0]), args[1:]
    experiment = load_config(path, kind)
    default = RunOptions(run_dir=Path("runs") / path.stem)
    made = _options(experiment, RunOptions)
    options = parse(made, made(default.run_dir, default.force, experiment), flags, f"mas-jax {command} {path}")
    return path, flags, options


def train(args: list[str]) -> int:
    """mas-jax train"""
    text = """\
usage: mas-jax train CONFIG [--run-dir DIR] [--force] [--FIELD VALUE ...]

Trains the team of a config file. A run directory that holds a run is resumed, exactly; SIGTERM saves and exits 0.
CONFIG --help lists every field. Examples:

  mas-jax train configs/quickstart.py
  mas-jax train configs/quickstart.py --run-dir runs/try --steps 5 --optimizers.team.lr 3e-4
"""
    if _help(text, args):
        return 0
    path, flags, options = _read_run(args, Experiment, "train")
    from mas_jax.progress import Reporter

    _prepare_jax()
    from mas_jax import run_directory
    from mas_jax.checkpoint import DamagedCheckpointError
    from mas_jax.rollout.driver import RolloutError
    from mas_jax.train import Preempted
    from mas_jax.train import train as train_team

    with Reporter() as reporter:
        try:
            command = run_directory.Command(path, tuple(flags))
            train_team(options.experiment, options.run_dir, reporter, force=options.force, command=command)
        except Preempted:
            reporter.say(
                f"stopped by SIGTERM; saved. The same command goes on from here: mas-jax train {path} {' '.join(flags)}"
            )
            return 0
        except (RolloutError, DamagedCheckpointError) as error:
            return _stopped(error)
        _summary(options.experiment, options.run_dir, path, reporter)
    return 0


def _summary(experiment: Experiment, directory: Path, config: Path, reporter: Any) -> None:
    from rich.table import Table

    from mas_jax.evaluate import table
    from mas_jax.train import evaluations

    found = evaluations(directory)
    (first, before), (last, after) = found[0], found[-1]
    names = [_measure(reward.name, experiment.roles, before) for reward in experiment.rewards]
    shown = Table(title=f"held-out tasks: step {first} -> step {last} (95 % intervals)")
    for column in ("measure", f"step {first}", f"step {last}", "change"):
        shown.add_column(column)
    for row in table(before, after, names):
        shown.add_row(*row)
    reporter.console.print(shown)
    trained = [name for name, entry in experiment.params.items() if entry.train]
    reporter.say(f"""
the run:      {directory}/  (config.json, metrics.jsonl, traces.jsonl, rollouts.zarr, checkpoints/)
the weights:  {directory}/export/{trained[0]}  (a Hugging Face directory: transformers loads it)
look inside:  mas-jax trace show {directory}
              mas-jax trace show {directory}/eval_{last}.jsonl
score it:     mas-jax eval {config} --params.{trained[0]}.path {directory}/export/{trained[0]}
train on:     mas-jax train {config} --run-dir {directory} --steps {experiment.steps * 2}
your own:     README.md, "Your own team\"""")


def _measure(name: str, roles: Iterable[str], metrics: Mapping[str, float]) -> str:
    """How a reward is shown: under its role, if it lands on one alone, else as the team's."""
    landed = [role for role in roles if f"{role}/{name}" in metrics]
    return f"{landed[0]}/{name}" if len(landed) == 1 else name


@dataclass(frozen=True)
class EvalOptions:
    """Score the team of a config file on its held-out tasks."""

    out: Path = Path("-")
    """Where the traces go, as JSON lines; - keeps none."""


def evaluate(args: list[str]) -> int:
    """mas-jax eval"""
    text = """\
usage: mas-jax eval CONFIG [--out FILE] [--FIELD VALUE ...]

Plays the team of a config file on its held-out tasks and prints means with 95 % intervals. Examples:

  mas-jax eval configs/quickstart.py
  mas-jax eval configs/quickstart.py --params.team.path runs/quickstart/export/team --evaluation.temperature 0
"""
    if _help(text, args):
        return 0
    path = Path(args[0])
    experiment = load_config(path, Experiment)
    made = _options(experiment, EvalOptions)
    options = parse(made, made(EvalOptions().out, experiment), args[1:], f"mas-jax eval {path}")
    _prepare_jax()
    return _evaluate(options.experiment, options.out)


def _evaluate(experiment: Experiment, out: Path) -> int:
    from rich.table import Table

    from mas_jax import config as configs
    from mas_jax import graph
    from mas_jax.cluster import build_groups
    from mas_jax.evaluate import evaluate as play
    from mas_jax.metrics import JsonLines
    from mas_jax.progress import Reporter
    from mas_jax.rollout.driver import Driver, RolloutError
    from mas_jax.rollout.rehearsal import rehearse
    from mas_jax.rollout.tool_pool import ToolPool
    from mas_jax.train import load_tasks

    configs.validate(experiment)
    if str(out) != "-":
        try:
            out.write_bytes(b"")
        except OSError as error:
            raise ConfigError("out", str(out), f"cannot be written ({error.strerror}); choose another") from error
    with Reporter() as reporter:
        reporter.phase("loading tasks")
        _, heldout = load_tasks(experiment)
        rehearse(experiment, heldout[0])
        reporter.phase("loading models")
        groups = build_groups(experiment, learn=False)
        for group in groups.values():
            group.push()
        tools = ToolPool(
            experiment.tools, workers=experiment.rollout.tool_workers, seconds=experiment.rollout.tool_seconds
        )
        driver = Driver(
            experiment.workflow, experiment.roles, groups, limits=experiment.limits, tools=tools, seed=experiment.seed
        )
        total = min(experiment.evaluation.tasks, len(heldout)) * experiment.evaluation.samples
        shown = reporter.phase("playing", total)
        try:
            metrics, traces = play(
                driver, experiment, heldout, progress=lambda done, tokens: shown(done, f"{done}/{total} episodes")
            )
        except RolloutError as error:
            return _stopped(error)
        finally:
            tools.close()
    if str(out) != "-":
        JsonLines(out).extend(graph.to_json(trace) for trace in traces)
    table = Table(title=f"{len(traces)} held-out episodes, {int(metrics['failed'])} failed")
    for column in ("measure", "mean", "95 % interval", "tasks"):
        table.add_column(column)
    for name in [_measure(reward.name, experiment.roles, metrics) for reward in experiment.rewards]:
        if name not in metrics:
            continue
        low, high = metrics[f"{name}/low"], metrics[f"{name}/high"]
        table.add_row(name, f"{metrics[name]:.3f}", f"[{low:.3f}, {high:.3f}]", str(metrics[f"{name}/n"]))
    reporter.console.print(table)
    return 0


def sft(args: list[str]) -> int:
    """mas-jax sft"""
    text = """\
usage: mas-jax sft CONFIG [--run-dir DIR] [--force] [--FIELD VALUE ...]

Behaviour cloning through the learner. CONFIG sets `experiment = Cloning(base=..., examples=...)`; examples come from a
function, from JSON lines (`mas_jax.cloning.FromJsonl`) or from the well-rewarded turns of a run (`FromTraces`). Example:

  mas-jax sft configs/quickstart_sft.py
"""
    if _help(text, args):
        return 0
    _, _, options = _read_run(args, Cloning, "sft")
    _prepare_jax()
    from mas_jax.cloning import clone
    from mas_jax.progress import Reporter

    with Reporter() as reporter:
        out = clone(options.experiment, options.run_dir, reporter, force=options.force)
        reporter.say(f"the weights:  {out}  (a Hugging Face directory)")
    return 0


def export(args: list[str]) -> int:
    """mas-jax export"""
    text = """\
usage: mas-jax export RUN_DIR [--step N] [--out DIR]

Writes a Hugging Face directory for each trained params entry, from the newest checkpoint of a run or from step N, to
RUN_DIR/export or DIR.
"""
    if _help(text, args):
        return 0
    directory = Path(args[0])
    options = parse(ExportOptions, ExportOptions(), args[1:], "mas-jax export RUN_DIR")
    _prepare_jax()
    from mas_jax import run_directory
    from mas_jax.checkpoint import Checkpoints
    from mas_jax.cluster import build_groups

    command = run_directory.read_command(directory)
    default = load_config(command.config, Experiment)
    made = _options(default, RunOptions)
    experiment = parse(made, made(directory, False, default), list(command.flags), "mas-jax export").experiment
    groups = {name: group for name, group in build_groups(experiment).items() if group.learns}
    abstract = {name: group.abstract_state() for name, group in groups.items()}
    checkpoints = Checkpoints(directory / "checkpoints", read_only=True)
    step = checkpoints.latest() if options.step < 0 else options.step
    if step is None or step not in checkpoints.steps():
        raise ConfigError("step", step, f"{directory} has checkpoints of steps {checkpoints.steps()}")
    states, _ = checkpoints.restore(step, abstract)
    out = directory / "export" if str(options.out) == "-" else options.out
    for name, group in groups.items():
        group.restore(states[name])
        group.export(out / name)
        print(f"{out / name}  (step {step})")
    return 0


@dataclass(frozen=True)
class ExportOptions:
    """Write Hugging Face directories from a checkpoint."""

    step: int = -1
    """-1: the newest."""
    out: Path = Path("-")
    """-: RUN_DIR/export."""


def trace(args: list[str]) -> int:
    """mas-jax trace"""
    text = """\
usage: mas-jax trace show RUN_DIR|FILE [--episode TEXT] [--failed] [--last] [--limit N]

Prints episodes turn by turn: who said what, who read whom, rewards and advantages. Examples:

  mas-jax trace show runs/quickstart --last
  mas-jax trace show runs/quickstart --episode "step 3/0" --limit 8
"""
    if _help(text, args):
        return 0
    if args[0] != "show" or len(args) < 2:
        raise ConfigError("trace", " ".join(args), "use `mas-jax trace show RUN_DIR`")
    options = parse(TraceOptions, TraceOptions(), args[2:], "mas-jax trace show RUN_DIR")
    from mas_jax.trace_view import show

    show(Path(args[1]), episode=options.episode, failed=options.failed, last=options.last, limit=options.limit)
    return 0


@dataclass(frozen=True)
class TraceOptions:
    """Print episodes turn by turn."""

    episode: str = ""
    """Only episodes whose id contains this."""
    failed: bool = False
    """Only episodes that did not end as done."""
    last: bool = False
    """From the end of the file."""
    limit: int = 3
    """How many episodes."""


def methods(args: list[str]) -> int:
    """mas-jax methods"""
    if args and args[0] in ("-h", "--help"):
        print("usage: mas-jax methods [NAME]\n\nThe table of credit-assignment methods; with NAME one row in full.")
        return 0
    from mas_jax.learners.methods import METHODS, lookup

    for name, method in {args[0]: lookup(args[0], 2)}.items() if args else METHODS.items():
        print(f"{name}\n  {method.formula}\n  {method.paper}")
        if args:
            for f in fields(method):
                if f.name not in ("paper", "formula"):
                    print(f"  {f.name:10} {vars(method)[f.name]}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "sft": sft,
    "export": export,
    "trace": trace,
    "methods": methods,
}
