"""Webhooks to real servers on this machine, which are slow, broken, hostile or away."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freight.control import webhooks
from freight.core.webhook import FIRST_WAIT_S, GIVEN_UP, KEEP_TRYING_S
from freight.store.database import StorageFull
from tests.faults.receivers import (
    SECRET,
    Behaviour,
    Clock,
    Request,
    answer,
    desk,
    drip,
    endless,
    garbage,
    hang_up,
    receiving,
    silent,
    until,
)  # fmt: skip

OK = answer(200)


def is_signed(request: Request, secret: str = SECRET) -> bool:
    """Check a request as its receiver would."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.{request.body}"
    digest = base64.b64encode(hmac.new(key, signed.encode(), hashlib.sha256).digest()).decode()
    return f"v1,{digest}" in request.headers["webhook-signature"].split(" ")


def test_an_event_is_delivered_signed_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def play() -> None:
        async with receiving(OK) as receiver, desk(tmp_path, receiver.entry()) as sender, sender.delivering():
            letter = await sender.put(receiver.url())
            await until(lambda: len(receiver.requests) == 1)
            await sender.emptied()
            assert await sender.timeline() == []
        [request] = receiver.requests
        assert request.line == "POST /in/token?key=k HTTP/1.1"
        assert is_signed(request)
        assert request.headers["webhook-id"] == letter.id == json.loads(request.body)["id"]
        assert request.headers["webhook-timestamp"] == "1000000"
        assert json.loads(request.body)["data"] == {"id": "a"}

    asyncio.run(play())


@pytest.mark.parametrize("trouble", [answer(500), answer(404), answer(429), garbage, hang_up, silent, drip])
def test_what_fails_is_sent_again_when_it_is_due_and_not_before(tmp_path: Path, trouble: Behaviour) -> None:
    async def play() -> None:
        async with (
            receiving(trouble, OK) as receiver,
            desk(tmp_path, receiver.entry(), timeout_s=0.5) as sender,
            sender.delivering(),
        ):
            await sender.put(receiver.url())
            failed = await sender.attempted(1)
            assert failed.next_at == sender.clock.now + FIRST_WAIT_S
            await sender.skip_to(failed.next_at - 0.1)
            # A letter to somebody else goes out, this one does not.
            await sender.put(receiver.url(), job="b")
            await until(lambda: len(receiver.requests) == 2)
            assert json.loads(receiver.requests[1].body)["data"] == {"id": "b"}
            await sender.skip_to(failed.next_at)
            await sender.emptied()
        first, _, last = receiver.requests
        assert (first.body, first.headers["webhook-id"]) == (last.body, last.headers["webhook-id"])
        assert last.headers["webhook-timestamp"] == "1000005"
        assert is_signed(last)

    asyncio.run(play())


def test_what_was_on_its_way_goes_again_after_a_restart_and_stopping_waits_for_nobody(tmp_path: Path) -> None:
    clock = Clock()

    async def play() -> None:
        async with receiving(silent, OK) as receiver:
            async with (
                desk(tmp_path, receiver.entry(), timeout_s=1e6, clock=clock) as sender,
                sender.delivering(),
            ):
                await sender.put(receiver.url())
                await until(lambda: len(receiver.requests) == 1)
            async with desk(tmp_path, receiver.entry(), clock=clock) as sender, sender.delivering():
                await sender.emptied()
            assert receiver.requests[0].body == receiver.requests[1].body

    asyncio.run(play())


def test_after_three_days_it_is_given_up_with_a_line_in_the_timeline(tmp_path: Path) -> None:
    async def play() -> None:
        async with receiving(answer(503)) as receiver, desk(tmp_path, receiver.entry()) as sender:
            began = sender.clock.now
            async with sender.delivering():
                await sender.put(receiver.url())
                while not await sender.timeline():
                    if (letters := await sender.waiting()) and letters[0].next_at > sender.clock.now:
                        assert letters[0].next_at <= began + KEEP_TRYING_S
                        await sender.skip_to(letters[0].next_at)
                    await asyncio.sleep(0)
                assert await sender.waiting() == []
            [(event, detail)] = await sender.timeline()
            assert event == GIVEN_UP
            tries = len(receiver.requests)
            assert detail == f"batch.completed for {receiver.entry()}: it answers 503; attempts: {tries} in 72 h"
            assert sender.clock.now == began + KEEP_TRYING_S

    asyncio.run(play())


def test_a_receiver_that_says_it_is_gone_is_left_alone(tmp_path: Path) -> None:
    async def play() -> None:
        async with receiving(answer(410)) as receiver, desk(tmp_path, receiver.entry()) as sender:
            async with sender.delivering():
                await sender.put(receiver.url())
                await sender.emptied()
            [(event, detail)] = await sender.timeline()
            assert (event, len(receiver.requests)) == (GIVEN_UP, 1)
            assert "410" in detail

    asyncio.run(play())


