"""A key is found or refused before anything starts, and its path stays on this host."""

from pathlib import Path

import pytest

from flows.recipes import RECIPES
from flows.run import resume_run, train_run
from flows.signing import KEY_VARIABLE, default_key, find_signer, make_key, signing_note
from storage.signing import Signer, new_key, public_hex, sign_commit
from tests.contract.records import commit


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return tmp_path / "home"


def test_without_any_key_nothing_is_signed() -> None:
    assert find_signer() is None


def test_the_default_key_is_found_and_the_variable_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(None)
    by_default = find_signer()
    other = tmp_path / "other.pem"
    new_key(other)
    monkeypatch.setenv(KEY_VARIABLE, str(other))
    named = find_signer()
    assert default_key().is_file()
    assert by_default is not None
    assert named is not None
    assert public_hex(by_default) != public_hex(named)


def test_a_key_that_cannot_be_used_is_refused_before_a_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "gone.pem"))
    store = tmp_path / "store"
    with pytest.raises(ValueError, match="cannot be read"):
        train_run(RECIPES["addition"](), run="r", store=str(store))
    with pytest.raises(ValueError, match="cannot be read"):
        resume_run("r", store=str(store))
    assert not store.exists()


def test_what_is_said_of_a_new_key_names_both_files_and_the_check(tmp_path: Path) -> None:
    said = "\n".join(make_key(tmp_path / "mine.pem"))
    assert f"{tmp_path}/mine.pem" in said
    assert f"{tmp_path}/mine.pem.pub" in said
    assert "secret" in said
    assert "rollbook verify RUN --key mine.pem.pub" in said


def test_a_change_of_hands_is_said_once_and_an_unchanged_key_is_not() -> None:
    signer, unsigned = Signer.generate(), commit(3, previous="p")
    signed = sign_commit(unsigned, signer)
    assert signing_note(signer, None) is None
    assert signing_note(signer, signed) is None
    assert signing_note(None, unsigned) is None
    assert "unsigned; the next commits are signed" in str(signing_note(signer, unsigned))
    assert "the next commits are unsigned" in str(signing_note(None, signed))
    assert "signed by key" in str(signing_note(Signer.generate(), signed))
