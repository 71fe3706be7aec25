"""A trainer of one weight and one moment, for tests of how states are restored and judged."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from storage.records import Probe, canonical_json, sha256_hex
from tasks.train.contract import Deviation, TrainConfig, Update, UpdateResult


class ToyEngine:
    """A TrainEngine whose bits depend on `instructions`: how much they are off is `drift`.

    `dither` is added to the drift at every update: a device that promises no bits.
    """

    def __init__(
        self, instructions: str = "AVX2", *, drift: float = 0.0, device: str = "cpu"
    ) -> None:
        self.state_id: str | None = None
        self.weight = self.moment = 0.0
        self.drift, self.dither = drift, 0.0
        self.dtype = "float32"
        self.num_updates = 0
        self._environment = {"device": device, "instructions": instructions}

    def configure(self, config: TrainConfig) -> None:
        self.dtype = config.dtype

    def vocabulary(self) -> tuple[int, list[int]]:
        return 32, [0, 1]

    def initialise(self, model_dir: Path) -> None:
        self.state_id = None
        self.weight, self.moment = _read(model_dir), 0.0

    def restore(self, snapshot_dir: Path) -> None:
        self.state_id = None
        self.weight, self.moment = json.loads((snapshot_dir / "state.json").read_text())

    def update(self, updates: Sequence[Update], *, temperature: float) -> UpdateResult:
        self.state_id = None
        self.drift += self.dither
        for update in updates:
            gradient = sum(abs(sample.advantage) for sample in update.samples)
            self.moment = 0.9 * self.moment + gradient * (1 + self.drift)
            self.weight += update.learning_rate * self.moment
            self.num_updates += 1
        samples = [sample for update in updates for sample in update.samples]
        said = {one.sample_id: [-1.0] * len(one.completion_token_ids) for one in samples}
        return UpdateResult(said, {"updates": float(len(updates))})

    def environment(self) -> dict[str, str]:
        return self._environment

    def compare(self, published: Path, before: Path) -> Deviation:
        theirs = _read(published)
        off = abs(self._cast() - theirs)
        change = abs(theirs - _read(before))
        return Deviation(int(off > 0), off, off, change)

    def take(self, published: Path) -> None:
        self.state_id = None
        if self._cast() != _read(published):
            self.weight = _read(published)

    def adopt(self, state_id: str) -> None:
        self.state_id = state_id

    def save_policy(self, directory: Path, *, max_file_bytes: int) -> dict[str, str]:
        write_weight(directory, self.weight, dtype=self.dtype)
        return {}

    def probe(self, token_ids: list[list[int]]) -> Probe:
        rows: list[list[float | None]] = [[None, *[-1.0] * (len(row) - 1)] for row in token_ids]
        count = len(rows)
        return Probe(
            token_ids=token_ids,
            logprobs=rows,
            next_token_ids=[0] * count,
            next_logprobs=[-1.0] * count,
        )

    def save_snapshot(self, directory: Path) -> str:
        (directory / "state.json").write_text(json.dumps([self.weight, self.moment]))
        return self.state_digest()

    def state_digest(self) -> str:
        return sha256_hex(canonical_json([self.weight, self.moment]))

    def _cast(self) -> float:
        return _bits(self.weight, self.dtype)[1]


def write_weight(directory: Path, weight: float, *, dtype: str = "float32") -> None:
    """Writes a safetensors file of that one weight, in the precision of `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    payload, _ = _bits(weight, dtype)
    name = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    entry = {"dtype": name, "shape": [1], "data_offsets": [0, len(payload)]}
    header = canonical_json({"weight": entry})
    header += b" " * (-len(header) % 8)
    whole = struct.pack("<Q", len(header)) + header + payload
    (directory / "model.safetensors").write_bytes(whole)


def _bits(weight: float, dtype: str) -> tuple[bytes, float]:
    """Returns the bytes of a weight and what they say; bfloat16 is cut, not rounded."""
    whole = struct.pack("<f", weight)
    kept = whole[2:] if dtype == "bfloat16" else whole
    return kept, struct.unpack("<f", kept.rjust(4, b"\0"))[0]


def _read(directory: Path) -> float:
    payload = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", payload[:8])
    return struct.unpack("<f", payload[8 + length :].rjust(4, b"\0"))[0]
