"""Lost answers, refusals and odd servers: what the S3 backend makes of them, over real HTTP."""

import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from storage.backends import s3
from storage.errors import (
    AlreadyExists,
    CommitConflict,
    CommitUnknown,
    Unavailable,
    Unsuitable,
)
from storage.object_store import ObjectStore
from storage.opening import create_bucket, open_store
from storage.store_config import StoreConfig
from tests.contract.fake_s3 import Answering, FakeS3, etag_of, fake_s3

BUCKET = "my.bucket"


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


@pytest.fixture
def store(fake: FakeS3) -> ObjectStore:
    return s3.open_s3(config_of(fake))


def config_of(fake: FakeS3) -> StoreConfig:
    return StoreConfig(uri=f"s3://{BUCKET}/p", endpoint=fake.endpoint)


def on_first_put(act: Callable[[Answering], None]) -> Callable[[Answering], bool]:
    """Misbehaves once, at the first PUT."""
    left = [True]

    def misbehave(answering: Answering) -> bool:
        if answering.command != "PUT" or not left:
            return False
        left.clear()
        act(answering)
        return True

    return misbehave


def apply_then_hang_up(answering: Answering) -> None:
    answering.apply()
    answering.hang_up()


def apply_then_fail(answering: Answering) -> None:
    answering.apply()
    answering.fail(500, "InternalError")


def lose_to_another(answering: Answering) -> None:
    answering.fake.objects[answering.key] = b"another's"
    answering.hang_up()


@pytest.mark.parametrize("act", [apply_then_hang_up, apply_then_fail])
def test_a_create_whose_answer_was_lost_is_found_again(
    fake: FakeS3, store: ObjectStore, act: Callable[[Answering], None]
) -> None:
    fake.misbehave = on_first_put(act)
    assert store.put_if_absent("commit", b"ours") == etag_of(b"ours")
    assert fake.objects == {f"{BUCKET}/p/commit": b"ours"}


def test_a_create_that_never_arrived_is_sent_again(fake: FakeS3, store: ObjectStore) -> None:
    fake.misbehave = on_first_put(Answering.hang_up)
    assert store.put_if_absent("commit", b"ours") == etag_of(b"ours")


def test_a_lost_answer_behind_which_another_won_is_a_loss(fake: FakeS3, store: ObjectStore) -> None:
    fake.misbehave = on_first_put(lose_to_another)
    with pytest.raises(AlreadyExists):
        store.put_if_absent("commit", b"ours")
    assert fake.objects[f"{BUCKET}/p/commit"] == b"another's"


@pytest.mark.parametrize("act", [apply_then_hang_up, Answering.hang_up])
def test_a_replace_whose_answer_was_lost_is_settled(
    fake: FakeS3, store: ObjectStore, act: Callable[[Answering], None]
) -> None:
    etag = store.put_if_absent("lease", b"first")
    fake.misbehave = on_first_put(act)
    assert store.put_if_match("lease", b"second", etag) == etag_of(b"second")
    with pytest.raises(CommitConflict):
        store.put_if_match("lease", b"third", etag)


