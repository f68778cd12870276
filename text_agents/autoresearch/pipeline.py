"""The pipeline specification: a small JSON language for tabular solutions, for agents too small to write whole
programs.

    {"rows": "all", "impute": "median", "scale": "standard", "encode": "onehot", "select": "all", "model": "boosting",
     "params": {"learning_rate": 0.1, "max_iter": 100, "max_leaf_nodes": 15}, "target": "log1p", "output": "raw"}

It can be wrong in the ways programs are wrong: strings left in, missing values left in, more components than columns,
a log of negative numbers, labels where probabilities are asked for. Whether a specification runs is for the sandbox
to find out.

Every value comes from a finite set, so that a model decodes under the grammar by choosing once per slot:
`slots(kind)` walks them in order, `schema(kind)` is the same as JSON schema for guided decoding."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_wmrl.errors import nearest

CLASSIFIERS = (
    "boosting",
    "forest",
    "extra_trees",
    "logistic",
    "knn",
    "tree",
    "svm",
    "mlp",
    "naive_bayes",
    "ridge",
    "dummy",
)
REGRESSORS = ("boosting", "forest", "extra_trees", "ridge", "lasso", "knn", "tree", "svm", "mlp", "poisson", "dummy")
PARAMS: dict[str, dict[str, tuple]] = {
    "boosting": {"learning_rate": (0.03, 0.1, 0.3), "max_iter": (30, 100, 200), "max_leaf_nodes": (7, 15, 31)},
    "forest": {"n_estimators": (20, 60, 120), "max_depth": (4, 12, None), "max_features": ("sqrt", 0.5, 1.0)},
    "extra_trees": {"n_estimators": (20, 60, 120), "max_depth": (4, 12, None), "max_features": ("sqrt", 0.5, 1.0)},
    "logistic": {"C": (0.01, 0.1, 1.0, 10.0)},
    "ridge": {"alpha": (0.1, 1.0, 10.0, 100.0)},
    "lasso": {"alpha": (0.001, 0.1, 10.0)},
    "poisson": {"alpha": (0.001, 0.1, 10.0)},
    "knn": {"n_neighbors": (1, 5, 15, 50), "weights": ("uniform", "distance")},
    "tree": {"max_depth": (2, 5, 10, None), "min_samples_leaf": (1, 5, 20)},
    "svm": {"C": (0.1, 1.0, 10.0), "kernel": ("rbf", "linear")},
    "mlp": {"hidden_layer_sizes": (16, 64), "alpha": (0.0001, 0.1), "max_iter": (30, 200)},
    "naive_bayes": {},
    "dummy": {},
}
COMMON = {
    "rows": ("all", "half", "tenth"),
    "impute": ("median", "mean", "most_frequent", "none"),
    "scale": ("none", "standard", "robust", "quantile"),
    "encode": ("onehot", "ordinal", "target", "drop", "none"),
    "select": ("all", "best10", "pca5", "pca20"),
}
TARGETS = ("none", "log1p", "sqrt", "standard")
OUTPUTS = {"classification": ("probability", "label"), "regression": ("raw", "clip", "round")}
ORDER = ("rows", "impute", "scale", "encode", "select", "model", "params", "target", "output")


class SpecError(Exception):
    """The text is no specification; the message says what is wrong, as it is told to the agent."""


@dataclass(frozen=True)
class Spec:
    """One specification; `kind` "classification" or "regression" decides which values are allowed."""

    kind: str
    rows: str = "all"
    impute: str = "median"
    scale: str = "none"
    encode: str = "ordinal"
    select: str = "all"
    model: str = "boosting"
    params: dict[str, Any] = field(default_factory=dict)
    target: str = "none"
    output: str = ""

    def to_json(self) -> str:
        """One line of JSON, keys in the grammar's order; `parse` reads it back."""
        values = {name: getattr(self, name) for name in ORDER}
        if self.kind == "classification":
            values.pop("target")
        return json.dumps(values)


def grammar_kind(task_kind: str) -> str:
    return "regression" if task_kind == "regression" else "classification"


def choices(kind: str) -> dict[str, tuple]:
    """Values of every slot but `params`."""
    models = CLASSIFIERS if kind == "classification" else REGRESSORS
    values = {**COMMON, "model": models}
    if kind == "regression":
        values["target"] = TARGETS
    return {**values, "output": OUTPUTS[kind]}


def slots(kind: str, chosen: Sequence[Any] = ()) -> tuple[str, tuple] | None:
    """The next slot (name, values) after the values `chosen` so far, in the grammar's order; None when complete.

    `params` are slots of their own, "params.NAME", right after the model. For constrained decoding: ask, choose one
    of the values, append it, ask again; `from_choices` builds the specification."""
    names = _names(kind, chosen)
    return names[len(chosen)] if len(chosen) < len(names) else None


def _names(kind: str, chosen: Sequence[Any]) -> list[tuple[str, tuple]]:
    found: list[tuple[str, tuple]] = []
    for name, values in choices(kind).items():
        found.append((name, values))
        if name == "model" and len(chosen) >= len(found):
            model = chosen[len(found) - 1]
            found += [(f"params.{key}", options) for key, options in PARAMS[model].items()]
    return found


def from_choices(kind: str, chosen: Sequence[Any]) -> Spec:
    """The specification of a complete walk through `slots`."""
    values: dict[str, Any] = {"params": {}}
    for (name, _), value in zip(_names(kind, chosen), chosen, strict=True):
        if name.startswith("params."):
            values["params"][name.removeprefix("params.")] = value
        else:
            values[name] = value
    return Spec(kind, **values)


