"""Renders a pipeline specification to the scikit-learn program it stands for: what runs in the sandbox, and what a
world model reads. Plain code, as a person would write it; nothing in it catches errors."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from text_agents.autoresearch.pipeline import Spec
from text_agents.autoresearch.tasks import Task
from vla_wmrl.errors import require

ESTIMATORS = {
    "classification": {
        "boosting": ("ensemble", "HistGradientBoostingClassifier", "random_state=0"),
        "forest": ("ensemble", "RandomForestClassifier", "random_state=0"),
        "extra_trees": ("ensemble", "ExtraTreesClassifier", "random_state=0"),
        "logistic": ("linear_model", "LogisticRegression", "max_iter=300"),
        "ridge": ("linear_model", "RidgeClassifier", ""),
        "knn": ("neighbors", "KNeighborsClassifier", ""),
        "tree": ("tree", "DecisionTreeClassifier", "random_state=0"),
        "svm": ("svm", "SVC", "probability=True, max_iter=5000, random_state=0"),
        "mlp": ("neural_network", "MLPClassifier", "random_state=0"),
        "naive_bayes": ("naive_bayes", "GaussianNB", ""),
        "dummy": ("dummy", "DummyClassifier", 'strategy="prior"'),
    },
    "regression": {
        "boosting": ("ensemble", "HistGradientBoostingRegressor", "random_state=0"),
        "forest": ("ensemble", "RandomForestRegressor", "random_state=0"),
        "extra_trees": ("ensemble", "ExtraTreesRegressor", "random_state=0"),
        "ridge": ("linear_model", "Ridge", ""),
        "lasso": ("linear_model", "Lasso", ""),
        "knn": ("neighbors", "KNeighborsRegressor", ""),
        "tree": ("tree", "DecisionTreeRegressor", "random_state=0"),
        "svm": ("svm", "SVR", "max_iter=5000"),
        "mlp": ("neural_network", "MLPRegressor", "random_state=0"),
        "poisson": ("linear_model", "PoissonRegressor", "max_iter=300"),
        "dummy": ("dummy", "DummyRegressor", ""),
    },
}
SCALERS = {"standard": "StandardScaler()", "robust": "RobustScaler()",
           "quantile": 'QuantileTransformer(n_quantiles=100, output_distribution="normal")'}  # fmt: skip
ENCODERS = {
    "onehot": 'OneHotEncoder(handle_unknown="ignore", min_frequency=5, sparse_output=False)',
    "ordinal": 'OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)',
    "target": "TargetEncoder(random_state=0)",
}
ROWS = {"half": 0.5, "tenth": 0.1}


@dataclass(frozen=True)
class Facts:
    """What a program must know of a task: names in its files. `classes`: submission columns of class probabilities."""

    kind: str
    id_column: str
    target: str  # column of train.csv
    columns: tuple[str, ...]  # of the submission, after the id
    labels: bool  # the metric wants labels


def facts_of(task: Task) -> Facts:
    """Raises UserError for a task that is no table of train.csv, test.csv and one target column."""
    for name in ("train.csv", "test.csv"):
        require((task.public / name).is_file(), f"task {task.name} has no {name}: specifications are for tabular tasks")
    train = pd.read_csv(task.public / "train.csv", nrows=5)
    test = pd.read_csv(task.public / "test.csv", nrows=5)
    extra = [c for c in train.columns if c not in test.columns]
    target = task.target[0] if len(task.target) == 1 and task.target[0] in train.columns else None
    if target is None:
        require(len(extra) == 1, f"task {task.name}: which column of train.csv is the target? {', '.join(extra) or 'none'}")
        target = extra[0]
    kind = "regression" if task.kind == "regression" else "classification"
    labels = task.metric.name in ("accuracy", "f1") or (task.kind == "other" and kind == "classification")
    return Facts(kind, task.id_column, target, tuple(task.target), labels)


def code_facts(task: Task) -> Facts:
    """What whole programs need to be known by: any task will do, they read its files themselves."""
    return Facts(task.kind, task.id_column, "", tuple(task.target), False)


def render(spec: Spec, facts: Facts) -> str:
    """The program of `spec` for a task with `facts`; it reads DATA_DIR and writes SUBMISSION_PATH."""
    preprocessing, imports = _preprocessing(spec, facts)
    module, name, fixed = ESTIMATORS[spec.kind][spec.model]
    imports.setdefault(f"sklearn.{module}", set()).add(name)
    options = [f"{key}={_literal(key, value)}" for key, value in spec.params.items()] + ([fixed] if fixed else [])
    steps = _selection(spec, imports)
    imports.setdefault("sklearn.pipeline", set()).add("make_pipeline")
    model = [f"estimator = {name}({', '.join(options)})"]
    model.append(f"model = make_pipeline({', '.join(['preprocess', *steps, 'estimator'])})")
    lines = ["import os", "", "import numpy as np", "import pandas as pd"]
    lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    lines += [
        "",
        'folder = os.environ["DATA_DIR"]',
        'train = pd.read_csv(os.path.join(folder, "train.csv"))',
        'test = pd.read_csv(os.path.join(folder, "test.csv"))',
    ]
    if spec.rows in ROWS:
        lines.append(f"train = train.sample(frac={ROWS[spec.rows]}, random_state=0)")
    lines += [
        f'features = [c for c in test.columns if c in train.columns and c != "{facts.id_column}"]',
        f'X, y = train[features], train["{facts.target}"]',
        'numeric = X.select_dtypes("number").columns.tolist()',
        "categorical = [c for c in features if c not in numeric]",
        "",
        *preprocessing,
        *model,
        *(_fit_regression(spec) if spec.kind == "regression" else ["model.fit(X, y)"]),
        *(_predict_regression(spec, facts) if spec.kind == "regression" else _predict_classes(spec, facts)),
        'submission.to_csv(os.environ["SUBMISSION_PATH"], index=False)',
    ]
    return "\n".join(lines) + "\n"


def _literal(key: str, value: object) -> str:
    if key == "hidden_layer_sizes":
        return f"({value},)"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _preprocessing(spec: Spec, facts: Facts) -> tuple[list[str], dict[str, set[str]]]:
    imports: dict[str, set[str]] = {"sklearn.compose": {"ColumnTransformer"}}
    numeric = []
    if spec.impute != "none":
        numeric.append(f'SimpleImputer(strategy="{spec.impute}")')
        imports["sklearn.impute"] = {"SimpleImputer"}
    if spec.scale != "none":
        numeric.append(SCALERS[spec.scale])
        imports["sklearn.preprocessing"] = {SCALERS[spec.scale].split("(")[0]}
    steps = [("numeric", _chain(numeric, imports), "numeric")]
    if spec.encode in ENCODERS:
        encoder = ENCODERS[spec.encode]
        if spec.encode == "target" and spec.kind == "regression":  # it takes whole numbers for classes otherwise
            encoder = encoder[:-1] + ', target_type="continuous")'
        imports.setdefault("sklearn.preprocessing", set()).add(encoder.split("(")[0])
        chain = [encoder]
        if spec.impute != "none":
            chain = ['SimpleImputer(strategy="most_frequent")', encoder]
        elif spec.encode == "ordinal":
            chain = [encoder[:-1] + ", encoded_missing_value=-2)"]
        steps.append(("categorical", _chain(chain, imports), "categorical"))
    elif spec.encode == "none":
        steps.append(("categorical", '"passthrough"', "categorical"))
    lines = ["preprocess = ColumnTransformer(", "    ["]
    lines += [f'        ("{name}", {chain}, {columns}),' for name, chain, columns in steps]
    return [*lines, "    ]", ")"], imports


def _chain(parts: list[str], imports: dict[str, set[str]]) -> str:
    if not parts:
        return '"passthrough"'
    if len(parts) == 1:
        return parts[0]
    imports.setdefault("sklearn.pipeline", set()).add("make_pipeline")
    return f"make_pipeline({', '.join(parts)})"


def _selection(spec: Spec, imports: dict[str, set[str]]) -> list[str]:
    if spec.select == "best10":
        score = "f_regression" if spec.kind == "regression" else "f_classif"
        imports["sklearn.feature_selection"] = {"SelectKBest", score}
        return [f"SelectKBest({score}, k=10)"]
    if spec.select.startswith("pca"):
        imports["sklearn.decomposition"] = {"PCA"}
        return [f"PCA(n_components={spec.select[3:]}, random_state=0)"]
    return []


def _fit_regression(spec: Spec) -> list[str]:
    if spec.target == "standard":
        return ["centre, spread = y.mean(), y.std()", "model.fit(X, (y - centre) / spread)"]
    forward = {"none": "y", "log1p": "np.log1p(y)", "sqrt": "np.sqrt(y)"}[spec.target]
    return [f"model.fit(X, {forward})"]


def _predict_regression(spec: Spec, facts: Facts) -> list[str]:
    raw = "model.predict(test[features])"
    back = {"none": raw, "log1p": f"np.expm1({raw})", "sqrt": f"{raw} ** 2", "standard": f"{raw} * spread + centre"}
    lines = [f"predicted = {back[spec.target]}"]
    if spec.output == "clip":
        lines.append("predicted = np.clip(predicted, y.min(), y.max())")
    elif spec.output == "round":
        lines.append("predicted = np.round(predicted)")
    return [*lines, _frame(facts.id_column, [(facts.columns[0], "predicted")])]


def _predict_classes(spec: Spec, facts: Facts) -> list[str]:
    if spec.output == "label":
        # where class probabilities are asked for, a column of labels under the target's name is the usual mistake
        column = facts.columns[0] if len(facts.columns) == 1 else facts.target
        return ["predicted = model.predict(test[features])", _frame(facts.id_column, [(column, "predicted")])]
    lines = ["probability = model.predict_proba(test[features])"]
    if len(facts.columns) == 1:
        return [*lines, _frame(facts.id_column, [(facts.columns[0], "probability[:, 1]")])]
    return [
        *lines,
        "submission = pd.DataFrame(probability, columns=model.classes_)",
        f'submission.insert(0, "{facts.id_column}", test["{facts.id_column}"])',
    ]


def _frame(id_column: str, columns: list[tuple[str, str]]) -> str:
    inside = ", ".join([f'"{id_column}": test["{id_column}"]', *(f'"{name}": {value}' for name, value in columns)])
    return f"submission = pd.DataFrame({{{inside}}})"
