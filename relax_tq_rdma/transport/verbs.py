"""What libibverbs says about the devices of this machine, asked in a child process.

sysfs and an open device node are not the whole truth: without the provider library of a driver (Debian's
``ibverbs-providers``) libibverbs lists no such device, and the largest memory region is known to the driver only. A
native library that hangs or crashes takes the child with it, not the caller.
"""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec

_CODE = """
import ctypes, json, os
try:
    lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
except OSError as error:
    print("\\nrtq-verbs " + json.dumps({"problem": str(error)}))
    raise SystemExit
for name in ("ibv_get_device_list", "ibv_open_device"):
    getattr(lib, name).restype = ctypes.c_void_p
lib.ibv_get_device_name.restype = ctypes.c_char_p
lib.ibv_get_device_name.argtypes = lib.ibv_open_device.argtypes = lib.ibv_close_device.argtypes = [ctypes.c_void_p]
lib.ibv_query_device.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
count = ctypes.c_int(0)
devices = {}
entries = ctypes.cast(lib.ibv_get_device_list(ctypes.byref(count)), ctypes.POINTER(ctypes.c_void_p))
for i in range(count.value if entries else 0):
    name = lib.ibv_get_device_name(entries[i]).decode()
    context = lib.ibv_open_device(entries[i])
    if not context:
        devices[name] = {"problem": os.strerror(ctypes.get_errno() or 5)}
        continue
    # struct ibv_device_attr: char fw_ver[64], be64 node_guid, be64 sys_image_guid, u64 max_mr_size, ...
    attributes = ctypes.create_string_buffer(1024)
    known = lib.ibv_query_device(context, attributes) == 0
    devices[name] = {"max_mr_bytes": int.from_bytes(attributes.raw[80:88], "little") if known else None}
    lib.ibv_close_device(context)
print("\\nrtq-verbs " + json.dumps({"devices": devices}))
"""


class VerbsDevice(msgspec.Struct, frozen=True, kw_only=True):
    """``problem`` says why the device does not open; empty when it does. ``max_mr_bytes``: largest memory region."""

    problem: str = ""
    max_mr_bytes: int | None = None


class VerbsFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All devices libibverbs lists; ``problem`` when it could not be asked (``devices`` then says nothing)."""

    devices: dict[str, VerbsDevice] = {}
    problem: str = ""


def query_verbs(limit: float) -> VerbsFacts:
    """Ask libibverbs, within ``limit`` seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CODE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return VerbsFacts(problem=f"libibverbs did not answer within {limit:g} s")
    except OSError as exc:
        return VerbsFacts(problem=f"no child process ({exc.strerror})")
    lines = done.stdout.decode(errors="replace").splitlines()
    line = next((text for text in lines if text.startswith("rtq-verbs ")), "")
    if not line:
        return VerbsFacts(problem=f"libibverbs ended the child with code {done.returncode}")
    return msgspec.convert(json.loads(line.removeprefix("rtq-verbs ")), VerbsFacts)
