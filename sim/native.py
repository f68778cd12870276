"""One control period of OSC_POSE + Panda gripper + MuJoCo substeps as a single native call that releases the GIL.

numba calls libmujoco's own functions by symbol (so the compiled code caches on disk) and keeps all controller state in one
record per environment: nothing is global, any number of environments may be stepped from any number of threads.

Three modes. EXACT gives robosuite 1.4's bits: both extra `mj_forward` calls of robosuite see the same qpos and qvel as the
following `mj_step`, so all they change is `qacc_warmstart`, and only their constraint solves have to be repeated. NEAR is
EXACT with Cholesky factors instead of LAPACK inverses (equal to rounding). FAST makes one constraint solve a substep.
"""

from __future__ import annotations

import glob
import math
import os

import llvmlite.binding as llvm
import mujoco
import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error
from robosuite.utils.transform_utils import quat2mat

EXACT, FAST, NEAR = 0, 1, 2
MODES = {"exact": EXACT, "near": NEAR, "fast": FAST}

# The same file that the Python bindings loaded, hence the same handle.
llvm.load_library_permanently(glob.glob(os.path.join(os.path.dirname(mujoco.__file__), "libmujoco.so*"))[0])

_ptr = types.intp


def _mj(name: str, n_pointers: int, *extra: types.Type) -> types.ExternalFunction:
    return types.ExternalFunction(name, types.void(*([_ptr] * n_pointers), *extra))


mj_step1, mj_step2 = _mj("mj_step1", 2), _mj("mj_step2", 2)
mj_fwdActuation, mj_fwdAcceleration = _mj("mj_fwdActuation", 2), _mj("mj_fwdAcceleration", 2)
mj_fwdConstraint = _mj("mj_fwdConstraint", 2)
mj_jacSite = _mj("mj_jacSite", 4, types.int32)
mj_fullM = _mj("mj_fullM", 3)  # signature of mujoco < 3.4

# Addresses and constants: set when a simulator is attached, meaningless in another process.
_ATTACHED = [
    *[(k, "i8") for k in ("model", "data", "qpos", "qvel", "ctrl", "qM", "bias", "site_xpos", "site_xmat", "jac", "fullM")],
    ("nq", "i8"), ("nv", "i8"), ("nu", "i8"), ("site", "i8"),
    ("qpos_adr", "i8", 7), ("qvel_adr", "i8", 7), ("act", "i8", 7), ("grip_act", "i8", 2),
    ("kp", "f8", 6), ("kd", "f8", 6), ("in_lo", "f8", 6), ("in_hi", "f8", 6), ("in_mid", "f8", 6), ("scale", "f8", 6),
    ("out_mid", "f8", 6), ("q0", "f8", 7), ("tau_lo", "f8", 7), ("tau_hi", "f8", 7),
    ("grip_mid", "f8", 2), ("grip_half", "f8", 2), ("grip_speed", "f8"),
]  # fmt: skip
# The controller's memory between calls: goal, gripper, and robosuite's snapshot of the arm (Controller.update).
_MEMORY = [
    ("new_update", "i8"), ("goal_pos", "f8", 3), ("goal_ori", "f8", (3, 3)), ("grip", "f8", 2),
    ("ee_pos", "f8", 3), ("ee_ori", "f8", (3, 3)), ("vel_pos", "f8", 3), ("vel_ori", "f8", 3),
    ("q", "f8", 7), ("v", "f8", 7), ("JT", "f8", (7, 6)), ("M", "f8", (7, 7)),
]  # fmt: skip
CONTEXT = np.dtype(_ATTACHED + _MEMORY)
MEMORY_FIELDS = [field[0] for field in _MEMORY]


