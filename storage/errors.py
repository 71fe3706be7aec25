"""What can go wrong with the store; backends translate vendor exceptions at their edge."""


class StorageError(Exception):
    """Root of every storage error; add a new one only if a caller acts differently on it."""


class NotFound(StorageError):
    """No object under this key."""


class AlreadyExists(StorageError):
    """A conditional create lost: an object is there already, with other bytes than ours."""


class CommitConflict(StorageError):
    """A conditional replace lost: the object changed since it was read. Reload, then decide."""


class CommitUnknown(StorageError):
    """The answer to a write was lost (timeout or 5xx after sending). Re-read before acting."""


class Corrupt(StorageError):
    """The bytes under a key do not match the digest that names them, or do not parse."""


class Unavailable(StorageError):
    """The store cannot be reached, refuses the credentials, or lacks room.

    The message says which, and what to do.
    """


class BucketMissing(Unavailable):
    """The server answers but has no such bucket; a caller may offer to create it."""


class Unsuitable(StorageError):
    """The store answers but lets two writers win, so it cannot hold a run."""


class LeaseHeld(StorageError):
    """A living process holds the lease; the message names its host, pid and age."""