def test_retry_after_is_honoured(tmp_path: Path) -> None:
    async def play() -> None:
        async with (
            receiving(answer(429, "Retry-After: 7200")) as receiver,
            desk(tmp_path, receiver.entry()) as sender,
            sender.delivering(),
        ):
            await sender.put(receiver.url())
            assert (await sender.attempted(1)).next_at == sender.clock.now + 7200

    asyncio.run(play())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(tmp_path: Path, status: int) -> None:
    async def play() -> None:
        async with receiving(OK) as other:
            async with (
                receiving(answer(status, f"Location: {other.url()}")) as receiver,
                desk(tmp_path, receiver.entry(), other.entry()) as sender,
                sender.delivering(),
            ):
                await sender.put(receiver.url())
                await sender.attempted(1)
            assert other.requests == []

    asyncio.run(play())


def test_a_silent_receiver_with_many_letters_holds_up_no_other(tmp_path: Path) -> None:
    async def play() -> None:
        async with receiving(silent) as mute, receiving(OK) as receiver:
            async with desk(tmp_path, mute.entry(), receiver.entry(), timeout_s=1e6) as sender:
                for epoch in range(20):
                    await sender.put(mute.url(), epoch)
                async with sender.delivering():
                    await until(lambda: mute.now == webhooks.MOST_OF_A_RECEIVER)
                    for epoch in range(20):
                        await sender.put(receiver.url(), epoch, "b")
                    await until(lambda: len(receiver.requests) == 20)
            assert (mute.most, len(mute.requests)) == (webhooks.MOST_OF_A_RECEIVER, webhooks.MOST_OF_A_RECEIVER)
            assert receiver.most <= webhooks.MOST_OF_A_RECEIVER

    asyncio.run(play())


def test_an_answer_without_end_is_an_answer(tmp_path: Path) -> None:
    async def play() -> None:
        async with receiving(endless) as receiver, desk(tmp_path, receiver.entry()) as sender, sender.delivering():
            await sender.put(receiver.url())
            await sender.emptied()
            await until(lambda: receiver.now == 0)
        assert len(receiver.requests) == 1

    asyncio.run(play())


def test_a_name_for_this_machine_reaches_it_only_where_the_settings_say_so(tmp_path: Path) -> None:
    async def play() -> None:
        async with receiving(OK) as receiver:
            entry = f"http://localhost:{receiver.port}"
            async with desk(tmp_path, entry) as sender, sender.delivering():
                await sender.put(f"{entry}/in")
                failed = await sender.attempted(1)
                assert receiver.now == len(receiver.requests) == 0
                sender.settings = replace(sender.settings, hosts=(f"{entry}=127.0.0.1",))
                await sender.skip_to(failed.next_at)
                await sender.emptied()
            assert len(receiver.requests) == 1

    asyncio.run(play())


def test_a_name_that_means_something_else_a_moment_later_gains_nothing(tmp_path: Path) -> None:
    meanings = [["127.0.0.1"], ["127.0.0.2"]]
    asked: list[str] = []

    async def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        return meanings[min(len(asked), 2) - 1]

    async def play() -> None:
        async with receiving(answer(500), OK) as receiver, receiving(OK, host="127.0.0.2", port=receiver.port) as inner:
            entry = f"http://hooks.test:{receiver.port}"
            async with (
                desk(tmp_path, f"{entry}=127.0.0.1", resolve=resolve) as sender,
                sender.delivering(),
            ):
                await sender.put(f"{entry}/in")
                failed = await sender.attempted(1)
                # One look-up, and the connection went to what that said.
                assert (asked, len(receiver.requests)) == (["hooks.test"], 1)
                assert receiver.requests[0].headers["host"] == f"hooks.test:{receiver.port}"
                await sender.skip_to(failed.next_at)
                await sender.attempted(2)
            assert (len(asked), len(receiver.requests), inner.requests) == (2, 1, [])

    asyncio.run(play())


def test_of_several_addresses_only_those_that_may_be_reached_are_tried(tmp_path: Path) -> None:
    async def resolve(_host: str, _port: int) -> list[str]:
        return ["127.0.0.2", "::1", "127.0.0.1"]

    async def play() -> None:
        async with receiving(OK) as receiver, receiving(OK, host="127.0.0.2", port=receiver.port) as inner:
            entry = f"http://hooks.test:{receiver.port}"
            async with desk(tmp_path, f"{entry}=127.0.0.1", resolve=resolve) as sender, sender.delivering():
                await sender.put(f"{entry}/in")
                await sender.emptied()
            assert (len(receiver.requests), inner.requests) == (1, [])

    asyncio.run(play())


