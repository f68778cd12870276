"""The shape of a tool's answer without its values, so that a model learns to predict structure and not a data base."""

from __future__ import annotations

import json
from typing import Any

MAX_KEYS = 12  # of an object whose keys are data (ids): past it, only what the values have in common is said


def mask_answer(text: str) -> str:
    """A tool's answer with JSON replaced by its OpenAPI-style schema; anything else is kept (a short status)."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, (dict, list)):
        return text
    return json.dumps(schema_of(value), sort_keys=True)


def schema_of(value: Any) -> dict:
    """{"type": ..., "properties" | "items": ...} of a JSON value."""
    if isinstance(value, dict):
        shapes = {key: schema_of(inner) for key, inner in value.items()}
        if len(shapes) > MAX_KEYS or (len(shapes) > 1 and _looks_like_ids(shapes)):
            same = merge(list(shapes.values()))
            if same is not None:
                return {"type": "object", "additionalProperties": same}
        return {"type": "object", "properties": shapes}
    if isinstance(value, list):
        return {"type": "array", "items": merge([schema_of(item) for item in value]) or {}}
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return {"type": name}
    return {"type": "null"}


def _looks_like_ids(shapes: dict[str, dict]) -> bool:
    return all(any(c.isdigit() for c in key) for key in shapes)


def merge(shapes: list[dict]) -> dict | None:
    """One schema for all, with every property that any has; None where their types differ."""
    if not shapes or len({shape["type"] for shape in shapes}) > 1:
        return None
    first = shapes[0]
    if first["type"] == "object" and all("properties" in shape for shape in shapes):
        names = sorted({name for shape in shapes for name in shape["properties"]})
        inner = {
            name: merge([shape["properties"][name] for shape in shapes if name in shape["properties"]]) or {} for name in names
        }
        return {"type": "object", "properties": inner}
    return first
