"""Write and open one policy version: safetensors files, their digest, and the probe.

The bytes of a policy pass here once: while they are sent, they are hashed. No torch.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from storage.errors import Corrupt
from storage.layout import EvalScope, StepScope, attempt_key
from storage.object_store import ObjectStore
from storage.objects import (
    fetch_file,
    file_sha256,
    link_directory,
    offer_file,
    put_object,
    read_object,
)
from storage.records import ObjectRef, PolicyRef, Probe, canonical_json, sha256_hex
from storage.safetensors_files import TensorSlice, hash_tensors, read_headers, tensor_files

NUM_TRANSFERS = 4
"""Files in flight at once; large ones are sent in parallel parts besides."""

_FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def policy_digest(directory: Path) -> str:
    """Returns the policy digest of the safetensors in `directory`.

    sha256 over the tensors in name order, each as (name, dtype, shape, sha256 of its bytes):
    independent of how they are divided into files, and hashed in parallel. A tied tensor is there
    once, under the name that it is stored by.

    Raises:
        ValueError: no safetensors, or one tensor in two files.
        Corrupt: a file is cut off.
    """
    return _digest(read_headers(directory))


def write_policy(  # noqa: PLR0913 - nine facts make a policy, and each is the caller's
    store: ObjectStore,
    directory: Path,
    *,
    scope: StepScope | EvalScope,
    attempt: str,
    version: int,
    dtype: str,
    tied: Mapping[str, str],
    probe: Probe | Future[Probe],
    cache: Path | None,
) -> PolicyRef:
    """Stores the safetensors in `directory` and the probe under the attempt's keys.

    Nothing sees the policy until a record names the returned reference. `cache` receives links
    to the files, so that a reader on this host downloads nothing; do not write into the files
    afterwards.

    Args:
        store: opened for writing.
        directory: holds `*.safetensors` and nothing else of interest.
        scope: the step (or evaluation) that makes the policy.
        attempt: owns the keys.
        version: the policy version this would become.
        probe: what the learner says under these weights; a future is waited for after the uploads.
        cache: the host's cache, or None.
        tied: {alias: name} of tensors that share memory; only `name` may be in the files.
        dtype: of every floating tensor: `float32`, `bfloat16` ...

    Raises:
        ValueError: no safetensors, another dtype, or a tied tensor that is missing or doubled.
        CommitUnknown: an upload was not settled.
    """
    tensors = read_headers(directory)
    _check_dtype(tensors, dtype)
    _check_tied(tensors, tied)
    paths = tensor_files(directory)
    keys = {path: attempt_key(scope, attempt, f"policy/{path.name}") for path in paths}
    with ThreadPoolExecutor(NUM_TRANSFERS + 2) as pool:
        uploads = [pool.submit(store.upload, key, path) for path, key in keys.items()]
        hashed = {path: pool.submit(file_sha256, path) for path in paths}
        digest = _digest(tensors)
        files = [_file_ref(path, key, hashed[path]) for path, key in keys.items()]
        _settle(uploads)
    if cache is not None:
        for path, file in zip(paths, files, strict=True):
            offer_file(cache, path, file.sha256)
    told = probe.result() if isinstance(probe, Future) else probe
    return PolicyRef(
        version=version,
        digest=digest,
        dtype=dtype,
        tied=dict(tied),
        files=files,
        probe=put_object(store, attempt_key(scope, attempt, "probe.json"), told.to_bytes()),
    )


def open_policy(store: ObjectStore, policy: PolicyRef, *, cache: Path) -> Path:
    """Returns a directory with the policy's `*.safetensors`, every file checked. Read only.

    Raises:
        NotFound: a file is gone.
        Corrupt: a file is not what `policy` names; the message names its key.
    """
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        paths = list(pool.map(lambda file: fetch_file(store, file, cache=cache), policy.files))
    names = [file.key.rpartition("/")[2] for file in policy.files]
    named = sorted(zip(names, [file.sha256 for file in policy.files], strict=True))
    directory = cache / "policies" / sha256_hex(canonical_json(named))
    directory.parent.mkdir(parents=True, exist_ok=True)
    return link_directory(directory, dict(zip(names, paths, strict=True)))


def read_probe(store: ObjectStore, policy: PolicyRef) -> Probe:
    """Returns the probe of a policy.

    Raises:
        NotFound: it is gone.
        Corrupt: other bytes than the policy names, or no probe.
    """
    payload = read_object(store, policy.probe)
    try:
        return Probe.from_bytes(payload)
    except ValueError as error:
        raise Corrupt(f"{policy.probe.key} is not a probe: {error}") from error


def _digest(tensors: Mapping[str, TensorSlice]) -> str:
    hashes = hash_tensors(tensors)
    rows = [[name, item.dtype, list(item.shape), hashes[name]] for name, item in tensors.items()]
    return sha256_hex(canonical_json(rows))


def _file_ref(path: Path, key: str, sha256: Future[str]) -> ObjectRef:
    return ObjectRef(key=key, sha256=sha256.result(), num_bytes=path.stat().st_size)


def _settle(uploads: list[Future[None]]) -> None:
    for upload in uploads:
        upload.result()


def _check_dtype(tensors: Mapping[str, TensorSlice], dtype: str) -> None:
    if dtype not in _FLOATS:
        raise ValueError(f"Policy dtype {dtype!r} is unknown. Expected one of {list(_FLOATS)}.")
    for name, tensor in tensors.items():
        if tensor.dtype in _FLOATS.values() and tensor.dtype != _FLOATS[dtype]:
            raise ValueError(
                f"Tensor {name} is {tensor.dtype} in a {dtype} policy. Expected {_FLOATS[dtype]}."
            )


def _check_tied(tensors: Mapping[str, TensorSlice], tied: Mapping[str, str]) -> None:
    for alias, name in tied.items():
        if alias in tensors or name not in tensors:
            raise ValueError(
                f"{alias} is tied to {name}. Expected {name} in the files and {alias} not, found "
                f"{[item for item in (alias, name) if item in tensors]}. Save it once."
            )
