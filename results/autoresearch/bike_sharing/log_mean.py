import os

import numpy as np
import pandas as pd

data = os.environ["DATA_DIR"]
train, test = pd.read_csv(f"{data}/train.csv"), pd.read_csv(f"{data}/test.csv")
test[["datetime"]].assign(count=np.expm1(np.log1p(train["count"]).mean())).to_csv(os.environ["SUBMISSION_PATH"], index=False)
