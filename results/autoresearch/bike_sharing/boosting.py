import os

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingRegressor


def features(table):
    when = pd.to_datetime(table["datetime"])
    table = table[["season", "holiday", "workingday", "weather", "temp", "atemp", "humidity", "windspeed"]]
    return table.assign(hour=when.dt.hour, weekday=when.dt.dayofweek, month=when.dt.month, year=when.dt.year)


data = os.environ["DATA_DIR"]
train, test = pd.read_csv(f"{data}/train.csv"), pd.read_csv(f"{data}/test.csv")
model = HistGradientBoostingRegressor(max_iter=400, learning_rate=0.05, random_state=0)
model.fit(features(train), np.log1p(train["count"]))
count = np.expm1(model.predict(features(test))).clip(0)
test[["datetime"]].assign(count=count).to_csv(os.environ["SUBMISSION_PATH"], index=False)
