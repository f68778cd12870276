"""The specification language: what is refused, that all of them are programs, and that its mistakes are real."""

import ast
import json
import os

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch import pipeline
from text_agents.autoresearch.generate import MISTAKES, generate
from text_agents.autoresearch.ladder import blend, candidates, run_here
from text_agents.autoresearch.pipeline import Spec, SpecError, from_choices, parse, sample, slots, to_choices
from text_agents.autoresearch.render import Facts, facts_of, render
from text_agents.autoresearch.tasks import load_task
from vla_wmrl.errors import UserError

REGRESSION = Facts("regression", "id", "target", ("target",), False)
CLASSES = Facts("classification", "id", "target", ("a", "b", "c"), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json here", "no JSON object"),
        ("{broken", "no JSON object"),
        ('{"modle": "forest"}', "did you mean model"),
        ('{"model": "xgboost"}', "model='xgboost' is not one of"),
        ('{"model": ["forest"]}', "is not one of"),
        ('{"model": "forest", "params": {"depth": 3}}', "forest has no parameter 'depth'"),
        ('{"model": "forest", "params": {"max_depth": 99}}', "params.max_depth=99 is not one of"),
        ('{"model": "forest", "params": [1]}', "params must hold"),
        ('{"model": "poisson"}', "is not one of"),
        ('{"target": "log1p"}', "unknown key 'target'"),
    ],
)
def test_what_the_grammar_does_not_allow_is_refused_with_the_reason(text, message):
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        parse(text, "classification")


def test_a_specification_is_found_in_prose_and_the_last_one_counts():
    text = 'First {"model": "tree"} then\n```json\n{"model": "knn", "params": {"n_neighbors": 5}}\n``` done.'
    spec = parse(text, "classification")
    assert (spec.model, spec.params, spec.output) == ("knn", {"n_neighbors": 5}, "probability")


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_json_choices_and_specification_say_the_same(kind):
    rng = np.random.default_rng(0)
    for _ in range(50):
        spec = sample(kind, rng)
        assert parse(spec.to_json(), kind) == spec == from_choices(kind, to_choices(spec))
        assert slots(kind, to_choices(spec)) is None


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_schema_allows_exactly_the_grammars_slots(kind):
    schema = pipeline.schema(kind)
    json.dumps(schema)
    assert [b["properties"]["model"]["const"] for b in schema["oneOf"]] == list(pipeline.choices(kind)["model"])
    for branch in schema["oneOf"]:
        model = branch["properties"]["model"]["const"]
        assert set(branch["properties"]["params"]["properties"]) == set(pipeline.PARAMS[model])
        assert list(branch["properties"]) == [n for n in pipeline.ORDER if n in branch["properties"]]
    assert pipeline.count(kind) > 10_000


def test_neighbours_differ_in_one_choice():
    spec = Spec("regression", model="forest", params={"n_estimators": 60, "max_depth": 12, "max_features": 0.5}, output="raw")
    near = list(pipeline.neighbours(spec))
    assert len({n.to_json() for n in near}) == len(near) > 20 and spec not in near
    for other in near:
        names = ("rows", "impute", "scale", "encode", "select", "model", "target", "output")
        changed = [n for n in names if getattr(other, n) != getattr(spec, n)]
        assert len(changed) == 1 or (not changed and other.params != spec.params)


@pytest.mark.parametrize("facts", [REGRESSION, CLASSES])
def test_every_specification_is_a_program_that_parses_and_imports_what_it_names(facts):
    rng = np.random.default_rng(1)
    for _ in range(150):
        code = render(sample(facts.kind, rng), facts)
        tree = ast.parse(code)
        imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
        used = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert used <= imported, code


def test_sound_specifications_run_and_are_valid(make_task, tmp_path):
    task = load_task(make_task())
    facts, ran = facts_of(task), 0
    specs = candidates(facts.kind, facts.labels, True, False, 0)
    for _ in range(8):
        table = run_here(render(next(specs), facts), task, tmp_path)
        ran += table is not None and task.grade(table.to_csv(index=False).encode()).status == "valid"
    assert ran == 8 and "DATA_DIR" not in os.environ


def test_target_encoding_takes_whole_numbers_for_a_quantity(make_task, tmp_path):
    """scikit-learn guesses classes from whole numbers, and fails on prices."""
    folder = make_task()
    table = pd.read_csv(folder / "public" / "train.csv")
    table.assign(target=(100 * table["target"]).round().astype(int)).to_csv(folder / "public" / "train.csv", index=False)
    task = load_task(folder)
    spec = Spec("regression", model="ridge", encode="target", output="raw")
    assert run_here(render(spec, facts_of(task)), task, tmp_path) is not None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"encode": "none"}, "could not convert string"),
        ({"select": "pca5"}, "n_components"),
        ({"target": "sqrt"}, "NaN"),
    ],
)
def test_mistakes_of_a_specification_are_errors_of_its_program(make_task, change, error, monkeypatch):
    folder = make_task()
    table = pd.read_csv(folder / "public" / "train.csv")
    table["target"] -= 5
    table.to_csv(folder / "public" / "train.csv", index=False)
    task = load_task(folder)
    spec = Spec("regression", **{"model": "ridge", "output": "raw", **change})
    monkeypatch.setenv("DATA_DIR", str(task.public))
    monkeypatch.setenv("SUBMISSION_PATH", str(folder / "out.csv"))
    with pytest.raises(ValueError, match=error), np.errstate(invalid="ignore"):
        exec(render(spec, facts_of(task)), {"__name__": "__main__"})


@pytest.mark.parametrize("facts", [REGRESSION, CLASSES])
def test_generated_solutions_are_repeatable_and_every_mistake_changes_the_program(facts):
    first, longer = generate(facts, 30, 5), generate(facts, 60, 5)
    assert longer[:30] == first and generate(facts, 30, 6) != first
    assert {"any", "sound"} < {s.source for s in longer} and sum(s.source.startswith("mistake") for s in longer) > 5
    code = render(Spec(facts.kind, model="forest", output="raw" if facts.kind == "regression" else "probability"), facts)
    for name, edit in MISTAKES.items():
        changed = edit(code, facts, np.random.default_rng(0))
        assert changed != code, name
        if name != "broken syntax":
            ast.parse(changed)
        else:
            with pytest.raises(SyntaxError):
                ast.parse(changed)


def test_blends_average_numbers_and_vote_on_labels():
    tables = [pd.DataFrame({"id": [1, 2], "target": v}) for v in ([1, 0], [1, 1], [4, 1])]
    assert blend(tables, labels=False)["target"].tolist() == pytest.approx([2.0, 2 / 3])
    assert blend(tables, labels=True)["target"].tolist() == [1, 1]


def test_specifications_are_refused_where_the_target_is_unclear(make_task):
    folder = make_task()
    test = pd.read_csv(folder / "public" / "test.csv")
    test.drop(columns="x").to_csv(folder / "public" / "test.csv", index=False)
    answers = folder / "private" / "test_answer.csv"
    answers.write_text(answers.read_text().replace("target", "y"))
    with pytest.raises(UserError, match=r"which column of train\.csv is the target"):
        facts_of(load_task(folder))
    (folder / "public" / "test.csv").unlink()
    with pytest.raises(UserError, match=r"no test\.csv"):
        facts_of(load_task(folder))