def test_a_host_that_was_taken_off_the_list_gets_nothing_until_it_is_back(tmp_path: Path) -> None:
    async def play() -> None:
        async with receiving(OK) as receiver, desk(tmp_path) as sender, sender.delivering():
            await sender.put(receiver.url())
            failed = await sender.attempted(1)
            assert receiver.requests == []
            sender.settings = replace(sender.settings, hosts=(receiver.entry(),))
            await sender.skip_to(failed.next_at)
            await sender.emptied()

    asyncio.run(play())


def test_a_secret_may_change_between_attempts_and_while_it_is_bad_nothing_is_sent(tmp_path: Path) -> None:
    other = "whsec_" + base64.b64encode(bytes(32)).decode()

    async def play() -> None:
        async with receiving(OK) as receiver, desk(tmp_path, receiver.entry()) as sender, sender.delivering():
            sender.change_secrets("not one")
            await sender.put(receiver.url())
            failed = await sender.attempted(1)
            assert receiver.requests == []
            sender.change_secrets(f"{other}\n{SECRET}\n")
            await sender.skip_to(failed.next_at)
            await sender.emptied()
        assert is_signed(receiver.requests[0])
        assert is_signed(receiver.requests[0], other)

    asyncio.run(play())


def test_a_full_disk_does_not_have_a_letter_sent_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_STORAGE_RETRY_S", 0.01)
    refusals: list[str] = []

    async def play() -> None:
        async with receiving(OK) as receiver, desk(tmp_path, receiver.entry()) as sender:
            delivered = sender.outbox.delivered

            def no_room(letter: str) -> None:
                if len(refusals) < 5:
                    refusals.append(letter)
                    raise StorageFull("no space left")
                delivered(letter)

            monkeypatch.setattr(sender.outbox, "delivered", no_room)
            async with sender.delivering():
                await sender.put(receiver.url())
                await sender.emptied()
            assert (len(refusals), len(receiver.requests)) == (5, 1)

    asyncio.run(play())


@pytest.mark.parametrize("status", [200, 410, 500])
def test_a_job_that_is_deleted_while_its_letter_is_on_its_way_leaves_nothing(tmp_path: Path, status: int) -> None:
    async def play() -> None:
        proceed = asyncio.Event()

        async def behave(request: Request, writer: asyncio.StreamWriter) -> None:
            await proceed.wait()
            await answer(status)(request, writer)

        async with receiving(behave, OK) as receiver, desk(tmp_path, receiver.entry()) as sender, sender.delivering():
            await sender.put(receiver.url())
            await until(lambda: len(receiver.requests) == 1)
            await sender.write(sender.catalog.delete, "a")
            proceed.set()
            await until(lambda: not sender.webhooks._going)
            await sender.put(receiver.url(), job="b")
            await sender.emptied()

    asyncio.run(play())


def test_neither_paths_of_urls_nor_secrets_nor_answers_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def play() -> None:
        async with (
            receiving(garbage, answer(410)) as receiver,
            desk(tmp_path, receiver.entry()) as sender,
            sender.delivering(),
        ):
            await sender.put(receiver.url())
            failed = await sender.attempted(1)
            await sender.skip_to(failed.next_at)
            await sender.emptied()
            assert "token" not in str(await sender.timeline())

    asyncio.run(play())
    assert "given up" in caplog.text
    for secret in ("/in/token", "key=k", "canary-of-a-receiver", SECRET.removeprefix("whsec_")):
        assert secret not in caplog.text


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make a certificate for a name; return what a server of it uses, and what trusts it."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command: list[Any] = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-keyout", key, "-out", cert, "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    return serving, ssl.create_default_context(cafile=str(cert))


@pytest.mark.parametrize("name", ["hooks.test", "other.test"])
def test_over_https_the_certificate_must_be_the_hosts(tmp_path: Path, name: str) -> None:
    serving, trust = certificate(tmp_path, name)

    async def resolve(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    async def play() -> None:
        async with receiving(OK, tls=serving) as receiver:
            entry = f"hooks.test:{receiver.port}"
            async with (
                desk(tmp_path, f"{entry}=127.0.0.1", resolve=resolve, trust=trust) as sender,
                sender.delivering(),
            ):
                await sender.put(f"https://{entry}/in")
                if name == "hooks.test":
                    await sender.emptied()
                else:
                    await sender.attempted(1)
            assert len(receiver.requests) == (1 if name == "hooks.test" else 0)

    asyncio.run(play())


def test_a_receiver_that_is_away_is_named_by_its_trouble_and_not_by_its_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def resolve(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    async def play() -> None:
        async with receiving(OK) as receiver:
            entry = f"http://hooks.test:{receiver.port}"
        async with desk(tmp_path, f"{entry}=127.0.0.1", resolve=resolve) as sender, sender.delivering():
            await sender.put(f"{entry}/in")
            await sender.attempted(1)

    asyncio.run(play())
    assert "connection refused" in caplog.text
    assert "127.0.0.1" not in caplog.text
