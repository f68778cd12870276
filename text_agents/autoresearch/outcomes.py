"""A world model that learns from past outcomes: what can be read off a program without running it, and what became of
programs like it.

It is the CPU default in a language model's place. Fitted on the executions of other tasks alone, it knows which
pipelines fail and which do well in general, and nothing of the task at hand beyond its facts: so it is right often, and
wrong in ways that depend on the task, as a language model is.

`program_facts` reads the syntax tree (calls, their arguments, names that nothing binds, files, what is written),
`task_facts` the description and the inventory (metric, sizes, strings, gaps). Both are dicts of numbers, so that code
of any origin has a place; nothing is executed."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd

from vla_wmrl.errors import require
from vla_wmrl.world_model.language import BUCKETS, STATUSES, Case, Outcome, Prediction, bucket_of, certain, compile_gate

METRIC_NAMES = ("auc", "log_loss", "accuracy", "f1", "rmse", "rmsle", "mae")
MIN_PROGRAMS = 3  # that a feature must occur in, to count
Form = Literal["boosting", "forest"]


@lru_cache(maxsize=8192)
def program_facts(code: str) -> dict[str, float]:
    """Facts of a program, not to be changed (they are kept); {} where it does not parse."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    facts = {"nodes": float(len(nodes)), "unbound names": float(len(_unbound(nodes)))}
    for node in nodes:
        for name, value in _facts_of_node(node):
            facts[name] = value
    return facts


def _facts_of_node(node: ast.AST) -> Iterator[tuple[str, float]]:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "?")
        yield f"call {name}", 1.0
        for keyword in node.keywords:
            yield from _facts_of_value(f"{name} {keyword.arg}", keyword.value)
            if name[:1].isupper():  # hyper-parameters that several estimators share
                yield from _facts_of_value(f"any {keyword.arg}", keyword.value)
    elif isinstance(node, ast.Tuple):
        words = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
        yield f"tuple {' '.join(words)}", 1.0
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.-]+\.\w{2,4}", node.value):
        yield f"file {node.value}", 1.0
    elif isinstance(node, ast.While):
        yield "while", 1.0
    elif isinstance(node, ast.BinOp):
        yield f"operator {type(node.op).__name__}", 1.0
    elif isinstance(node, ast.comprehension):
        conditions = sum(isinstance(n, ast.Compare) for test in node.ifs for n in ast.walk(test))
        yield f"comprehension with {conditions} conditions", 1.0


def _facts_of_value(name: str, value: ast.expr) -> Iterator[tuple[str, float]]:
    value = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
    if not isinstance(value, ast.Constant):
        return
    if isinstance(value.value, int | float) and not isinstance(value.value, bool):
        yield name, float(value.value)
    yield f"{name} = {value.value!r}", 1.0


