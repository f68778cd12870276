"""Failures of simulator processes."""

import os
import time
from dataclasses import dataclass

import pytest

from sim.workers import Pool, WorkerError, WorkerTimeout
from vla_wmrl.errors import UserError


@dataclass(frozen=True)
class Echo:
    value: int
    affinity: tuple = ()

    def run(self, context):
        return self.value, context.worker


@dataclass(frozen=True)
class Fails:
    kind: type
    affinity: tuple = ()

    def run(self, context):
        raise self.kind("the job's own words")


@dataclass(frozen=True)
class Dies:
    marker: str
    affinity: tuple = ()

    def run(self, context):
        if not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os._exit(7)
        return "second life"


@dataclass(frozen=True)
class Hangs:
    affinity: tuple = ()

    def run(self, context):
        time.sleep(3600)


def test_results_come_in_the_order_of_the_jobs_for_any_number_of_workers():
    for n in (1, 2):
        with Pool(n) as pool:
            assert [value for value, _ in pool.map([Echo(i) for i in range(7)])] == list(range(7))


def test_submitted_jobs_run_after_what_was_submitted_before_and_errors_arrive_with_the_result():
    with Pool(2) as pool:
        first = pool.submit([Echo(i) for i in range(5)], lambda results: [value for value, _ in results])
        second, third = pool.submit([Echo(9)]), pool.submit([Fails(ValueError)])
        assert first.result() == list(range(5)) and second.result()[0][0] == 9
        with pytest.raises(WorkerError, match="the job's own words"):
            third.result()


def test_an_error_in_a_worker_shows_its_id_and_its_own_traceback():
    with Pool(1) as pool, pytest.raises(WorkerError, match="worker 0 failed") as error:
        pool.map([Fails(ValueError)])
    assert "the job's own words" in str(error.value) and "in run" in str(error.value)


def test_a_users_mistake_in_a_worker_stays_one_line():
    with Pool(1) as pool, pytest.raises(UserError, match=r"^the job's own words$"):
        pool.map([Fails(UserError)])


def test_a_job_lost_with_its_worker_runs_again_in_a_new_one(tmp_path):
    with Pool(1, rebuilds=1) as pool:
        assert pool.map([Dies(str(tmp_path / "died"))]) == ["second life"]


def test_a_silent_worker_is_killed_and_named_and_rebuilds_are_bounded():
    with Pool(1, timeout_s=2.0, rebuilds=0) as pool, pytest.raises(WorkerTimeout, match="worker 0 silent for 2 s"):
        pool.map([Hangs()])
    assert not pool._workers
