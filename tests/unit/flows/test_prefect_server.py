import logging
import socket
import threading

import pytest
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.prefect_server import check_server, controller_settings, prefect_server


def test_a_server_that_does_not_answer_is_named_in_one_line():
    with socket.socket() as taken:
        # Bound and not listening: nobody else can get this port while the test runs.
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: address}),
            pytest.raises(ValueError, match="unset it") as caught,
            prefect_server(),
        ):
            pass
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_that_is_none_is_refused():
    with (
        temporary_settings({PREFECT_API_URL: "nowhere"}),
        pytest.raises(ValueError, match="at nowhere "),
    ):
        check_server()


@pytest.mark.parametrize("name", ["EventsWorker", "prefect._internal.concurrency"])
def test_what_prefect_says_while_the_process_ends_stays_off_the_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.prefect_server.local_services", lambda: None)
    with temporary_settings(restore_defaults={PREFECT_API_URL}), prefect_server():
        pass
    assert not logging.getLogger(name).filter(logging.makeLogRecord({}))


def test_lines_of_our_threads_go_where_the_flow_sends_its_own(monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[str, str | None]] = []

    def emit(_: APILogHandler, record: logging.LogRecord) -> None:
        sent.append((record.getMessage(), PREFECT_API_URL.value()))

    monkeypatch.setattr(APILogHandler, "emit", emit)
    speak = logging.getLogger("storage.leases").warning
    with temporary_settings({PREFECT_API_URL: "http://there/api"}), controller_settings():
        speak("from here")
        thread = threading.Thread(target=speak, args=("from a thread",))
        thread.start()
        thread.join()
    speak("after the end")
    assert sent == [
        ("from here", "http://there/api"),
        ("from a thread", "http://there/api"),
    ]
