"""Children of this process that ended and that nobody has waited for."""

import psutil


def zombies() -> set[int]:
    """Returns their process ids; other tests may have left some."""
    found = set[int]()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.NoSuchProcess:
            pass
    return found
