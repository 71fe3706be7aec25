"""Where the product keeps what belongs to this host."""

from pathlib import Path

import pytest

from infra.home import checkout, home


def test_a_checkout_keeps_its_things_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLBOOK_HOME", raising=False)
    assert checkout() == Path(__file__).parents[3]
    assert home() == Path(__file__).parents[3] / ".rollbook"


def test_the_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path / "elsewhere"))
    assert home() == tmp_path / "elsewhere"