def test_an_answer_that_cannot_be_settled_is_commit_unknown(
    fake: FakeS3, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PAUSES_S", (0.0, 0.01))

    def misbehave(answering: Answering) -> bool:
        if answering.command == "PUT":
            answering.apply()
        answering.hang_up()
        return True

    fake.misbehave = misbehave
    with pytest.raises(CommitUnknown, match="Read it again before acting"):
        store.put_if_absent("commit", b"ours")
    with pytest.raises(CommitUnknown):
        store.put("data", b"x")


def test_a_conflict_answer_is_tried_again(fake: FakeS3, store: ObjectStore) -> None:
    fake.misbehave = on_first_put(
        lambda answering: answering.fail(409, "ConditionalRequestConflict")
    )
    assert store.put_if_absent("commit", b"ours") == etag_of(b"ours")


def test_a_body_that_breaks_off_is_read_again(fake: FakeS3, store: ObjectStore) -> None:
    store.put("data", b"0123456789")
    left = [True]

    def misbehave(answering: Answering) -> bool:
        if answering.command != "GET" or not left:
            return False
        left.clear()
        answering.send_response(200)
        answering.send_header("ETag", etag_of(b"0123456789"))
        answering.send_header("Content-Length", "10")
        answering.end_headers()
        answering.wfile.write(b"0123")
        answering.hang_up()
        return True

    fake.misbehave = misbehave
    assert store.get("data") == b"0123456789"
    assert not left


def test_s13_a_clock_that_is_off_gets_a_clear_message_and_no_retries(
    fake: FakeS3, store: ObjectStore
) -> None:
    def misbehave(answering: Answering) -> bool:
        answering.fail(403, "RequestTimeTooSkewed")
        return True

    fake.misbehave = misbehave
    for call in (lambda: store.get("a"), lambda: store.put_if_absent("a", b"x")):
        fake.requests.clear()
        with pytest.raises(Unavailable, match="clock is off by more than 15 minutes"):
            call()
        assert len(fake.requests) == 1


def test_s13_a_clock_that_is_off_is_seen_without_a_body_too(
    fake: FakeS3, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misbehave(answering: Answering) -> bool:
        answering.answer(403)
        return True

    fake.misbehave = misbehave
    with pytest.raises(Unavailable, match="denies HeadObject of a"):
        store.size("a")
    there = formatdate(time.time() - 20 * 60, usegmt=True)
    monkeypatch.setattr(Answering, "date_time_string", lambda *_: there)
    fake.requests.clear()
    with pytest.raises(Unavailable, match="clock is off by more than 15 minutes"):
        store.size("a")
    assert [command for command, _, _ in fake.requests] == ["HEAD"]


def test_a_full_store_says_so(fake: FakeS3, store: ObjectStore) -> None:
    def misbehave(answering: Answering) -> bool:
        answering.fail(507, "InsufficientStorage")
        return True

    fake.misbehave = misbehave
    with pytest.raises(Unavailable, match="has no room for a"):
        store.put("a", b"x")


@pytest.mark.parametrize("honoured", ["if-none-match", "if-match", ""])
def test_a_store_that_ignores_a_condition_is_refused(fake: FakeS3, honoured: str) -> None:
    fake.honours = frozenset({honoured})
    with pytest.raises(Unsuitable, match="two controllers could both commit"):
        open_store(config_of(fake), writing=True)
    assert fake.objects == {}


def test_a_store_without_conditional_requests_is_refused(fake: FakeS3) -> None:
    def misbehave(answering: Answering) -> bool:
        conditional = "if-none-match" in answering.headers
        if conditional:
            answering.fail(501, "NotImplemented")
        return conditional

    fake.misbehave = misbehave
    with pytest.raises(Unsuitable, match="conditional puts are expected"):
        open_store(config_of(fake), writing=True)


def refuse_new_headers(answering: Answering) -> bool:
    """As a store that knows no `x-amz-checksum` headers and no `aws-chunked` bodies."""
    modern = [name for name in answering.headers if name.lower().startswith("x-amz-checksum")]
    chunked = "aws-chunked" in answering.headers.get("content-encoding", "")
    if modern or chunked or answering.headers.get("x-amz-sdk-checksum-algorithm"):
        answering.fail(400, "InvalidRequest")
        return True
    return False


def named_by_config(fake: FakeS3, monkeypatch: pytest.MonkeyPatch, path: Path) -> StoreConfig:
    return config_of(fake)


def named_by_variable(fake: FakeS3, monkeypatch: pytest.MonkeyPatch, path: Path) -> StoreConfig:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", fake.endpoint)
    return config_of(fake).model_copy(update={"endpoint": None})


def named_by_profile(fake: FakeS3, monkeypatch: pytest.MonkeyPatch, path: Path) -> StoreConfig:
    (path / "config").write_text(f"[default]\nendpoint_url = {fake.endpoint}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path / "config"))
    return config_of(fake).model_copy(update={"endpoint": None})


@pytest.mark.parametrize("named", [named_by_config, named_by_variable, named_by_profile])
def test_s10_s14_a_custom_endpoint_sees_path_style_and_no_new_checksums(
    fake: FakeS3,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    named: Callable[[FakeS3, pytest.MonkeyPatch, Path], StoreConfig],
) -> None:
    fake.misbehave = refuse_new_headers
    config = named(fake, monkeypatch, tmp_path)
    store = open_store(config, writing=True)
    store.put("data", b"x" * 100_000)
    assert len(store.get("data")) == 100_000
    create_bucket(config)
    for _, path, headers in fake.requests:
        assert path.startswith((f"/{BUCKET}/", f"/{BUCKET}?")) or path == f"/{BUCKET}"
        assert headers["host"] == fake.endpoint.removeprefix("http://")


def test_s10_checksums_are_sent_to_a_custom_endpoint_that_is_asked_to_take_them(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_with(config: StoreConfig) -> bool:
        fake.requests.clear()
        s3.open_s3(config).put("data", b"x")
        return any("x-amz-checksum" in name for _, _, sent in fake.requests for name in sent)

    config = config_of(fake)
    assert not put_with(config)
    assert put_with(config.model_copy(update={"checksums": "when_supported"}))
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    assert put_with(config)


def test_s14_aws_itself_gets_its_own_defaults() -> None:
    for endpoint in (None, "https://s3.eu-central-1.amazonaws.com"):
        client = s3.open_s3(StoreConfig(uri="s3://bucket/p", endpoint=endpoint))._bulk
        assert client.meta.config.request_checksum_calculation == "when_supported"
        assert client.meta.config.s3["addressing_style"] == "auto"


def test_commits_are_signed_with_their_bytes_and_data_is_not(
    fake: FakeS3, store: ObjectStore
) -> None:
    store.put_if_absent("commit", b"x")
    store.put("data", b"x")
    signed = {path: headers["x-amz-content-sha256"] for _, path, headers in fake.requests}
    assert signed[f"/{BUCKET}/p/data"] == "UNSIGNED-PAYLOAD"
    assert len(signed[f"/{BUCKET}/p/commit"]) == 64


def test_a_server_that_is_down_is_named_within_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    config = StoreConfig(uri="s3://bucket/p", endpoint=endpoint)
    start = time.monotonic()
    for writing in (True, False):
        with pytest.raises(Unavailable, match="cannot be reached") as caught:
            open_store(config, writing=writing)
        assert endpoint in str(caught.value)
    with pytest.raises(Unavailable, match="cannot be reached"):
        s3.open_s3(config).put_if_absent("a", b"x")
    assert time.monotonic() - start < 15


def test_an_endpoint_that_is_no_url_is_named() -> None:
    with pytest.raises(Unavailable, match="not-a-url"):
        open_store(StoreConfig(uri="s3://bucket", endpoint="not-a-url"), writing=False)


def test_an_unknown_profile_is_named(monkeypatch: pytest.MonkeyPatch, fake: FakeS3) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(Unavailable, match="nobody"):
        open_store(config_of(fake), writing=True)


def test_keys_that_may_not_list_uploads_are_good_enough(fake: FakeS3) -> None:
    def misbehave(answering: Answering) -> bool:
        refused = "uploads" in answering.path
        if refused:
            answering.fail(403, "AccessDenied")
        return refused

    fake.misbehave = misbehave
    open_store(config_of(fake), writing=True).put("a", b"x")


def test_a_bucket_that_only_reads_is_told_by_the_write_that_it_denied(fake: FakeS3) -> None:
    def misbehave(answering: Answering) -> bool:
        refused = answering.command in ("PUT", "POST", "DELETE")
        if refused:
            answering.fail(403, "AccessDenied")
        return refused

    fake.misbehave = misbehave
    # The probe tries to delete what it may have written: that failure is not the news.
    with pytest.raises(Unavailable, match=r"denies PutObject of probes/\w+ \(AccessDenied\)"):
        open_store(config_of(fake), writing=True)


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, fake: FakeS3) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(Unavailable, match="AWS_ACCESS_KEY_ID"):
        open_store(config_of(fake), writing=True)
