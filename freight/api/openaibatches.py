"""Routes of the OpenAI API about batches and models."""

from typing import Annotated, Any, Final

from fastapi import FastAPI, Query, Response

from freight.api.replies import OPENAI_REFUSED, Key, Who, json_of
from freight.control.service import Service
from freight.core.openaibatch import DEFAULT_PAGE, MOST_PAGE, Batch, BatchPage, BatchRequest, ModelCard, ModelCards

_OPTIONS: Final[dict[str, Any]] = {"responses": OPENAI_REFUSED, "tags": ["OpenAI API"]}


def add_openai_batch_routes(app: FastAPI, service: Service) -> None:
    """Add what makes, shows and cancels batches."""

    async def create(
        request: BatchRequest,
        who: Who,
        key: Key = None,
    ) -> Response:
        """Make a batch of an uploaded file. It is checked afterwards: any bad line fails the batch."""
        return json_of(await service.batches.create(who, request, key))

    async def page(
        who: Who,
        limit: Annotated[int, Query(ge=1, le=MOST_PAGE)] = DEFAULT_PAGE,
        after: Annotated[str | None, Query(description="The last batch of the page before.")] = None,
    ) -> Response:
        """List your batches, the newest first."""
        return json_of(await service.batches.page(who, limit, after))

    async def retrieve(batch: str, who: Who) -> Response:
        """Tell how a batch of yours stands."""
        return json_of(await service.batches.retrieve(who, batch))

    async def cancel(batch: str, who: Who) -> Response:
        """Cancel a batch of yours; what is done is kept."""
        return json_of(await service.batches.cancel(who, batch))

    add = app.add_api_route
    add("/v1/batches", create, methods=["POST"], response_model=Batch, **_OPTIONS)
    add("/v1/batches", page, methods=["GET"], response_model=BatchPage, **_OPTIONS)
    add("/v1/batches/{batch}", retrieve, methods=["GET"], response_model=Batch, **_OPTIONS)
    add("/v1/batches/{batch}/cancel", cancel, methods=["POST"], response_model=Batch, **_OPTIONS)


def add_openai_model_routes(app: FastAPI, service: Service) -> None:
    """Add what lists the models that batches may name."""

    async def models(who: Who) -> Response:
        """List the models that you may run, by every name that they have."""
        return json_of(service.models.cards(who))

    async def model(name: str, who: Who) -> Response:
        """Tell about one model, by a name that may have slashes in it."""
        return json_of(service.models.card(who, name))

    app.add_api_route("/v1/models", models, methods=["GET"], response_model=ModelCards, **_OPTIONS)
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], response_model=ModelCard, **_OPTIONS)
