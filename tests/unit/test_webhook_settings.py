"""Asking for a webhook: what is refused, and which setting is named."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from freight.control.webhooks import Webhooks, WebhookSettings
from freight.errors import FreightError, OperationError, UserError
from freight.store.catalog import Catalog
from freight.store.folder import Locking
from freight.store.outbox import Outbox

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
URL = "https://hooks.lab/in/token"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text(SECRET + "\n")
    return str(tmp_path / "secret")


def refusal(tmp_path: Path, url: str, settings: WebhookSettings) -> FreightError | None:
    """Return why a webhook to `url` is refused; None when it is not."""

    async def write(call: Any, *args: Any) -> Any:
        return call(*args)

    async def ask() -> FreightError | None:
        catalog = Catalog(tmp_path / "catalog.db", Locking.LOCAL)
        try:
            Webhooks(Outbox(catalog._connection), write, lambda: settings).submit_check(url)
        except FreightError as error:
            return error
        finally:
            catalog.close()
        return None

    return asyncio.run(ask())


def test_a_listed_host_and_a_secret_are_all_it_needs(tmp_path: Path, secret: str) -> None:
    assert refusal(tmp_path, URL, WebhookSettings(("other.lab", "hooks.lab"), secret)) is None


def test_without_settings_webhooks_are_off_and_the_setting_is_named(tmp_path: Path) -> None:
    refused = refusal(tmp_path, URL, WebhookSettings())
    assert refused is not None
    assert "webhooks.hosts" in refused.message


def test_a_host_that_is_not_listed_is_refused_with_what_is_but_no_addresses(tmp_path: Path, secret: str) -> None:
    settings = WebhookSettings(("a.lab", "http://b.lab:9000=10.0.0.7"), secret)

    refused = refusal(tmp_path, URL, settings)

    assert refused is not None
    assert refused.message == "webhooks.hosts does not list this receiver: https, host hooks.lab, port 443"
    assert refused.hint == "it lists a.lab, http://b.lab:9000"


@pytest.mark.parametrize("url", ["", "hooks.lab", "http://", "file:///etc/passwd", "https://u:p@hooks.lab/"])
def test_what_is_no_url_of_a_server_is_refused_without_being_quoted(tmp_path: Path, secret: str, url: str) -> None:
    refused = refusal(tmp_path, url, WebhookSettings(("hooks.lab",), secret))
    assert refused is not None
    assert "u:p" not in f"{refused.message} {refused.hint}"


@pytest.mark.parametrize("text", [None, "", "whsec_YWJj", "hunter2", "whsec_é"])
def test_without_a_good_secret_the_setting_is_named_and_the_secret_is_not(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)

    with pytest.raises(UserError) as told:
        WebhookSettings(("hooks.lab",), str(file)).secrets()
    refused = refusal(tmp_path, URL, WebhookSettings(("hooks.lab",), str(file)))

    assert f"webhooks.secret_file {file}" in told.value.message
    assert "YWJj" not in told.value.message
    assert "hunter2" not in told.value.message
    # It is no fault of who asks, who is told no path either.
    assert isinstance(refused, OperationError)
    assert "webhooks.secret_file" in refused.message
    assert str(tmp_path) not in refused.message


def test_without_a_secret_file_the_setting_is_named(tmp_path: Path) -> None:
    refused = refusal(tmp_path, URL, WebhookSettings(("hooks.lab",)))
    assert isinstance(refused, OperationError)
    assert "webhooks.secret_file" in refused.message


def test_an_entry_that_means_nothing_is_named(tmp_path: Path, secret: str) -> None:
    refused = refusal(tmp_path, URL, WebhookSettings(("hooks.lab", "b.lab/path"), secret))
    assert refused is not None
    assert "webhooks.hosts: 'b.lab/path'" in refused.message