@intrinsic
def _as_pointer(typingctx, address):
    def codegen(cgctx, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@njit
def _view(address, n):
    return carray(_as_pointer(address), (n,), np.float64)


@njit
def _snapshot(c):
    """robosuite's Controller.update, without its forward call."""
    nv = c.nv
    mj_jacSite(c.model, c.data, c.jac, c.jac + 24 * nv, np.int32(c.site))
    jac = carray(_as_pointer(c.jac), (6, nv), np.float64)
    qvel, qpos = _view(c.qvel, nv), _view(c.qpos, c.nq)
    xpos, xmat = _view(c.site_xpos, 3), _view(c.site_xmat, 9)
    vel_pos, vel_ori = np.dot(jac[:3], qvel), np.dot(jac[3:], qvel)
    for i in range(3):
        c.ee_pos[i], c.vel_pos[i], c.vel_ori[i] = xpos[i], vel_pos[i], vel_ori[i]
        for j in range(3):
            c.ee_ori[i, j] = xmat[3 * i + j]
    mj_fullM(c.model, c.fullM, c.qM)
    full = carray(_as_pointer(c.fullM), (nv, nv), np.float64)
    for a in range(7):
        d = c.qvel_adr[a]
        c.q[a], c.v[a] = qpos[c.qpos_adr[a]], qvel[d]
        for i in range(6):
            c.JT[a, i] = jac[i, d]
        for b in range(7):
            c.M[a, b] = full[d, c.qvel_adr[b]]


@njit
def _set_goal(c, action):
    """OperationalSpaceController.set_goal with fixed impedance, delta actions, no limits, no interpolation."""
    delta = np.empty(6)
    for i in range(6):
        delta[i] = (min(max(action[i], c.in_lo[i]), c.in_hi[i]) - c.in_mid[i]) * c.scale[i] + c.out_mid[i]
    if delta[3] != 0.0 or delta[4] != 0.0 or delta[5] != 0.0:  # else robosuite keeps the old orientation goal
        vec = delta[3:]
        angle = math.sqrt(vec[0] * vec[0] + vec[1] * vec[1] + vec[2] * vec[2])
        quat = np.zeros(4)
        quat[3] = math.cos(angle / 2.0)
        if angle != 0.0:  # it is 0 for a delta whose squares underflow
            quat[:3] = vec / angle * math.sin(angle / 2.0)
        c.goal_ori[:] = np.dot(quat2mat(quat), c.ee_ori.copy())  # quat2mat rounds to float32, as robosuite does
    for i in range(3):
        c.goal_pos[i] = c.ee_pos[i] + delta[i]


@njit
def _torques_exact(c, bias):
    """run_controller with robosuite's own jitted algebra (inverse and pseudo-inverses through LAPACK)."""
    ori_err = orientation_error(c.goal_ori.copy(), c.ee_ori.copy())
    wrench, force, torque = np.empty(6), np.empty(3), np.empty(3)
    for i in range(3):
        force[i] = (c.goal_pos[i] - c.ee_pos[i]) * c.kp[i] + (-c.vel_pos[i]) * c.kd[i]
        torque[i] = ori_err[i] * c.kp[3 + i] + (-c.vel_ori[i]) * c.kd[3 + i]
    jt = c.JT.copy()
    jpt, jot = jt[:, :3].copy(), jt[:, 3:].copy()
    m = c.M.copy()
    # .T views: robosuite's fancy indexing leaves Jacobians and M in Fortran order, which picks the BLAS path.
    _, lam_pos, lam_ori, null = opspace_matrices(m.T, jt.T, jpt.T, jot.T)
    wrench[:3], wrench[3:] = np.dot(lam_pos, force), np.dot(lam_ori, torque)
    tau = np.dot(jt, wrench)
    for a in range(7):
        tau[a] += bias[c.qvel_adr[a]]
    tau += nullspace_torques(m.T, null, c.q0.copy(), c.q.copy(), c.v.copy(), 10)
    return tau


@njit
def _cholesky(a, n):
    """In place, lower triangle. False when not positive definite."""
    for j in range(n):
        s = a[j, j]
        for k in range(j):
            s -= a[j, k] * a[j, k]
        if not s > 1e-14:
            return False
        s = math.sqrt(s)
        a[j, j] = s
        for i in range(j + 1, n):
            t = a[i, j]
            for k in range(j):
                t -= a[i, k] * a[j, k]
            a[i, j] = t / s
    return True


@njit
def _solve_lower(a, n, b):
    for i in range(n):
        t = b[i]
        for k in range(i):
            t -= a[i, k] * b[k]
        b[i] = t / a[i, i]


@njit
def _solve_upper(a, n, b):
    for i in range(n - 1, -1, -1):
        t = b[i]
        for k in range(i + 1, n):
            t -= a[k, i] * b[k]
        b[i] = t / a[i, i]


@njit
def _torques_fast(c, bias):
    """The same control law with Cholesky factors: A = J M^-1 J^T, nullspace torque M w - J^T A^-1 J w."""
    jt, tau = c.JT, np.empty(7)
    fac, y = np.empty((7, 7)), np.empty((6, 7))
    a, a_pos, a_ori = np.empty((6, 6)), np.empty((3, 3)), np.empty((3, 3))
    wrench, w, jw = np.empty(6), np.empty(7), np.empty(6)
    for i in range(7):
        for j in range(7):
            fac[i, j] = c.M[i, j]
    if not _cholesky(fac, 7):
        return _torques_exact(c, bias)
    for r in range(6):  # y = (L^-1 J^T)^T, so that A = y y^T
        for i in range(7):
            y[r, i] = jt[i, r]
        _solve_lower(fac, 7, y[r])
    for i in range(6):
        for j in range(i + 1):
            s = 0.0
            for k in range(7):
                s += y[i, k] * y[j, k]
            a[i, j] = s
    for i in range(3):
        for j in range(i + 1):
            a_pos[i, j], a_ori[i, j] = a[i, j], a[3 + i, 3 + j]
    if not (_cholesky(a_pos, 3) and _cholesky(a_ori, 3) and _cholesky(a, 6)):
        return _torques_exact(c, bias)
    r, g = c.ee_ori, c.goal_ori
    for i in range(3):
        p, q = (i + 1) % 3, (i + 2) % 3
        e = 0.0
        for k in range(3):
            e += r[p, k] * g[q, k] - r[q, k] * g[p, k]
        wrench[i] = (c.goal_pos[i] - c.ee_pos[i]) * c.kp[i] - c.vel_pos[i] * c.kd[i]
        wrench[3 + i] = 0.5 * e * c.kp[3 + i] - c.vel_ori[i] * c.kd[3 + i]
    _solve_lower(a_pos, 3, wrench[:3])
    _solve_upper(a_pos, 3, wrench[:3])
    _solve_lower(a_ori, 3, wrench[3:])
    _solve_upper(a_ori, 3, wrench[3:])
    kv = 2.0 * math.sqrt(10.0)
    for i in range(7):
        w[i] = 10.0 * (c.q0[i] - c.q[i]) - kv * c.v[i]
    for i in range(6):
        s = 0.0
        for k in range(7):
            s += jt[k, i] * w[k]
        jw[i] = s
    _solve_lower(a, 6, jw)
    _solve_upper(a, 6, jw)
    for i in range(7):
        s = bias[c.qvel_adr[i]]
        for k in range(6):
            s += jt[i, k] * (wrench[k] - jw[k])
        for k in range(7):
            s += c.M[i, k] * w[k]
        tau[i] = s
    return tau


@njit
def _control(c, action, first_substep, mode):
    """SingleArm.control; the caller has brought mjData up to date with its qpos and qvel."""
    if c.new_update:  # false only in the first substep after env.reset: robosuite then acts on a stale snapshot
        if mode != FAST:
            mj_fwdConstraint(c.model, c.data)
        _snapshot(c)
    if first_substep:
        _set_goal(c, action)
    bias, ctrl = _view(c.bias, c.nv), _view(c.ctrl, c.nu)
    tau = _torques_exact(c, bias) if mode == EXACT else _torques_fast(c, bias)
    c.new_update = 1
    step = c.grip_speed * np.sign(action[6])  # only the sign counts; 0 holds
    for i in range(2):
        c.grip[i] = min(max(c.grip[i] + (-step if i == 0 else step), -1.0), 1.0)
        ctrl[c.grip_act[i]] = c.grip_mid[i] + c.grip_half[i] * c.grip[i]
    for a in range(7):
        ctrl[c.act[a]] = min(max(tau[a], c.tau_lo[a]), c.tau_hi[a])


@njit(nogil=True, cache=True)
def run(contexts, actions, first, last, mode):
    """Substeps [first, last) of one control period for every environment of `contexts` [E] with `actions` [E, 7]."""
    for e in range(contexts.shape[0]):
        c, action = contexts[e], actions[e]
        for i in range(first, last):
            mj_step1(c.model, c.data)
            if mode != FAST:  # with the ctrl of the last substep
                mj_fwdActuation(c.model, c.data)
                mj_fwdAcceleration(c.model, c.data)
                mj_fwdConstraint(c.model, c.data)
            _control(c, action, i == 0, mode)
            mj_step2(c.model, c.data)
