"""Routes under /resource_server: the facility's API, for batches of files on the service's machine."""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import FastAPI, Query, Response

from freight.api.replies import REFUSED, Key, Who, json_of
from freight.control.service import Service
from freight.core.facility import STATUSES
from freight.core.facilityview import (
    BatchCancelled,
    BatchMade,
    BatchRequest,
    BatchResult,
    BatchRow,
    ClusterJobs,
    Endpoints,
    FailedResult,
    NoResult,
)
from freight.core.paging import MOST_PAGE

_BASE = "/resource_server"
_BATCHES = f"{_BASE}/v1/batches"


def add_facility_routes(app: FastAPI, service: Service) -> None:
    """Add what makes, shows and cancels batches, and tells where they can run."""
    facility = service.facility

    async def create(
        cluster: str,
        framework: str,
        request: BatchRequest,
        who: Who,
        key: Key = None,
    ) -> Response:
        """Make a batch of a file on the service's machine. What is wrong with the lines in it is in the results."""
        return json_of(await facility.submit(who, cluster, framework, request, key))

    async def page(
        who: Who,
        status: Annotated[str | None, Query(description="pending, running, failed, completed or cancelled")] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_PAGE)] = MOST_PAGE,
        after: str | None = None,
    ) -> Response:
        """List one's batches, the newest first; where there are more, a Link header leads to the next page."""
        rows, following = await facility.page(who, status, limit, after)
        answer = json_of(rows)
        if following is not None:
            asked = {"status": status} if status is not None else {}
            answer.headers["link"] = (
                f'<{_BATCHES}?{urlencode(asked | {"limit": limit, "after": following})}>; rel="next"'
            )
        return answer

    async def status(batch: str, who: Who) -> Response:
        """Tell a batch's status: pending, running, failed, completed or cancelled."""
        return json_of(STATUSES[(await facility.find(who, batch)).state])

    async def result(batch: str, who: Who) -> Response:
        """Tell where the files of a batch that has ended are, and what became of it; why, where it failed."""
        return json_of(await facility.result(who, batch))

    async def cancel(batch: str, who: Who) -> Response:
        """Cancel a batch; what is done is kept."""
        row = await service.cancel_job((await facility.find(who, batch)).id)
        return json_of(BatchCancelled(batch_id=row.id, status=STATUSES[row.state]))

    async def endpoints(who: Who) -> Response:
        """List the clusters, their frameworks, and the models there: all, and those that do batches."""
        return json_of(facility.endpoints(who))

    async def jobs(cluster: str, who: Who) -> Response:
        """Tell which models run and which are waited for on a cluster, and one's own batches that have not ended."""
        return json_of(await facility.jobs(who, cluster))

    options: dict[str, Any] = {"responses": REFUSED, "tags": ["facility"]}
    add = app.add_api_route
    add(f"{_BASE}/{{cluster}}/{{framework}}/v1/batches", create, methods=["POST"], response_model=BatchMade, **options)
    add(_BATCHES, page, methods=["GET"], response_model=list[BatchRow], **options)
    add(f"{_BATCHES}/{{batch}}", status, methods=["GET"], response_model=str, **options)
    ended = FailedResult | BatchResult | NoResult
    add(f"{_BATCHES}/{{batch}}/result", result, methods=["GET"], response_model=ended, **options)
    add(f"{_BATCHES}/{{batch}}/cancel", cancel, methods=["POST"], response_model=BatchCancelled, **options)
    add(f"{_BASE}/list-endpoints", endpoints, methods=["GET"], response_model=Endpoints, **options)
    add(f"{_BASE}/{{cluster}}/jobs", jobs, methods=["GET"], response_model=ClusterJobs, **options)
