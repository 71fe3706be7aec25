import pytest

from flows.progress import watching


def test_brackets_in_what_began_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with watching("one", first=1, last=2) as watcher:
        watcher.begin("model models[/]mine[bold]")
        watcher.say("run in dir[/]")
    printed = capsys.readouterr().err
    assert "models[/]mine[bold]" in printed
    assert "dir[/]" in printed
