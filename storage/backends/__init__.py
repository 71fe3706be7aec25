"""The store backends: scheme of the address -> what opens it. A new one is a line here."""

from collections.abc import Callable

from storage.backends.local import open_local
from storage.backends.memory import open_memory
from storage.backends.s3 import open_s3
from storage.object_store import ObjectStore
from storage.store_config import StoreConfig

BACKENDS: dict[str, Callable[[StoreConfig], ObjectStore]] = {
    "file": open_local,
    "memory": open_memory,
    "s3": open_s3,
}
