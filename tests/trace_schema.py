"""The public orchestration-trace schema (arXiv 2605.02801), and what its validator checks beyond it."""

import jsonschema

ID = {"type": "string", "minLength": 1}
TIME = {"type": "number", "minimum": 0}
NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["trace_id", "task_id", "events", "edges", "rewards", "costs"],
    "additionalProperties": False,
    "properties": {
        "trace_id": ID,
        "task_id": ID,
        "system": {"type": "string"},
        "topology": {
            "enum": [
                "centralized", "planner_executor_critic", "debate", "swarm", "hierarchical", "harness", "mixed", "unknown",
            ]
        },
        "events": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["id", "t", "type", "agent"],
                "properties": {
                    "id": ID,
                    "t": TIME,
                    "type": {
                        "enum": [
                            "orchestrator_decision", "spawn", "despawn", "message", "tool_call", "tool_result", "return",
                            "aggregate", "human_intervention", "safety_event",
                        ]
                    },
                    "agent": {"type": "string"},
                    "role": {"type": "string"},
                    "from": {"type": "string"},
                    "to": {"type": "string"},
                    "tool": {"type": "string"},
                    "content_ref": {"type": "string"},
                    "trusted": {"type": "boolean"},
                },
            },
        },
        "edges": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["src", "dst", "type"],
                "additionalProperties": False,
                "properties": {
                    "src": ID,
                    "dst": ID,
                    "type": {
                        "enum": [
                            "temporal", "causal", "spawn", "message", "tool_dependency", "return", "aggregate", "safety_flow",
                        ]
                    },
                },
            },
        },
        "rewards": NUMBERS,
        "costs": {
            "type": "object",
            "required": ["tokens", "wall_clock_s"],
            "additionalProperties": {"type": "number", "minimum": 0},
        },
        "metrics": NUMBERS,
    },
}  # fmt: skip


def check(document: dict) -> None:
    """Raise unless the document is valid, its event ids are unique, and its edges join events forwards in time."""
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    times = {event["id"]: event["t"] for event in document["events"]}
    assert len(times) == len(document["events"]), "two events have one id"
    for edge in document["edges"]:
        assert {edge["src"], edge["dst"]} <= times.keys(), f"an edge to nowhere: {edge}"
        assert times[edge["src"]] <= times[edge["dst"]], f"an edge backwards in time: {edge}"
