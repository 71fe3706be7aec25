"""Tells Prefect that data has arrived: `python -m infra.announce s3://bucket/prompts/today`.

For whoever uploads it, or for what the bucket's own notifications call. What then starts is said
by `python -m infra.automations on-data`.
"""

import argparse
import os
import sys
import uuid
from datetime import UTC, datetime

from infra.automations import DATA_EVENT, data_resource
from infra.daemons import ServiceError
from infra.prefect_api import call


def announce(api_url: str, uri: str) -> str:
    """Emits the event and returns its id.

    Raises:
        ServiceError: the server does not answer or refuses.
    """
    event_id = str(uuid.uuid4())
    event = {
        "id": event_id,
        "occurred": datetime.now(UTC).isoformat(),
        "event": DATA_EVENT,
        "resource": {"prefect.resource.id": data_resource(uri), "prefect.resource.name": uri},
        "payload": {"uri": uri},
    }
    call(api_url, "POST", "/events", [event])
    return event_id


def main() -> None:
    """Runs the command; a failure ends with its cause and a non-zero exit."""
    parser = argparse.ArgumentParser(prog="infra.announce", description=__doc__)
    parser.add_argument("uri", help="what arrived")
    parser.add_argument("--api-url", default=os.environ.get("PREFECT_API_URL"))
    options = parser.parse_args()
    try:
        if not options.api_url:
            raise ServiceError("No Prefect server was named. Set PREFECT_API_URL, or --api-url.")
        event_id = announce(options.api_url, options.uri)
    except ServiceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    sys.stdout.write(f"announced {options.uri} (event {event_id})\n")


if __name__ == "__main__":
    main()