def _unbound(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that are read and that nothing binds anywhere: a NameError, where the line is reached."""
    read, bound = set(), set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


@lru_cache(maxsize=512)
def task_facts(description: str, inventory: str) -> dict[str, float]:
    """Facts of a task as its texts tell them: metric, rows, columns, strings, categories, gaps by file and type."""
    facts = {f"metric {m}": float(f"Evaluation: {m}," in description) for m in METRIC_NAMES}
    file = ""
    for line in inventory.splitlines():
        if head := re.match(r"(\S+)\.csv \(\d+ bytes\)(?:: (\d+) rows, (\d+) columns)?", line):
            file = head[1]
            facts[f"{file} rows"], facts[f"{file} columns"] = float(head[2] or 0), float(head[3] or 0)
        elif column := re.match(r"  (\S.*?): (\d+ values|[a-z]+\d*)(?:, (\d+) missing)?:", line):
            strings = column[2].endswith("values")
            kind = "strings" if strings else "numbers"
            facts[f"{file} {kind}"] = facts.get(f"{file} {kind}", 0.0) + 1
            facts[f"{file} gaps in {kind}"] = facts.get(f"{file} gaps in {kind}", 0.0) + float(column[3] or 0)
            if strings:
                largest = f"{file} categories"
                facts[largest] = max(facts.get(largest, 0.0), float(column[2].split()[0]))
    return facts


def unknown_columns(code: str, inventory: str) -> float:
    """Constant strings in brackets of a program that name no column of its data, and nothing that it makes itself."""
    known = set(re.findall(r"^  (\S.*?): ", inventory, re.M)) | {"DATA_DIR", "SUBMISSION_PATH"}
    return float(len(set(re.findall(r'\w\["([^"]+)"\](?!\s*=[^=])', code)) - known))


def case_facts(case: Case) -> dict[str, float]:
    """All features of a case, and the few products that decide whether a program runs."""
    facts = program_facts(case.code) | task_facts(case.description, case.inventory)
    facts["unknown columns"] = unknown_columns(case.code, case.inventory)
    gaps = sum(v for k, v in facts.items() if " gaps in numbers" in k and k.split()[0] in ("train", "test"))
    strings = max(facts.get("train strings", 0.0), facts.get("test strings", 0.0))  # a long inventory is cut before train.csv
    facts["gaps are left in"] = float(gaps > 0 and "call SimpleImputer" not in facts)
    facts["strings are left in"] = float(strings > 0 and "tuple categorical passthrough" in facts)
    return facts


class OutcomeModel:
    """Status and quality bucket of programs, from facts. Fitted: `vectors_`, `status_`, `quality_`, `shares_`."""

    def __init__(self, form: Form = "boosting", seed: int = 0):
        self.form, self.seed = form, seed

    def _classifier(self):
        from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier

        if self.form == "forest":
            return ExtraTreesClassifier(300, min_samples_leaf=2, max_features=0.3, random_state=self.seed)
        return HistGradientBoostingClassifier(
            max_iter=80, learning_rate=0.08, max_leaf_nodes=8, min_samples_leaf=5, l2_regularization=1.0, random_state=self.seed
        )

    def fit(self, cases: Sequence[Case], statuses: Sequence[str], rewards: Sequence[float]) -> OutcomeModel:
        """Learn from cases [n] with true statuses [n] and rewards [n] (of valid ones, on the ladder).

        Cases that the compile gate settles are left out: it will settle them again. Raises UserError with none left.
        """
        from sklearn.feature_extraction import DictVectorizer

        kept = [i for i, case in enumerate(cases) if compile_gate(case.code) is None]
        require(len(kept) >= 2, f"{len(kept)} past outcomes that ran: a world model cannot be fitted on them")
        facts = [case_facts(cases[i]) for i in kept]
        counts: dict[str, int] = {}
        for row in facts:
            for name in row:
                counts[name] = counts.get(name, 0) + 1
        self.names_ = {name for name, n in counts.items() if n >= min(MIN_PROGRAMS, len(kept))}
        self.vectors_ = DictVectorizer(sparse=False, dtype=np.float32)
        X = self.vectors_.fit_transform([{k: v for k, v in row.items() if k in self.names_} for row in facts])
        status = np.array([statuses[i] for i in kept], object)
        self.status_ = self._fitted(X, status)
        valid = np.flatnonzero(status == "valid")
        buckets = np.array([bucket_of(2 * rewards[kept[i]] - 1) for i in valid], object)
        self.quality_ = self._fitted(X[valid], buckets) if len(valid) else None
        return self

    def _fitted(self, X: np.ndarray, y: np.ndarray):
        """A classifier, or the one class there is."""
        return self._classifier().fit(X, y.astype(str)) if len(set(y)) > 1 else str(y[0])

    def predict(self, cases: Sequence[Case]) -> list[Prediction]:
        """A prediction a case; code that does not compile has its certain one."""
        if not cases:
            return []
        gates = [compile_gate(case.code) for case in cases]
        facts = [{k: v for k, v in case_facts(case).items() if k in self.names_} for case in cases]
        X = self.vectors_.transform(facts)
        p_status = _spread(self.status_, X, STATUSES)
        p_bucket = np.full((len(X), 4), 0.25) if self.quality_ is None else _spread(self.quality_, X, BUCKETS)
        return [certain(gate) if gate else prediction_of(s, b) for gate, s, b in zip(gates, p_status, p_bucket, strict=True)]


def _spread(model, X: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Probabilities [n, len(names)], 0 for classes that the model has not seen."""
    full = np.zeros((len(X), len(names)))
    if isinstance(model, str):
        full[:, names.index(model)] = 1.0
    else:
        full[:, [names.index(c) for c in model.classes_]] = model.predict_proba(X)
    return full


def prediction_of(p_status: np.ndarray, p_bucket: np.ndarray) -> Prediction:
    """A prediction with the two likeliest statuses of p_status [4] and the likeliest bucket of p_bucket [4]."""
    bucket = BUCKETS[int(np.argmax(p_bucket))]
    # among equals the later one of the ladder: what the compile gate has let through is hardly malformed
    named = [STATUSES[i] for i in sorted(range(4), key=lambda i: (-p_status[i], -i))[:2]]
    outcomes = []
    for status in named:
        own = bucket if status == "valid" else None
        outcomes.append(Outcome(status, None, None, own, f"Predicted: {status}.", float(p_status[STATUSES.index(status)])))
    return Prediction(tuple(outcomes), p_status, p_bucket)


def fit_outcomes(form: Form) -> Callable[[Sequence[Case], pd.DataFrame], Callable[[Sequence[Case]], list[Prediction]]]:
    """The model as the fidelity harness wants it."""
    return lambda cases, rows: OutcomeModel(form).fit(cases, rows["status"].tolist(), rows["reward"].tolist()).predict
