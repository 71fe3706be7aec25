"""The system calls that no program of a sandbox may make, as the filter that bubblewrap installs.

Three kinds: those that take memory which no limit counts (memfd_create and System V's objects),
those by which a program would let others run before it until no clock but the wall's ends it, and
those that no honest program needs and whose bugs are how sandboxes are left. Of sockets there are
the common families only: others, as that between virtual machines, know no network namespaces.
"""

import errno
import platform
import socket
import struct

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
"""From here on, x86-64 numbers its calls a second time."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: number on x86-64, number on aarch64.
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
}
# These two take a family first.
_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""The last is AF_NETLINK, in which the addresses of a name are looked up."""


def refusing_filter() -> bytes | None:
    """Returns the filter for this machine's architecture, None where the numbers are not known.

    A refused call fails with EPERM, and so does every call of a foreign architecture.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    column = list(_ARCHITECTURES).index(machine)
    numbers = [pair[column] for pair in _REFUSED.values()]
    takes_family = [pair[column] for pair in _SOCKETS.values()]
    family_at = 4 + len(numbers) + len(takes_family) + 1
    refuse_at = family_at + 1 + len(_FAMILIES)
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 0, refuse_at - 2, _ARCHITECTURES[machine]),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_AT_LEAST, refuse_at - 4, 0, _X32),
    ]
    steps += [(_JUMP_EQUAL, refuse_at - at - 1, 0, n) for at, n in enumerate(numbers, 4)]
    first = 4 + len(numbers)
    steps += [(_JUMP_EQUAL, family_at - at - 1, 0, n) for at, n in enumerate(takes_family, first)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET)]
    first = family_at + 1
    steps += [(_JUMP_EQUAL, refuse_at - at, 0, int(f)) for at, f in enumerate(_FAMILIES, first)]
    steps += [(_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
