"""bespokelabs-curator: `curator.LLM`, by default with its rate limits, at best with none and a fixed concurrency.

Nothing is sent to anybody but the engine: see the environment in roster.py.
"""

import json
from typing import Any

from bench.peers.arguments import parse, records

ENDLESS = 1_000_000_000


def run() -> None:
    """Run the file; the answers are in responses_*.jsonl below the output folder, and in its dataset."""
    from bespokelabs import curator

    class Batch(curator.LLM):
        """Sends the messages of a row as they are."""

        def prompt(self, input: dict[str, Any]) -> list[dict[str, Any]]:
            """Return the messages."""
            return input["messages"]

        def parse(self, input: dict[str, Any], response: str) -> list[dict[str, Any]]:
            """Return the row of the output."""
            return [{"custom_id": input["custom_id"], "response": response}]

    given = parse(__doc__ or "")
    params: dict[str, Any] = {"base_url": f"{given.url}/v1", "api_key": "none"}
    if given.setting == "best":
        params["max_concurrent_requests"] = given.window
        params["max_requests_per_minute"] = params["max_tokens_per_minute"] = ENDLESS
    rows: list[dict[str, Any]] = []
    for record in records(given.input):
        body = record["body"]
        options = json.dumps({name: value for name, value in body.items() if name != "messages"})
        rows.append({"custom_id": record["custom_id"], "messages": body["messages"], "generation_params": options})
    llm = Batch(model_name=given.model, backend="openai", backend_params=params)
    llm(rows, working_dir=str(given.output))


if __name__ == "__main__":
    run()