def schema(kind: str) -> dict:
    """JSON schema (draft 2020-12) of a specification, for engines with guided decoding. One branch a model."""
    common = {name: {"enum": list(values)} for name, values in choices(kind).items() if name != "model"}
    branches = []
    for model in choices(kind)["model"]:
        params = {name: {"enum": list(values)} for name, values in PARAMS[model].items()}
        own = {"type": "object", "properties": params, "required": list(params), "additionalProperties": False}
        properties = {**common, "model": {"const": model}, "params": own}
        ordered = {name: properties[name] for name in ORDER if name in properties}
        branches.append({"type": "object", "properties": ordered, "required": list(ordered), "additionalProperties": False})
    return {"oneOf": branches}


def parse(text: str, kind: str) -> Spec:
    """The specification in an agent's text: the last JSON object in it, fenced or not. Raises SpecError.

    Keys left out take their defaults; unknown keys and values are refused.
    """
    found = None
    decoder = json.JSONDecoder()
    position = 0
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
            found = value
        except ValueError:
            position = start + 1
    if not isinstance(found, dict):
        raise SpecError("no JSON object found")
    allowed = choices(kind)
    for name in found:
        if name not in allowed and name != "params":
            raise SpecError(f"unknown key {name!r}{nearest(name, [*allowed, 'params'])}")
    for name, value in found.items():
        if name != "params" and value not in allowed[name]:
            raise SpecError(f"{name}={value!r} is not one of {', '.join(allowed[name])}")
    model = found.get("model", "boosting")
    params = found.get("params", {})
    if not isinstance(params, dict):
        raise SpecError("params must hold keys and values")
    for name, value in params.items():
        if name not in PARAMS[model]:
            raise SpecError(f"{model} has no parameter {name!r}{nearest(name, list(PARAMS[model]))}")
        if not any(value == option and type(value) is not bool for option in PARAMS[model][name]):
            raise SpecError(f"params.{name}={value!r} is not one of {', '.join(map(str, PARAMS[model][name]))}")
    values = {"output": OUTPUTS[kind][0], **found, "params": params}
    return Spec(kind, **values)


def code_of(text: str) -> str:
    """The program in an agent's text (code mode): the last fenced block, or the whole text where nothing is fenced."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.S)
    return blocks[-1] if blocks else text


def sample(kind: str, rng: np.random.Generator) -> Spec:
    """A specification with every slot drawn uniformly: about half do not run on a table with strings and gaps."""
    chosen: list[Any] = []
    while (slot := slots(kind, chosen)) is not None:
        chosen.append(slot[1][rng.integers(len(slot[1]))])
    return from_choices(kind, chosen)


SOUND = {"impute": ("median", "mean", "most_frequent"), "encode": ("onehot", "ordinal", "target"), "select": ("all",)}


def sample_sound(kind: str, rng: np.random.Generator, labels: bool) -> Spec:
    """As `sample`, leaving out what is known to fail or to be a handicap. labels: the metric wants labels."""
    chosen: list[Any] = []
    names: list[str] = []
    while (slot := slots(kind, chosen)) is not None:
        name, values = slot
        values = SOUND.get(name, values)
        if name == "output":
            values = (("label",) if labels else ("probability",)) if kind == "classification" else ("raw", "clip")
        if name == "model" and kind == "classification" and not labels:
            values = tuple(v for v in values if v != "ridge")  # it has no probabilities
        if name == "model" and kind == "regression":
            values = tuple(v for v in values if v != "poisson")  # it wants targets above 0
        if name == "target":
            values = ("none", "standard")
        names.append(name)
        chosen.append(values[rng.integers(len(values))])
    return from_choices(kind, chosen)


def neighbours(spec: Spec) -> Iterator[Spec]:
    """Every specification one choice away: for local search, and for groups that differ in one decision."""
    chosen = to_choices(spec)
    for i in range(len(chosen)):
        name, values = slots(spec.kind, chosen[:i])
        for value in values:
            if value == chosen[i]:
                continue
            if name == "model":
                params = [options[len(options) // 2] for options in PARAMS[value].values()]
                old = len(PARAMS[chosen[i]])
                yield from_choices(spec.kind, [*chosen[:i], value, *params, *chosen[i + 1 + old :]])
            else:
                yield from_choices(spec.kind, [*chosen[:i], value, *chosen[i + 1 :]])


def to_choices(spec: Spec) -> list[Any]:
    """The walk through `slots` that gives `spec`; parameters it leaves out count as the middle value."""
    chosen: list[Any] = []
    while (slot := slots(spec.kind, chosen)) is not None:
        name, values = slot
        if name.startswith("params."):
            chosen.append(spec.params.get(name.removeprefix("params."), values[len(values) // 2]))
        else:
            chosen.append(getattr(spec, name))
    return chosen


def count(kind: str) -> int:
    """How many specifications there are."""
    per_model = sum(int(np.prod([len(v) for v in PARAMS[m].values()] or [1])) for m in choices(kind)["model"])
    rest = [len(v) for name, v in choices(kind).items() if name != "model"]
    return per_model * int(np.prod(rest))


def unique(specs: Iterator[Spec], n: int) -> list[Spec]:
    """The first `n` different ones (by their JSON) of an endless stream."""
    seen: dict[str, Spec] = {}
    for spec in itertools.islice(specs, 100 * n):
        seen.setdefault(spec.to_json(), spec)
        if len(seen) == n:
            break
    return list(seen.values())
