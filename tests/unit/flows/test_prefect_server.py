import logging
import socket

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.prefect_server import check_server, prefect_server


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
