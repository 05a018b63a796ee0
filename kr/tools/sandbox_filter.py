"""A seccomp filter for the sandbox: system calls that code without privileges has no business with.

Namespaces alone leave three doors open that matter here: new user namespaces (inside which code
could mount memory file systems of any size), memory outside of RLIMIT_AS (System V shared memory,
memfd), and sockets that network namespaces do not cover (vsock). The filter is classic BPF.
"""

from __future__ import annotations

import errno
import platform
import struct

_ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}   # AUDIT_ARCH_*, column below
_DENIED = {  # numbers on x86_64 and aarch64
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "acct": (163, 89),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), 435, (41, 198)
_NEW_NAMESPACE = 0x7E020000     # all CLONE_NEW* flags
_AF_UNIX = 1

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0 = 0, 4, 16    # offsets in struct seccomp_data
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _fail(error: int) -> int:
  return 0x00050000 | error


def program() -> bytes | None:
  """The filter for this machine, as `bwrap --seccomp` reads it; None on an unknown architecture."""
  if platform.machine() not in _ARCHES:
    return None
  arch, column = _ARCHES[platform.machine()]
  deny = _fail(errno.EPERM)
  code = [
      (_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, arch), (_RET, 0, 0, _KILL),
      (_LOAD, 0, 0, _NR), (_JGE, 0, 1, 0x40000000), (_RET, 0, 0, deny),   # the x32 numbers
      # clone3 hides its flags behind a pointer; with ENOSYS the C library falls back to clone.
      (_JEQ, 0, 1, _CLONE3), (_RET, 0, 0, _fail(errno.ENOSYS)),
      (_JEQ, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _ARG0), (_JSET, 0, 1, _NEW_NAMESPACE),
      (_RET, 0, 0, deny), (_RET, 0, 0, _ALLOW),
      (_JEQ, 0, 4, _SOCKET[column]), (_LOAD, 0, 0, _ARG0), (_JEQ, 1, 0, _AF_UNIX),
      (_RET, 0, 0, deny), (_RET, 0, 0, _ALLOW)]
  for numbers in _DENIED.values():
    code += [(_JEQ, 0, 1, numbers[column]), (_RET, 0, 0, deny)]
  code.append((_RET, 0, 0, _ALLOW))
  return b"".join(struct.pack("=HBBI", *step) for step in code)
