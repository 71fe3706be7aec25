"""How fast is the store? Objects, and policies of the size of SmolLM2, in a directory and in S3.

`python tests/benchmarks/store.py` starts SeaweedFS in a temporary directory. Prints medians, and
ratios to a plain copy of the same bytes in the same directory; the last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.policies import open_policy, policy_digest, write_policy
from storage.records import PolicyRef, Probe
from storage.safetensors_files import RawTensor, write_tensors
from storage.store_config import StoreConfig
from tests.contract.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, seaweed_server

MIB = 1 << 20
PROBE = Probe(token_ids=[[1]], logprobs=[[None]], next_token_ids=[1], next_logprobs=[-0.5])


def measure(call: Callable[[int], object], repeats: int) -> float:
    """Median seconds of a call."""
    seconds: list[float] = []
    for number in range(repeats):
        start = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def make_weights(folder: Path, num_mib: int, file_mib: int) -> Path:
    """bf16 tensors of 1 MiB and one of a fifth of the whole (an embedding), random bytes."""
    sizes = [num_mib // 5, *([1] * (num_mib - num_mib // 5))]
    tensors = {
        f"layer.{index:04d}.weight": RawTensor("BF16", (size, MIB // 2), os.urandom(size * MIB))
        for index, size in enumerate(sizes)
    }
    write_tensors(folder, tensors, max_file_bytes=file_mib * MIB)
    return folder


def bench_store(store: ObjectStore, weights: Path, folder: Path, repeats: int) -> dict[str, float]:
    """Seconds of every operation on one store."""
    small, large = os.urandom(2_000), os.urandom(32 * MIB)
    figures = {
        "record put": measure(lambda n: store.put_if_absent(f"record/{n}", small), 20 * repeats),
        "record get": measure(lambda n: store.get(f"record/{n}"), 20 * repeats),
        "32 MiB put": measure(lambda n: store.put(f"large/{n}", large), repeats),
        "32 MiB get": measure(lambda n: store.get(f"large/{n}"), repeats),
    }
    refs: list[PolicyRef] = []

    def publish(number: int) -> None:
        refs.append(
            write_policy(
                store,
                weights,
                scope=StepScope(run="bench", step=number),
                attempt="a",
                version=number,
                dtype="bfloat16",
                tied={},
                probe=PROBE,
                cache=folder / "warm",
            )
        )

    figures["policy publish"] = measure(publish, repeats)
    figures["policy open, same host"] = measure(
        lambda n: open_policy(store, refs[n], cache=folder / "warm"), repeats
    )
    figures["policy open, cold"] = measure(
        lambda n: open_policy(store, refs[n], cache=folder / f"cold-{n}"), repeats
    )
    return figures


def print_table(figures: dict[str, dict[str, float]], num_mib: int, copy_s: float) -> None:
    print(f"plain copy of the policy ({num_mib} MiB): {copy_s:.2f} s")
    print(f"{'':26}" + "".join(f"{name:>28}" for name in figures))
    for what in next(iter(figures.values())):
        mib = 32 if what.startswith("32") else num_mib if what.startswith("policy") else 0
        cells = ""
        for store in figures.values():
            seconds = store[what]
            if mib:
                cells += f"{seconds:9.3f} s {mib / seconds:7.0f} MiB/s"
                cells += f" {seconds / (copy_s * mib / num_mib):4.1f}x"
            else:
                cells += f"{seconds * 1000:9.1f} ms{'':16}"
        print(f"{what:26}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=257, help="size of the policy (SmolLM2: 257)")
    parser.add_argument("--file-mib", type=int, default=2048, help="size limit of one file")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = make_weights(folder / "weights", options.mib, options.file_mib)
        copy_s = measure(lambda n: shutil.copytree(weights, folder / f"copy-{n}"), options.repeats)
        hash_s = measure(lambda n: policy_digest(weights), options.repeats)
        (folder / "seaweed").mkdir()
        with seaweed_server(folder / "seaweed") as endpoint:
            stores = {
                "directory": StoreConfig(uri=str(folder / "directory")),
                "seaweedfs": StoreConfig(uri=f"s3://{BUCKET}/bench", endpoint=endpoint),
            }
            figures = {
                kind: bench_store(
                    open_store(config, writing=True), weights, folder / kind, options.repeats
                )
                for kind, config in stores.items()
            }
    print_table(figures, options.mib, copy_s)
    print(json.dumps({"mib": options.mib, "copy_s": copy_s, "digest_s": hash_s} | figures))


if __name__ == "__main__":
    main()
