"""Runs inside the sandbox: preloads imports once, then forks every program into namespaces of its own. Standard
library only.

Three processes a program: the *server* (this file's main loop; trusted, lives as long as the box), the *supervisor*
(trusted; enters new mount, pid and ipc namespaces, mounts private disks, keeps the clock, reads what the program
left) and the *program* (pid 1 of the new pid namespace: when it ends the kernel ends everything it has started). The
program has no privileges, no view of the server's processes, and no descriptor but /dev/null and its two output
pipes.

Frames on stdin and stdout: 4 bytes of length (big endian), JSON, then the blobs whose lengths the JSON gives as
`blobs`."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import linecache
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
import traceback

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 24, 38, 22
WORK, INPUT, TASKS = "/box", "/input", "/tasks"
MB = 1 << 20
# machine: (audit architecture, clone3, clone, calls that are refused)
SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E, 435, 56,
        (101, 155, 161, 165, 166, 167, 169, 175, 176, 246, 248, 249, 250, 272, 298, 304, 308, 310, 311, 313, 320, 321,
         323, 425, 426, 427, 428, 429, 430, 431, 432, 442),
    ),
    "aarch64": (
        0xC00000B7, 435, 220,
        (39, 40, 41, 51, 97, 104, 105, 106, 117, 142, 217, 218, 219, 224, 225, 241, 265, 268, 270, 271, 273, 280, 282,
         294, 425, 426, 427, 428, 429, 430, 431, 432, 442),
    ),
}  # fmt: skip
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if s is None else s.encode() for s in (source, target, kind, options)]
    _check(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def prctl(option: int, *values: int) -> None:
    _check(libc.prctl(option, *values, *[0] * (4 - len(values))), f"prctl {option}")


def read_exactly(fd: int, n: int) -> bytes:
    parts, left = [], n
    while left:
        part = os.read(fd, min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> tuple[dict, list[bytes]]:
    (size,) = struct.unpack(">I", read_exactly(fd, 4))
    header = json.loads(read_exactly(fd, size))
    return header, [read_exactly(fd, n) for n in header["blobs"]]


def send(fd: int, header: dict, blobs: tuple[bytes, ...] = ()) -> None:
    text = json.dumps({**header, "blobs": [len(b) for b in blobs]}).encode()
    write_all(fd, struct.pack(">I", len(text)) + text + b"".join(blobs))


class Capped:
    """The first and the last `limit / 2` bytes of a stream; what lies between is counted only."""

    def __init__(self, limit: int):
        self.half, self.head, self.tail, self.total = limit // 2, b"", b"", 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:] if room > 0 else self.tail + data)[-self.half :]

    def value(self) -> bytes:
        dropped = self.total - len(self.head) - len(self.tail)
        return self.head + (f"\n... {dropped} bytes left out ...\n".encode() if dropped else b"") + self.tail


def enter_namespaces(user: bool, uid: int, gid: int) -> None:
    """New mount, pid (for children) and ipc namespaces; without root, inside a new user namespace that allows them."""
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWIPC | (os.CLONE_NEWUSER if user else 0))
    if user:
        prctl(PR_SET_DUMPABLE, 1)  # else the kernel gives these files to root
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
        prctl(PR_SET_DUMPABLE, 0)


def private_disks(task: str, uid: int, gid: int, disk: int, own_tmp: bool) -> None:
    """Fresh memory-backed disks for one program, and its own task's public files alone, read-only.

    own_tmp: False where Python itself lies under /tmp, which then stays as it is, read-only.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    for target in (WORK, "/dev/shm", *(["/tmp"] if own_tmp else [])):
        mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes=4096,mode=700,uid={uid},gid={gid}")
    mount(f"{TASKS}/{task}", INPUT, None, MS_BIND)
    mount("none", INPUT, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    mount("tmpfs", TASKS, "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "size=4k,mode=000")


def drop_privileges(job: dict, base_vm: int) -> None:
    """Limits, no other descriptors, no capabilities, another user where that is possible, and a system-call filter."""
    limits = job["limits"]
    memory = limits["memory_mb"] * MB
    for name, value in (
        ("CORE", 0), ("DATA", memory), ("AS", memory + base_vm), ("FSIZE", limits["file_mb"] * MB),
        ("NOFILE", 256), ("NPROC", limits["processes"]), ("MSGQUEUE", 0), ("MEMLOCK", 0),
    ):  # fmt: skip
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    cpu = int(limits["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    os.closerange(3, 65536)
    try:
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")  # when memory runs out the program goes, not the server
    except OSError:
        pass  # a nested box without /proc
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails past the kernel's last one
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(job["gid"], job["gid"], job["gid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, data), "capset")
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # again: a change of user clears it
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    forbid_system_calls()


def forbid_system_calls() -> None:
    """A filter that refuses what a solution never needs: new namespaces, mounts, tracing, keys, kernel modules, bpf."""
    machine = SYSTEM_CALLS.get(os.uname().machine)
    if machine is None:
        return  # another machine: the namespaces, the user and the missing capabilities still hold
    arch, clone3, clone, denied = machine
    allow, kill, no = 0x7FFF0000, 0x80000000, 0x00050000
    rules: list[tuple[int, int, int, int]] = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (0x06, 0, 0, kill), (0x20, 0, 0, 0)]
    rules += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, no | 1)]  # x86's second set of numbers for the same calls
    rules += [(0x15, 0, 1, clone3), (0x06, 0, 0, no | 38)]  # "not implemented": libc falls back to clone
    for number in denied:
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, no | 1)]
    rules += [
        (0x15, 0, 3, clone),
        (0x20, 0, 0, 16),
        (0x45, 0, 1, 0x7E020000),
        (0x06, 0, 0, no | 1),
        (0x06, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(holder))


def finish(scope: dict) -> None:
    """What Python does at the end of a program: wait for threads, exit functions, close files that were left open."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    scope.clear()
    gc.collect()


def program(code: str, job: dict, base_vm: int, out: int, err: int) -> None:
    """Becomes the program. Never returns."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    except OSError:
        mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=4k")  # nested: no process list at all
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    exit_code = 1
    try:
        os.setsid()  # a signal to its own process group must not reach the supervisor and the server
        os.chdir(WORK)
        drop_privileges(job, base_vm)
        os.environ.update(
            HOME=WORK,
            TMPDIR="/tmp" if job["own_tmp"] else WORK,
            DATA_DIR=INPUT,
            SUBMISSION_PATH=f"{WORK}/submission.csv",
        )
        sys.argv, sys.stdin = ["solution.py"], open(0)  # noqa: SIM115  (stays open, as stdin does)
        linecache.cache["solution.py"] = (len(code), None, code.splitlines(True), "solution.py")
        scope = {"__name__": "__main__", "__file__": "solution.py"}
        exec(compile(code, "solution.py", "exec"), scope)
        finish(scope)
        exit_code = 0
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
    except BaseException:
        kind, error, trace = sys.exc_info()
        own = trace and trace.tb_next  # without this file's own frame
        sys.stderr.write("".join(traceback.format_exception(kind, error, own or None)))
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                exit_code = exit_code or 1
        os._exit(exit_code & 0xFF)


def read_submission(limit: int) -> tuple[bytes | None, str]:
    """The bytes of submission.csv if it is a plain file of at most `limit` bytes; a symbolic link is not followed."""
    try:
        fd = os.open(f"{WORK}/submission.csv", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, ""
    except OSError:
        return None, "submission.csv is a link or cannot be opened"
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return None, "submission.csv is not a plain file"
        if info.st_size > limit:
            return None, f"submission.csv has {info.st_size} bytes, more than {limit}"
        return read_exactly(fd, info.st_size), ""
    finally:
        os.close(fd)


def supervise(job: dict, code: str, base_vm: int) -> None:
    """Runs one program and sends its result to stdout. Exits 0 when the result was sent."""
    limits = job["limits"]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    enter_namespaces(job["user_namespace"], job["uid"], job["gid"])
    private_disks(job["task"], job["uid"], job["gid"], limits["disk_mb"] * MB, job["own_tmp"])
    pipes = [os.pipe(), os.pipe()]
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        program(code, job, base_vm, pipes[0][1], pipes[1][1])
    streams = {}
    for reading, writing in pipes:
        os.close(writing)
        streams[reading] = Capped(limits["output_kb"] * 1024)
    ended = os.pidfd_open(pid)
    poller = select.poll()
    for fd in (ended, *streams):
        poller.register(fd, select.POLLIN)
    deadline, timed_out, status, usage, open_fds = started + limits["wall_s"], False, None, None, set(streams)
    while open_fds or status is None:
        for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000 if status is None else 1000):
            if fd == ended:
                _, status, usage = os.wait4(pid, 0)
                poller.unregister(ended)
            else:
                data = os.read(fd, 65536)
                streams[fd].add(data)
                if not data:
                    poller.unregister(fd)
                    open_fds.discard(fd)
        if status is None and time.monotonic() >= deadline:
            timed_out = True
            os.kill(pid, signal.SIGKILL)
            deadline += 3600
    wall = time.monotonic() - started
    submission, note = read_submission(limits["submission_mb"] * MB)
    header = {
        "exit_code": os.waitstatus_to_exitcode(status), "timed_out": timed_out, "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime, "max_rss_mb": usage.ru_maxrss / 1024, "note": note,
        "submitted": submission is not None,
    }  # fmt: skip
    send(1, header, (*(s.value() for s in streams.values()), submission or b""))


def serve(preload: list[str]) -> None:
    """The main loop; ends at end of file."""
    loaded, failed = [], []
    for name in preload:
        try:
            importlib.import_module(name)
            loaded.append(name)
        except ImportError:
            failed.append(name)
    prctl(PR_SET_DUMPABLE, 0)
    with open("/proc/self/statm") as f:
        base_vm = int(f.read().split()[0]) * resource.getpagesize()
    send(1, {"ready": True, "loaded": loaded, "failed": failed, "uid": os.getuid()})
    while True:
        try:
            job, (code,) = receive(0)
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            failure = 1
            try:
                supervise(job, code.decode("utf-8", "replace"), base_vm)
                failure = 0
            except BaseException:
                sys.stderr.write(traceback.format_exc())
                sys.stderr.flush()
            finally:
                os._exit(failure)
        _, status = os.waitpid(pid, 0)
        if status:
            send(1, {"lost": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
