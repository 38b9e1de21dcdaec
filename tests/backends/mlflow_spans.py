"""Print all traces that MLflow's client finds, as JSON.

Usage, in MLflow's environment: mlflow_spans.py ADDRESS
"""

import base64
import json
import sys

import mlflow

mlflow.set_tracking_uri(sys.argv[1])
found = []
for trace in mlflow.search_traces(locations=["0"], return_type="list", include_spans=True):
    for span in trace.data.spans:
        plain = span.to_dict()
        found.append(
            {
                "trace_id": base64.b64decode(plain["trace_id"]).hex(),
                "span_id": base64.b64decode(plain["span_id"]).hex(),
                "parent_id": (
                    base64.b64decode(plain["parent_span_id"]).hex()
                    if plain["parent_span_id"]
                    else None
                ),
                "name": plain["name"],
                "start_ns": plain["start_time_unix_nano"],
                "end_ns": plain["end_time_unix_nano"],
                "status": plain["status"]["code"],
                "attributes": {
                    key: json.loads(value) for key, value in plain["attributes"].items()
                },
                "links": [[link.trace_id.removeprefix("tr-"), link.span_id] for link in span.links],
                "tags": trace.info.tags,
                "state": str(trace.info.state),
            }
        )
print(json.dumps(found))
