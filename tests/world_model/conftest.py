"""Fixtures on the toy world."""

import numpy as np
import pytest

from tests.world_model.toy_world import SMALL, TOKENS, WIDTH, ToyPolicy, make_task, make_trace
from vla_wmrl.types import Start
from vla_wmrl.world_model.latent import StateSpaceModel


@pytest.fixture(scope="session")
def tasks():
    return {0: make_task(0, ("soup_1", "sauce_1", "milk_1", "basket_1")), 3: make_task(3, ("butter_1", "basket_1"))}


@pytest.fixture
def policy():
    return ToyPolicy()


@pytest.fixture
def make_model(tasks):
    def make(updates: int = 4, seed: int = 0) -> StateSpaceModel:
        model = StateSpaceModel(tasks, seed=seed, width=16, config=SMALL)
        for kind, first in (("expert", 0), ("near_miss", 10), ("policy", 20)):
            model.observe([make_trace(t, first + i) for t in tasks.values() for i in range(3)], kind)
        model.fit(updates)
        for task in tasks.values():
            states = np.concatenate([make_trace(task, i).states for i in range(3)])
            rng = np.random.default_rng(task.task_id)
            model.decoder.observe(task.task_id, states, rng.normal(size=(len(states), TOKENS, WIDTH)))
        model.fit_decoder(ToyPolicy(), 3)
        return model

    return make


@pytest.fixture
def starts(tasks):
    made = [Start(t.task_id, i, state=make_trace(t, i).states[0]) for t in tasks.values() for i in range(2)]
    return [made[0], made[2], made[1], made[3]]  # tasks interleaved
