"""Episodes in a terminal: who said what, who read whom, and what it was worth."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from mas_jax.config import ConfigError
from mas_jax.metrics import read

LONGEST = 600


def show(path: Path, *, episode: str = "", failed: bool = False, last: bool = False, limit: int = 3) -> None:
    """Print up to `limit` episodes of a run directory or a traces file. Raises ConfigError when there is none to show."""
    file = path / "traces.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("RUN_DIR", str(path), "no traces.jsonl there; give a run directory or a traces file")
    found = [t for t in read(file) if episode in t["trace_id"] and (not failed or _end(t)["stop"] != "done")]
    if not found:
        raise ConfigError("episode", episode, f"no such episode in {file}")
    console = Console(highlight=False)
    for trace in found[-limit:] if last else found[:limit]:
        print_trace(console, trace)
    console.print(Text(f"{min(limit, len(found))} of {len(found)} episodes", style="dim"))


def _end(trace: dict) -> dict:
    return trace["events"][-1]


def print_trace(console: Console, trace: dict) -> None:
    """One episode, its events in order of logical time."""
    rewards = ", ".join(f"{name} {value:g}" for name, value in trace["rewards"].items())
    console.rule(Text(f"{trace['trace_id']}   {rewards}"), align="left")
    depth = {}
    for event in trace["events"]:
        depth[event["id"]] = event["id"].count(".")
        pad = "  " * depth[event["id"]]
        if event["type"] == "message":
            reads = " ".join(read["event"] for read in event["reads"])
            head = f"{pad}[{event['id']}] {event['agent']}"
            notes = f"  reads {reads}" if reads else ""
            notes += f"  {event['sampled_tokens']} tokens, {event['finish']}"
            notes += f", reward {event['reward']:g}, advantage {event['advantage']:+.2f}"
            console.print(Text(head, style="bold") + Text(notes, style="dim"))
            console.print(Text(_indent(_prompt_end(event["prompt"]), pad + "  > "), style="dim"))
            console.print(Text(_indent(event["text"], pad + "    ")))
        elif event["type"] == "tool_result":
            console.print(Text(f"{pad}[{event['id']}] {event['tool']}", style="bold"))
            console.print(Text(_indent(event["text"], pad + "    ")))
        elif event["type"] == "return":
            why = f": {event['error']}" if "error" in event else ""
            console.print(Text(f"-> {event['stop']}{why}   {_indent(event['text'], '').strip()}", style="green"))


def _prompt_end(text: str) -> str:
    return text if len(text) <= LONGEST else f"... {text[-LONGEST:]}"


def _indent(text: str, pad: str) -> str:
    shown = text if len(text) <= 4 * LONGEST else text[: 4 * LONGEST] + " ..."
    return "\n".join(pad + line for line in shown.splitlines() or [""])
