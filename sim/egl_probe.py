"""Ask the GL libraries of this machine what they offer; prints one JSON object. Standard library only.

Runs as its own process (`python egl_probe.py`): a broken driver can crash the process that asks, and asking leaves GL
state behind.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import sys

EGL_EXTENSIONS = 0x3055
EGL_DRM_DEVICE_FILE_EXT = 0x3233
EGL_CUDA_DEVICE_NV = 0x323A
EGL_PLATFORM_DEVICE_EXT = 0x313F
MAX_DEVICES = 32


def load(names: list[str]) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def function(egl: ctypes.CDLL, name: str, result, *arguments):
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = egl.eglGetProcAddress(name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def pci_address(drm_file: str) -> str:
    """PCI address ("0000:65:00.0") behind a DRM device file, "" where the kernel does not say."""
    link = f"/sys/class/drm/{os.path.basename(drm_file)}/device"
    return os.path.basename(os.path.realpath(link)) if drm_file and os.path.exists(link) else ""


def egl_devices(egl: ctypes.CDLL) -> list[dict]:
    query = function(egl, "eglQueryDevicesEXT", ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    string = function(egl, "eglQueryDeviceStringEXT", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
    attrib = function(
        egl, "eglQueryDeviceAttribEXT", ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t)
    )
    platform_display = function(
        egl, "eglGetPlatformDisplayEXT", ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p
    )
    if not (query and string and platform_display):
        return []
    handles, count = (ctypes.c_void_p * MAX_DEVICES)(), ctypes.c_int(0)
    if not query(MAX_DEVICES, handles, ctypes.byref(count)):
        return []
    egl.eglInitialize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    devices = []
    for index in range(count.value):
        extensions = (string(handles[index], EGL_EXTENSIONS) or b"").decode().split()
        drm_file, cuda_id = "", None
        if "EGL_EXT_device_drm" in extensions:
            drm_file = (string(handles[index], EGL_DRM_DEVICE_FILE_EXT) or b"").decode()
        if "EGL_NV_device_cuda" in extensions and attrib:
            value = ctypes.c_ssize_t(-1)
            if attrib(handles[index], EGL_CUDA_DEVICE_NV, ctypes.byref(value)):
                cuda_id = value.value
        display = platform_display(EGL_PLATFORM_DEVICE_EXT, handles[index], None)
        devices.append(
            {
                "index": index,
                "software": "EGL_MESA_device_software" in extensions,
                "usable": bool(display) and bool(egl.eglInitialize(display, None, None)),
                "cuda_id": cuda_id,
                "pci": pci_address(drm_file),
            }
        )
    return devices


def main() -> None:
    egl = load(["libEGL.so.1", "libEGL.so"])
    print(
        json.dumps(
            {
                "platform": sys.platform,
                "egl": egl_devices(egl) if egl else [],
                "osmesa": load(["libOSMesa.so.8", "libOSMesa.so", "libOSMesa.so.6"]) is not None,
            }
        )
    )


if __name__ == "__main__":
    main()
