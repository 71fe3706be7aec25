"""A signature holds for exactly the bytes that were signed, by exactly the key that signed."""

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.records import StepCommit, canonical_json
from storage.signing import (
    Signer,
    check_signature,
    load_public_key,
    load_signer,
    new_key,
    public_hex,
    public_path,
    sign_commit,
)
from tests.contract.records import commit

SIGNER = Signer.generate()
SIGNED = sign_commit(commit(1, previous="p"), SIGNER).to_bytes()


def test_a_key_from_its_files_signs_and_checks(tmp_path: Path) -> None:
    public = new_key(tmp_path / "deep" / "signing.pem")
    signed = sign_commit(commit(1, previous="p"), load_signer(tmp_path / "deep" / "signing.pem"))
    check = check_signature(signed.to_bytes(), load_public_key(public))
    assert (check.verdict, check.public_key) == ("good", public_hex(load_public_key(public)))
    assert StepCommit.from_bytes(signed.to_bytes()) == signed


def test_a_private_key_is_for_its_owner_only_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    new_key(path)
    before = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="exists"):
        new_key(path)
    assert path.read_bytes() == before


def test_a_public_file_that_is_there_keeps_a_new_key_from_being_made(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    public_path(path).write_text("somebody's")
    with pytest.raises(ValueError, match=r"signing\.pem\.pub exists"):
        new_key(path)
    assert not path.exists()


def test_signing_again_replaces_the_signature_and_gives_the_same_bytes() -> None:
    again = sign_commit(StepCommit.from_bytes(SIGNED), SIGNER)
    assert again.to_bytes() == SIGNED


def test_an_unsigned_commit_is_missing_its_signature() -> None:
    payload = commit(1, previous="p").to_bytes()
    assert check_signature(payload, SIGNER.public_key()).verdict == "missing"
    body = json.loads(payload)
    del body["signature"]
    assert check_signature(canonical_json(body), None).verdict == "missing"


def test_without_a_known_key_a_whole_signature_is_self_asserted() -> None:
    check = check_signature(SIGNED, None)
    assert (check.verdict, check.public_key) == ("self-asserted", public_hex(SIGNER))


def test_a_commit_by_another_key_is_told_from_a_changed_one() -> None:
    other = Signer.generate().public_key()
    assert check_signature(SIGNED, other).verdict == "other key"


@settings(max_examples=200)
@given(st.integers(0, len(SIGNED) - 1), st.integers(1, 255))
def test_no_altered_byte_passes(position: int, flip: int) -> None:
    altered = bytearray(SIGNED)
    altered[position] ^= flip
    check = check_signature(bytes(altered), SIGNER.public_key())
    assert check.verdict in ("bad", "missing")


def test_the_same_commit_in_another_encoding_is_bad() -> None:
    spaced = json.dumps(json.loads(SIGNED), indent=1, sort_keys=True).encode()
    doubled = SIGNED.replace(b'"attempt":"a"', b'"attempt":"b","attempt":"a"')
    for payload in (spaced, SIGNED + b"\n", doubled):
        assert check_signature(payload, SIGNER.public_key()).verdict == "bad"


def test_a_signature_cannot_be_written_in_two_ways() -> None:
    body = json.loads(SIGNED)
    upper = {**body["signature"], "signature": body["signature"]["signature"].upper()}
    shorter = {name: value for name, value in body["signature"].items() if name != "algorithm"}
    for signature in (upper, shorter, {**body["signature"], "note": "x"}):
        payload = canonical_json({**body, "signature": signature})
        assert check_signature(payload, SIGNER.public_key()).verdict == "bad"


def test_a_stranger_who_signs_anew_is_found_by_whoever_knows_the_key() -> None:
    forged = StepCommit.from_bytes(SIGNED).model_copy(update={"metrics": {"reward_mean": 1.0}})
    payload = sign_commit(forged, Signer.generate()).to_bytes()
    assert check_signature(payload, SIGNER.public_key()).verdict == "other key"
    assert check_signature(payload, None).verdict == "self-asserted"


def test_wrong_key_files_are_refused_by_name(tmp_path: Path) -> None:
    private = tmp_path / "signing.pem"
    public = new_key(private)
    nothing = tmp_path / "nothing.pem"
    for path, load, expected in (
        (public, load_signer, r"not its \.pub"),
        (private, load_public_key, r"ends in \.pub"),
        (nothing, load_signer, "cannot be read"),
        (nothing, load_public_key, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=expected):
            load(path)
