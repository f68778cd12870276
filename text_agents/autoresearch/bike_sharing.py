"""Rebuilds Kaggle's bike-sharing-demand from UCI's hourly table and Kaggle's two boards, as a task folder.

Kaggle's split is by day of the month: 1 to 19 is train, 20 to the end is test (10,886 and 6,493 rows). A held-out
check: here HumanRank is against 3,242 real teams. The data are the user's own copy and are not part of this
repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd

from vla_wmrl.errors import require

NAME = "bike-sharing-demand"
FILES = ("bike_hour.csv", f"{NAME}.description.txt", f"{NAME}.private.csv", f"{NAME}.public.csv")
ROWS = (10_886, 6_493)


def build(source: str | Path, folder: str | Path) -> Path:
    """Write the task to `folder`/bike-sharing-demand and return that. Raises UserError listing missing files."""
    source, root = Path(source), Path(folder) / NAME
    missing = [name for name in FILES if not (source / name).is_file()]
    require(not missing, f"{source} lacks {', '.join(missing)}")
    hours = pd.read_csv(source / "bike_hour.csv")
    day = pd.to_datetime(hours["dteday"], format="mixed")
    # UCI scales its four measurements to [0, 1]; Kaggle has them in degrees, percent and km/h
    table = pd.DataFrame({
        "datetime": (day + pd.to_timedelta(hours["hr"], unit="h")).dt.strftime("%Y-%m-%d %H:%M:%S"),
        "season": hours["season"], "holiday": hours["holiday"], "workingday": hours["workingday"],
        "weather": hours["weathersit"], "temp": (hours["temp"] * 41).round(2), "atemp": (hours["atemp"] * 50).round(3),
        "humidity": (hours["hum"] * 100).round(0), "windspeed": (hours["windspeed"] * 67).round(4),
        "casual": hours["casual"], "registered": hours["registered"], "count": hours["cnt"],
    })  # fmt: skip
    train, test = table[day.dt.day <= 19], table[day.dt.day > 19]
    require((len(train), len(test)) == ROWS, f"bike_hour.csv splits into {len(train)} and {len(test)} rows, expected {ROWS}")
    public, private = root / "public", root / "private"
    public.mkdir(parents=True, exist_ok=True)
    private.mkdir(mode=0o700, exist_ok=True)
    train.to_csv(public / "train.csv", index=False)
    test.drop(columns=["casual", "registered", "count"]).to_csv(public / "test.csv", index=False)
    test[["datetime"]].assign(count=0).to_csv(public / "sample_submission.csv", index=False)
    test[["datetime", "count"]].to_csv(private / "test_answer.csv", index=False)
    shutil.copyfile(source / f"{NAME}.description.txt", public / "description.txt")
    for which in ("private", "public"):
        shutil.copyfile(source / f"{NAME}.{which}.csv", private / f"{which}_leaderboard.csv")
    settings = {"name": NAME, "metric": "rmsle", "kind": "regression", "held_out": True}
    (root / "task.json").write_text(json.dumps(settings), encoding="utf-8")
    return root
